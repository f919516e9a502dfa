# SPDX-License-Identifier: Apache-2.0
"""Verbs of an engine by name.  Imports no torch: front ends read the annotations."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from moe_lora.core.errors import AdapterNotFoundError, ConfigError
from moe_lora.core.request import AdapterFacts, AdapterInfo, EngineStats, ModelInfo
from moe_lora.dist.net.codec import Interface, Method, verb, verbs_of

from .client.messages import (
    CurrentPause,
    Generate,
    HeldRequest,
    KvSent,
    KvWindow,
    PauseMode,
    PauseScope,
    PoolEntry,
    RequestLoad,
    SleepOrder,
    SleepPart,
)

if TYPE_CHECKING:
    from .adapters.pool_store import PoolAdapters
    from .core import EngineCore
    from .pauses import Pauses
    from .sleep import Sleep

Result = TypeVar("Result")
Steps = Generator[Future[Any] | Callable[[], bool], Any, Result]
"""A verb that waits for another thread's future, or for a condition between steps."""
Sources = Sequence[bytes]
"""Descriptors of windows, in order of preference."""


def of_adapter(method: Method) -> Method:
    """Mark a verb: the controller runs the verb on all instances that have the adapter.

    Takes the adapter's name first, and returns an AdapterInfo.
    """
    method.is_of_adapter = True  # type: ignore[attr-defined]
    return verb(method)


def of_instances(method: Method) -> Method:
    """Mark a verb: the controller runs the verb on all instances.

    Returns None, or a list; the controller joins lists.
    """
    method.is_of_instances = True  # type: ignore[attr-defined]
    return verb(method)


