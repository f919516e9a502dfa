# SPDX-License-Identifier: Apache-2.0
"""Adapters changed on every instance, or on none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from anyio import move_on_after

from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    BusyError,
    EngineDeadError,
    EngineSilentError,
)
from moe_lora.core.request import AdapterInfo
from moe_lora.dist.net.codec import Interface, verb, verbs_of
from moe_lora.engine.client.client import EngineClient
from moe_lora.engine.client.messages import AbortOrder, PoolEntry
from moe_lora.engine.verbs import ADAPTER_VERBS, INSTANCE_VERBS

from .instances import Instance, InstanceRegistry, Served, ServedVersion, reason
from .reports import merge_adapters

if TYPE_CHECKING:
    from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
    from moe_lora.dist.cluster.pool.pool import FleetPool
    from moe_lora.dist.cluster.rollouts import Rollouts

logger = logging.getLogger(__name__)
STANDING = frozenset(("pause_requests", "resume_requests", "sleep", "wake_up"))
"""Verbs of `StandingOrders`."""
UNDO_PAUSE_S = 0.5
"""Between attempts to take a load back at a busy instance."""
MAX_ABORTS = 8
"""Abort orders in a controller's state."""
Answer = TypeVar("Answer")
Loaded = TypeVar("Loaded", AdapterInfo, PoolEntry)
Answers = tuple[list[tuple[Instance, Answer]], list[tuple[Instance, Exception]]]
"""Answers, and errors of instances that refused."""


def latest_aborts(orders: tuple[AbortOrder, ...]) -> tuple[AbortOrder, ...]:
    """At most MAX_ABORTS orders; drops the oldest order by ids, else the oldest."""
    if len(orders) <= MAX_ABORTS:
        return orders
    first = next((one for one in orders if one.scope.ids), orders[0])
    return tuple(one for one in orders if one is not first)


async def ask(
    instance_registry: InstanceRegistry,
    instances: list[Instance],
    calls: Iterable[Awaitable[Answer]],
) -> Answers[Answer]:
    """Answers and errors of these instances, from a call per instance.

    Dead instances leave routing and the result; silent instances leave only the result.  Raises
    EngineDeadError if no instance is left.
    """
    clients = [instance.client for instance in instances]
    results = await asyncio.gather(*calls, return_exceptions=True)
    answers: list[tuple[Instance, Answer]] = []
    errors: list[tuple[Instance, Exception]] = []
    for instance, client, result in zip(instances, clients, results, strict=True):
        if isinstance(result, EngineSilentError):
            continue
        if isinstance(result, EngineDeadError):
            instance_registry.lose(instance, client)
        elif isinstance(result, Exception):
            errors.append((instance, result))
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.append((instance, result))
    if not answers and not errors:
        instance_registry.having(None)
        raise EngineDeadError("the LLM instances that were asked ended meanwhile; send the request again")
    return answers, errors


async def ask_live(
    instance_registry: InstanceRegistry, call: Callable[[EngineClient], Awaitable[Answer]]
) -> list[tuple[Instance, Answer]]:
    """Each live instance's answer.  Raises the first refusal, EngineDeadError."""
    live = instance_registry.having(None)
    answers, errors = await ask(instance_registry, live, [call(one.client) for one in live])
    for _, error in errors:
        raise error
    return answers


async def load_alike(
    instances: list[Instance], load: Callable[[list[Instance], str | None], Awaitable[Answers[Loaded]]]
) -> Answers[Loaded]:
    """Load an adapter on these instances: the first reads the content, the rest must match its hash."""
    for number, first in enumerate(instances, 1):
        rest = instances[number:]
        try:
            answers, errors = await load([first], None)
        except EngineDeadError:
            if not rest:
                raise
            continue  # the next instance reads
        if errors or not rest:
            return answers, errors
        loaded = answers[0][1]
        info = loaded if isinstance(loaded, AdapterInfo) else loaded.info
        try:
            more, errors = await load(rest, info.content_hash or None)
        except EngineDeadError:  # no instance left: all hear at their return
            return answers, []
        return answers + more, errors
    raise AssertionError("an adapter is loaded somewhere")


