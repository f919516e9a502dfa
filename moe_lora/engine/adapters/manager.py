"""Which adapters the engine knows, their versions, and which of them requests hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.orders import Readiness
from moe_lora.core.clock import Clock
from moe_lora.core.errors import AdapterExistsError, AdapterNotFoundError, CapacityError
from moe_lora.core.request import AdapterInfo

from .adapter_loader import AdapterLoader, AdapterVersion


class AdapterManager:
    """Names, versions and users of adapters (the scheduler's `Adapters`); an `AdapterLoader` makes them
    ready for computing.
    """

    def __init__(self, placement: AdapterLoader, clock: Clock) -> None:
        self.placement = placement
        self._clock = clock
        self._current: dict[str, AdapterVersion] = {}
        self._uids = itertools.count(1)
        self._versions: dict[str, int] = {}

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """What takes long of an `add` that is to come; may be called from another thread."""
        return self.placement.prepare(packed)

    def add(
        self, packed: PackedAdapter, path: str | None, *, replace: bool = False, version: int | None = None
    ) -> AdapterVersion:
        """Serve `packed` under its name from now on; a new version is pinned as the one before it was.

        version: its number, which whoever serves it on several engines gives; None: one more than the last.
        Raises AdapterExistsError if the name is taken and not to be replaced, CapacityError if there could
        never be room for it.
        """
        try:
            return self._add(packed, path, replace, version)
        except (AdapterExistsError, CapacityError):
            self.placement.undo_prepare(packed)
            raise

    def _add(
        self, packed: PackedAdapter, path: str | None, replace: bool, version: int | None
    ) -> AdapterVersion:
        name = packed.name
        if name in self._current and not replace:
            raise AdapterExistsError(
                f"adapter {name!r} is already loaded; unload it first or load it in place"
            )
        number = self._versions.get(name, 0) + 1 if version is None else version
        adapter = AdapterVersion(next(self._uids), number, packed, path)
        previous = self._current.get(name)
        if previous is not None and previous.pinned:
            self._hand_pin_over(previous, adapter)
        else:
            self.placement.admit(adapter)
        self._versions[name] = number
        self._current[name] = adapter
        if previous is not None:
            self._retire(previous)
        return adapter

    def _hand_pin_over(self, previous: AdapterVersion, adapter: AdapterVersion) -> None:
        """Admit a version that takes the pin of the one before it, and with that its room."""
        self.placement.unpin(previous)
        try:
            self.placement.admit(adapter)
            try:
                self.placement.pin(adapter)
            except CapacityError:
                self.placement.drop(adapter)
                raise
        except CapacityError:
            self.placement.pin(previous)
            raise

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
        return self.placement.resident()

    def info(self, adapter: AdapterVersion) -> AdapterInfo:
        """What clients are told of an adapter."""
        residency, num_pages = self.placement.where(adapter)
        last_used_s = adapter.last_used_s
        return AdapterInfo(
            name=adapter.name,
            version=adapter.version,
            lora_rank=adapter.packed.max_lora_rank,
            nbytes=adapter.packed.nbytes,
            targets=adapter.packed.targets,
            path=adapter.path,
            residency=residency,
            num_running=adapter.num_running,
            num_waiting=adapter.num_waiting,
            num_pages=num_pages,
            pinned=adapter.pinned,
            idle_s=None if last_used_s is None else self._clock.now_s() - last_used_s,
            content_hash=adapter.packed.content_hash,
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether it may depend on another process that an adapter becomes ready."""
        return self.placement.waits_for_others

    def enqueue(self, adapter: AdapterVersion) -> None:
        """One more request of the adapter waits, holding nothing."""
        adapter.num_waiting += 1

    def dequeue(self, adapter: AdapterVersion) -> None:
        """One of those holds the adapter now, or has left."""
        adapter.num_waiting -= 1
        self.settle(adapter)

    def begin_round(self) -> None:
        """Requests are about to be admitted, one `acquire` after the other."""
        self.placement.begin_round()

    def acquire(self, adapter: AdapterVersion, *, again: bool = False) -> Readiness:
        """Hold the adapter for one request, its bytes on their way if they are not there.

        NO_ROOM: it is not held, there is no place now.  again: this request held it before.
        """
        readiness = self.placement.hold(adapter, again=again)
        if readiness is not Readiness.NO_ROOM:
            adapter.num_running += 1
            adapter.last_used_s = self._clock.now_s()
        return readiness

    def has_unused_lease(self, adapter: AdapterVersion) -> bool:
        """Whether others wait for its place, which is kept for this engine, though no request uses it."""
        return self.placement.has_unused_lease(adapter)

    def readiness(self, adapter: AdapterVersion) -> Readiness:
        """Of an adapter that was acquired: whether its bytes are there."""
        return self.placement.readiness(adapter)

    def release(self, adapter: AdapterVersion) -> None:
        """One request of the adapter does not hold it any more."""
        adapter.num_running -= 1
        adapter.last_used_s = self._clock.now_s()
        self.placement.let_go(adapter)
        self.settle(adapter)

    def settle(self, adapter: AdapterVersion) -> None:
        """If nobody holds the adapter any more, or waits for it: let it go; a retired one is freed."""
        if adapter.num_running or adapter.num_waiting:
            return
        self.placement.stop_asking(adapter)
        if adapter.retired:
            self.placement.drop(adapter)

    def _retire(self, adapter: AdapterVersion) -> None:
        adapter.retired = True
        self.placement.unpin(adapter)
        self.settle(adapter)
