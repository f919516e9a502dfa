# SPDX-License-Identifier: Apache-2.0
"""Serves unknown adapters from their first request on, and unloads idle adapters near a number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, cast

from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import AdapterNotFoundError, MoeLoraError
from moe_lora.core.request import GenerateRequest, TokenOutput

from .instances import ServedVersion
from .resolver import MissingNames, Resolver, finder
from .routing_client import FleetClient

logger = logging.getLogger(__name__)
MARK = "/."
"""Ends the path of an adapter that a resolver loaded; other loads have plain paths.

Instances and controller keep an adapter's path, so all front ends know the resolvers' adapters, also after a
restart.
"""
_TRIES = 3
"""A second front end may unload an adapter between load and request."""


class ResolvingClient(FleetClient):
    """A `FleetClient` that loads unknown adapters.  `attach` comes before the first request."""

    def attach(self, resolver: Resolver, most: int) -> None:
        """most: see `SourcesConfig.max_resolved`."""
        self._resolver, self._most = resolver, most
        self._unloading: asyncio.Task[None] | None = None
        self._loads: dict[str, asyncio.Task[None]] = {}
        """By id of the request that waits."""

    async def is_served(self, name: str) -> bool:
        """Loads an unknown adapter.  Raises the load's error, except for an unknown name."""
        with suppress(AdapterNotFoundError):
            await self._serve(name)
        return await super().is_served(name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        for last in (False,) * (_TRIES - 1) + (True,):
            if not await self._is_ready(request):
                yield TokenOutput(request_id=request.request_id, token_ids=(), finish_reason="abort")
                return
            begun = False
            try:
                async with aclosing(cast(Any, super().generate(request))) as outputs:
                    async for output in outputs:
                        begun = True
                        yield output
                return
            except AdapterNotFoundError:
                if begun or last or request.adapter is None:
                    raise

    async def abort(self, request_id: str) -> None:
        if request_id in self._loads:
            self._loads[request_id].cancel()
        await super().abort(request_id)

    async def _is_ready(self, request: GenerateRequest) -> bool:
        """True once the request's adapter is served; False after an abort.  Raises as `_serve`."""
        if request.adapter is None or await super().is_served(request.adapter):
            return True
        load = self._loads[request.request_id] = asyncio.create_task(self._serve(request.adapter))
        try:
            await asyncio.wait({load})
        finally:
            load.cancel()
            del self._loads[request.request_id]
        return not load.cancelled() and load.result() is None

    async def _serve(self, name: str) -> None:
        if await super().is_served(name):
            return
        self._resolver.missing.check(name)
        num_resolved = len(self._resolved())
        if num_resolved >= self._most * 9 // 10 and self._unloading is None:
            self._unloading = asyncio.create_task(self._unload_idle())
        if num_resolved >= self._most and self._unloading is not None:
            await asyncio.shield(self._unloading)
        await self._resolver.load(name)

    def _resolved(self) -> dict[str, ServedVersion]:
        """Adapters that the resolvers of all front ends loaded, except pinned adapters."""
        served = self._instance_registry.adapters.items()
        return {name: one for name, one in served if one.path.endswith(MARK) and not one.pinned}

    async def _unload_idle(self) -> None:
        """Unload the adapters with the longest idle time, to four fifths of the number."""
        try:
            infos = await self.list_adapters()
            resolved, used = self._resolved(), self._used()
            idle = [
                one
                for one in infos
                if one.name in resolved and one.name not in used and not one.num_running + one.num_waiting
            ]
            # An adapter without a use may have a request under way.
            idle.sort(key=lambda one: (one.idle_s is None, -(one.idle_s or 0.0)))
            for one in idle[: max(0, len(resolved) - self._most * 4 // 5)]:
                if one.name not in self._used():
                    with suppress(AdapterNotFoundError):  # another front end unloaded or replaced the version
                        await self.call("unload_adapter", one.name, resolved[one.name])
        except MoeLoraError as error:
            logger.warning("idle adapters stay: %s", error)
        finally:
            self._unloading = None

    def _used(self) -> set[str | None]:
        """Names of the requests and loads of this front end."""
        return {one.request.adapter for one in self._running.values()} | self._resolver.running.keys()


def attach_resolver(fleet: FleetClient, cluster: ClusterConfig, call: Callable[..., Awaitable[Any]]) -> None:
    """Have the fleet's client find adapters by `sources.resolver`.  call: the controller's.

    Raises ConfigError for a resolver that is no folder.
    """
    assert isinstance(fleet, ResolvingClient)
    config = cast(SourcesConfig, cluster.sources)
    find = finder(cluster, call)

    def load(name: str, folder: str) -> Awaitable[object]:
        return call("load_adapter", name, folder + MARK)

    fleet.attach(Resolver(find, load, MissingNames(config.missing_s)), config.max_resolved)
