"""Adapters on the LoRA Server: ready means leased."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.dist.lora_server.attach import LoraServerClient

from .adapter_version import AdapterVersion


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
        self._held: dict[int, AdapterVersion] = {}
        self._num_versions: Counter[str] = Counter()
        self.num_loads = self.num_evictions = self.loaded_bytes = 0
        self._leases = server.leases(self._take)

    def check(self, packed: PackedAdapter) -> None:
        self._store.put(packed)
        self._leases.register(packed.content_hash)
        self._num_versions[packed.content_hash] += 1

    def hold(self, adapter: AdapterVersion) -> bool:
        if adapter.uid in self._held:
            return True
        adapter_id = adapter.packed.content_hash
        with self._lock:
            lease = self._leases.lease(adapter_id)
            if lease is None and self._leases.acquire(adapter_id):
                lease = self._leases.lease(adapter_id)
                if lease is None:
                    return False
            adapter.lease = lease
            self._held[adapter.uid] = adapter
        return True

    def let_go(self, adapter: AdapterVersion) -> None:
        adapter_id = adapter.packed.content_hash
        with self._lock:
            self._held.pop(adapter.uid, None)
            adapter.lease = None
            if all(other.packed.content_hash != adapter_id for other in self._held.values()):
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

    def _take(self) -> None:
        """Leases came or went."""
        with self._lock:
            for adapter in self._held.values():
                adapter.lease = self._leases.lease(adapter.packed.content_hash)
        if self.on_change is not None:
            self.on_change()
