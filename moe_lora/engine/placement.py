"""Where adapters' bytes lie while requests use them: the interface, and this device's own arena."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.blocks import BlockManager
from moe_lora.cache.pages import PageAllocator
from moe_lora.core.errors import CapacityError
from moe_lora.policies.eviction import least_recently_used

from .adapter_version import AdapterVersion
from .slot_writer import SlotWriter


class Placement(Protocol):
    """Makes adapters ready for computing.  Called by the engine's own thread only."""

    on_change: Callable[[], None] | None
    """Called, from another thread, when an adapter that was not ready may be now."""

    def counters(self) -> dict[str, int]:
        """Counters of `EngineStats` by their names there."""
        ...

    def admit(self, packed: PackedAdapter) -> PackedAdapter:
        """Take on an adapter that `drop` will end; returns what to keep of it.

        Raises CapacityError if it could never be made ready.
        """
        ...

    def hold(self, adapter: AdapterVersion) -> bool:
        """Make the adapter ready and keep it so; False if that can't be done now (ask again later)."""
        ...

    def let_go(self, adapter: AdapterVersion) -> None:
        """Its last running request ended: it stays ready while nobody else needs the room."""
        ...

    def drop(self, adapter: AdapterVersion) -> None:
        """It will not be used again."""
        ...

    def resident(self) -> Iterator[AdapterVersion]:
        """Adapters that are ready now."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...


class LocalPlacement:
    """Adapters in this device's arena: one extent of whole pages per layer, at true rank, idle ones evicted.

    Extents take no more pages than the arena has beyond those promised to KV: idle adapters would never give
    these back.  load_bytes_per_s: upper bound on the rate of loading, which holds up the step, as it does in
    vLLM's S-LoRA; None = none.
    """

    on_change: Callable[[], None] | None = None

    def __init__(
        self,
        pages: PageAllocator,
        page_bytes: int,
        writer: SlotWriter,
        blocks: BlockManager,
        load_bytes_per_s: float | None = None,
    ) -> None:
        self._load_bytes_per_s = load_bytes_per_s
        self._pages = pages
        self._page_bytes = page_bytes
        self._writer = writer
        self._blocks = blocks
        self._max_pages = pages.num_pages - blocks.max_blocks
        self._resident: dict[int, AdapterVersion] = {}
        self._free_slots = list(range(writer.num_slots - 1, -1, -1))
        self.num_loads = self.num_evictions = self.loaded_bytes = 0

    def admit(self, packed: PackedAdapter) -> PackedAdapter:
        pages = sum(self._layer_pages(packed))
        if pages > self._max_pages:
            raise CapacityError(
                f"adapter {packed.name!r} needs {pages * self._page_bytes / 1e9:.3f} GB, the engine keeps "
                f"{self._max_pages * self._page_bytes / 1e9:.3f} GB for adapters; raise lora_memory_gb"
            )
        return self._writer.keep(packed)

    def hold(self, adapter: AdapterVersion) -> bool:
        return adapter.slot is not None or self._bring_in(adapter)

    def let_go(self, adapter: AdapterVersion) -> None:
        """Nothing to do: adapters without running requests are what `_evict_idle` looks for."""

    def drop(self, adapter: AdapterVersion) -> None:
        self._vacate(adapter)
        self._writer.forget(adapter.packed)

    def _vacate(self, adapter: AdapterVersion) -> None:
        if adapter.slot is None:
            return
        self._writer.clear(adapter.slot)
        self._free_slots.append(adapter.slot)
        self._free_extents(adapter)
        del self._resident[adapter.uid]
        adapter.slot = None

    def resident(self) -> Iterator[AdapterVersion]:
        return iter(self._resident.values())

    def close(self) -> None:
        """Nothing to do: the arena goes with the engine."""

    def counters(self) -> dict[str, int]:
        return {
            "adapter_loads": self.num_loads,
            "adapter_evictions": self.num_evictions,
            "adapter_load_bytes": self.loaded_bytes,
        }

    @property
    def _num_pages(self) -> int:
        return sum(adapter.num_pages for adapter in self._resident.values())

    def _layer_pages(self, packed: PackedAdapter) -> list[int]:
        return [-(-num_bytes // self._page_bytes) for num_bytes in self._writer.layer_bytes(packed)]

    def _bring_in(self, adapter: AdapterVersion) -> bool:
        if not self._make_room(sum(self._layer_pages(adapter.packed))) or not self._take_extents(adapter):
            return False
        start_s = time.monotonic()
        adapter.slot = self._free_slots.pop()
        offsets = [first * self._page_bytes for first, _ in adapter.extents]
        self._writer.write(adapter.slot, adapter.packed, offsets)
        self._resident[adapter.uid] = adapter
        self.num_loads += 1
        self.loaded_bytes += adapter.packed.nbytes
        if self._load_bytes_per_s is not None:
            time.sleep(
                max(0.0, adapter.packed.nbytes / self._load_bytes_per_s - (time.monotonic() - start_s))
            )
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
        self._vacate(victim)
        self.num_evictions += 1
        return True
