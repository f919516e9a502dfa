"""One row of the registry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

READY, BROKEN, REMOVED = "ready", "broken", "removed"
STATES = (READY, BROKEN, REMOVED)
COLUMNS = (
    *("name", "version", "lora_rank", "alpha", "targets", "num_bytes"),
    *("content_hash", "base_hash", "source", "owner", "state", "created_s"),
)
SELECT = f"SELECT {', '.join(COLUMNS)} FROM adapters AS a"
INSERT = f"INSERT INTO adapters ({', '.join(COLUMNS)}) VALUES (:{', :'.join(COLUMNS)})"
LIVE = f"state != '{REMOVED}'"
CURRENT = f"""{LIVE} AND NOT EXISTS (
    SELECT 1 FROM adapters AS b WHERE b.name = a.name AND b.version > a.version AND b.{LIVE})"""
"""Of the versions of a name, the last that is not removed."""


@dataclass(frozen=True, kw_only=True)
class RegisteredAdapter:
    """One version of an adapter.

    lora_rank: the largest of its config; alpha: the config's lora_alpha.  targets: modules and parameters
    as the config names them.  num_bytes: of its files.  content_hash: of its files (`ContentStore`).
    base_hash: see `base_model_hash`.  path: the folder to serve it from.  source: where it was added from.
    state: ready; broken, its files were found lost or altered; or removed.  created_s: Unix time.
    """

    name: str
    version: int
    lora_rank: int
    alpha: float
    targets: tuple[str, ...]
    num_bytes: int
    content_hash: str
    base_hash: str
    source: str
    owner: str
    state: str
    created_s: float
    path: str

    @classmethod
    def from_row(cls, row: Sequence[Any], store: str) -> RegisteredAdapter:
        """The adapter in a row of COLUMNS; its files lie under `store`."""
        fields = dict(zip(COLUMNS, row, strict=True))
        fields["targets"] = tuple(json.loads(fields["targets"]))
        # Not by pathlib: a list makes tens of thousands of these.
        return cls(**fields, path=f"{store}/{fields['content_hash']}")
