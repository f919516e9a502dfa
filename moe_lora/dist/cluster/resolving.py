# SPDX-License-Identifier: Apache-2.0
"""Serves unknown adapters from their first request on, and unloads idle adapters near a number."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, cast

from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import (
    AdapterError,
    AdapterNotFoundError,
    AdapterVersionError,
    BusyError,
    MoeLoraError,
)
from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.engine.client.messages import PauseScope

from .resolver import MARK, MissingNames, Resolver, finder, resolved
from .routing_client import FleetClient

logger = logging.getLogger(__name__)
_TRIES = 3
"""Another front end may unload an adapter between load and request."""
ROOM_S = 30.0
"""Wait of a load for adapters without requests."""
_LOOK_S, _LONGEST_LOOK_S = 0.1, 2.0


class ResolvingClient(FleetClient):
    """A `FleetClient` that loads unknown adapters.  `attach` comes before the first request."""

    def attach(self, resolver: Resolver, most: int) -> None:
        """most: see `SourcesConfig.max_resolved`."""
        self._resolver, self._most = resolver, most
        self._unloading: asyncio.Task[None] | None = None
        self._loads: dict[str, tuple[GenerateRequest, asyncio.Task[None]]] = {}
        """Requests that wait, by id."""
        self._instance_registry.on_abort = self._abort_loads
        self._used: Counter[str | None] = Counter()
        """Requests by adapter, from before the load on."""

    async def is_served(self, name: str) -> bool:
        """Loads an unknown adapter.  Raises the load's error, except for an unknown name."""
        if await super().is_served(name):
            return True
        with suppress(AdapterNotFoundError):
            await self._load(name)
        return await super().is_served(name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        adapter = request.adapter
        self._used[adapter] += 1
        try:
            async with aclosing(self._outputs(request)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._used[adapter] -= 1
            if not self._used[adapter]:
                del self._used[adapter]

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        for number in range(_TRIES):
            if not await self._is_ready(request, refused=number > 0):
                yield TokenOutput(request_id=request.request_id, token_ids=(), finish_reason="abort")
                return
            begun = False
            try:
                async with aclosing(cast(Any, super().generate(request))) as outputs:
                    async for output in outputs:
                        begun = True
                        yield output
                return
            except AdapterNotFoundError as error:
                if begun:
                    raise
                problem = error
        raise AdapterVersionError(
            f"adapter {request.adapter!r} was unloaded {_TRIES} times before the request began; send the "
            "request again, or raise sources.max_resolved"
        ) from problem

    async def abort(self, request_id: str) -> None:
        if request_id in self._loads:
            self._loads[request_id][1].cancel()
        await super().abort(request_id)

    def _abort_loads(self, scope: PauseScope) -> None:
        for request, load in self._loads.values():
            if scope.covers(request):
                load.cancel()

    async def _is_ready(self, request: GenerateRequest, *, refused: bool) -> bool:
        """True once the request's adapter is served; False after an abort.  Raises as `_load`.

        refused: by an instance without the adapter.
        """
        adapter = request.adapter
        if adapter is None or (not refused and await super().is_served(adapter)):
            return True
        load = asyncio.create_task(self._load(adapter))
        self._loads[request.request_id] = request, load
        try:
            await asyncio.wait({load})
        finally:
            load.cancel()
            del self._loads[request.request_id]
        return not load.cancelled() and load.result() is None

    async def _load(self, name: str) -> None:
        """Waits for room.  Raises BusyError while every resolved adapter has requests."""
        self._resolver.missing.check(name)
        end_s, pause_s = time.monotonic() + ROOM_S, _LOOK_S
        while True:
            num_resolved = len(resolved(self._instance_registry))
            if num_resolved >= self._most * 9 // 10 and self._unloading is None:
                self._unloading = asyncio.create_task(self._unload_idle())
            if num_resolved >= self._most and self._unloading is not None:
                await asyncio.shield(self._unloading)
            is_last = time.monotonic() >= end_s
            if is_last or len(resolved(self._instance_registry)) < self._most:
                try:
                    return await self._resolver.load(name)
                except BusyError:
                    if is_last:
                        raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    async def _unload_idle(self) -> None:
        """Unload the adapters with the longest idle time, to four fifths of the number."""
        try:
            infos = await self.list_adapters()
            found = resolved(self._instance_registry)
            idle = [
                one
                for one in infos
                if one.name in found and not (self._is_used(one.name) or one.num_running + one.num_waiting)
            ]
            # An adapter without a use may have a request under way.
            idle.sort(key=lambda one: (one.idle_s is None, -(one.idle_s or 0.0)))
            for one in idle[: max(0, len(found) - self._most * 4 // 5)]:
                if not self._is_used(one.name):
                    with suppress(AdapterError, AdapterNotFoundError):  # others changed it
                        await self.call("unload_adapter", one.name, found[one.name])
        except MoeLoraError as error:
            logger.warning("idle adapters stay: %s", error)
        finally:
            self._unloading = None

    def _is_used(self, name: str) -> bool:
        """True for requests and loads of this front end."""
        return name in self._used or name in self._resolver.running


def attach_resolver(fleet: FleetClient, cluster: ClusterConfig, call: Callable[..., Awaitable[Any]]) -> None:
    """Have the fleet's client find adapters by `sources.resolver`.  call: the controller's.

    Raises ConfigError for a resolver that is no folder.
    """
    assert isinstance(fleet, ResolvingClient)
    config = cast(SourcesConfig, cluster.sources)
    find = finder(cluster, call)

    def load(name: str, folder: str) -> Awaitable[object]:
        return call("load_adapter", name, folder + MARK, most=config.max_resolved)

    fleet.attach(Resolver(find, load, MissingNames(config.missing_s)), config.max_resolved)
