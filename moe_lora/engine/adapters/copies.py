# SPDX-License-Identifier: Apache-2.0
"""One rank's copies between arenas, and from adapter files to the device.

Orders name pages, slots and content hashes only: valid on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import numpy as np
import torch

from moe_lora.adapters.host_store import without_data
from moe_lora.adapters.packed import PackedAdapter, shard_layer
from moe_lora.cache.orders import Copy
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.kernels.operands import SlotTable
from moe_lora.lora.local import LayerPart, open_slot, part_bytes, point_layer, point_slot

if TYPE_CHECKING:
    from moe_lora.kernels.page_locked import Staging

    from .pool_fetch import LayerReader
    from .pool_store import PoolAdapters


@dataclass(frozen=True)
class BringAdapter:
    """Load an adapter to the device and set `slot`.

    layer_first_pages: -1 for an empty layer.  pages: None: from the adapter's file.  first_group: number of
    first layers loaded last; each layer serves at once (`load_order`); None: all serve at the end.  tables:
    for pages of a pool's adapter, without a file on any rank; None: by content hash.
    """

    slot: int
    content_hash: str
    layer_first_pages: tuple[int, ...]
    pages: Copy | None
    first_group: int | None = None
    tables: PackedAdapter | None = None


@dataclass(frozen=True)
class ClearSlot:
    """Empty `slot`."""

    slot: int


RankOrder = Copy | BringAdapter | ClearSlot

Steps: TypeAlias = Iterator[int]
"""Executes an order piece by piece: yields a piece's bytes, complete at the next step."""


