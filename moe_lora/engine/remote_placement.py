"""Adapters on the LoRA Server: ready means leased."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.dist.lora_server.attach import LoraServerClient
from moe_lora.kernels.step import Lease

from .adapter_version import AdapterVersion
from .placement import LocalPlacement


class RemotePlacement:
    """`Placement` by leases of the LoRA Server, which decides for all instances.

    A request whose adapter finds no room there waits; while the server is away requests start all the same,
    and their deltas are computed here.
    """

    on_change: Callable[[], None] | None = None

    def __init__(self, server: LoraServerClient) -> None:
        self._server = server
        self._store = server.store
        self._lock = threading.Lock()
        self._known: dict[str, set[AdapterVersion]] = {}
        self._granted: dict[str, Lease] = {}
        self._held: dict[int, AdapterVersion] = {}
        self._num_versions: Counter[str] = Counter()
        self.num_loads = self.num_evictions = self.loaded_bytes = 0
        self._leases = server.leases(self._take)

    def admit(self, packed: PackedAdapter) -> PackedAdapter:
        """In the host store, mapped: what was read into this process's memory may go."""
        self._store.put(packed)
        self._leases.register(packed.content_hash)
        self._num_versions[packed.content_hash] += 1
        return self._store.get(packed.content_hash, packed.name)

    def hold(self, adapter: AdapterVersion) -> bool:
        if adapter.uid in self._held:
            return True
        adapter_id = adapter.packed.content_hash
        with self._lock:
            lease = self._granted.get(adapter_id)
            if lease is None and self._leases.connected:
                self._leases.acquire(adapter_id)
                return False
            adapter.lease = lease
            self._held[adapter.uid] = adapter
            self._known.setdefault(adapter_id, set()).add(adapter)
        if lease is None:
            self._leases.acquire(adapter_id)
        return True

    def let_go(self, adapter: AdapterVersion) -> None:
        adapter_id = adapter.packed.content_hash
        with self._lock:
            self._held.pop(adapter.uid, None)
            adapter.lease = None
            users = self._known.get(adapter_id, set())
            users.discard(adapter)
            if users:
                return
            self._known.pop(adapter_id, None)
            self._granted.pop(adapter_id, None)
        self._leases.release(adapter_id)

    def drop(self, adapter: AdapterVersion) -> None:
        self.let_go(adapter)
        adapter_id = adapter.packed.content_hash
        self._num_versions[adapter_id] -= 1
        if not self._num_versions[adapter_id]:
            del self._num_versions[adapter_id]
            self._leases.unregister(adapter_id)

    def resident(self) -> Iterator[AdapterVersion]:
        return iter(list(self._held.values()))

    def close(self) -> None:
        self._leases.stop()
        self._server.close()

    def _take(self, adapter_id: str, lease: Lease | None) -> None:
        """A lease was granted, or lost."""
        with self._lock:
            if lease is None:
                self._granted.pop(adapter_id, None)
            else:
                self._granted[adapter_id] = lease
            for adapter in self._known.get(adapter_id, ()):
                adapter.lease = lease
        if self.on_change is not None:
            self.on_change()


class BothPlacements:
    """Adapters computed partly on this device and partly by the LoRA Server: ready when both parts are."""

    def __init__(self, local: LocalPlacement, remote: RemotePlacement) -> None:
        self._local = local
        self._remote = remote

    @property
    def on_change(self) -> Callable[[], None] | None:
        return self._remote.on_change

    @on_change.setter
    def on_change(self, call: Callable[[], None] | None) -> None:
        self._remote.on_change = call

    @property
    def num_loads(self) -> int:
        return self._local.num_loads

    @property
    def num_evictions(self) -> int:
        return self._local.num_evictions

    @property
    def loaded_bytes(self) -> int:
        return self._local.loaded_bytes

    def admit(self, packed: PackedAdapter) -> PackedAdapter:
        return self._local.admit(self._remote.admit(packed))

    def hold(self, adapter: AdapterVersion) -> bool:
        """The lease is asked for first: it takes longer."""
        leased = self._remote.hold(adapter)
        return self._local.hold(adapter) and leased

    def let_go(self, adapter: AdapterVersion) -> None:
        self._remote.let_go(adapter)

    def drop(self, adapter: AdapterVersion) -> None:
        self._local.drop(adapter)
        self._remote.drop(adapter)

    def resident(self) -> Iterator[AdapterVersion]:
        return self._remote.resident()

    def close(self) -> None:
        self._remote.close()
