# SPDX-License-Identifier: Apache-2.0
"""Drains, restarts and the number of instances, by an operator."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import starmap
from typing import Any

from anyio import current_time, fail_after, move_on_after

from moe_lora.core.errors import ConfigError, EngineDeadError, EngineSilentError
from moe_lora.dist.cluster.drains import Warmed
from moe_lora.dist.cluster.instances import Instance, InstanceRegistry
from moe_lora.dist.net.codec import verb

logger = logging.getLogger(__name__)

LOOK_S = 0.1
SETTLE_S = 0.5
"""Time until all front ends know of a drain."""
WARM_S = 3.0
"""Limit for all answers before a drain."""
LEAVE_S = 20.0
"""Limit for the end of an ended process's connection."""


class InstanceControl:
    """Drains and restarts instances, one at a time.

    drain_s: time for a restarted instance to lose requests.  seen_by_all: True if all front ends route to
    this process.  An order for an absent instance waits for its dial-in.  by_adapter: see `Routes`.
    """

    def __init__(
        self,
        instance_registry: InstanceRegistry,
        drain_s: float,
        prefill_instances: Collection[str] = (),
        *,
        by_adapter: bool = False,
    ) -> None:
        self.seen_by_all: Callable[[str, str], bool] = lambda name, incarnation: True
        self._registry = instance_registry
        self._drain_s = drain_s
        self._prefill = prefill_instances
        self._by_adapter = by_adapter
        self.changing = asyncio.Lock()
        """Held by a restart, and by a change of the number."""
        self.scale: Callable[[int, float], Awaitable[None]] | None = None
        """Sets the number of instances; None: fixed."""

    @verb
    async def drain_instance(self, name: str) -> None:
        """Give an instance no requests, and move requests elsewhere if possible.

        Raises ConfigError for an unknown or the last undrained instance, or after an undrain meanwhile.
        """
        await self._named(name)
        orders = self._registry.drains.orders
        warmed = await self._warm_others(name, lambda: self._registry.undrained)
        later = self._registry.drains.orders.get(name)
        if later is not None and not later.drained and later != orders.get(name):
            raise ConfigError(f"instance {name!r} was undrained before its drain began")
        self._registry.drains.warm(warmed)
        await self._order(name, drained=True)
        logger.info("instance %s is drained", name)

    @verb
    async def undrain_instance(self, name: str) -> None:
        """Give the instance requests again.

        Raises ConfigError for an unknown instance.
        """
        if name not in self._registry.drains.by_operator:  # an instance gone for good may be undrained
            await self._named(name)
        await self._order(name, drained=False)
        logger.info("instance %s is not drained any more", name)

    async def _order(self, name: str, *, drained: bool) -> None:
        order = self._registry.drains.order(name, drained=drained)
        for instance in self._registry.live:  # an absent instance hears at its return
            if instance.name == name:
                with suppress(EngineDeadError):
                    await instance.client.call("remember_drain", order)

    @verb
    async def restart_instance(self, name: str, limit_s: float) -> None:
        """Drain an instance, end the process, and return when the supervisor's next process takes part.

        Raises ConfigError for an unknown instance, or if all others are drained; EngineDeadError if after
        limit_s no process takes part, no other instance serves at all front ends, or another change goes on.
        """
        async with self._change(limit_s):
            instance = await self._named(name)
            await self._check_others(name, self._not_drained)
            await _until(lambda: instance.live, limit_s, _not_here(name))
            warmed = await self._warm_others(name, self._not_drained)
            before = instance.incarnation
            self._registry.drains.warm(warmed)
            self._registry.drains.restart({name})
            logger.info("instance %s is drained until it is started again", name)
            try:
                await asyncio.sleep(SETTLE_S)
                await self._until_idle(instance)
                await self._until_others(name, limit_s)
                await self._end(instance)
                await self._until_back(instance, before, limit_s)
            finally:
                self._registry.drains.restart(())

    @verb
    async def scale_instances(self, number: int, limit_s: float) -> None:
        """Have this number of instances: new ones take part at the return, others leave after a drain.

        Raises ConfigError for an impossible number; EngineDeadError for a failed start, or after limit_s.
        """
        if self.scale is None:
            raise ConfigError(
                "the number of instances is fixed: start the server with one front end and with scaling: "
                "{max_instances: N} in the file (--set scaling.max_instances=N); on Ray call moe-lora "
                "cluster scale"
            )
        async with self._change(limit_s):
            await self.scale(number, limit_s)

    @asynccontextmanager
    async def _change(self, limit_s: float) -> AsyncIterator[None]:
        try:
            with fail_after(limit_s):
                await self.changing.acquire()
        except TimeoutError:
            raise EngineDeadError(
                f"another change of instances is under way after limit_s={limit_s:g}; try again later"
            ) from None
        try:
            yield
        finally:
            self.changing.release()

    async def check_leaving(self, names: Collection[str]) -> None:
        """Start loads at others.  Raises ConfigError if instances leave, and no other takes requests."""
        warmed = await self._start_loads(names)  # other instances may leave meanwhile
        stays = any(one.name not in names for one in self._registry.undrained)
        if not stays and any(one.name in names for one in self._registry.live):
            raise ConfigError(f"{', '.join(names)} can't leave: no other takes requests; undrain one first")
        self._registry.drains.warm(warmed)

    async def remove(self, names: Collection[str], end: Callable[[], Awaitable[None]]) -> None:
        """Drain instances together, end the processes by `end`, and forget the instances and their drains."""

        def leaving() -> list[Instance]:
            return [one for one in self._registry.instances if one.name in names]

        drains = self._registry.drains
        drains.restart(names)
        logger.info("instances %s are drained, to end for good", ", ".join(names))
        try:
            await asyncio.sleep(SETTLE_S)
            live = [one for one in leaving() if one.live]
            await asyncio.gather(*map(self._until_idle, live), return_exceptions=True)
            await end()
            with move_on_after(LEAVE_S):
                await asyncio.sleep(LOOK_S)  # the last dial-in may still be in the socket
                while any(one.live for one in leaving()):
                    await asyncio.sleep(LOOK_S)
            for one in leaving():
                self._registry.remove(one)
            for name in drains.by_operator.intersection(names):
                drains.order(name, drained=False)
        finally:
            drains.restart(())

    async def _warm_others(self, name: str, undrained: Callable[[], Sequence[Instance]]) -> Warmed:
        """Start loads, then check again: other instances may leave meanwhile."""
        await self._check_others(name, undrained)
        warmed = await self._start_loads({name})
        await self._check_others(name, undrained)
        return warmed

    async def _start_loads(self, names: Collection[str]) -> Warmed:
        """Load the leaving instances' adapters in use at others of the role that may get the requests.

        With `by_adapter` at one, unless one has the adapter; returns both for routers.
        """
        undrained = self._registry.undrained
        leaving = [one for one in undrained if one.name in names]
        roles = {one.name in self._prefill for one in leaving}
        others = [one for one in undrained if one.name not in names and (one.name in self._prefill) in roles]
        if not others:
            return {}
        end_s = current_time() + WARM_S
        used = await _answers("used_adapters", dict.fromkeys(leaving, ()), (end_s - current_time()) / 3)
        num_requests = Counter[str]()
        for one, found in used.items():
            num_requests.update(found)
            if found is None:
                logger.warning("instance %s doesn't name its adapters; others load them later", one.name)
        asked = [name for name, _ in num_requests.most_common()]
        loads, places = dict.fromkeys(others, asked), dict[str, tuple[str, ...]]()
        if self._by_adapter and asked:
            loads = {one: [] for one in others}
            asks = dict.fromkeys(others, (asked,))
            answers = await _answers("ready_adapters", asks, (end_s - current_time()) / 2)
            # A device may have an older version of a missing adapter.
            ready = {one: set(found or ()) - one.missing for one, found in answers.items()}
            places = {name: tuple(one.name for one in others if name in ready[one]) for name in asked}
            for name in asked:
                if not places[name]:
                    able = [one for one in others if name not in one.missing] or others
                    least = min(able, key=lambda one: (len(loads[one]), one.outstanding_tokens))
                    loads[least].append(name)
                    places[name] = (least.name,)
        orders = {one: (found,) for one, found in loads.items() if found}
        await _answers("preload_adapters", orders, end_s - current_time())
        return dict.fromkeys(names, places)

    def _not_drained(self) -> list[Instance]:
        """Includes returning instances."""
        return [one for one in self._registry.instances if one.name not in self._registry.drained]

    async def _named(self, name: str) -> Instance:
        await self._registry.dialled_in(lambda: any(one.name == name for one in self._registry.instances))
        for instance in self._registry.instances:
            if instance.name == name:
                return instance
        names = ", ".join(sorted(one.name for one in self._registry.instances)) or "none"
        raise ConfigError(f"there is no instance {name!r}; choose one of {names}")

    async def _check_others(self, name: str, undrained: Callable[[], Sequence[Instance]]) -> None:
        def is_another() -> bool:
            return any(one.name != name for one in undrained())

        await self._registry.dialled_in(is_another)
        if not is_another():
            raise ConfigError(
                f"instance {name!r} can't be drained: no other takes requests; start or undrain one first"
            )

    async def _until_idle(self, instance: Instance) -> None:
        with move_on_after(self._drain_s):
            while True:
                try:
                    stats = await instance.client.stats()
                except EngineSilentError:
                    raise _not_here(instance.name) from None
                except EngineDeadError:
                    return  # `_end` reports the problem
                if not stats.num_running + stats.num_waiting + stats.num_background:
                    return
                await asyncio.sleep(LOOK_S)
        logger.info(
            "instance %s has requests after drain_s=%g; others take them", instance.name, self._drain_s
        )

    async def _until_others(self, name: str, limit_s: float) -> None:
        problem = EngineDeadError(
            f"instance {name} was not ended: after limit_s={limit_s:g} no other takes requests at all "
            "front ends; start or undrain one first"
        )

        def is_seen() -> bool:
            return any(self.seen_by_all(one.name, str(one.incarnation)) for one in self._registry.undrained)

        await _until(is_seen, limit_s, problem)

    async def _end(self, instance: Instance) -> None:
        if instance.silent:
            raise _not_here(instance.name)
        logger.info("instance %s is told to end, to be started again", instance.name)
        try:
            await instance.client.call("restart")
        except EngineSilentError:
            logger.warning("instance %s does not say that it ends; it may still", instance.name)
        except EngineDeadError:
            logger.info("instance %s has ended by itself", instance.name)

    async def _until_back(self, instance: Instance, before: str | None, limit_s: float) -> None:
        problem = EngineDeadError(
            f"instance {instance.name} was ended and is not back after limit_s={limit_s:g}; its log says "
            "why, and it takes part as soon as it is"
        )

        def is_back() -> bool:
            return (
                instance.live
                and instance.incarnation not in (None, before)
                and self.seen_by_all(instance.name, str(instance.incarnation))
            )

        await _until(is_back, limit_s, problem)


async def _answers(
    verb: str, calls: Mapping[Instance, tuple[Any, ...]], limit_s: float
) -> dict[Instance, Any]:
    """None for an error, and for a late answer.  calls: arguments."""

    async def answer(one: Instance, args: tuple[Any, ...]) -> Any:
        with move_on_after(limit_s), suppress(Exception):
            return await one.client.call(verb, *args)

    found = await asyncio.gather(*starmap(answer, calls.items()))
    return dict(zip(calls, found, strict=True))


async def _until(condition: Callable[[], bool], limit_s: float, problem: EngineDeadError) -> None:
    try:
        with fail_after(limit_s):
            while not condition():
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise problem from None


def _not_here(name: str) -> EngineDeadError:
    return EngineDeadError(
        f"instance {name!r} does not take part now, so it can't be told to end; end its process, which is "
        "started again"
    )
