"""Which adapters the engine knows and which of them lie in its arena."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.blocks import BlockManager
from moe_lora.cache.pages import PageAllocator
from moe_lora.core.clock import Clock
from moe_lora.core.errors import AdapterExistsError, AdapterNotFoundError, CapacityError
from moe_lora.execution.slots import write_slot
from moe_lora.kernels.step import SlotTable
from moe_lora.policies.eviction import least_recently_used

from .adapter_version import AdapterVersion


class Residency:
    """Keeps adapters in host memory, brings them into the arena, and evicts idle ones for others.

    The adapter's data lie as one extent of whole pages per layer, at true rank.  Extents take no more pages
    than the arena has beyond those promised to KV: idle adapters would never give these back.
    """

    def __init__(
        self,
        pages: PageAllocator,
        page_bytes: int,
        arena: torch.Tensor,
        slots: SlotTable,
        blocks: BlockManager,
        clock: Clock,
    ) -> None:
        self._pages = pages
        self._page_bytes = page_bytes
        self._arena = arena
        self._slots = slots
        self._blocks = blocks
        self._clock = clock
        self._max_pages = pages.num_pages - blocks.max_blocks
        self._current: dict[str, AdapterVersion] = {}
        self._resident: dict[int, AdapterVersion] = {}
        self._free_slots = list(range(slots.num_slots - 1, -1, -1))
        self._uids = itertools.count(1)
        self._versions: dict[str, int] = {}
        self.num_loads = self.num_evictions = self.loaded_bytes = 0

    def add(self, packed: PackedAdapter, path: str | None, *, replace: bool = False) -> AdapterVersion:
        """Serve `packed` under its name from now on.

        Raises AdapterExistsError if the name is taken and not to be replaced, CapacityError if the arena
        could never hold it.
        """
        name = packed.name
        if name in self._current and not replace:
            raise AdapterExistsError(
                f"adapter {name!r} is already loaded; unload it first or load it in place"
            )
        pages = sum(self._layer_pages(packed))
        if pages > self._max_pages:
            raise CapacityError(
                f"adapter {name!r} needs {pages * self._page_bytes / 1e9:.3f} GB, the engine keeps "
                f"{self._max_pages * self._page_bytes / 1e9:.3f} GB for adapters; raise lora_memory_gb"
            )
        number = self._versions.get(name, 0) + 1
        adapter = AdapterVersion(next(self._uids), number, packed, path)
        self._versions[name] = number
        previous = self._current.get(name)
        self._current[name] = adapter
        if previous is not None:
            self._retire(previous)
        return adapter

    def current(self, name: str) -> AdapterVersion:
        """The version that new requests for `name` use.  Raises AdapterNotFoundError."""
        if name not in self._current:
            raise AdapterNotFoundError(f"adapter {name!r} is not loaded")
        return self._current[name]

    def remove(self, name: str) -> AdapterVersion:
        """Refuse new requests for `name`; its memory is freed once the last request is done."""
        adapter = self.current(name)
        del self._current[name]
        self._retire(adapter)
        return adapter

    def known(self) -> list[AdapterVersion]:
        return list(self._current.values())

    def resident(self) -> Iterator[AdapterVersion]:
        return iter(self._resident.values())

    def acquire(self, adapter: AdapterVersion) -> bool:
        """Bring the adapter in if need be and pin it for one request; False if there is no place now."""
        if adapter.slot is None and not self._bring_in(adapter):
            return False
        adapter.num_running += 1
        adapter.last_used_s = self._clock.now_s()
        return True

    def release(self, adapter: AdapterVersion) -> None:
        """One request of the adapter stopped running."""
        adapter.num_running -= 1
        adapter.last_used_s = self._clock.now_s()
        self.settle(adapter)

    def settle(self, adapter: AdapterVersion) -> None:
        """Free a retired adapter that nobody runs or waits for."""
        if adapter.retired and adapter.num_running == 0 and adapter.num_waiting == 0:
            self._evict(adapter)
            self._blocks.forget(adapter.uid)

    def _retire(self, adapter: AdapterVersion) -> None:
        adapter.retired = True
        self.settle(adapter)

    @property
    def _num_pages(self) -> int:
        return sum(adapter.num_pages for adapter in self._resident.values())

    def _layer_pages(self, packed: PackedAdapter) -> list[int]:
        return [-(-layer.data.nbytes // self._page_bytes) for layer in packed.layers]

    def _bring_in(self, adapter: AdapterVersion) -> bool:
        if not self._make_room(sum(self._layer_pages(adapter.packed))) or not self._take_extents(adapter):
            return False
        adapter.slot = self._free_slots.pop()
        offsets = [first * self._page_bytes for first, _ in adapter.extents]
        write_slot(self._slots, adapter.slot, self._arena, adapter.packed, offsets)
        self._resident[adapter.uid] = adapter
        self.num_loads += 1
        self.loaded_bytes += adapter.packed.nbytes
        return True

    def _make_room(self, num_pages: int) -> bool:
        """A free slot and `num_pages` within the adapters' share; nothing is evicted where it can't help."""
        pinned = sum(adapter.num_pages for adapter in self._resident.values() if adapter.num_running)
        if pinned + num_pages > self._max_pages:
            return False
        while not self._free_slots or self._num_pages + num_pages > self._max_pages:
            if not self._evict_idle():
                return False
        return True

    def _take_extents(self, adapter: AdapterVersion) -> bool:
        """One run of pages per layer, evicting idle adapters and then cached prefixes for them."""
        for num_pages in self._layer_pages(adapter.packed):
            first = self._pages.alloc_run(num_pages) if num_pages else 0
            while first is None and (self._evict_idle() or self._blocks.evict_one()):
                first = self._pages.alloc_run(num_pages)
            if first is None:
                self._free_extents(adapter)
                return False
            adapter.extents.append((first, num_pages))
        return True

    def _free_extents(self, adapter: AdapterVersion) -> None:
        for first, num_pages in adapter.extents:
            if num_pages:
                self._pages.free(first, num_pages)
        adapter.extents.clear()

    def _evict_idle(self) -> bool:
        victim = least_recently_used(self._resident.values())
        if victim is None:
            return False
        self._evict(victim)
        self.num_evictions += 1
        return True

    def _evict(self, adapter: AdapterVersion) -> None:
        if adapter.slot is None:
            return
        self._slots.clear(adapter.slot)
        self._free_slots.append(adapter.slot)
        self._free_extents(adapter)
        del self._resident[adapter.uid]
        adapter.slot = None
