"""What the lease table has decided; the caller carries the events out in the order they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Run: TypeAlias = tuple[int, int]
"""(first page, number of pages) in the arena of one server rank."""
Runs: TypeAlias = Mapping[int, Mapping[int, Run]]
"""server rank -> layer -> run.  Ranks and layers of which the adapter has nothing are left out."""


@dataclass(frozen=True)
class Load:
    """Bring the adapter's shards into these pages, layer by layer, and serve them as (slot, generation)."""

    adapter_id: str
    slot: int
    generation: int
    runs: Runs


@dataclass(frozen=True)
class Evict:
    """Stop serving (slot, generation): its pages belong to whatever is loaded next."""

    adapter_id: str
    slot: int
    generation: int


@dataclass(frozen=True)
class Grant:
    """The instance holds a lease: its puts for this adapter carry slot and generation from now on.

    The adapter's Load was issued before, perhaps just now: a put may have to wait for its layer.
    """

    instance: str
    adapter_id: str
    slot: int
    generation: int


Event: TypeAlias = Load | Evict | Grant