class EngineVerbs:
    """The verbs of one engine, called by the thread that owns `core`.

    pauses, asleep: None before the first use.
    """

    def __init__(
        self,
        core: EngineCore,
        files: Executor,
        make_pauses: Callable[[], Pauses],
        make_sleep: Callable[[Callable[[], None]], Sleep],
    ) -> None:
        self._core = core
        self._files = files
        self._make_pauses = make_pauses
        self._make_sleep = make_sleep
        self.pauses: Pauses | None = None
        self.asleep: Sleep | None = None

    @verb
    def model_info(self) -> ModelInfo:
        return self._core.info

    @verb
    def stats(self) -> EngineStats:
        found = self._core.stats()
        if self.pauses is None or not self.pauses.num_delayed:
            return found
        num = self.pauses.num_delayed - (background := self.pauses.num_background)
        return replace(
            found,
            num_waiting=found.num_waiting + num,
            num_deferred=found.num_deferred + num,
            num_background=found.num_background + background,
        )

    @of_instances
    def pause_requests(
        self,
        scope: PauseScope,
        mode: PauseMode,
        timeout_s: float,
        clears_cache: bool = False,
        waits: bool = True,
    ) -> Steps[None]:
        """As `Pauses.start`; returns once no covered request computes.  clears_cache: then clear the cache.

        Raises TimeoutError if the pause ends before the last request.
        """
        if self.pauses is None:
            self.pauses = self._make_pauses()
        pause = self.pauses.start(scope, mode, timeout_s)
        if not waits:
            return
        yield partial(self.pauses.is_given, pause)
        if not self.pauses.lasts(pause):
            is_over = time.monotonic() >= pause.end_s
            why = f"the pause ended after {timeout_s:g} s," if is_over else "a resume ended the pause"
            raise TimeoutError(f"{why} before the last running request")
        if clears_cache:
            self._core.adapters.clear_history(scope.names)

    @of_instances
    def resume_requests(self, owner: str | None) -> None:
        """As `Pauses.end`."""
        if self.pauses is not None:
            self.pauses.end(owner)

    @of_instances
    def paused_scopes(self) -> list[PauseScope]:
        return [] if self.pauses is None else self.pauses.scopes

    @verb
    def current_pauses(self) -> list[CurrentPause]:
        """For a restarted controller."""
        return [] if self.pauses is None else self.pauses.current

    @of_instances
    def abort_requests(self, scope: PauseScope) -> None:
        """End all covered requests."""
        if self.pauses is None:
            self.pauses = self._make_pauses()
        self.pauses.abort(scope)

    @of_instances
    def sleep(
        self, parts: Sequence[SleepPart], drops_weights: bool, mode: PauseMode, timeout_s: float
    ) -> Steps[None]:
        if self.asleep is None:
            self.asleep = self._make_sleep(partial(self.abort_requests, PauseScope()))
        try:
            yield from self.asleep.start(parts, mode, timeout_s, drops_weights=drops_weights)
        except Exception:
            self._apply_pauses()
            raise

    @of_instances
    def wake_up(self, parts: Sequence[SleepPart]) -> Steps[None]:
        if self.asleep is not None:
            yield from self.asleep.stop(parts)
            self._apply_pauses()

    @of_instances
    def sleep_orders(self) -> list[SleepOrder]:
        """Empty while awake."""
        return [] if self.asleep is None or not self.asleep.order.parts else [self.asleep.order]

    @of_instances
    def clear_cache(self) -> None:
        """Make all cached prefixes unfindable."""
        self._core.adapters.clear_history(lambda name: True)

    @verb
    def join_lora_server(self, address: str, layout: str, limit_s: float) -> Steps[None]:
        """As `LeasedAdapters.move`."""
        leased = self._core.adapters.leases
        if leased is None:
            raise ConfigError("this instance has no LoRA Server to move from; start it with lora_server")
        yield from leased.move(self._core, address, layout, limit_s)

    def delay_asleep(self, command: Generate, arrival_s: float) -> bool:
        """Delay a request from before a sleep; False while awake."""
        if not self.sleep_orders():
            return False
        self.pauses = self.pauses or self._make_pauses()
        self.pauses.add(command, arrival_s)
        return True

    @verb
    def load_adapter(
        self,
        name: str,
        path: str,
        replace: bool = False,
        version: int | None = None,
        content_hash: str | None = None,
    ) -> Steps[AdapterInfo]:
        """Read a PEFT directory and serve the adapter; with `replace`, as a new version of the name.

        Running requests finish on the old version.  version: None: the last number and one.  content_hash:
        None: the current content.
        """
        packed = (yield self._files.submit(self._core.read_adapter, name, path, content_hash)).result()
        return self._core.add_adapter(packed, path, replace=replace, version=version)

    @verb
    def check_next(self, name: str) -> None:
        """Raises BusyError while the adapter's next version surely finds no slot for its pin."""
        self._core.adapters.check_next(name)

    @verb
    def unload_adapter(self, name: str, waits: bool = True) -> Steps[None]:
        """Refuse new requests for the adapter, wait for the last, and free its memory."""
        uids = self._core.remove_adapter(name)
        yield lambda: not (waits and self._core.adapters_in_use(uids))

    @of_adapter
    def pin_adapter(self, name: str, pinned: bool) -> AdapterInfo:
        """Pin an adapter to the device, or undo the pin; a new version keeps the pin.

        Raises AdapterNotFoundError, or CapacityError without room for a request.
        """
        adapters = self._core.adapters
        adapter = adapters.current(name)
        (adapters.pin if pinned else adapters.unpin)(adapter)
        self._core.transfers.send()
        return adapters.info(adapter)

    @verb
    def preload_adapters(self, names: Sequence[str]) -> int:
        return self._core.adapters.preload(names)

    @verb
    def used_adapters(self) -> dict[str, int]:
        """Requests of each adapter in use."""
        num = {one.name: one.num_running + one.num_waiting for one in self._core.adapters.known()}
        return {name: number for name, number in num.items() if number}

    @verb
    def ready_adapters(self, names: Sequence[str]) -> list[str]:
        """Adapters of these names on the device."""
        adapters, asked = self._core.adapters, set(names)
        there = [one for one in adapters.known() if one.name in asked]
        return [one.name for one in there if adapters.info(one).residency == "device"]

    @verb
    def list_adapters(self) -> list[AdapterInfo]:
        adapters = self._core.adapters
        return [adapters.info(adapter) for adapter in adapters.known()]

    @verb
    def hold_request(
        self, request_id: str, since: int, window: KvWindow | None = None
    ) -> Future[HeldRequest]:
        """As `RequestMoves.hold` and `send_rest`."""
        held = self._core.moves.hold(request_id, since)
        if self.pauses is not None:
            self.pauses.leave(request_id)
        return self._core.moves.send_rest(held, request_id, window)

    @verb
    def resume_request(
        self, request_id: str, tokens: Sequence[int], kv_tokens: int, first_page: int, unshared: bool
    ) -> None:
        self._core.moves.resume(request_id, tokens, kv_tokens, first_page, unshared)
        self._apply_pauses()

    def _apply_pauses(self) -> None:
        if self.pauses is not None:
            self.pauses.apply()

    @verb
    def request_loads(self) -> list[RequestLoad]:
        """As `RequestMoves.loads`; paused requests count as free."""
        loads = self._core.moves.loads()
        if self.pauses is None:
            return loads
        paused = self.pauses.held
        return [replace(load, held=False) if load.name in paused else load for load in loads]

    @verb
    def kv_window(self, request_id: str) -> KvWindow | None:
        return self._core.moves.kv_window(request_id)

    @verb
    def kv_send(self, request_id: str, window: KvWindow, follows: bool = False) -> Future[KvSent]:
        """As `RequestMoves.start_send`."""
        return self._core.moves.start_send(request_id, window, follows=follows)


