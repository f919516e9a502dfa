"""How adapters get into slots: of this process, or of all ranks of an instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.adapters.shard import LayerShard, shard_layer
from moe_lora.core.errors import AdapterError, CapacityError
from moe_lora.core.shape import ModelShape
from moe_lora.execution import exchange
from moe_lora.execution.slots import write_slot
from moe_lora.kernels.step import SlotTable

from .followers import Followers


class SlotWriter(Protocol):
    """Fills and clears slots."""

    @property
    def num_slots(self) -> int: ...

    def layer_bytes(self, packed: PackedAdapter) -> Sequence[int]:
        """Room that each layer of the adapter takes in an arena."""
        ...

    def keep(self, packed: PackedAdapter) -> PackedAdapter:
        """Take on an adapter, once for each time that `forget` will end it; returns what to keep of it.

        Raises CapacityError if there is no room for that.
        """
        ...

    def write(self, slot: int, packed: PackedAdapter, layer_offsets_bytes: Sequence[int]) -> None:
        """Put a kept adapter into the arena and make `slot` mean it."""
        ...

    def clear(self, slot: int) -> None:
        """Make `slot` mean "no delta anywhere"."""
        ...

    def forget(self, packed: PackedAdapter) -> None:
        """End what `keep` began."""
        ...


class LocalSlotWriter:
    """Whole adapters in this process's arena."""

    def __init__(self, slots: SlotTable, arena: torch.Tensor) -> None:
        self._slots = slots
        self._arena = arena

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    def layer_bytes(self, packed: PackedAdapter) -> Sequence[int]:
        return [layer.nbytes for layer in packed.layers]

    def keep(self, packed: PackedAdapter) -> PackedAdapter:
        return packed

    def write(self, slot: int, packed: PackedAdapter, layer_offsets_bytes: Sequence[int]) -> None:
        write_slot(self._slots, slot, self._arena, packed, layer_offsets_bytes)

    def clear(self, slot: int) -> None:
        self._slots.clear(slot)

    def forget(self, packed: PackedAdapter) -> None:
        """Nothing of it is kept here."""


class PartSlotWriter(LocalSlotWriter):
    """In this process's arena, the entries of adapters that are computed here."""

    def __init__(self, own: RankSlots, arena: torch.Tensor, sizes: ShardSizes) -> None:
        super().__init__(own.slots, arena)
        self._own = own
        self._sizes = sizes

    def layer_bytes(self, packed: PackedAdapter) -> Sequence[int]:
        return self._sizes.layer_bytes(packed)

    def write(self, slot: int, packed: PackedAdapter, layer_offsets_bytes: Sequence[int]) -> None:
        self._own.write(slot, packed, layer_offsets_bytes)

    def forget(self, packed: PackedAdapter) -> None:
        self._sizes.forget(packed)


@dataclass(frozen=True)
class WriteSlot:
    """Tells a follower to write its part of the adapter in the host store under this hash."""

    slot: int
    content_hash: str
    layer_offsets_bytes: tuple[int, ...]


@dataclass(frozen=True)
class ClearSlot:
    slot: int


class RankSlots:
    """The slots of one rank, which keeps the entries `kept` ([X] bool) of adapters."""

    def __init__(self, slots: SlotTable, arena: torch.Tensor, shape: ModelShape, kept: np.ndarray) -> None:
        self.slots = slots
        self._arena = arena
        self._shape = shape
        self._kept = kept

    def write(self, slot: int, packed: PackedAdapter, layer_offsets_bytes: Sequence[int]) -> None:
        shards = [shard_layer(layer, self._shape, self._kept) for layer in packed.layers]
        write_slot(self.slots, slot, self._arena, packed, layer_offsets_bytes, shards)


class GroupSlotWriter:
    """The slots of all ranks alike: the same slot numbers and offsets everywhere, so that one bookkeeping
    serves them; a layer takes the room of its largest part.  Followers read adapters from `store`.
    """

    def __init__(self, own: RankSlots, sizes: ShardSizes, store: HostStore, followers: Followers) -> None:
        self._own = own
        self._sizes = sizes
        self._store = store
        self._followers = followers
        self._num_kept: Counter[str] = Counter()

    @property
    def num_slots(self) -> int:
        return self._own.slots.num_slots

    def layer_bytes(self, packed: PackedAdapter) -> Sequence[int]:
        return self._sizes.layer_bytes(packed)

    def keep(self, packed: PackedAdapter) -> PackedAdapter:
        """In the host store, mapped: what was read into this process's memory may go."""
        try:
            self._store.put(packed)
            stored = self._store.get(packed.content_hash, packed.name)
        except (OSError, SafetensorError, AdapterError) as error:
            raise CapacityError(
                f"adapter {packed.name!r} of {packed.nbytes / 1e9:.3f} GB can't be kept in "
                f"{self._store.directory} ({error}); free room there or let TMPDIR name another place"
            ) from error
        self._num_kept[packed.content_hash] += 1
        return stored

    def write(self, slot: int, packed: PackedAdapter, layer_offsets_bytes: Sequence[int]) -> None:
        self._followers.tell(WriteSlot(slot, packed.content_hash, tuple(layer_offsets_bytes)))
        self._own.write(slot, packed, layer_offsets_bytes)
        # Until followers have read it, the file must not go, nor a failure to read it go unnoticed.
        self._followers.settle(exchange.TIMEOUT_S)

    def clear(self, slot: int) -> None:
        self._followers.tell(ClearSlot(slot))
        self._own.slots.clear(slot)

    def forget(self, packed: PackedAdapter) -> None:
        self._num_kept[packed.content_hash] -= 1
        if not self._num_kept[packed.content_hash]:
            self._sizes.forget(packed)
            self._store.remove(packed.content_hash)


class ShardSizes:
    """Bytes that the layers of adapters take on the rank that holds most of them.

    kept: per rank the entries ([X] bool) that it keeps.
    """

    def __init__(self, shape: ModelShape, kept: Sequence[np.ndarray]) -> None:
        self._shape = shape
        self._kept = kept
        self._all_kept = all(entries.all() for entries in kept)
        self._known: dict[str, list[int]] = {}

    def layer_bytes(self, packed: PackedAdapter) -> Sequence[int]:
        if self._all_kept:
            return [layer.nbytes for layer in packed.layers]
        sizes = self._known.get(packed.content_hash)
        if sizes is None:
            shards = [
                [shard_layer(layer, self._shape, kept) for kept in self._kept] for layer in packed.layers
            ]
            sizes = [
                max(map(_num_elements, ranks)) * layer.data.element_size()
                for layer, ranks in zip(packed.layers, shards, strict=True)
            ]
            self._known[packed.content_hash] = sizes
        return sizes

    def forget(self, packed: PackedAdapter) -> None:
        self._known.pop(packed.content_hash, None)


def _num_elements(shard: LayerShard) -> int:
    return shard.num_elements
