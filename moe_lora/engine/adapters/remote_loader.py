"""Adapters on the LoRA Server: ready means leased."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.cache.orders import Readiness
from moe_lora.core.errors import CapacityError
from moe_lora.core.request import AdapterResidency
from moe_lora.dist.lora_server.client.attach import LoraServerClient

from .adapter_loader import AdapterVersion
from .local_loader import LocalLoader

logger = logging.getLogger(__name__)


class RemoteLoader:
    """The part of a placement that is leases of the LoRA Server, which decides for all instances.

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
        self._mapped: dict[str, PackedAdapter] = {}
        """By content hash, so that the host store can be given again what it has lost."""
        self._leases = server.leases(self._take)

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """Put the adapter into the host store, from whichever thread."""
        self._store.put(packed)
        return packed

    def admit(self, packed: PackedAdapter) -> PackedAdapter:
        """In the host store, mapped: what was read into this process's memory may go.

        Raises CapacityError if the server could never hold it.
        """
        self._store.put(packed)
        self._leases.register(packed.content_hash)
        self._num_versions[packed.content_hash] += 1
        mapped = self._store.get(packed.content_hash, packed.name)
        self._mapped.setdefault(packed.content_hash, mapped)
        return mapped

    def hold(self, adapter: AdapterVersion) -> bool:
        """Whether there is a lease, or none can come; if not, it is asked for, and may come later."""
        if adapter.uid in self._held:
            return True
        adapter_id = adapter.packed.content_hash
        try:
            self._store.restore(adapter_id)
        except CapacityError as error:
            logger.error("adapter %s: %s", adapter.name, error)
        with self._lock:
            lease = self._leases.lease(adapter_id)
            if lease is None and self._leases.acquire(adapter_id):
                lease = self._leases.lease(adapter_id)
                if lease is None:
                    return False
            adapter.lease = lease
            self._held[adapter.uid] = adapter
        return True

    def has_unused_lease(self, adapter: AdapterVersion) -> bool:
        """Whether there is a lease and no request of any version of this content holds it."""
        adapter_id = adapter.packed.content_hash
        if self._leases.lease(adapter_id) is None:
            return False
        users = (other for other in self._held.values() if other.packed.content_hash == adapter_id)
        return not any(other.num_running for other in users)

    def let_go(self, adapter: AdapterVersion) -> None:
        """Give the lease back, or stop asking for it."""
        adapter_id = adapter.packed.content_hash
        with self._lock:
            self._held.pop(adapter.uid, None)
            adapter.lease = None
            if all(other.packed.content_hash != adapter_id for other in self._held.values()):
                self._leases.release(adapter_id)

    def drop(self, adapter: AdapterVersion) -> None:
        self.let_go(adapter)
        self.dismiss(adapter.packed)

    def dismiss(self, packed: PackedAdapter) -> None:
        """Undo one `admit`."""
        adapter_id = packed.content_hash
        self._num_versions[adapter_id] -= 1
        if not self._num_versions[adapter_id]:
            del self._num_versions[adapter_id]
            self._mapped.pop(adapter_id, None)
            self._leases.unregister(adapter_id)

    def resident(self) -> Iterator[AdapterVersion]:
        return iter(list(self._held.values()))

    def counters(self) -> dict[str, int]:
        backend = self._server.backend
        return {
            "lora_server_requests": backend.num_requests,
            "lora_server_fallback_rows": backend.num_fallback_rows,
        }

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


class SharedLoader:
    """Adapters computed by the LoRA Server, and for the sites that it leaves out by this device: ready when
    both parts are.  Where the server computes all, they have no pages here, and the arena is for KV.
    """

    waits_for_others = True

    def __init__(self, local: LocalLoader, remote: RemoteLoader) -> None:
        self._local = local
        self._remote = remote

    @property
    def on_change(self) -> Callable[[], None] | None:
        return self._remote.on_change

    @on_change.setter
    def on_change(self, call: Callable[[], None] | None) -> None:
        self._remote.on_change = call

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        return self._remote.prepare(packed)

    def undo_prepare(self, packed: PackedAdapter) -> None:
        """Nothing to do: the host store is for all instances, and keeps what it has."""

    def begin_round(self) -> None:
        self._local.begin_round()

    def admit(self, adapter: AdapterVersion) -> None:
        adapter.packed = self._remote.admit(adapter.packed)
        try:
            self._local.admit(adapter)
        except CapacityError:
            self._remote.dismiss(adapter.packed)
            raise

    def hold(self, adapter: AdapterVersion, *, again: bool = False) -> Readiness:
        """The lease is asked for first: it takes longer.  While there is no room here it is kept, unused."""
        leased = self._remote.hold(adapter)
        self._local.note_remote(adapter, ready=leased)
        return self._local.hold(adapter, again=again) if leased else Readiness.NO_ROOM

    def has_unused_lease(self, adapter: AdapterVersion) -> bool:
        return self._remote.has_unused_lease(adapter)

    def readiness(self, adapter: AdapterVersion) -> Readiness:
        return self._local.readiness(adapter)

    def let_go(self, adapter: AdapterVersion) -> None:
        if not adapter.num_running:
            self._remote.let_go(adapter)
        self._local.let_go(adapter)

    def stop_asking(self, adapter: AdapterVersion) -> None:
        self._remote.let_go(adapter)

    def drop(self, adapter: AdapterVersion) -> None:
        self._local.drop(adapter)
        self._remote.drop(adapter)

    def pin(self, adapter: AdapterVersion) -> None:
        """Its part on this device; the LoRA Server decides for itself."""
        if not self._local.num_pages(adapter):
            raise CapacityError(
                f"adapter {adapter.name!r} can't be pinned: the LoRA Server computes all of it, and decides "
                "what it holds; raise its capacity instead"
            )
        self._local.pin(adapter)

    def bring_pinned(self) -> None:
        self._local.bring_pinned()

    def unpin(self, adapter: AdapterVersion) -> None:
        self._local.unpin(adapter)

    def where(self, adapter: AdapterVersion) -> tuple[AdapterResidency, int]:
        place, num_pages = self._local.where(adapter)
        if adapter.lease is not None:
            return "remote", num_pages
        return (place if num_pages else "disk"), num_pages

    def resident(self) -> Iterator[AdapterVersion]:
        return self._remote.resident()

    def counters(self) -> dict[str, int]:
        return self._remote.counters()

    def close(self) -> None:
        self._remote.close()
