# SPDX-License-Identifier: Apache-2.0
"""A RemoteBackend that computes every delta a second time, locally, and compares the bits.

Legend: T token rows, K experts per token.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter, entries_of_experts
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.dist.deltas.remote_backend import RemoteBackend, ServerPartition
from moe_lora.kernels.operands import SlotTable, StepTables
from moe_lora.lora.backend import AddTo
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import RowRouting, Source
from tests.adapters.dense import shard_adapter
from tests.slots import write_slot

_BITS = {4: torch.int32, 2: torch.int16}


@dataclass
class Tally:
    """What one client rank of an instance found.

    num_sites: (step, layer, site) that were compared.  num_added: output rows that the local backend changed.
    num_wrong: output rows with other bits.  first_wrong: layer * 100 + site of the first of them, -1 if none.
    num_requests, num_fallback_rows: of the RemoteBackend.
    """

    num_sites: int = 0
    num_added: int = 0
    num_wrong: int = 0
    first_wrong: int = -1
    num_requests: int = 0
    num_fallback_rows: int = 0


def tally_path(store_dir: str | Path, client_rank: int) -> Path:
    return Path(store_dir).parent / f"tally-{client_rank}"


def read_tally(store_dir: str | Path, client_rank: int) -> Tally:
    """What this client rank had found when it last added a delta; its process may be gone."""
    return Tally(*np.fromfile(tally_path(store_dir, client_rank), dtype=np.int64).tolist())


class ComparedBackend(RemoteBackend):
    """Adds what the server sent; keeps a `Tally` in a file beside the host store."""

    def __init__(
        self, shape: ModelShape, source: Source, division: ServerPartition, links, layout, store: HostStore
    ) -> None:
        super().__init__(shape, source, division, links, layout, store)
        self._local = LocalAdapters(shape, store, layout.shard)
        self._tally = Tally()
        # A mapping survives a process that is ended at once.
        path = tally_path(store.directory, division.client_rank)
        self._file = np.memmap(path, np.int64, "w+", shape=(len(fields(Tally)),))

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        super().begin_step(step, routing)
        self._local.begin_step(step, routing)

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo:
        local = self._local.backend.begin(layer, site, x, ids)
        remote = super().begin(layer, site, x, ids)
        return partial(self._add_both, 100 * layer + site, remote, local)

    def _add_both(self, place: int, remote: AddTo | None, local: AddTo | None, y: torch.Tensor) -> None:
        before, expected = _bits(y.clone()), y.clone()
        if local is not None:
            local(expected)
        if remote is not None:
            remote(y)
        tally = self._tally
        num_wrong = int((_bits(y) != _bits(expected)).any(1).sum())
        if num_wrong and not tally.num_wrong:
            tally.first_wrong = place
        tally.num_sites += 1
        tally.num_added += int((_bits(expected) != before).any(1).sum())
        tally.num_wrong += num_wrong
        tally.num_requests, tally.num_fallback_rows = self.num_requests, self.num_fallback_rows
        self._file[:] = list(asdict(tally).values())


class LocalAdapters:
    """The adapters of the steps in an arena of their own, and a LocalBackend over them.

    shard: of a rank with a part of each matrix; None: whole matrices.
    """

    def __init__(self, shape: ModelShape, store: HostStore, shard: ModelShard | None = None) -> None:
        self._shape = shape
        self._store = store
        self._shard = shard
        self._slot_of: dict[str, int] = {}
        self._load()

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        """What is leased comes from here, the rest from nowhere."""
        slots = self._slots([adapter.content_hash for adapter in routing.adapters])
        terms = routing.terms.copy()
        leased = terms["source"] == Source.LEASED
        terms["slot"] = np.where(leased, slots[terms["adapter"]], -1)
        terms["source"] = np.where(leased, Source.LOCAL, 0)
        self.backend.begin_step(step, replace(routing, terms=terms))

    def _slots(self, hashes: list[str]) -> np.ndarray:
        """Slot of each adapter and of none."""
        new = [content_hash for content_hash in hashes if content_hash not in self._slot_of]
        if new:
            self._slot_of |= {content_hash: len(self._slot_of) + i for i, content_hash in enumerate(new)}
            self._load()
        return np.array([self._slot_of[content_hash] for content_hash in hashes] + [-1])

    def _load(self) -> None:
        packed = [self._part(self._store.get(content_hash, content_hash)) for content_hash in self._slot_of]
        arena = torch.empty(sum(adapter.nbytes for adapter in packed), dtype=torch.uint8)
        slots = SlotTable(
            max(1, len(packed)), self._shape.num_layers, self._shape.num_entries, torch.device("cpu")
        )
        start = 0
        for slot, adapter in enumerate(packed):
            sizes = [layer.nbytes for layer in adapter.layers]
            offsets = [start + before for before in itertools.accumulate(sizes, initial=0)]
            start = offsets.pop()
            write_slot(slots, slot, arena, adapter, offsets)
        self.backend = LocalBackend(self._shape, arena, slots)

    def _part(self, packed: PackedAdapter) -> PackedAdapter:
        if (shard := self._shard) is None:
            return packed
        kept = entries_of_experts(shard.whole, shard.experts)
        return shard_adapter(packed, shard.whole, [kept] * len(packed.layers), shard)


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(_BITS[y.element_size()])
