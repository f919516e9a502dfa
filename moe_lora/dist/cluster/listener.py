# SPDX-License-Identifier: Apache-2.0
"""The front end's listener for engines."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_lora.config import LimitsConfig
from moe_lora.core.address import Address
from moe_lora.core.errors import AdapterNotFoundError, ConfigError, EngineDeadError, UnreadError
from moe_lora.core.request import AdapterInfo, GenerateRequest, ModelInfo, TokenOutput
from moe_lora.dist.net.connection import listen
from moe_lora.dist.net.peer import Peer, PeerEndedError
from moe_lora.dist.net.session import Dialler, RefusedError
from moe_lora.engine.client.client import CallableEngine
from moe_lora.engine.client.messages import (
    Abort,
    Beat,
    Dead,
    Hearing,
    InstanceFacts,
    Move,
    Outputs,
    PauseOrder,
    Rejected,
    Request,
)
from moe_lora.engine.client.step_notes import ReadNotes

from .health import HealthMonitor
from .instance_links import HANDSHAKE
from .instances import Instance, InstanceRegistry, Served, ServedVersion, reason

if TYPE_CHECKING:
    from moe_lora.dist.cluster.pool.directory import PoolDirectory
    from moe_lora.dist.net.keys import Keys

logger = logging.getLogger(__name__)


async def catch_up(
    client: CallableEngine,
    served: dict[str, ServedVersion],
    have: dict[str, ServedVersion],
    missing: set[str],
    pool: PoolDirectory | None = None,
    problems: dict[str, str] | None = None,
) -> None:
    """Load, unload and pin until the engine has `served`; failures go to missing and problems.

    pool None: the engine reads adapters from disk.
    """
    gone = [name for name in have if name not in served]
    if pool is not None:
        for name in gone:  # first: an unload may raise
            pool.forget(name, have[name].version)
    for name in gone:
        if name not in missing:
            await client.call("unload_adapter", name, waits=False)
        missing.discard(name)
        del have[name]
    for name, adapter in served.items():
        before = have.get(name)
        is_there = adapter.is_same(before)
        if is_there and before is not None and before.pinned == adapter.pinned:
            continue
        is_loaded, content_hash = name in have and name not in missing, adapter.content_hash
        try:
            if not is_there:
                if pool is None:
                    words = (name, adapter.path, True, adapter.version, content_hash)
                    info: AdapterInfo = await client.call("load_adapter", *words)
                    content_hash = info.content_hash or None
                else:
                    await pool.give(client, name, adapter.path, adapter.version, content_hash)
                is_loaded = True
            if adapter.pinned != (before is not None and before.pinned):
                await client.call("pin_adapter", name, adapter.pinned)
            missing.discard(name)
        except EngineDeadError:
            raise
        except Exception as error:
            logger.error("adapter %s is unavailable here: %s", name, error)
            if is_loaded:
                with suppress(AdapterNotFoundError):  # a pool without the bytes removed the adapter
                    await client.call("unload_adapter", name, waits=False)
            missing.add(name)
            if problems is not None:
                problems[name] = reason(error)
        have[name] = replace(adapter, content_hash=content_hash)


async def held_by(
    client: DialledClient, pool: PoolDirectory | None = None
) -> tuple[dict[str, ServedVersion], dict[str, int]]:
    """The engine's adapters and LoRA ranks, after all earlier commands.  Raises EngineDeadError."""
    await client.settled()
    if pool is not None:
        await pool.enter(client)
    infos: list[AdapterInfo] = await client.call("list_adapters")
    have = {
        info.name: ServedVersion(info.path or "", info.version, info.pinned, info.content_hash or None)
        for info in infos
    }
    return have, {info.name: info.lora_rank for info in infos}


_WAIT_FOR_REQUESTS = frozenset(("unload_adapter", "pause_requests"))
"""Verbs that count at once, and return with a request's end."""
MOST_ROUNDS = 2
"""After so many rounds an engine enters routing without some adapters: others load meanwhile."""
RECOVERY_S = 2.0
"""Running engines dial in at least once a second."""


