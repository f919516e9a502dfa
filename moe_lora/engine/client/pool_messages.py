"""What instances of an adapter pool tell who keeps its directory.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_lora.adapters.facts import AdapterFacts
from moe_lora.core.request import AdapterInfo


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """An adapter that an instance knows.

    source: the descriptor of the window in which the instance holds it, for its peers; None: it does not.
    """

    info: AdapterInfo
    facts: AdapterFacts
    source: bytes | None
