"""Which adapters the engine knows, their versions, and which of them requests hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.blocks import BlockManager
from moe_lora.core.clock import Clock
from moe_lora.core.errors import AdapterExistsError, AdapterNotFoundError

from .adapter_version import AdapterVersion
from .placement import Placement


class Residency:
    """Names, versions and pins of adapters; a `Placement` makes them ready for computing."""

    def __init__(self, placement: Placement, blocks: BlockManager, clock: Clock) -> None:
        self.placement = placement
        self._blocks = blocks
        self._clock = clock
        self._current: dict[str, AdapterVersion] = {}
        self._uids = itertools.count(1)
        self._versions: dict[str, int] = {}

    def add(self, packed: PackedAdapter, path: str | None, *, replace: bool = False) -> AdapterVersion:
        """Serve `packed` under its name from now on.

        Raises AdapterExistsError if the name is taken and not to be replaced, CapacityError if there could
        never be room for it.
        """
        name = packed.name
        if name in self._current and not replace:
            raise AdapterExistsError(
                f"adapter {name!r} is already loaded; unload it first or load it in place"
            )
        packed = self.placement.admit(packed)
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
        return self.placement.resident()

    def acquire(self, adapter: AdapterVersion) -> bool:
        """Bring the adapter in if need be and pin it for one request; False if there is no place now."""
        if not self.placement.hold(adapter):
            return False
        adapter.num_running += 1
        adapter.last_used_s = self._clock.now_s()
        return True

    def release(self, adapter: AdapterVersion) -> None:
        """One request of the adapter stopped running."""
        adapter.num_running -= 1
        adapter.last_used_s = self._clock.now_s()
        if adapter.num_running == 0:
            self.placement.let_go(adapter)
        self.settle(adapter)

    def settle(self, adapter: AdapterVersion) -> None:
        """Nobody runs the adapter any more, or waits for it: let it go; a retired one is freed."""
        if adapter.num_running or adapter.num_waiting:
            return
        self.placement.let_go(adapter)
        if adapter.retired:
            self.placement.drop(adapter)
            self._blocks.forget(adapter.uid)

    def _retire(self, adapter: AdapterVersion) -> None:
        adapter.retired = True
        self.settle(adapter)
