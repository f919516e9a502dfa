"""Adapters in this device's arena, where the cache puts them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.orders import LoadAdapter, Namespace, Order, Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.clock import Clock
from moe_lora.core.errors import CapacityError
from moe_lora.core.request import AdapterResidency

from .adapter_loader import AdapterStore, AdapterVersion, ShardSizes
from .copies import BringAdapter, ClearSlot, CopyPages, RankOrder

# What adapters may take of an arena beside one request: some can't be served at all, some not pinned.


@dataclass(frozen=True, kw_only=True)
class AdapterRoom:
    """num_slots: adapters on the device at once.  num_pages: those that the KV of one request leaves."""

    num_slots: int
    num_pages: int
    page_bytes: int

    def check_fits(self, name: str, num_pages: int, pinned: Sequence[int]) -> None:
        """Raises CapacityError if an adapter of so many pages could never be on the device.

        pinned: pages of each pinned adapter.
        """
        if not num_pages:
            return
        if len(pinned) >= self.num_slots:
            raise CapacityError(
                f"adapter {name!r} finds no slot: pinned ones take all max_loras={self.num_slots}; unpin one "
                "or raise max_loras"
            )
        if sum(pinned) + num_pages > self.num_pages:
            raise CapacityError(
                f"adapter {name!r} needs {self._mb(num_pages)} MB; beside a request of max_model_len the "
                f"arena has {self._mb(self.num_pages)} MB for adapters, of which {self._mb(sum(pinned))} MB "
                "are pinned; raise arena_mb or unpin adapters"
            )

    def check_pin(self, name: str, num_pages: int, pinned: Sequence[int], others: Sequence[int]) -> None:
        """Raises CapacityError if one more pinned adapter left no slot or no room for a request of another.

        others: pages of each adapter that stays without a pin and has any.
        """
        if others and len(pinned) + 1 >= self.num_slots:
            raise CapacityError(
                f"adapter {name!r} can't be pinned: of max_loras={self.num_slots} slots one must stay free "
                "for others; unpin another adapter or raise max_loras"
            )
        largest = max(others, default=0)
        if sum(pinned) + num_pages + largest > self.num_pages:
            raise CapacityError(
                f"adapter {name!r} of {self._mb(num_pages)} MB can't be pinned: that would leave no room for "
                f"a request of an adapter of {self._mb(largest)} MB; unpin another one or raise arena_mb"
            )

    def _mb(self, num_pages: int) -> str:
        return f"{num_pages * self.page_bytes / 1e6:.3f}"


class LocalLoader:
    """`AdapterLoader` in this device's arena: the cache says which adapters, this gives them slots.

    room: what they may take in all.  clear: has all ranks clear a slot.
    """

    on_change: Callable[[], None] | None = None
    waits_for_others = False

    def __init__(
        self,
        cache: UnifiedCache,
        kept: AdapterStore,
        sizes: ShardSizes,
        clock: Clock,
        *,
        room: AdapterRoom,
        clear: Callable[[ClearSlot], None],
    ) -> None:
        self._cache = cache
        self._kept = kept
        self._sizes = sizes
        self._clock = clock
        self._room = room
        self._clear = clear
        self._known: dict[Namespace, AdapterVersion] = {}
        self._versions: defaultdict[str, list[int]] = defaultdict(list)
        self._pinned: set[int] = set()
        self._to_bring: dict[Namespace, AdapterVersion] = {}
        self._num_pages: dict[Namespace, int] = {}
        self._slots: dict[Namespace, int] = {}
        self._free_slots = list(range(room.num_slots - 1, -1, -1))
        self._refused_pages = sys.maxsize
        cache.on_departure = self._depart

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        return self._kept.prepare(packed)

    def undo_prepare(self, packed: PackedAdapter) -> None:
        self._kept.undo_prepare(packed)

    def admit(self, adapter: AdapterVersion) -> None:
        layer_pages = self._sizes.layer_pages(adapter.packed)
        num_pages = sum(layer_pages)
        self._room.check_fits(adapter.name, num_pages, self._pinned_pages())
        adapter.packed = self._kept.keep(adapter.packed, adapter.path)
        try:
            self._cache.add_adapter(
                adapter.uid, layer_pages, self._clock.now_s(), inherits=self._latest(adapter.name)
            )
        except CapacityError:
            self._kept.forget(adapter.packed)
            raise
        self._known[adapter.uid] = adapter
        self._versions[adapter.name].append(adapter.uid)
        self._num_pages[adapter.uid] = num_pages

    def num_pages(self, adapter: AdapterVersion) -> int:
        """What the adapter takes on this device when it is there."""
        return self._num_pages[adapter.uid]

    def begin_round(self) -> None:
        self._refused_pages = sys.maxsize

    def hold(self, adapter: AdapterVersion, *, again: bool = False) -> Readiness:
        """Within a round, what found no room for few pages is not searched for more."""
        num_pages = self._num_pages[adapter.uid]
        if num_pages >= self._refused_pages and self.readiness(adapter) is Readiness.NO_ROOM:
            return Readiness.NO_ROOM
        readiness = self._cache.hold(adapter.uid, self._clock.now_s(), again=again)
        if readiness is Readiness.NO_ROOM:
            self._refused_pages = num_pages
        return readiness

    def has_unused_lease(self, adapter: AdapterVersion) -> bool:
        """Never: what is idle here makes room for whoever asks."""
        return False

    def readiness(self, adapter: AdapterVersion) -> Readiness:
        return self._cache.readiness(adapter.uid)

    def let_go(self, adapter: AdapterVersion) -> None:
        self._cache.let_go(adapter.uid, self._clock.now_s())

    def stop_asking(self, adapter: AdapterVersion) -> None:
        """Nothing to do: the cache remembers no questions."""

    def drop(self, adapter: AdapterVersion) -> None:
        self.unpin(adapter)
        self._cache.forget(adapter.uid)
        self._kept.forget(adapter.packed)
        del self._known[adapter.uid], self._num_pages[adapter.uid]
        versions = self._versions[adapter.name]
        versions.remove(adapter.uid)
        if not versions:
            del self._versions[adapter.name]

    def pin(self, adapter: AdapterVersion) -> None:
        if adapter.pinned:
            return
        self._check_pin(adapter)
        adapter.pinned = True
        self._pinned.add(adapter.uid)
        self._cache.pin(adapter.uid)
        self._to_bring[adapter.uid] = adapter
        self.bring_pinned()

    def bring_pinned(self) -> None:
        """Have pinned adapters brought that found no room so far."""
        for adapter in list(self._to_bring.values()):
            self.begin_round()
            if self.hold(adapter, again=True) is not Readiness.NO_ROOM:
                self.let_go(adapter)
                del self._to_bring[adapter.uid]

    def unpin(self, adapter: AdapterVersion) -> None:
        if adapter.pinned:
            adapter.pinned = False
            self._pinned.discard(adapter.uid)
            self._to_bring.pop(adapter.uid, None)
            self._cache.unpin(adapter.uid)

    def where(self, adapter: AdapterVersion) -> tuple[AdapterResidency, int]:
        place = self._cache.place(adapter.uid)
        if place == "device":
            return "device", self._num_pages[adapter.uid]
        return (self._kept.place(adapter.packed.content_hash) if place == "disk" else "host"), 0

    def resident(self) -> Iterator[AdapterVersion]:
        return (adapter for adapter in self._known.values() if adapter.slot is not None)

    def note_remote(self, adapter: AdapterVersion, *, ready: bool) -> None:
        """Whether the LoRA Server holds the adapter; of interest where nothing of it is computed here."""
        if not self._num_pages[adapter.uid]:
            self._cache.note_remote(adapter.uid, ready)

    def counters(self) -> dict[str, int]:
        """Those of the adapters kept: see `EngineCore.stats` for the cache's."""
        return self._kept.counters()

    def close(self) -> None:
        """The arena goes with the engine."""
        self._kept.close()

    def translate(self, order: Order) -> tuple[RankOrder, int] | None:
        """The order as ranks understand it, and how many pages it moves; None for an adapter that was dropped
        since.
        """
        if _brings(order) and order.namespace not in self._known:
            return None
        if isinstance(order, LoadAdapter):
            return self._bring(order.namespace, order.layer_first_pages, None)
        pages = CopyPages(order.device_pages, order.host_pages, order.to_device)
        if _brings(order):
            return self._bring(order.namespace, self._cache.layer_first_pages(order.namespace), pages)
        return pages, len(pages.device_pages)

    def arrived(self, order: Order) -> None:
        """An order is done: an adapter that it brought is ready."""
        if not _brings(order):
            return
        slot, adapter = self._slots.get(order.namespace), self._known.get(order.namespace)
        if adapter is not None:
            adapter.slot = slot

    def _bring(
        self, namespace: Namespace, first_pages: tuple[int, ...], pages: CopyPages | None
    ) -> tuple[RankOrder, int]:
        slot = self._slots[namespace] = self._free_slots.pop()
        adapter = self._known[namespace]
        order = BringAdapter(slot, adapter.packed.content_hash, first_pages, pages)
        return order, self._num_pages[namespace]

    def _depart(self, namespace: Namespace) -> None:
        slot = self._slots.pop(namespace, None)
        if slot is None:
            return
        self._clear(ClearSlot(slot))
        self._free_slots.append(slot)
        adapter = self._known.get(namespace)
        if adapter is not None:
            adapter.slot = None

    def _latest(self, name: str) -> int | None:
        """The version of that name which requests use now."""
        return max(self._versions.get(name, ()), default=None)

    def _check_pin(self, adapter: AdapterVersion) -> None:
        others = [
            self._num_pages[other.uid]
            for other in self._known.values()
            if not (other.pinned or (other.name == adapter.name and other.is_idle))
        ]
        self._room.check_pin(
            adapter.name, self._num_pages[adapter.uid], self._pinned_pages(), [num for num in others if num]
        )

    def _pinned_pages(self) -> list[int]:
        """Pages of each adapter that is pinned."""
        return [self._num_pages[uid] for uid in self._pinned]


def _brings(order: Order) -> bool:
    """Whether it has an adapter on the device."""
    return isinstance(order, LoadAdapter) or (order.is_adapter and order.to_device)