class Arenas:
    """Memory of a rank by pages.

    device, host: [P, page_bytes] uint8, from 1-D tensors.
    """

    def __init__(self, device: torch.Tensor, host: torch.Tensor | None, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.device = device.view(-1, page_bytes)
        self.host = None if host is None else host.view(-1, page_bytes)


class RankCopier:
    """Executes orders in one rank's memory.

    kept: [X] bool, entries on this rank.  pool: None: adapters are local.  shard: None: whole matrices.
    """

    def __init__(
        self,
        arenas: Arenas,
        slots: SlotTable,
        shape: ModelShape,
        kept: np.ndarray,
        find: Callable[[str], PackedAdapter],
        pool: PoolAdapters | None = None,
        shard: ModelShard | None = None,
    ) -> None:
        self._arenas = arenas
        self._slots = slots
        self._shape = shape
        self._kept = None if kept.all() and shard is None else kept
        self._shard = shard
        self._staging: Staging | None = None
        if arenas.device.is_cuda:
            from moe_lora.kernels.page_locked import Staging

            self._staging = Staging()
        self._find = find
        self._pool = pool

    def fetches(self, order: RankOrder) -> bool:
        """True if the order waits for a process or disk."""
        if self._pool is None or not _is_outside(order):
            return False
        return self._pool.at_hand(order.content_hash) is None

    def shared_first(self, order: RankOrder) -> Steps | None:
        """Steps before `begin`, on one rank alone: a file for other processes."""
        if self._pool is None or not self._pool.shares or not _is_outside(order):
            return None
        return _alone(self._pool.sharing(order.content_hash))

    def tables(self, content_hash: str) -> PackedAdapter | None:
        """See `BringAdapter`."""
        return None if self._pool is None or self._kept is None else without_data(self._find(content_hash))

    def begin(self, order: RankOrder) -> Steps:
        """Steps of the order, on the current CUDA stream.  The adapter may be forgotten meanwhile."""
        if isinstance(order, Copy):
            return self._copy(order)
        if isinstance(order, ClearSlot):
            return self._clear(order)
        packed = order.tables
        if self._pool is not None and _is_outside(order):
            packed = self._pool.at_hand(order.content_hash)
            if packed is None:
                assert self._kept is None, "several ranks read a file"
                return self._fetch(order, self._pool.reader(order.content_hash))
        return self._bring(order, packed or self._find(order.content_hash))

    def ended(self, content_hash: str) -> None:
        """Orders for this adapter are over."""
        if self._pool is not None:
            self._pool.unshare(content_hash)

    def carry_out(self, order: RankOrder) -> None:
        """Execute the whole order now."""
        for _ in self.begin(order):
            continue

    def _clear(self, order: ClearSlot) -> Steps:
        self._slots.clear(order.slot)
        yield 0

    def _copy(self, order: Copy) -> Steps:
        self._copy_pages(order, order.device_pages, order.host_pages)
        yield len(order.device_pages) * self._arenas.page_bytes

    def _copy_pages(self, order: Copy, device_pages: Sequence[int], host_pages: Sequence[int]) -> None:
        host, device = self._arenas.host, self._arenas.device
        assert host is not None
        for first, host_first, count in _runs(device_pages, host_pages):
            pages, kept = device[first : first + count], host[host_first : host_first + count]
            _copy(kept, pages) if order.to_device else _copy(pages, kept)

    def _fetch(self, order: BringAdapter, reader: LayerReader) -> Steps:
        from .pool_fetch import fetch_layers

        arena, sizes = self._arenas.device.view(-1), reader.layer_bytes
        offsets = [max(0, first) * self._arenas.page_bytes for first in order.layer_first_pages]
        targets = [arena[start : start + size] for start, size in zip(offsets, sizes, strict=True)]
        assert self._pool is not None
        packed = fetch_layers(reader, targets)
        self._pool.learn_tables(packed)
        yield sum(sizes)
        point_slot(self._slots, order.slot, packed, offsets)

    def _bring(self, order: BringAdapter, packed: PackedAdapter) -> Steps:
        """Layer by layer; the table never points to absent bytes."""
        parts: Sequence[LayerPart] = packed.layers
        if self._kept is not None:
            parts = [shard_layer(layer, self._shape, self._kept, self._shard) for layer in packed.layers]
        open_slot(self._slots, order.slot, packed)
        offsets = [max(0, first) * self._arenas.page_bytes for first in order.layer_first_pages]
        layer_wise, numbers = order.first_group is not None, list(range(len(parts)))
        if order.first_group is not None:
            from moe_lora.policies.admission.host_start import load_order

            numbers = load_order(len(parts), order.first_group)
        pointed = []
        for number in numbers:
            layer, part, offset = packed.layers[number], parts[number], offsets[number]
            if order.pages is not None:
                pages = _pages_of_layer(order.layer_first_pages, number, order.pages)
                self._copy_pages(order.pages, order.pages.device_pages[pages], order.pages.host_pages[pages])
                yield (pages.stop - pages.start) * self._arenas.page_bytes
            else:
                data = part_bytes(layer, part)
                assert offset + len(data) <= self._arenas.device.numel()
                there = self._arenas.device.view(-1)[offset : offset + len(data)]
                _copy(data, there) if self._staging is None else self._staging.copy(data, there)
                yield len(data)
            pointed.append((number, layer, part, offset))
            if layer_wise:
                point_layer(self._slots, order.slot, *pointed.pop())
        for place in pointed:
            point_layer(self._slots, order.slot, *place)


def _is_outside(order: RankOrder) -> TypeGuard[BringAdapter]:
    """True if the adapter comes from no arena."""
    return isinstance(order, BringAdapter) and order.pages is None


def _alone(work: Callable[[], None]) -> Steps:
    work()
    yield 0


def _pages_of_layer(first_pages: Sequence[int], number: int, copy: Copy) -> slice:
    if first_pages[number] < 0:
        return slice(0, 0)
    after = next((page for page in first_pages[number + 1 :] if page >= 0), None)
    start = copy.device_pages.index(first_pages[number])
    return slice(start, len(copy.device_pages) if after is None else copy.device_pages.index(after))


def _runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(page, page, number) of runs contiguous in both sequences."""
    start = 0
    for end in range(1, len(first) + 1):
        if end == len(first) or first[end] != first[end - 1] + 1 or second[end] != second[end - 1] + 1:
            yield first[start], second[start], end - start
            start = end


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_cpu and target.is_cpu:
        # numpy copies on this thread without Python's lock; torch would start threads.
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)
