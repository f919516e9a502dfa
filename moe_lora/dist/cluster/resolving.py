# SPDX-License-Identifier: Apache-2.0
"""Loads unknown adapters at the first request, and unloads idle adapters near a number."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, cast

from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    ConfigError,
    MoeLoraError,
)
from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.dist.net.thread import in_daemon_thread

from .instances import ServedVersion
from .routing_client import FleetClient

logger = logging.getLogger(__name__)
Find = Callable[[str], Awaitable[str]]
"""A name's folder.  Raises AdapterNotFoundError, AdapterError or OSError; other errors may pass."""
MAX_LOADS = 4
"""Names that a front end finds and loads at once."""
MAX_MISSING = 10_000
"""Missing names that a front end remembers."""
MARK = "/."
"""Ends the path of an adapter that a resolver loaded; other loads have plain paths.

Instances and controller keep an adapter's path, so all front ends know the resolvers' adapters, also after a
restart.
"""
_TRIES = 3
"""A second front end may unload an adapter between load and request."""


class MissingNames:
    """Names without a loadable adapter, with the error, for `kept_s`; the oldest go first."""

    def __init__(self, kept_s: float, most: int = MAX_MISSING) -> None:
        self._kept_s = kept_s
        self._most = most
        self._found: dict[str, tuple[float, type[MoeLoraError], str]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, name: str, error: MoeLoraError) -> None:
        self._found.pop(name, None)
        self._found[name] = time.monotonic() + self._kept_s, type(error), str(error)
        if len(self._found) > self._most:
            del self._found[next(iter(self._found))]

    def check(self, name: str) -> None:
        """Raises the remembered error."""
        found = self._found.get(name)
        if found is None:
            return
        until_s, kind, text = found
        if time.monotonic() < until_s:
            raise kind(text)
        del self._found[name]


class Resolver:
    """Finds and loads unknown adapters for a front end: a name once at a time.

    load: serves a folder under a name on the instances.
    """

    def __init__(
        self, find: Find, load: Callable[[str, str], Awaitable[object]], missing: MissingNames
    ) -> None:
        self._find, self._load = find, load
        self.missing = missing
        self.running: dict[str, asyncio.Task[None]] = {}
        """By name."""
        self._turns = asyncio.Semaphore(MAX_LOADS)

    async def load(self, name: str) -> None:
        """Return once the adapter is served.  Raises the error of finding or loading, now or before."""
        self.missing.check(name)
        task = self.running.get(name)
        if task is None:
            task = self.running[name] = asyncio.create_task(self._resolve(name))
            task.add_done_callback(partial(self._forget, name))
        await asyncio.shield(task)

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        del self.running[name]
        if not task.cancelled():
            task.exception()  # all callers may have left

    async def _resolve(self, name: str) -> None:
        async with self._turns:
            try:
                folder = await self._folder(name)
                with suppress(AdapterExistsError):  # of another front end
                    await self._load(name, folder)
            except (AdapterError, AdapterNotFoundError) as error:
                self.missing.add(name, error)
                raise
            except OSError as error:  # remembered too: each try reads a broken disk on all instances
                what = f"adapter {name!r} can't be read ({error.strerror or error}); mend its files"
                self.missing.add(name, AdapterError(what))
                raise AdapterError(what) from error

    async def _folder(self, name: str) -> str:
        """Logs the cause of a failed search: addresses and settings are for administrators alone."""
        try:
            return await self._find(name)
        except AdapterError as error:
            logger.warning("adapter %s is not found: %s", name, error)
            raise AdapterNotFoundError(f"no adapter {name!r} is found") from error


class ResolvingClient(FleetClient):
    """A `FleetClient` that loads unknown adapters.  `attach` comes before the first request."""

    def attach(self, resolver: Resolver, most: int) -> None:
        """most: see `SourcesConfig.max_resolved`."""
        self._resolver, self._most = resolver, most
        self._unloading: asyncio.Task[None] | None = None

    async def is_served(self, name: str) -> bool:
        """Loads an unknown adapter.  Raises the load's error, except for an unknown name."""
        with suppress(AdapterNotFoundError):
            await self._serve(name)
        return await super().is_served(name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        for last in (False,) * (_TRIES - 1) + (True,):
            if request.adapter is not None:
                await self._serve(request.adapter)
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
    find = _finder(cluster, call)

    def load(name: str, folder: str) -> Awaitable[object]:
        return call("load_adapter", name, folder + MARK)

    fleet.attach(Resolver(find, load, MissingNames(config.missing_s)), config.max_resolved)


def _finder(cluster: ClusterConfig, call: Callable[..., Awaitable[Any]]) -> Find:
    """Raises ConfigError for an absent folder."""
    from moe_lora.adapters.sources.names import find_folder, find_on_hub

    config = cast(SourcesConfig, cluster.sources)
    place = cast(str, config.resolver)
    taken, root = {cluster.served_model_name, *cluster.other_model_names}, os.path.abspath(place)
    if place != "registry" and not place.startswith("hf:") and not os.path.isdir(root):
        raise ConfigError(
            f"sources.resolver={place} is not a folder; give a folder of adapters, registry, or hf:ORG"
        )

    async def find(name: str) -> str:
        if name in taken:
            raise AdapterNotFoundError(f"{name!r} is the base model's name")
        if place == "registry":
            return cast(str, (await call("registry_resolve", name)).path)
        if place.startswith("hf:"):
            return await in_daemon_thread(find_on_hub, name, place[3:], config)
        return await in_daemon_thread(find_folder, name, root, cluster.engine.adapter_root)

    return find