class PoolVerbs:
    """Verbs of an engine with a pool."""

    def __init__(self, engine: EngineVerbs, core: EngineCore, pool: PoolAdapters, files: Executor) -> None:
        self._engine = engine
        self._core = core
        self._pool = pool
        self._files = files

    @verb
    def pool_load(
        self,
        name: str,
        path: str,
        replace: bool,
        version: int,
        content_hash: str | None = None,
    ) -> Steps[PoolEntry]:
        """As `load_adapter`, and hold the bytes for other instances."""
        yield from self._engine.load_adapter(name, path, replace, version, content_hash)
        return self._pool.entry(*self._core.known_adapter(name))

    @verb
    def pool_know(
        self, facts: AdapterFacts, path: str, replace: bool, version: int, sources: Sources
    ) -> PoolEntry:
        """Serve an adapter with bytes at other instances."""
        self._pool.set_sources(facts.content_hash, sources)  # a pinned adapter's load starts at once
        self._core.add_adapter(self._pool.stand_in(facts), path, replace=replace, version=version)
        return self._pool.entry(*self._core.known_adapter(facts.name))

    @verb
    def pool_hold(self, content_hash: str, sources: Sources) -> Steps[bytes | None]:
        """Hold a known adapter; returns the descriptor for peers.  Raises AdapterNotFoundError."""
        held = (yield self._files.submit(self._pool.fetch_held, content_hash, sources)).result()
        if not self._pool.knows(content_hash):
            held.window.free()
            raise AdapterNotFoundError(f"the adapter of content {content_hash} was unloaded meanwhile")
        self._pool.hold(held)
        return self._pool.source(content_hash)

    @verb
    def pool_drop(self, content_hash: str) -> None:
        self._pool.drop(content_hash)

    @verb
    def pool_sources(self, sources: Mapping[str, Sources]) -> None:
        """Set the sources of these content hashes."""
        for content_hash, places in sources.items():
            if self._pool.knows(content_hash):
                self._pool.set_sources(content_hash, places)

    @verb
    def pool_state(self) -> list[PoolEntry]:
        """All adapters of this engine."""
        return [
            self._pool.entry(*self._core.known_adapter(info.name)) for info in self._engine.list_adapters()
        ]

    @verb
    def pool_orphans(self) -> list[str]:
        return self._pool.orphans()

    @verb
    def pool_known(self, content_hashes: Sequence[str]) -> list[str]:
        """The served hashes among these."""
        return list(filter(self._pool.knows, content_hashes))

    @verb
    def pool_free(self, content_hash: str) -> None:
        self._pool.free_orphan(content_hash)


ENGINE_VERBS = {**verbs_of(EngineVerbs), **verbs_of(PoolVerbs)}
ENGINE_INTERFACE = Interface(ENGINE_VERBS)
ADAPTER_VERBS = {
    name: method for name, method in ENGINE_VERBS.items() if getattr(method, "is_of_adapter", False)
}
"""Verbs with the mark `of_adapter`."""
INSTANCE_VERBS = {
    name: method for name, method in ENGINE_VERBS.items() if getattr(method, "is_of_instances", False)
}
"""Verbs with the mark `of_instances`."""
