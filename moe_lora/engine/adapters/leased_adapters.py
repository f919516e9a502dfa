# SPDX-License-Identifier: Apache-2.0
"""Adapters at the LoRA Server: kept in its host store, ready once leased; and the move to another server."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import AdapterError, CapacityError, LoraServerError
from moe_lora.core.processes import in_thread

from .adapter_store import AdapterStore, AdapterVersion, no_others

if TYPE_CHECKING:
    from moe_lora.dist.host_workers.workers import HostWorkers
    from moe_lora.dist.lora_server.attach import LeaseClient, LoraServerClient
    from moe_lora.engine.core import EngineCore
    from moe_lora.engine.ranks.rank import Rank
    from moe_lora.engine.ranks.server_move import FollowersMove

logger = logging.getLogger(__name__)
Waits: TypeAlias = Generator[Future[Any], Any, None]

GRANTS_S = 10.0
"""Limit for registers and leases before a move; rows without a lease are computed here."""
_LOOK_S = 0.005


class LeasedAdapters(AdapterStore):
    """`AdapterStore` with adapters at the LoRA Server.

    Without a connection, requests start with deltas computed here.
    """

    def __init__(
        self,
        server: LoraServerClient,
        *,
        store: HostStore | None = None,
        before_removal: Callable[[], bool] | None = None,
        host: HostWorkers | None = None,
        others_counts: Callable[[], list[int]] = no_others,
    ) -> None:
        super().__init__(store=store, before_removal=before_removal, host=host, others_counts=others_counts)
        self._server = server
        self._lock = threading.Lock()
        self._held: dict[int, AdapterVersion] = {}
        self._mapped: dict[str, PackedAdapter] = {}
        """By content hash, to restore the server's host store after a loss."""
        self._num_prepared: Counter[str] = Counter()
        self.is_served: Callable[[str], bool] = lambda content_hash: False
        """True if a name of this instance may return to the content."""
        self._leases = server.leases(self._take, self._fail)
        self._moving: tuple[str, Future[None]] | None = None

    @property
    def leases(self) -> LeasedAdapters:
        return self

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """Put the adapter into the server's host store, and register it: this waits for the server.

        Thread-safe.  Raises CapacityError for an adapter beyond the server's capacity.
        """
        packed = self._stored(packed)
        with self._lock:
            self._num_prepared[packed.content_hash] += 1
        try:
            self._register(packed)
        except CapacityError:
            self.undo_prepare(packed)
            raise
        return packed

    def undo_prepare(self, packed: PackedAdapter) -> None:
        self._end_preparation(packed.content_hash)
        self._unregister(packed.content_hash, delete=not self.is_served(packed.content_hash))

    def keep(self, packed: PackedAdapter, path: str | None = None) -> PackedAdapter:
        """Mapped from the server's host store; registered unless the leases know it.  Raises as `prepare`."""
        content_hash, mapped = packed.content_hash, self._stored(packed)
        if not self._leases.knows(content_hash):
            self._register(packed)
        packed = super().keep(mapped, path)
        self._end_preparation(content_hash)
        self._mapped.setdefault(content_hash, mapped)
        return packed

    def forget(self, packed: PackedAdapter) -> None:
        super().forget(packed)
        content_hash = packed.content_hash
        if content_hash not in self._kept:
            del self._mapped[content_hash]
            self._unregister(content_hash)

    def _stored(self, packed: PackedAdapter) -> PackedAdapter:
        """Mapped from the server's host store, which restores a file that a late drop deletes."""
        content_hash, store = packed.content_hash, self._server.store
        store.put(packed)
        try:
            return store.get(content_hash, packed.name)
        except AdapterError as error:
            logger.warning("adapter %s is written again: %s", packed.name, error)
            store.remove(content_hash)
            store.put(packed)
            return store.get(content_hash, packed.name)

    def _register(self, packed: PackedAdapter) -> None:
        leases = None
        while leases is not self._leases:  # a move may have replaced them
            leases = self._leases
            try:
                leases.register(packed.content_hash)
            except CapacityError as error:
                if leases is self._leases:
                    about = f"adapter {packed.name!r} of {packed.nbytes / 1e9:.6f} GB"
                    raise type(error)(f"{about} can't be served by the LoRA Server: {error}") from error

    def _end_preparation(self, content_hash: str) -> None:
        with self._lock:
            self._num_prepared -= Counter([content_hash])

    def _unregister(self, content_hash: str, *, delete: bool = False) -> None:
        with self._lock:  # a `prepare` meanwhile registers after this
            if content_hash not in self._kept and content_hash not in self._num_prepared:
                self._leases.unregister(content_hash)
                if delete:
                    self._leases.drop(content_hash, only_unused=True)

    def delete(self, content_hash: str) -> None:
        """Delete a content's file where no instance has the adapter."""
        self._leases.drop(content_hash)

    def acquire(self, adapter: AdapterVersion) -> bool:
        """True with a lease, or if none can come; else requests a lease, for further requests too."""
        adapter_id, is_held = adapter.packed.content_hash, adapter.uid in self._held
        if is_held and (adapter.lease is not None or not self._leases.acquire(adapter_id, adapter.asker)):
            return True
        try:
            self._server.store.restore(adapter_id)
        except CapacityError as error:
            logger.error("adapter %s: %s", adapter.name, error)
        with self._lock:
            lease = self._leases.lease(adapter_id)
            if lease is None and self._leases.acquire(adapter_id, adapter.asker):
                lease = self._leases.lease(adapter_id)
                if lease is None:
                    return False
            adapter.lease = lease
            self._held[adapter.uid] = adapter
        return True

    def is_unused(self, adapter: AdapterVersion) -> bool:
        """True for a lease without requests of this content."""
        adapter_id = adapter.packed.content_hash
        if self._leases.lease(adapter_id) is None:
            return False
        users = (other for other in self._held.values() if other.packed.content_hash == adapter_id)
        return not any(other.num_running for other in users)

    def release(self, adapter: AdapterVersion) -> None:
        """Release the lease, or cancel its request."""
        adapter_id = adapter.packed.content_hash
        with self._lock:
            self._held.pop(adapter.uid, None)
            adapter.lease = None
            if all(other.packed.content_hash != adapter_id for other in self._held.values()):
                self._leases.release(adapter_id)

    def resident(self) -> Iterator[AdapterVersion]:
        """Adapters usable now."""
        return iter(list(self._held.values()))

    def counters(self) -> dict[str, int]:
        backend, pushed = self._server.backend, self._server.pushed
        _, num_requests, num_fallback_rows, num_host_rows = self._others_counts()
        return {
            "lora_server_requests": backend.num_requests + num_requests,
            "lora_server_fallback_rows": backend.num_fallback_rows + num_fallback_rows,
            "lora_server_host_rows": backend.num_host_rows + num_host_rows,
            "lora_server_put_steps": 0 if pushed is None else pushed.num_steps,
            "lora_server_redone_steps": 0 if pushed is None else pushed.num_redone,
            **super().counters(),
        }

    def leases_at(self, server: LoraServerClient) -> LeaseClient:
        """Leases of another server for all needs here; beside steps."""
        server.store = self._server.store  # maps the adapters
        self._failed_there: dict[str, Exception] = {}
        return server.leases(self._take, self._failed_there.__setitem__, self._leases)

    def lease_from(self, server: LoraServerClient, leases: LeaseClient) -> LeaseClient:
        """Use the `leases_at` a server from now on, between steps; returns the former ones."""
        with self._lock:
            former, self._leases, self._server = self._leases, leases, server
        leases.on_failure = self._fail
        for content_hash, error in self._failed_there.copy().items():
            self._fail(content_hash, error)
        self._take()
        return former

    def move(self, core: EngineCore, address: str, layout: str, limit_s: float) -> Waits:
        """Reach another server, wait for leases there, then move all ranks; requests go on meanwhile.

        A second call for the same address waits first.  Raises LoraServerError if a rank does not reach the
        server within limit_s, or beside a move to another; CapacityError for a refused adapter; then nothing
        has changed.
        """
        while self._moving is not None:
            there, ended = self._moving
            if there != address:
                raise LoraServerError(f"this instance is about to move to the LoRA Server at {there}")
            yield ended
        assert core.rank.config.lora_server is not None
        server = replace(core.rank.config.lora_server, address=address, layout=layout)
        if core.rank.config.lora_server.address == address:
            return
        ended = Future()
        self._moving = address, ended
        try:
            yield from self._move(core, server, limit_s)
        finally:
            self._moving = None
            ended.set_result(None)

    def _move(self, core: EngineCore, server: LoraServerConfig, limit_s: float) -> Waits:
        rank, end_s, undo = core.rank, time.monotonic() + limit_s, ExitStack()
        others = _followers_move(core, server, limit_s)
        try:
            if others is not None:
                undo.callback(others.close)
            reaching = in_thread(partial(_reached, rank, self, server, others, end_s))
            client, leases, grants_end_s = (yield reaching).result()
            undo.callback(in_thread, partial(_left, client, leases))
            leases.succeed(self._leases)
            while not leases.covers(self._leases) and time.monotonic() < grants_end_s:
                yield in_thread(partial(time.sleep, _LOOK_S))  # requests have started
                leases.succeed(self._leases)
            leases.check_connected()
            if time.monotonic() >= end_s:
                raise LoraServerError(f"this instance did not reach all leases within limit_s={limit_s:g}")
            former = self.lease_from(client, leases)
        except Exception:
            undo.close()
            raise
        if others is not None:
            others.move()
        in_thread(partial(_left, rank.move_to(server, client), former))

    def close(self) -> None:
        super().close()
        self._leases.stop()
        self._server.close()

    def _fail(self, content_hash: str, error: Exception) -> None:
        with self._lock:
            for adapter in self._held.values():
                if adapter.packed.content_hash == content_hash:
                    adapter.lease = None
            self._leases.release(content_hash)
        if self.on_failure is not None:
            self.on_failure(content_hash, error)

    def _take(self) -> None:
        with self._lock:
            for adapter in self._held.values():
                adapter.lease = self._leases.lease(adapter.packed.content_hash)
        if self.on_change is not None:
            self.on_change()


def _followers_move(core: EngineCore, server: LoraServerConfig, limit_s: float) -> FollowersMove | None:
    followers = core.transfers.followers
    if not followers.num_followers:
        return None
    from moe_lora.engine.ranks.server_move import FollowersMove

    return FollowersMove(followers, server, limit_s)


def _reached(
    rank: Rank, leased: LeasedAdapters, server: LoraServerConfig, others: FollowersMove | None, end_s: float
) -> tuple[LoraServerClient, LeaseClient, float]:
    """Connection and leases, and the end of the wait for leases."""
    client = rank.reach(server, end_s - time.monotonic())
    assert client is not None
    with ExitStack() as undo:
        undo.callback(client.close)
        leases = leased.leases_at(client)
        undo.callback(leases.stop)
        if others is not None:
            others.wait()
        grants_end_s = min(end_s, time.monotonic() + GRANTS_S)
        while not leases.settled and time.monotonic() < grants_end_s:
            time.sleep(_LOOK_S)
        leases.check(leased._leases)
        undo.pop_all()
    return client, leases, grants_end_s


def _left(client: LoraServerClient, leases: LeaseClient) -> None:
    leases.stop()
    client.close()
