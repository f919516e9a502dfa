# SPDX-License-Identifier: Apache-2.0
"""The engine's adapters: versions, holds by requests, pins."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, count
from typing import TYPE_CHECKING

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.orders import Namespace, Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.clock import Clock
from moe_lora.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    BusyError,
    CapacityError,
    MoeLoraError,
)
from moe_lora.core.request import COMPOSED, AdapterInfo, AdapterResidency
from moe_lora.lora.row_routing import content_number

from .adapter_store import AdapterFailures, AdapterStore, AdapterVersion, ShardSizes

if TYPE_CHECKING:
    from moe_lora.policies.admission.host_start import HostLoads

logger = logging.getLogger(__name__)


class AdapterManager:
    """Names, versions, users and pins of adapters (the scheduler's `Adapters`).

    leases: of the LoRA Server; an adapter is ready when leased and the local part is loaded.  num_pages:
    limit on the device, beside one request's KV.  host_loads: decides when prompts begin on host workers;
    None: whenever possible.
    """

    def __init__(
        self,
        cache: UnifiedCache,
        store: AdapterStore,
        sizes: ShardSizes,
        contents: AdapterContents,
        clock: Clock,
        *,
        num_pages: int,
        host_loads: HostLoads | None = None,
    ) -> None:
        self.store = store
        self.failures = AdapterFailures(clock)
        self.host_loads = host_loads
        self.contents = contents
        self.leases = leases = store.leases
        self.versions: dict[Namespace, AdapterVersion] = {}
        self.waits_for_others = leases is not None
        """True if readiness may depend on another process."""
        self.page_bytes = sizes.page_bytes
        self._cache = cache
        self._sizes = sizes
        self._clock = clock
        self.num_slots = cache.max_adapters
        self._max_pages = num_pages
        self._current: dict[str, AdapterVersion] = {}
        self._uids = count(1)
        self._numbers: dict[str, int] = {}
        self._pinned: set[AdapterVersion] = set()
        self.to_bring: list[AdapterVersion] = []
        self.on_drop: Callable[[AdapterVersion], None] | None = None
        """Called after a version's last trace is gone."""
        self._refused_pages = sys.maxsize
        self.num_preloaded = 0
        if host_loads is not None:
            cache.watch_loads(lambda uid: host_loads.end(uid, clock.now_s()))

    def add(
        self, packed: PackedAdapter, path: str | None, *, replace: bool = False, version: int | None = None
    ) -> AdapterVersion:
        """Serve `packed` under its name from now on; a new version keeps the pin.

        version: None: last number and one.  Raises AdapterExistsError for a taken name without `replace`,
        unless that adapter failed; CapacityError for an adapter that can never fit; BusyError if requests
        of the former version leave the pin no room.
        """
        name, previous = packed.name, self._current.get(packed.name)
        try:
            if previous is not None and not replace and self.failures.problem(previous) is None:
                raise AdapterExistsError(
                    f"adapter {name!r} is already loaded; unload it first or load it in place"
                )
            number = self._numbers.get(name, 0) + 1 if version is None else version
            adapter = AdapterVersion(next(self._uids), number, packed, path)
            if previous is not None and previous.pinned:
                self._hand_pin_over(previous, adapter)
            else:
                self._admit(adapter)
        except MoeLoraError:
            self.store.undo_prepare(packed)
            self.contents.discard(packed.content_hash)
            raise
        self._numbers[name] = number
        self._current[name] = adapter
        if previous is not None:
            self._retire(previous)
        self.contents.serve(name, adapter.packed.content_hash)
        return adapter

    def check_next(self, name: str) -> None:
        """Raises BusyError if requests of a pinned adapter hold the slot of its next version."""
        previous = self._current.get(name)
        if previous is None or not previous.pinned or len(self._pinned) < self.num_slots:
            return
        if any(one.num_pages for one in self.versions.values() if one.name == name and not one.is_idle):
            raise _busy(name)

    def current(self, name: str) -> AdapterVersion:
        """The version for new requests.  Raises AdapterNotFoundError."""
        if name not in self._current:
            raise AdapterNotFoundError(f"adapter {name!r} is not loaded")
        return self._current[name]

    def usable(self, name: str) -> AdapterVersion:
        """As `current`.  Raises AdapterFailedError for an unavailable adapter."""
        adapter = self.current(name)
        if adapter.uid in self.failures.by_version:
            self.failures.check(adapter)
        return adapter

    def remove(self, name: str) -> None:
        """Refuse new requests; the last request frees the memory."""
        adapter = self.current(name)
        del self._current[name]
        if name.startswith(COMPOSED):  # the name is the content
            del self._numbers[name]
        self._retire(adapter)
        self.contents.forget(name)

    def known(self) -> list[AdapterVersion]:
        return list(self._current.values())

    def resident(self) -> Iterator[AdapterVersion]:
        """Adapters ready now."""
        if self.leases is not None:
            leaseless = (adapter for adapter in self.versions.values() if adapter.leaseless)
            return chain(self.leases.resident(), leaseless)
        return (adapter for adapter in self.versions.values() if adapter.slot is not None)

    def info(self, adapter: AdapterVersion) -> AdapterInfo:
        """Facts for clients."""
        residency: AdapterResidency = self._cache.place(adapter.uid)
        num_pages = adapter.num_pages if residency == "device" else 0
        if self.leases is not None:
            on_device = num_pages or adapter.leaseless
            residency = "remote" if adapter.lease is not None else "device" if on_device else "disk"
        elif residency == "disk":
            residency = self.store.place(adapter.packed.content_hash)
        problem = self.failures.problem(adapter)
        last_used_s = adapter.last_used_s
        return AdapterInfo(
            name=adapter.name,
            version=adapter.version,
            lora_rank=adapter.packed.max_lora_rank,
            nbytes=adapter.packed.nbytes,
            targets=adapter.packed.targets,
            path=adapter.path,
            residency=residency if problem is None else "unavailable",
            problem=problem or "",
            num_running=adapter.num_running,
            num_waiting=adapter.num_waiting,
            num_pages=num_pages,
            pinned=adapter.pinned,
            idle_s=None if last_used_s is None else self._clock.now_s() - last_used_s,
            content_hash=adapter.packed.content_hash,
            device_bytes=adapter.num_pages * self.page_bytes,
        )

    def enqueue(self, adapter: AdapterVersion) -> None:
        """Count a waiting request, without a hold."""
        adapter.num_waiting += 1

    def dequeue(self, adapter: AdapterVersion) -> None:
        """A waiting request holds the adapter now, or has left."""
        adapter.num_waiting -= 1
        if adapter.retired or self.leases is not None:
            self._settle(adapter)

    def begin_round(self) -> None:
        """Start of a round of `acquire` calls."""
        self._refused_pages = sys.maxsize

    def acquire(self, adapter: AdapterVersion, *, again: bool = False, num_tokens: int = 1) -> Readiness:
        """Hold the adapter for one request, and start its load if absent.

        NO_ROOM: not held for lack of room; a lease that came meanwhile stays.  again: the request held the
        adapter before.
        """
        adapter.asker = self._cache.asker
        if self.leases is not None and not adapter.leaseless:
            leased = self.leases.acquire(adapter)
            if not adapter.num_pages:
                self._cache.note_remote(adapter.uid, leased)
            if not leased:
                return Readiness.NO_ROOM
        readiness = self._hold(adapter, again=again, num_tokens=num_tokens)
        if readiness is not Readiness.NO_ROOM:
            adapter.num_running += 1
            adapter.last_used_s = self._clock.now_s()
        return readiness

    def has_unused_lease(self, adapter: AdapterVersion) -> bool:
        """True if other engines wait for a slot unused here."""
        return self.leases is not None and self.leases.is_unused(adapter)

    def readiness(self, adapter: AdapterVersion) -> Readiness:
        readiness = self._cache.readiness(adapter.uid)
        if readiness is Readiness.LOADING and self.store.host_has(adapter.packed.content_hash):
            return Readiness.HOST_COMPUTABLE
        return readiness

    def stop_host(self, failed: Mapping[int, Exception]) -> set[AdapterVersion]:
        """Make requests of failed adapters wait for the device; returns the versions."""
        if not failed:
            return set()
        found = set()
        for adapter in self.versions.values():
            error = failed.get(content_number(adapter.packed.content_hash))
            if error is not None:
                found.add(adapter)
                self.store.stop_host(adapter.packed.content_hash)
                logger.error(
                    "adapter %s version %d: its requests wait for its load, since its host workers failed",
                    *(adapter.name, adapter.version),
                    exc_info=error,
                )
        return found

    def pays_on_host(self, adapter: AdapterVersion, num_tokens: int, on_host: int) -> bool:
        """True if host workers compute these prompt tokens sooner."""
        now_s = self._clock.now_s()
        return self.host_loads is None or self.host_loads.pays(adapter.uid, num_tokens, on_host, now_s)

    def release(self, adapter: AdapterVersion) -> None:
        """Release the adapter for one request; evictable without users."""
        adapter.num_running -= 1
        adapter.last_used_s = self._clock.now_s()
        if self.leases is not None:
            self.release_lease(adapter)
        self._cache.let_go(adapter.uid, adapter.last_used_s)
        if adapter.retired or self.leases is not None:
            self._settle(adapter)

    def release_lease(self, adapter: AdapterVersion) -> None:
        """Release the lease, or cancel its request, unless a request holds the adapter."""
        if self.leases is not None and not adapter.num_running:
            self.leases.release(adapter)

    def is_ready(self, adapter: AdapterVersion) -> bool:
        """True if the local part is on the device."""
        return self._cache.readiness(adapter.uid) is Readiness.READY and (
            adapter.slot is not None or not adapter.num_pages
        )

    def hold_merged(self, adapter: AdapterVersion) -> bool:
        """Keep a ready adapter on the device for a merge; False if not ready."""
        if not self.is_ready(adapter):
            return False
        self._cache.hold(adapter.uid, self._clock.now_s(), again=True)
        adapter.merged = True
        return True

    def release_merged(self, adapter: AdapterVersion) -> None:
        """Undo `hold_merged`; the last request frees an unloaded adapter."""
        adapter.merged = adapter.leaseless = False
        self._cache.let_go(adapter.uid, self._clock.now_s())
        self._settle(adapter)

    def give_lease_back(self, adapter: AdapterVersion) -> None:
        """Release the lease: the weights carry the LoRA Server's part."""
        if self.leases is not None:
            adapter.leaseless = True
            self.leases.release(adapter)

    def take_lease_again(self, adapter: AdapterVersion) -> bool:
        """Acquire the lease before an unmerge.

        False: requests need a lease, so the adapter must stay merged.
        """
        if adapter.leaseless and self.leases is not None:
            adapter.leaseless = bool(adapter.num_running) and not self.leases.acquire(adapter)
        return not adapter.leaseless

    def clear_history(self, names: Callable[[str | None], bool]) -> None:
        """Make the cached prefixes of these adapters unfindable.

        names: called with None for the base model.
        """
        found = [uid for uid, adapter in self.versions.items() if names(adapter.name)]
        self._cache.clear_history([*found, None] if names(None) else found)

    def evict_all(self) -> None:
        """Free all pages.  No request and no copy may be under way."""
        for adapter in self._pinned:
            self._cache.unpin(adapter.uid)
        self.to_bring.clear()
        try:
            self._cache.evict_all()
        finally:
            for adapter in self._pinned:
                self._cache.pin(adapter.uid)

    def bring_evicted(self) -> None:
        """Load pinned adapters again."""
        self.to_bring = list(self._pinned)
        self.bring_pinned()

    def pin(self, adapter: AdapterVersion) -> None:
        """Load the adapter's local part and keep it.

        Raises CapacityError without room for a request, or BusyError.
        """
        if adapter.pinned:
            return
        self._check_pin(adapter)
        adapter.pinned = True
        self._pinned.add(adapter)
        self._cache.pin(adapter.uid)
        self.to_bring.append(adapter)
        self.bring_pinned()

    def bring_pinned(self) -> float | None:
        """Load pinned adapters without room so far; returns the seconds until a failed load's repetition."""
        rests_s: list[float] = []
        for adapter in list(self.to_bring):
            failure = self.failures.by_version.get(adapter.uid)
            rest_s = 0.0 if failure is None else (failure.retry_s or 0.0) - self._clock.now_s()
            if rest_s > 0.0:
                rests_s.append(rest_s)
                continue
            self.begin_round()
            if self._hold(adapter, again=True) is not Readiness.NO_ROOM:
                self._cache.let_go(adapter.uid, self._clock.now_s())
                self.to_bring.remove(adapter)
        return min(rests_s, default=None)

    def unpin(self, adapter: AdapterVersion) -> None:
        """Undo `pin`."""
        if adapter.pinned:
            adapter.pinned = False
            self._pinned.discard(adapter)
            if adapter in self.to_bring:
                self.to_bring.remove(adapter)
            self._cache.unpin(adapter.uid)

    def preload(self, names: Iterable[str]) -> int:
        """Load adapters ahead of requests, in order; returns the number loaded or loading.

        Adapters in use stay, and no preload evicts another.  Skips unknown names.  Source: dLoRA, section
        5.1.
        """
        found = [self._current[name] for name in names if name in self._current]
        found = [adapter for adapter in found if adapter.num_pages]
        for adapter in found:
            self._cache.pin(adapter.uid)
        self.begin_round()
        for adapter in found:
            if self._cache.readiness(adapter.uid) is not Readiness.NO_ROOM:
                continue
            if self._hold(adapter, again=True) is not Readiness.NO_ROOM:
                self._cache.let_go(adapter.uid, self._clock.now_s())
                self.num_preloaded += 1
        for adapter in found:
            self._cache.unpin(adapter.uid)
        return sum(self._cache.readiness(adapter.uid) is not Readiness.NO_ROOM for adapter in found)

    def _admit(self, adapter: AdapterVersion) -> None:
        """Admit an adapter; `adapter.packed` becomes the kept form.  Raises CapacityError."""
        with ExitStack() as undo:
            packed = adapter.packed
            layer_pages = self._sizes.layer_pages(packed.layers, packed.shard_elements, packed.of_ranks)
            adapter.num_pages = sum(layer_pages)
            self._check_fits(adapter)
            adapter.packed = self.store.keep(adapter.packed, adapter.path)
            undo.callback(self.store.forget, adapter.packed)
            if self.store.host is not None and self._sizes.is_computed_here(adapter.packed):
                self.store.stop_host(adapter.packed.content_hash)
            previous = self._current.get(adapter.name)
            inherits = None if previous is None else previous.uid
            self._cache.add_adapter(adapter.uid, layer_pages, self._clock.now_s(), inherits=inherits)
            self.versions[adapter.uid] = adapter
            undo.pop_all()

    def _drop(self, adapter: AdapterVersion) -> None:
        self.unpin(adapter)
        self._cache.forget(adapter.uid)
        del self.versions[adapter.uid]
        self.failures.forget(adapter.uid)
        if self.on_drop is not None:
            self.on_drop(adapter)
        self.store.forget(adapter.packed)

    def _hand_pin_over(self, previous: AdapterVersion, adapter: AdapterVersion) -> None:
        self.unpin(previous)
        with ExitStack() as undo:
            undo.callback(self.pin, previous)
            self._admit(adapter)
            undo.callback(self._drop, adapter)
            self.pin(adapter)
            undo.pop_all()

    def _retire(self, adapter: AdapterVersion) -> None:
        adapter.retired = True
        self.unpin(adapter)
        self._settle(adapter)

    def _settle(self, adapter: AdapterVersion) -> None:
        if adapter.is_idle:
            self.release_lease(adapter)
            if adapter.retired:
                self._drop(adapter)

    def _hold(self, adapter: AdapterVersion, *, again: bool, num_tokens: int = 1) -> Readiness:
        """Within a round, a failed search is not repeated for more pages."""
        if adapter.num_pages >= self._refused_pages and self.readiness(adapter) is Readiness.NO_ROOM:
            return Readiness.NO_ROOM
        now_s, before = self._clock.now_s(), self._cache.readiness(adapter.uid)
        readiness = self._cache.hold(adapter.uid, now_s, again=again)
        if self.host_loads is not None and readiness is Readiness.LOADING:
            from moe_lora.timing.host_times import ColdAdapter

            packed, under_way = adapter.packed, before is Readiness.LOADING
            num_bytes = adapter.num_pages * self.page_bytes
            cold = ColdAdapter(lora_rank=packed.max_lora_rank, num_bytes=num_bytes, targets=packed.targets)
            self.host_loads.begin(adapter.uid, cold, num_tokens, now_s, under_way=under_way)
        if readiness is Readiness.NO_ROOM:
            self._refused_pages = adapter.num_pages
        return readiness

    def _check_fits(self, adapter: AdapterVersion) -> None:
        """Raises CapacityError if this size can never fit."""
        if not adapter.num_pages:
            return
        if len(self._pinned) >= self.num_slots:
            raise CapacityError(
                f"adapter {adapter.name!r} finds no slot: pinned ones take all "
                f"max_loras={self.num_slots}; unpin one or raise max_loras"
            )
        pinned = sum(other.num_pages for other in self._pinned)
        if pinned + adapter.num_pages > self._max_pages:
            raise CapacityError(
                f"adapter {adapter.name!r} needs {self._mb(adapter.num_pages)} MB; beside a request of "
                f"max_model_len the arena has {self._mb(self._max_pages)} MB for adapters, of which "
                f"{self._mb(pinned)} MB are pinned; raise arena_mb or unpin adapters"
            )

    def _check_pin(self, adapter: AdapterVersion) -> None:
        """Raises CapacityError if the pin leaves no slot or room for another adapter's request.

        Raises BusyError if only requests of the name's former versions are in the way.
        """
        name = adapter.name
        if self.leases is not None and not adapter.num_pages:
            raise CapacityError(
                f"adapter {name!r} can't be pinned: the LoRA Server computes all of it, and decides "
                "what it holds; raise its capacity instead"
            )
        others = [
            other
            for other in self.versions.values()
            if not (other.pinned or other is adapter or (other.name == name and other.is_idle))
        ]
        try:
            self._check_pin_beside(adapter, others)
        except CapacityError:
            self._check_pin_beside(adapter, [other for other in others if other.name != name])
            raise _busy(name) from None

    def _check_pin_beside(self, adapter: AdapterVersion, others: Sequence[AdapterVersion]) -> None:
        name, largest = adapter.name, max((other.num_pages for other in others), default=0)
        if largest and len(self._pinned) + 1 >= self.num_slots:
            raise CapacityError(
                f"adapter {name!r} can't be pinned: of max_loras={self.num_slots} slots one must stay "
                "free for others; unpin another adapter or raise max_loras"
            )
        pinned = sum(other.num_pages for other in self._pinned)
        if pinned + adapter.num_pages + largest > self._max_pages:
            raise CapacityError(
                f"adapter {name!r} of {self._mb(adapter.num_pages)} MB can't be pinned: that would leave no "
                f"room for a request of an adapter of {self._mb(largest)} MB; unpin another one or raise "
                "arena_mb"
            )

    def _mb(self, num_pages: int) -> str:
        return f"{num_pages * self.page_bytes / 1e6:.3f}"


def _busy(name: str) -> BusyError:
    return BusyError(
        f"adapter {name!r} can't be pinned yet: requests of its former version still hold a slot; "
        "send the request again once they have ended, or unpin the adapter first"
    )
