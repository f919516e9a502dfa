# SPDX-License-Identifier: Apache-2.0
"""Rollouts: an alias moves from one adapter to another, by shares of the requests."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from moe_lora.core.errors import (
    AdapterNotFoundError,
    CapacityError,
    ConfigError,
    EngineDeadError,
    MoeLoraError,
)
from moe_lora.core.request import version_name
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.engine.client.messages import Alias, AliasChange

from .aliases import MAX_ALIASES, STEPS, check_exists, learn, of_adapter, rolled_out, targets

if TYPE_CHECKING:
    from .adapter_calls import FleetAdapters
    from .controller.served_registry import ServedRegistry

logger = logging.getLogger(__name__)
_VERSION = re.compile(r"v([1-9]\d{0,8})")


class Rollouts:
    """Executes steps of aliases, in sequence.  versions: the registry of adapters, if any.

    Pins keep both adapters of an alias loaded.  Instances and front ends remember the aliases for a later
    controller.
    """

    def __init__(self, adapters: FleetAdapters, versions: ServedRegistry | None) -> None:
        self._adapters, self._versions = adapters, versions
        self._registry = adapters.instance_registry
        self._lock = asyncio.Lock()
        self._releasing: dict[str, asyncio.Task[None]] = {}
        """By adapter."""

    async def change(self, name: str, change: AliasChange) -> Alias:
        """The alias after the step.

        Raises AdapterNotFoundError for an unknown alias or adapter, ConfigError for a step out of order, and
        the errors of a load and of a pin.
        """
        registry = self._registry
        async with self._lock:
            await registry.dialled_in(lambda: registry.live)
            before = registry.aliases.get(name, Alias())
            if change.step == "rollout":
                after = await self._rolled_out(name, before, change)
            else:
                check_exists(name, before)
                after = STEPS[change.step](name, before)
            if after is not before:
                number = 1 + max((one.number for one in registry.aliases.values()), default=0)
                loaded, pinned = (
                    [one for one in names if one in targets(after)] for names in (after.loaded, after.pinned)
                )
                after = replace(after, loaded=tuple(loaded), pinned=tuple(pinned), number=number)
                learn(registry.aliases, {name: after})
                await self._send()
                self._release(before, after)
            return after

    async def _rolled_out(self, name: str, before: Alias, change: AliasChange) -> Alias:
        registry = self._registry
        if not before.current and sum(bool(one.current) for one in registry.aliases.values()) >= MAX_ALIASES:
            raise ConfigError(f"there are {MAX_ALIASES} aliases, the most; remove an alias first")
        target, version = self._target(name, change.to)
        if (task := self._releasing.get(target)) is not None:
            await asyncio.wait([task])
            target, version = self._target(name, change.to)
        after = rolled_out(name, before, target, change.share, registry.adapters)
        loaded, pinned = before.loaded, before.pinned
        try:
            if version is not None:
                versions = self._versions
                assert versions is not None
                found = await in_daemon_thread(versions.registry.resolve, name, versions.base_hash, version)
                await self._adapters.call("load_adapter", target, found.path)
                loaded = (*loaded, target)
            for one in targets(after):
                if not registry.adapters[one].pinned and await self._pin(one):
                    pinned = (*pinned, one)
        except BaseException:
            self._release(replace(after, loaded=loaded, pinned=pinned), before)
            raise
        return replace(after, loaded=loaded, pinned=pinned)

    async def _pin(self, adapter: str) -> bool:
        """False for an adapter of a LoRA Server, which decides by itself.  Raises CapacityError."""
        try:
            await self._adapters.call("pin_adapter", adapter, True)
        except CapacityError:
            infos = await self._registry.having(adapter)[0].client.list_adapters()
            if any(info.num_pages for info in infos if info.name == adapter):
                raise
            return False
        return True

    def _target(self, name: str, to: str) -> tuple[str, int | None]:
        """The adapter's name, and the registry's version to load first, if any."""
        served = self._registry.adapters
        if to in served:
            return to, None
        version = _VERSION.fullmatch(to)
        if version is None:
            raise AdapterNotFoundError(
                f"adapter {to!r} is not loaded; load it first, or name a version of the registry, as v8"
            )
        if self._versions is None:
            raise ConfigError(f"{to!r} is no loaded adapter, and without --registry there are no versions")
        target = version_name(name, int(version[1]))
        return target, None if target in served else int(version[1])

    async def _send(self) -> None:
        """Have the live instances remember the aliases; absent instances learn at their return."""
        for instance in self._registry.live:
            with suppress(EngineDeadError):
                await instance.client.call("remember_aliases", self._registry.aliases)

    def _release(self, before: Alias, after: Alias) -> None:
        """Undo pins and loads of rollouts, of adapters that left the alias."""
        for adapter in set(targets(before)) - set(targets(after)):
            if not any(of_adapter(self._registry.aliases, adapter)):
                task = self._releasing[adapter] = asyncio.create_task(self._free(adapter, before))
                task.add_done_callback(partial(self._forget, adapter))

    def _forget(self, adapter: str, task: asyncio.Task[None]) -> None:
        if self._releasing.get(adapter) is task:
            del self._releasing[adapter]

    async def _free(self, adapter: str, before: Alias) -> None:
        """Running requests end first."""
        try:
            if adapter in before.pinned:
                await self._adapters.call("pin_adapter", adapter, False)
            if adapter in before.loaded:
                await self._adapters.call("unload_adapter", adapter)
        except MoeLoraError as error:
            logger.warning("adapter %s stays loaded or pinned after its rollout: %s", adapter, error)
