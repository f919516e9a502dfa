# SPDX-License-Identifier: Apache-2.0
"""A fleet's adapter pool: keeps the wanted copies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

from moe_lora.core.errors import AdapterNotFoundError, EngineDeadError, LastProblem
from moe_lora.core.request import AdapterInfo
from moe_lora.dist.cluster.adapter_calls import Answers, ask, load_alike
from moe_lora.dist.cluster.instances import Instance, InstanceRegistry, ServedVersion
from moe_lora.engine.client.client import CallableEngine, EngineClient
from moe_lora.engine.client.messages import PoolEntry
from moe_lora.policies.migration.pool_moves import copies_to_drop, copies_to_make, place_holders

from .directory import PoolDirectory

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Interval of checks of holders."""

_State = tuple[int, list[EngineClient]]
Table = Mapping[str, Sequence[tuple[int, float]]]


class FleetPool:
    """Loads adapters into the pool, moves copies, and replaces lost holders."""

    def __init__(self, instance_registry: InstanceRegistry, directory: PoolDirectory) -> None:
        self._instance_registry = instance_registry
        self._directory = directory
        self._wanted: dict[str, list[int]] | None = None
        self._round = asyncio.Lock()
        self._at_rest: _State | None = None
        """The last state without pending work."""
        self._problem = LastProblem()

    async def run(self) -> None:
        """Keep the wanted copies, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.step()
            except Exception as error:  # requests find their adapters as before
                self._failed(f"the adapter pool can't be kept: {error!r}")

    async def step(self) -> None:
        """Replace lost holders, drop surplus copies, send sources."""
        async with self._round:
            if self._state() != self._at_rest:
                await self._make_copies()
                await self._drop_copies()
        await self.sweep()

    async def sweep(self) -> None:
        """Free contents without a served name or a request on any instance.

        Instances report such contents, even after a failure.
        """
        with suppress(EngineDeadError):
            answers, _ = await self._ask(self._instance_registry.live, "pool_orphans")
            orphans = sorted({content_hash for _, found in answers for content_hash in found})
            if not orphans:
                return
            known, errors = await self._ask(self._instance_registry.live, "pool_known", orphans)
            used = {content_hash for _, found in known for content_hash in found}
            calls = [
                _engine(instance).call("pool_free", content_hash)
                for instance, found in answers
                for content_hash in found
                if content_hash not in used and not errors
            ]
            await asyncio.gather(*calls, return_exceptions=True)

    def want(self, table: Table) -> None:
        """Follow a routing table from the next step on."""
        self._wanted = {
            name: [instance for instance, share in row if share > 0] for name, row in table.items()
        }

    @asynccontextmanager
    async def moving(self, table: Table) -> AsyncIterator[None]:
        """Copies for a routing table: made before the body, which switches the routing; surplus dropped
        after.

        A failed copy is no error: the instance loads on demand.
        """
        async with self._round:
            self.want(table)
            await self._make_copies()
            yield
            await self._drop_copies()

    async def load(
        self, instances: list[Instance], name: str, path: str, *, replace: bool, version: int
    ) -> tuple[list[tuple[Instance, AdapterInfo]], list[tuple[Instance, Exception]]]:
        """Serve a directory as `name`: some instances read and hold the adapter.  Returns as
        `adapter_calls.ask`.
        """

        async def load(some: list[Instance], content: str | None) -> Answers[PoolEntry]:
            return await self._ask(some, "pool_load", name, path, replace, version, content)

        homes = [instance for instance in instances if instance.index in self._emptiest(instances)]
        try:
            answers, errors = await load_alike(homes, load)
        except EngineDeadError:
            left = [instance for instance in instances if instance.live]
            if not 0 < len(left) < len(instances):
                raise
            return await self.load(left, name, path, replace=replace, version=version)
        if answers and not errors:
            facts = answers[0][1].facts
            sources = [entry.source for _, entry in answers]
            others = [instance for instance in instances if instance not in homes]
            if others:
                with suppress(EngineDeadError):  # no instance left: all hear at their return
                    more, errors = await self._ask(
                        others, "pool_know", facts, path, replace, version, sources
                    )
                    answers += more
        if not errors:
            self._note(answers)
        return [(instance, entry.info) for instance, entry in answers], errors

    async def take_back(
        self, instances: list[Instance], name: str, previous: ServedVersion
    ) -> list[tuple[Instance, Exception]]:
        """Return to the earlier version after a refused load; returns the failures.

        The pool still holds the earlier bytes.
        """
        path, version = previous.path, previous.version
        facts = self._directory.facts_at(name, path, version)

        def undo(client: EngineClient) -> Awaitable[PoolEntry]:
            engine = cast("CallableEngine", client)
            if facts is None:
                return engine.call("pool_load", name, path, True, version, previous.content_hash)
            sources = self._directory.sources(facts.content_hash, engine)
            return engine.call("pool_know", facts, path, True, version, sources)

        answers, errors = await ask(
            self._instance_registry, instances, [undo(one.client) for one in instances]
        )
        self._note(answers)
        return errors

    def forget(self, name: str) -> None:
        """The name is no longer served."""
        self._directory.forget(name)

    def _note(self, answers: list[tuple[Instance, PoolEntry]]) -> None:
        for instance, entry in answers:
            self._directory.serve(entry)
            self._directory.note(_engine(instance), entry.facts.content_hash, entry.source)

    def _emptiest(self, instances: list[Instance]) -> list[int]:
        held = dict.fromkeys((instance.index for instance in instances), 0)
        sizes = self._directory.sizes()
        clients = {_engine(instance): instance.index for instance in instances}
        for content_hash, holders in self._directory.held(clients).items():
            for index in holders:
                held[index] += sizes.get(content_hash, 0)
        return sorted(held, key=lambda index: (held[index], index))[: self._directory.replicas]

    async def _make_copies(self) -> None:
        state = self._state()
        held, target = self._held(), self._target()
        moves = await asyncio.to_thread(lambda: copies_to_make(target(), held))
        await asyncio.gather(
            *(
                self._hold(
                    instance, [content_hash for content_hash, index in moves if index == instance.index]
                )
                for instance in self._instance_registry.live
            )
        )
        await self._tell()
        self._at_rest = None if moves else state

    async def _hold(self, instance: Instance, content_hashes: list[str]) -> None:
        client = _engine(instance)
        for content_hash in content_hashes:
            sources = self._directory.sources(content_hash, client, instance.index)
            try:
                source = await client.call("pool_hold", content_hash, sources)
            except EngineDeadError:
                return
            except AdapterNotFoundError:  # unloaded meanwhile
                continue
            except Exception as error:  # such as full memory
                self._failed(f"instance {instance.name} can't hold an adapter: {error}")
                continue
            self._directory.note(client, content_hash, source)

    async def _drop_copies(self) -> None:
        """Drop unwanted copies after sources: no instance reads a dropped copy."""
        held, target = self._held(), self._target()
        drops = await asyncio.to_thread(lambda: copies_to_drop(target(), held))
        if not drops:
            return
        self._at_rest = None
        clients = {instance.index: _engine(instance) for instance in self._instance_registry.live}
        drops = [(content_hash, index) for content_hash, index in drops if index in clients]
        for content_hash, index in drops:
            self._directory.note(clients[index], content_hash, None)
        await self._tell()
        calls = [clients[index].call("pool_drop", content_hash) for content_hash, index in drops]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _tell(self) -> None:
        calls = []
        for instance in self._instance_registry.live:
            client = _engine(instance)
            if news := self._directory.news(client, instance.index):
                calls.append(client.call("pool_sources", news))
        await asyncio.gather(*calls, return_exceptions=True)

    def _target(self) -> Callable[[], dict[str, frozenset[int]]]:
        """Computes, in any thread, the wanted holders."""
        wanted: dict[str, set[int]] = {}
        for name, content_hash in self._directory.content_hashes().items():
            wanted.setdefault(content_hash, set()).update((self._wanted or {}).get(name, ()))
        live = [instance.index for instance in self._instance_registry.live]
        sizes, held, replicas = self._directory.sizes(), self._held(), self._directory.replicas
        return partial(place_holders, sizes, held, live, replicas, wanted)

    def _state(self) -> _State:
        return self._directory.version, [instance.client for instance in self._instance_registry.live]

    def _held(self) -> dict[str, list[int]]:
        return self._directory.held(
            {_engine(instance): instance.index for instance in self._instance_registry.live}
        )

    async def _ask(
        self, instances: list[Instance], method: str, *args: Any
    ) -> tuple[list[tuple[Instance, Any]], list[tuple[Instance, Exception]]]:
        return await ask(
            self._instance_registry,
            instances,
            [one.client.call(method, *args) for one in instances],
        )

    def _failed(self, problem: str) -> None:
        if self._problem.is_new(problem):
            logger.warning(problem)


def _engine(instance: Instance) -> CallableEngine:
    assert isinstance(instance.client, CallableEngine), "a pool is one of engines that can be asked"
    return instance.client