class CatchUp:
    """Brings an engine's adapters up to date before the engine enters routing.

    In the recovery, the first seconds, adapters found on engines count as served, and no engine enters
    routing; so adapters loaded over HTTP outlive this process.  recovery_s None: until `end_recovery`.
    """

    def __init__(self, instance_registry: InstanceRegistry, recovery_s: float | None = RECOVERY_S) -> None:
        self._instance_registry = instance_registry
        self._completing: set[asyncio.Future[None]] = set()
        self._holding = ExitStack()
        self._holding.enter_context(instance_registry.loading())
        if recovery_s is not None:
            asyncio.get_running_loop().call_later(recovery_s, self.end_recovery)

    def end_recovery(self) -> None:
        """Admit engines to routing.  Idempotent."""
        registry = self._instance_registry
        registry.recovered = registry.recovered or registry.served
        self._holding.close()

    async def __call__(self, instance: Instance, client: DialledClient, incarnation: str) -> None:
        """Put an engine into routing.  Raises EngineDeadError after its end, or after `close`."""
        registry = self._instance_registry
        (have, ranks), missing = await held_by(client, registry.pool), set[str]()
        instance.problems = {}
        asleep, paused = [await client.call(verb) for verb in ("sleep_orders", "current_pauses")]
        if (asleep or paused) and (registry.recovered is None or not registry.live):
            registry.standing_orders().recover(asleep, paused)
        if registry.recovered is None:
            registry.recover(Served.of(have))
            while registry.recovered is None and not registry.closed.is_set():
                await registry.at_rest()
            # engines that start together get adapters meanwhile
            have, _ = await held_by(client, registry.pool)
        elif incarnation != instance.incarnation and registry.on_late is not None:
            await registry.on_late(have, ranks)
        may_differ = instance.silent or (registry.standing is not None and bool(registry.standing.pauses))
        known = await self._order(client, {}, may_differ=may_differ)
        num_rounds = 0
        while not await registry.join(
            instance, client, have, missing, incarnation, lacking=num_rounds == MOST_ROUNDS
        ):
            num_rounds += 1
            await catch_up(client, registry.adapters, have, missing, registry.pool, instance.problems)
        await self._order(client, known, may_differ=may_differ)  # later calls reach the instance
        order = registry.drains.orders.get(instance.name)
        if order is not None:  # its process may be younger than the order
            await client.call("remember_drain", order)
        if registry.aliases:
            await client.call("remember_aliases", registry.aliases)
        if registry.on_lacking is not None and (instance.missing or have.keys() != registry.adapters.keys()):
            completing = asyncio.create_task(registry.on_lacking(instance, have))
            self._completing.add(completing)
            completing.add_done_callback(self._completing.discard)

    async def _order(
        self, client: DialledClient, known: dict[str, PauseOrder], *, may_differ: bool
    ) -> dict[str, PauseOrder]:
        """`StandingOrders.give`, if there are orders."""
        standing = self._instance_registry.standing
        return {} if standing is None else await standing.give(client, known, may_differ=may_differ)


class _Stream(AsyncIterator[TokenOutput]):
    """An engine's outputs of a request; an early close aborts the request.

    Beyond max_unread items the request ends with an UnreadError.
    """

    def __init__(
        self, request: GenerateRequest, under_way: dict[str, _Stream], peer: Peer, max_unread: int
    ) -> None:
        self._max_unread = max_unread
        self._name = request.request_id
        self.adapter = request.adapter
        self._under_way = under_way
        self._peer = peer
        self._items: deque[TokenOutput | Exception] = deque()
        self._waiter: asyncio.Future[TokenOutput] | None = None
        self._over = False

    def put(self, item: TokenOutput | Exception) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            self._give(waiter, item)
        elif (
            len(self._items) < self._max_unread
            or isinstance(item, Exception)
            or item.finish_reason is not None
        ):
            self._items.append(item)
        else:
            what = f"more than {self._max_unread} steps of this answer wait for its client to read them"
            self._items.clear()
            self._items.append(UnreadError(what))
            self.leave()

    def __anext__(self) -> asyncio.Future[TokenOutput]:
        if self._over:
            raise StopAsyncIteration
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if self._items:
            self._give(waiter, self._items.popleft())
        return waiter

    def _give(self, waiter: asyncio.Future[TokenOutput], item: TokenOutput | Exception) -> None:
        if isinstance(item, Exception):
            self._over = True
            waiter.set_exception(item)
        else:
            self._over = item.finish_reason is not None
            waiter.set_result(item)

    async def aclose(self) -> None:
        self._over = True
        self.leave()

    def leave(self) -> None:
        if self._under_way.get(self._name) is self:
            del self._under_way[self._name]
            self._peer.send(Abort(self._name))


