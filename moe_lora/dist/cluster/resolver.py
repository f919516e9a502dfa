# SPDX-License-Identifier: Apache-2.0
"""Finds and loads unknown adapters: a name once at a time, with a memory of errors."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    ConfigError,
    MoeLoraError,
)
from moe_lora.dist.net.thread import in_daemon_thread

from .aliases import targets

if TYPE_CHECKING:
    from .instances import InstanceRegistry, ServedVersion

logger = logging.getLogger(__name__)
Find = Callable[[str], Awaitable[str]]
"""A name's folder.  Raises AdapterNotFoundError, AdapterError or OSError; other errors may pass."""
MAX_LOADS = 4
"""Names that a front end finds and loads at once."""
MARK = "/."
"""Ends the path of an adapter that a resolver loaded: all front ends know paths, also after a restart."""
MAX_MISSING = 10_000
"""Missing names that a front end remembers."""


def resolved(instance_registry: InstanceRegistry) -> dict[str, ServedVersion]:
    """Adapters that the resolvers of all front ends loaded, except pinned and aliased adapters."""
    kept = {name for one in instance_registry.aliases.live.values() for name in targets(one)}
    return {
        name: one
        for name, one in instance_registry.adapters.items()
        if one.path.endswith(MARK) and not one.pinned and name not in kept
    }


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


def finder(cluster: ClusterConfig, call: Callable[..., Awaitable[Any]]) -> Find:
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