class FleetAdapters:
    """Changes the adapters of all instances; a returning instance catches up later.

    A change outlives the caller's cancellation: instances must agree.  pool: chooses holders of each adapter;
    None: all.
    """

    def __init__(self, instance_registry: InstanceRegistry, ranks: dict[str, int] | None = None) -> None:
        directory = instance_registry.pool
        self.pool: FleetPool | None = None
        if directory is not None:
            from moe_lora.dist.cluster.pool.pool import FleetPool

            self.pool = FleetPool(instance_registry, directory)
        self.ranks = {} if ranks is None else ranks
        self.instance_registry = instance_registry
        instance_registry.on_late = self._merge_late
        instance_registry.on_lacking = self._complete
        self._own = verbs_of(self)
        self._rollouts: Rollouts | None = None
        self._undoing: set[asyncio.Task[None]] = set()
        self._found: set[str] = set()
        """Names under load for a resolver."""
        # Calls for one adapter run in sequence: instances must agree.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def devices(self) -> set[str]:
        """Devices of all instances."""
        return {device for instance in self.instance_registry.instances for device in instance.devices}

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        """Run one of `FLEET_CHANGES` on all live instances, after earlier changes of the adapter.

        Raises the verb's errors.
        """
        registry = self.instance_registry
        bound = _INTERFACE.bind(verb, args, words)
        if verb in INSTANCE_VERBS:
            return await self._on_all(verb, bound)
        name, *rest = bound
        change = self._own.get(verb, partial(self._change, verb))

        async def work() -> Any:
            async with self._locks.setdefault(name, asyncio.Lock()):
                if not registry.live:
                    await registry.dialled_in(lambda: registry.live)
                return await change(name, *rest)

        task = asyncio.ensure_future(work())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: _tell(name, done))
            raise

    def rollouts(self, versions: ServedRegistry | None) -> Rollouts:
        """Created at the first step of an alias."""
        if self._rollouts is None:
            from .rollouts import Rollouts

            self._rollouts = Rollouts(self, versions)
        return self._rollouts

    async def _on_all(self, verb: str, args: tuple[Any, ...]) -> list[Any] | None:
        """Run one of `INSTANCE_VERBS` on all live instances; joins lists."""
        registry = self.instance_registry
        if registry.on_abort is not None and (verb == "abort_requests" or args[1:2] == ("abort",)):
            registry.aborts = latest_aborts((*(registry.aborts or ()), AbortOrder(args[0], time.time_ns())))
            registry.on_abort(args[0])
        async with registry.standing_orders().recording(verb, args) if verb in STANDING else nullcontext():
            answers = await ask_live(registry, lambda client: client.call(verb, *args))
        lists = [found for _, found in answers if found is not None]
        return [*chain.from_iterable(lists)] if lists else None

    @verb
    async def load_adapter(
        self, name: str, path: str, replace: bool = False, most: int | None = None
    ) -> AdapterInfo:
        """Serve the directory as `name` on all live instances, or return all to the earlier version.

        most: of resolvers' adapters; beyond, raises BusyError.
        """
        registry, pool = self.instance_registry, self.pool
        if name in registry.aliases:
            from .aliases import check_load

            check_load(registry.aliases, name)
        with registry.loading(), nullcontext() if most is None else self._resolving(name, most):
            previous = registry.served_version(name)
            if previous is not None and not replace:
                replace = registry.suspects.problem(name) is not None or await self._is_unavailable(name)
            if previous is not None and not replace:
                raise AdapterExistsError(
                    f"adapter {name!r} is already loaded; unload it first or load it in place"
                )
            if previous is not None and previous.pinned:  # before any instance reads the content
                await ask_live(registry, lambda client: client.call("check_next", name))
            instances, version = registry.having(None), registry.next_version(name)
            asked = [one.client for one in instances]
            if pool is None:

                async def load(some: list[Instance], content: str | None) -> Answers[AdapterInfo]:
                    words: Any = {"replace": replace, "version": version, "content_hash": content}
                    calls = [one.client.call("load_adapter", name, path, **words) for one in some]
                    return await ask(registry, some, calls)

                answers, errors = await load_alike(instances, load)
            else:
                answers, errors = await pool.load(instances, name, path, replace=replace, version=version)
            if errors:
                if len(errors) < len(instances):
                    registry.use_up(name, version)
                if busy := await self._take_back([instance for instance, _ in answers], name, previous):
                    later = asyncio.create_task(self._take_back_later(busy, name, previous))
                    self._undoing.add(later)
                    later.add_done_callback(self._undoing.discard)
                raise _refusal(name, answers, errors)
            for instance, _ in answers:
                instance.missing.discard(name)
                instance.problems.pop(name, None)
            info = answers[0][1]
            registry.serve(info, path)
            self.ranks[name] = info.lora_rank
            if late := [one for one in registry.live if one.client not in asked]:
                await self._reach_late(name, late)
            return info

    async def _merge_late(self, have: Mapping[str, ServedVersion], ranks: Mapping[str, int]) -> None:
        """Serve an instance's earlier adapters, unless changed since the recovery."""
        registry = self.instance_registry
        await registry.at_rest()  # a version under load counts
        under_load = {name for name, lock in self._locks.items() if lock.locked()}
        now, before = registry.served, registry.recovered or Served()
        late = {
            name: one
            for name, one in have.items()
            if one.version >= registry.next_version(name)
            and now.state_of(name) == before.state_of(name)
            and name not in under_load
        }
        registry.recovered = before.joined(Served.of(late))
        registry.recover(Served.of(late))
        self.ranks.update({name: ranks[name] for name in ranks.keys() & late.keys()})
        for instance in registry.live:
            instance.missing |= set(late)
            instance.problems |= dict.fromkeys(late, "an instance that was late has it; it is being loaded")
        for name in late if registry.live else ():
            async with self._locks.setdefault(name, asyncio.Lock()):
                if served := registry.served_version(name):
                    await self._load_missing(name, served)

    async def _complete(self, instance: Instance, have: Mapping[str, ServedVersion]) -> None:
        """Bring an instance's adapters to the served state, one after another."""
        from .listener import catch_up

        registry, client = self.instance_registry, instance.client
        caller: Any = client
        lacking = instance.missing - instance.problems.keys() | have.keys() - registry.adapters.keys()
        # What loads everywhere now comes last: a load may hang.
        for name in sorted(lacking, key=lambda name: name in self._locks and self._locks[name].locked()):
            async with self._locks.setdefault(name, asyncio.Lock()):
                if not (instance.live and instance.client is client):
                    return
                served, before = registry.served_version(name), have.get(name)
                there = {} if before is None else {name: before}
                with suppress(AdapterNotFoundError, EngineDeadError):
                    if served is None:
                        await catch_up(caller, {}, there, set(), registry.pool)
                    else:
                        now, problems = {name: served}, instance.problems
                        await catch_up(caller, now, there, instance.missing, registry.pool, problems)

    async def _reach_late(self, name: str, late: Sequence[Instance]) -> None:
        for instance in late:
            instance.missing.add(name)
            instance.problems[name] = "it joined during the load; the adapter is being loaded"
        await self._load_missing(name, self.instance_registry.adapters[name])

    async def _load_missing(self, name: str, served: ServedVersion) -> None:
        """Load an adapter on the live instances without it."""
        from .listener import catch_up

        pool = self.instance_registry.pool
        lacking: list[Any] = [one for one in self.instance_registry.live if name in one.missing]
        loads = [catch_up(one.client, {name: served}, {}, one.missing, pool, one.problems) for one in lacking]
        await asyncio.gather(*loads, return_exceptions=True)

    @contextmanager
    def _resolving(self, name: str, most: int) -> Iterator[None]:
        from .resolving import resolved

        registry = self.instance_registry
        if name not in registry.adapters and len(resolved(registry).keys() | self._found) >= most:
            raise BusyError(
                f"sources.max_resolved={most} adapters are loaded for requests; send the request again later"
            )
        self._found.add(name)
        try:
            yield
        finally:
            self._found.discard(name)

    async def _is_unavailable(self, name: str) -> bool:
        registry = self.instance_registry
        answers, _ = await ask(registry, registry.live, [one.client.list_adapters() for one in registry.live])
        infos = chain.from_iterable(infos for _, infos in answers)
        return any(info.name == name and info.residency == "unavailable" for info in infos)

    @verb
    async def unload_adapter(self, name: str, only: ServedVersion | None = None) -> None:
        """Refuse new requests for `name` everywhere, and free the adapter at all instances.

        only: this version alone, without a wait for its last request.  Raises AdapterNotFoundError for an
        unserved name or version.
        """
        registry = self.instance_registry
        registry.having(None)
        if only not in (None, registry.served_version(name)):
            raise AdapterNotFoundError(f"adapter {name!r} was loaded again, pinned or unloaded meanwhile")
        if registry.aliases:
            from .aliases import check_unload

            check_unload(registry.aliases, name)
        was_served = registry.served_version(name) is not None  # maybe unavailable on all instances
        registry.forget(name)
        self.ranks.pop(name, None)
        # Read again: an instance may have joined before `forget`.
        instances = registry.having(None)
        if self.pool is not None:
            self.pool.forget(name)
        calls = [one.client.call("unload_adapter", name, waits=only is None) for one in instances]
        answers, errors = await ask(registry, instances, calls)
        if self.pool is not None:
            await self.pool.sweep()
        for _, error in errors:
            if not (answers or was_served) or not isinstance(error, AdapterNotFoundError):
                raise error

    async def _change(self, verb: str, name: str, *args: Any) -> AdapterInfo:
        """Run a verb on the adapter's live instances, or return all to the earlier pin.

        Raises AdapterNotFoundError for an unknown name.
        """
        registry = self.instance_registry
        with registry.loading():
            served = registry.adapters.get(name)
            if served is None:
                raise AdapterNotFoundError(f"adapter {name!r} is not loaded")
            instances = registry.having(name)
            asked = [one.client for one in registry.live]
            calls = [one.client.call(verb, name, *args) for one in instances]
            answers, errors = await ask(registry, instances, calls)
            if errors:
                before = [instance for instance, info in answers if info.pinned != served.pinned]
                if before:
                    undone = [one.client.call("pin_adapter", name, served.pinned) for one in before]
                    await ask(registry, before, undone)
                raise errors[0][1]
            info = merge_adapters([info] for _, info in answers)[0]
            registry.pin(name, pinned=info.pinned)
            if late := [one for one in registry.live if one.client not in asked]:
                with suppress(EngineDeadError):
                    await ask(registry, late, [one.client.call(verb, name, *args) for one in late])
            return info

    async def _take_back(
        self, instances: list[Instance], name: str, previous: ServedVersion | None
    ) -> list[Instance]:
        """Undo a load; after a failure the instance loses the adapter's requests.  Returns busy instances."""
        errors = await self._undo(instances, name, previous) if instances else []
        failed = {instance for instance, _ in errors}
        for instance in instances:
            if instance.live and instance not in failed:
                instance.missing.discard(name)
                instance.problems.pop(name, None)
        for instance, error in errors:
            if instance.problems.get(name) != reason(error):  # logged once
                what = "instance %s can't go back to what it served as %s: %r"
                logger.error(what, instance.name, name, error)
            instance.missing.add(name)
            instance.problems[name] = reason(error)
        return [one for one, error in errors if isinstance(error, BusyError)]

    async def _take_back_later(self, busy: list[Instance], name: str, previous: ServedVersion | None) -> None:
        """Undo a load at busy instances, until the served version changes."""
        registry = self.instance_registry
        before = None if previous is None else previous.version
        with suppress(EngineDeadError):
            while busy:
                with move_on_after(UNDO_PAUSE_S):
                    await registry.closed.wait()
                async with self._locks.setdefault(name, asyncio.Lock()):
                    now = registry.served_version(name)
                    if registry.closed.is_set() or registry.version(name) != before:
                        return
                    tried = [one for one in busy if one.live and name in one.missing]
                    busy = await self._take_back(tried, name, now)
                    if now is not None and previous is not None and now.pinned != previous.pinned:
                        back = [one for one in tried if one.live and name not in one.missing]
                        calls = [one.client.call("pin_adapter", name, now.pinned) for one in back]
                        await asyncio.gather(*calls, return_exceptions=True)

    async def _undo(
        self, instances: list[Instance], name: str, previous: ServedVersion | None
    ) -> list[tuple[Instance, Exception]]:
        """Return to what these instances served; returns the failures."""
        if self.pool is not None and previous is not None:
            return await self.pool.take_back(instances, name, previous)
        if previous is None:
            calls = [one.client.call("unload_adapter", name) for one in instances]
        else:
            words: Any = {"version": previous.version, "content_hash": previous.content_hash}
            load = name, previous.path
            calls = [one.client.call("load_adapter", *load, replace=True, **words) for one in instances]
        return (await ask(self.instance_registry, instances, calls))[1]


def _refusal(
    name: str, answers: list[tuple[Instance, AdapterInfo]], errors: list[tuple[Instance, Exception]]
) -> Exception:
    instance, error = errors[0]
    if not answers:
        return error
    kind = BusyError if isinstance(error, BusyError) else AdapterError
    return kind(f"instance {instance.name} refused adapter {name!r}, so the others took it back: {error}")


def _tell(name: str, change: asyncio.Future[Any]) -> None:
    if not change.cancelled() and (error := change.exception()) is not None:
        logger.warning("adapter %s: a change whose caller left failed: %s", name, error)


FLEET_CHANGES = {**INSTANCE_VERBS, **ADAPTER_VERBS, **verbs_of(FleetAdapters)}
_INTERFACE = Interface(FLEET_CHANGES)