_ALIKE = ("family", "dtype", "max_model_len", "vocab_size", "eos_token_ids", "sampling_defaults")


class DialledClient(CallableEngine):
    """`EngineClient` of an engine that dialled in; a close ends only the connection.

    Belongs to the connection's event loop.  on_death: called with the adapters at work and the notes.
    max_unread: unread items per request.
    """

    ended: asyncio.Event

    def __init__(
        self, peer: Peer, name: str, max_unread: int = LimitsConfig.max_unread_steps, notes: str = ""
    ) -> None:
        self._notes = ReadNotes(notes)
        self.name = name
        self._max_unread = max_unread
        self.ended: asyncio.Event = peer.ended
        self.hearing = Hearing()
        self.on_beat: Callable[[Beat], None] = lambda beat: None
        self.on_move: Callable[[Move], None] = lambda move: None
        self.on_death: Callable[[frozenset[str], ReadNotes], None] = lambda adapters, notes: None
        self._peer = peer
        self._streams: dict[str, _Stream] = {}
        self._dead: EngineDeadError | None = None

    async def read(self) -> None:
        """Pass on the engine's messages until the end, then end all waits."""
        failed = False
        async for message in self._peer.messages():
            if isinstance(message, Outputs):
                streams = self._streams
                for output in message.outputs:
                    find = streams.get if output.finish_reason is None else streams.pop
                    stream = find(output.request_id, None)
                    if stream is not None:
                        stream.put(output)
            elif isinstance(message, Beat):
                self.hearing.hear(message)
                self.on_beat(message)
            elif isinstance(message, Move):
                self.on_move(message)
            elif isinstance(message, Rejected):
                stream = self._streams.pop(message.request_id, None)
                if stream is not None:
                    stream.put(message.error)
            elif isinstance(message, Dead):
                failed = True
                logger.error("instance %s: %s", self.name, message.error)
                self._peer.end("the engine has failed")
        self._dead = EngineDeadError(f"instance {self.name} has ended: {self._peer.problem}")
        if failed or self._peer.cut:
            self.on_death(self._at_work(), self._notes)
        for stream in self._streams.values():
            stream.put(self._dead)
        self._streams.clear()

    def _at_work(self) -> frozenset[str]:
        """Adapters in the engine's notes, else of this connection's requests."""
        if self._notes.readable:
            return self._notes.adapters()
        return frozenset(s.adapter for s in self._streams.values() if s.adapter is not None)

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        try:
            return await self._peer.call(verb, *args, **words)
        except PeerEndedError as error:
            raise EngineDeadError(f"instance {self.name} has ended: {error}") from error

    def fail_request(self, request_id: str, error: EngineDeadError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put(error)
            stream.leave()

    def fail_all(self, error: Exception) -> None:
        """Fail pending calls; requests continue."""
        self._peer.abandon_calls(error)

    async def settled(self) -> None:
        """Wait for the effects of all earlier commands.  Raises EngineDeadError."""
        try:
            await self._peer.settled(but=_WAIT_FOR_REQUESTS)
        except PeerEndedError as error:
            raise EngineDeadError(f"instance {self.name} has ended: {error}") from error

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        name = request.request_id
        if self._dead is not None or self.ended.is_set():
            raise self._dead or EngineDeadError(f"instance {self.name} has ended: {self._peer.problem}")
        if name in self._streams:
            raise ValueError(f"request_id {name!r} is already running")
        self._peer.send(Request.of(request))
        stream = self._streams[name] = _Stream(request, self._streams, self._peer, self._max_unread)
        return stream

    async def abort(self, request_id: str) -> None:
        self._peer.send(Abort(request_id))

    def leave(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put(TokenOutput(request_id=request_id, token_ids=(), finish_reason="abort"))
            self._peer.send(Abort(request_id))

    def hang_up(self, reason: str) -> None:
        """End the connection at once."""
        self._peer.abort(reason)

    async def close(self) -> None:
        self._peer.end("the front end was closed")
        await self._peer.closed()


class InstanceListener:
    """Admits engines of this cluster to the `InstanceRegistry`.

    catch_up None: another process's controller manages the adapters.  on_give_up: called with a dead engine's
    name.  epoch: of a leading controller.
    """

    def __init__(
        self,
        instance_registry: InstanceRegistry,
        catch_up: CatchUp | None = None,
        on_give_up: Callable[[str], None] = lambda name: None,
        max_unread: int = LimitsConfig.max_unread_steps,
        epoch: int = 0,
    ) -> None:
        self._max_unread = max_unread
        self._epoch = epoch
        self._instance_registry = instance_registry
        self._on_give_up = on_give_up
        self._catch_up = catch_up
        self._inside: set[str] = set()
        self._info: ModelInfo | None = None
        self._place: Address | None = None

    @asynccontextmanager
    async def open(self, setting: str, address: Address, keys: Keys | None) -> AsyncIterator[Address]:
        """Listen until the context ends.  Raises ConfigError for an unavailable address."""
        visit = partial(HANDSHAKE.receive, self._register, self._serve)
        async with listen(setting, address, keys, visit) as place:
            self._place = place
            logger.info("LLM instances are awaited at %s", place)
            yield place

    def _register(self, caller: Dialler) -> tuple[float, int]:
        """Register an engine; returns seconds between beats, and the epoch.  Raises RefusedError."""
        info: ModelInfo = caller.payload.info
        first = self._info or info
        for fact in _ALIKE:
            there, here = getattr(info, fact), getattr(first, fact)
            if there != here:
                reason = f"{fact} is {there!r} there and {here!r} at the other instances"
                raise RefusedError(reason, "start all with the same model and settings")
        if caller.name in self._inside:
            reason = f"an instance named {caller.name} is here already"
            raise RefusedError(reason, "give each its own --name")
        self._info = first
        self._inside.add(caller.name)
        return self._instance_registry.heartbeat.interval_s, self._epoch

    async def _serve(self, peer: Peer, caller: Dialler) -> None:
        try:
            await self._follow(peer, caller)
        finally:
            self._inside.discard(caller.name)

    async def _follow(self, peer: Peer, caller: Dialler) -> None:
        facts: InstanceFacts = caller.payload
        client = DialledClient(peer, caller.name, self._max_unread, facts.notes)
        client.on_move = self._instance_registry.on_move
        client.on_death = partial(self._instance_registry.suspects.note_death, caller.name)
        reading = asyncio.create_task(client.read())

        async def come() -> None:
            was_silent = instance.silent
            if self._catch_up is not None:
                await self._catch_up(instance, client, caller.epoch)
            else:
                registry = self._instance_registry
                if registry.standing is not None:
                    await registry.standing.until_given(caller.name, caller.epoch)
                have, _ = await held_by(client)
                self._instance_registry.join_as_it_is(instance, client, have, caller.epoch)
            how = "gets on again" if was_silent else f"dialled in from {caller.host}"
            logger.info("instance %s %s", caller.name, how)

        def give_up() -> None:
            is_there = not client.ended.is_set()
            client.hang_up("it does not get on")
            if is_there:  # else a successor may have the name
                self._on_give_up(caller.name)

        try:
            instance = self._instance_registry.enter(caller.name, client)
            instance.devices = facts.info.devices
            self._instance_registry.hear_drain(caller.name, facts.drain)
            if facts.aliases and not self._instance_registry.directed:
                from .aliases import learn

                learn(self._instance_registry.aliases, facts.aliases)
            await HealthMonitor(self._instance_registry, instance, client, come, give_up).run()
            if not self._instance_registry.closed.is_set():
                logger.warning(
                    "instance %s left (%s); its requests go on elsewhere", caller.name, peer.problem
                )
                if not self._instance_registry.live:
                    logger.warning("no LLM instance is left; one may dial in at %s", self._place)
        except (EngineDeadError, ConfigError) as error:
            logger.warning("instance %s left before it took part: %s", caller.name, error)
        finally:
            peer.end("the front end lets it go")
            await reading
