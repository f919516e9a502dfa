# SPDX-License-Identifier: Apache-2.0
"""Finds and loads unknown adapters at their first request, and unloads idle adapters."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from moe_lora.adapters.peft.files import CONFIG_FILE
from moe_lora.adapters.sources import AdapterSources
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    AdapterVersionError,
    BusyError,
    ConfigError,
    MoeLoraError,
)
from moe_lora.core.request import GenerateRequest, TokenOutput, name_problem
from moe_lora.core.wrong_files import confined
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.engine.client.messages import PauseScope

from .aliases import targets
from .routing_client import FleetClient

if TYPE_CHECKING:
    from .instances import InstanceRegistry, ServedVersion


Find = Callable[[str], Awaitable[str]]
"""A name's folder.  Raises AdapterNotFoundError, AdapterError or OSError."""
MAX_LOADS = 4
"""Most finds and loads at once."""
MARK = "/."
"""Ends a resolved adapter's path, known to all front ends."""
MAX_MISSING = 10_000
"""Most remembered missing names."""


def resolved(instance_registry: InstanceRegistry) -> dict[str, ServedVersion]:
    """Adapters of all resolvers, except pinned and aliased adapters."""
    kept = {name for one in instance_registry.aliases.live.values() for name in targets(one)}
    return {
        name: one
        for name, one in instance_registry.adapters.items()
        if one.path.endswith(MARK) and not one.pinned and name not in kept
    }


class MissingNames:
    """Errors of unloadable names, for `kept_s`; the oldest go first."""

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
    """Finds and loads unknown adapters, a name once at a time."""

    def __init__(
        self, find: Find, load: Callable[[str, str], Awaitable[object]], missing: MissingNames
    ) -> None:
        self._find, self._load = find, load
        self.missing = missing
        self.running: dict[str, asyncio.Task[None]] = {}
        """By name."""
        self._turns = asyncio.Semaphore(MAX_LOADS)

    async def load(self, name: str) -> None:
        """Return once the adapter is served.  Raises the load's error."""
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
            except OSError as error:  # remembered: each try reads a broken disk everywhere
                what = f"adapter {name!r} can't be read ({error.strerror or error}); mend its files"
                self.missing.add(name, AdapterError(what))
                raise AdapterError(what) from error

    async def _folder(self, name: str) -> str:
        """Logs a failed search's cause, for administrators alone."""
        try:
            return await self._find(name)
        except AdapterError as error:
            logger.warning("adapter %s is not found: %s", name, error)
            raise AdapterNotFoundError(f"no adapter {name!r} is found") from error


def finder(cluster: ClusterConfig, call: Callable[..., Awaitable[Any]]) -> Find:
    """Raises ConfigError for an absent folder."""

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


_HUB_PART = re.compile(r"[\w-][\w.-]*", re.ASCII)


def find_folder(name: str, folder: str, root: str | None) -> str:
    """The folder `folder`/`name`, below root.  Raises AdapterNotFoundError."""
    path = os.path.join(folder, name)
    if is_below(name) and confined(path, root) and os.path.isfile(os.path.join(path, CONFIG_FILE)):
        return path
    raise _missing(name)


def find_on_hub(name: str, organisation: str, config: SourcesConfig) -> str:
    """The fetched adapter `organisation`/`name`.  Raises as `AdapterSources.local`, AdapterNotFoundError."""
    if not _HUB_PART.fullmatch(name):
        raise _missing(name)
    return AdapterSources(config).local(f"hf://{organisation}/{name}")


def is_below(name: str) -> bool:
    """True for a path without empty or hidden parts."""
    return name_problem(name) is None and all(part and part[0] != "." for part in name.split("/"))


def _missing(name: str) -> AdapterNotFoundError:
    return AdapterNotFoundError(f"no adapter {name[:100]!r} is found")


logger = logging.getLogger(__name__)
_TRIES = 3
"""Another front end may unload an adapter before its request."""
ROOM_S = 30.0
"""Wait of a load for adapters without requests."""
_LOOK_S, _LONGEST_LOOK_S = 0.1, 2.0


class ResolvingClient(FleetClient):
    """A `FleetClient` that loads unknown adapters; call `attach` first."""

    def attach(self, resolver: Resolver, most: int) -> None:
        """most: see `SourcesConfig.max_resolved`."""
        self._resolver, self._most = resolver, most
        self._unloading: asyncio.Task[None] | None = None
        self._loads: dict[str, tuple[GenerateRequest, asyncio.Task[None]]] = {}
        """Waiting requests, by id."""
        self._instance_registry.on_abort = self._abort_loads
        self._used: Counter[str | None] = Counter()
        """Requests by adapter, even before the load."""

    async def is_served(self, name: str) -> bool:
        """Loads an unknown adapter.  Raises the load's error, except AdapterNotFoundError."""
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
        """True once the adapter is served; False after an abort.  Raises as `_load`.

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
        """Unload the longest idle adapters, to four fifths."""
        try:
            infos = await self.list_adapters()
            found = resolved(self._instance_registry)
            idle = [
                one
                for one in infos
                if one.name in found and not (self._is_used(one.name) or one.num_running + one.num_waiting)
            ]
            # A never used adapter may have a request under way.
            idle.sort(key=lambda one: (one.idle_s is None, -(one.idle_s or 0.0)))
            for one in idle[: max(0, len(found) - self._most * 4 // 5)]:
                if not self._is_used(one.name):
                    with suppress(AdapterError, AdapterNotFoundError):  # changed meanwhile
                        await self.call("unload_adapter", one.name, found[one.name])
        except MoeLoraError as error:
            logger.warning("idle adapters stay: %s", error)
        finally:
            self._unloading = None

    def _is_used(self, name: str) -> bool:
        """True for this front end's requests and loads."""
        return name in self._used or name in self._resolver.running


def attach_resolver(fleet: FleetClient, cluster: ClusterConfig, call: Callable[..., Awaitable[Any]]) -> None:
    """Have the fleet's client find adapters by `sources.resolver`.  Raises ConfigError."""
    assert isinstance(fleet, ResolvingClient)
    config = cast(SourcesConfig, cluster.sources)
    find = finder(cluster, call)

    def load(name: str, folder: str) -> Awaitable[object]:
        return call("load_adapter", name, folder + MARK, most=config.max_resolved)

    fleet.attach(Resolver(find, load, MissingNames(config.missing_s)), config.max_resolved)
