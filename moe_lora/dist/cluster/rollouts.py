# SPDX-License-Identifier: Apache-2.0
"""Rollouts: an alias moves between adapters, by shares of the requests."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lora.core.errors import (
    AdapterError,
    AdapterNotFoundError,
    CapacityError,
    ConfigError,
    EngineDeadError,
    MoeLoraError,
    RegistryError,
)
from moe_lora.core.request import version_name
from moe_lora.dist.net.thread import in_daemon_thread
from moe_lora.engine.client.messages import Alias, AliasChange

from .aliases import MAX_ALIASES, STEPS, check_exists, learn, of_adapter, rolled_out, targets

if TYPE_CHECKING:
    from .adapter_calls import FleetAdapters
    from .controller.served_registry import ServedRegistry

logger = logging.getLogger(__name__)
VERSION = re.compile(r"v([1-9]\d{0,8})")
"""A registry's version in a rollout's `to`."""
_LOOK_S = 0.2


class Rollouts:
    """Executes steps of aliases, in sequence."""

    def __init__(self, adapters: FleetAdapters, versions: ServedRegistry | None) -> None:
        self._adapters, self._versions = adapters, versions
        self._registry = adapters.instance_registry
        self._lock = asyncio.Lock()
        self._releasing: dict[str, asyncio.Task[None]] = {}
        """By adapter."""

    async def change(self, name: str, change: AliasChange) -> tuple[Alias, bool]:
        """The alias after the step; True if a later start has it.

        Raises AdapterNotFoundError for an unknown alias or adapter, ConfigError for a step out of order, and
        errors of loads and pins.
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
                self._record(name, after)
                left = set(targets(before)) - set(targets(after))
                freed = [adapter for adapter in left if not self._hand_over(adapter, before)]
                await self._send()
                for adapter in freed:
                    self._release(adapter, adapter in before.loaded, adapter in before.pinned)
            return registry.aliases[name], await self._save(name)

    async def _save(self, name: str) -> bool:
        """Raises RegistryError: the step is done, but lost for the next start."""
        if self._versions is None:
            return False
        paths = {adapter: served.path for adapter, served in self._registry.adapters.items()}
        try:
            return await in_daemon_thread(
                self._versions.save_alias, name, self._registry.aliases[name], paths
            )
        except RegistryError as error:
            what = f"{name!r} is changed, but a later start of the server does not know of this step"
            raise RegistryError(f"{what}: {error}") from error

    async def pin_all(self) -> None:
        """Pin an earlier server's aliased adapters, if there is room."""
        registry = self._registry
        while not registry.live:
            await asyncio.sleep(_LOOK_S)
        async with self._lock:
            for name, alias in registry.aliases.live.items():
                pinned = [one for one in targets(alias) if await self._pin_saved(one)]
                if pinned:
                    self._record(name, replace(alias, pinned=(*alias.pinned, *pinned)))
            await self._send()

    async def _pin_saved(self, adapter: str) -> bool:
        served = self._registry.adapters.get(adapter)
        try:
            return served is not None and not served.pinned and await self._pin(adapter)
        except MoeLoraError as error:
            logger.warning("adapter %s of an alias is not pinned: %s", adapter, error)
            return False

    def _record(self, name: str, alias: Alias) -> None:
        """Numbers exceed an earlier controller's: its last steps may be unknown here."""
        aliases = self._registry.aliases
        number = max([int(time.time() * 1000), *(1 + one.number for one in aliases.values())])
        kept = [
            tuple(one for one in names if one in targets(alias)) for names in (alias.loaded, alias.pinned)
        ]
        learn(aliases, {name: replace(alias, loaded=kept[0], pinned=kept[1], number=number)})

    def _hand_over(self, adapter: str, before: Alias) -> bool:
        """Have another alias undo the adapter's pin and load later; False if alone."""
        heir = next(of_adapter(self._registry.aliases, adapter), None)
        if heir is None:
            return False
        alias, one = self._registry.aliases[heir], (adapter,)
        if adapter in before.loaded or adapter in before.pinned:
            loaded = alias.loaded + one * (adapter in before.loaded)
            pinned = alias.pinned + one * (adapter in before.pinned)
            self._record(heir, replace(alias, loaded=loaded, pinned=pinned))
        return True

    async def _rolled_out(self, name: str, before: Alias, change: AliasChange) -> Alias:
        registry = self._registry
        if not before.current and sum(bool(one.current) for one in registry.aliases.values()) >= MAX_ALIASES:
            raise ConfigError(f"there are {MAX_ALIASES} aliases, the most; remove an alias first")
        for one in (self._target(name, change.to)[0], before.current or name):
            if (task := self._releasing.get(one)) is not None:
                await asyncio.wait([task])
        target, version = self._target(name, change.to)
        after = rolled_out(name, before, target, change.share, registry.adapters)
        loaded, pinned = list[str](), list[str]()
        try:
            if version is not None and target in registry.adapters:
                await self._check_version(name, version)
            elif version is not None:
                versions = self._versions
                assert versions is not None
                found = await in_daemon_thread(versions.registry.resolve, name, versions.base_hash, version)
                await self._adapters.call("load_adapter", target, found.path)
                loaded.append(target)
            for one in targets(after):
                self._check_served(one)
                if not registry.adapters[one].pinned and await self._pin(one):
                    pinned.append(one)
            for one in targets(after):
                self._check_served(one)
        except BaseException:
            for one in {*loaded, *pinned}:
                self._release(one, one in loaded, one in pinned)
            raise
        return replace(after, loaded=(*before.loaded, *loaded), pinned=(*before.pinned, *pinned))

    async def _check_version(self, name: str, version: int) -> None:
        """Raises AdapterError for other files under this version's name."""
        assert self._versions is not None
        found = await in_daemon_thread(self._versions.registry.get, name, version)
        served = self._registry.adapters.get(version_name(name, version))
        if served is not None and Path(served.path) != Path(found.path):
            raise AdapterError(
                f"adapter {version_name(name, version)!r} has files of {served.path}, not of the registry's "
                f"version {version} of {name!r}; unload that adapter first"
            )

    def _check_served(self, adapter: str) -> None:
        """Raises AdapterNotFoundError after an unload."""
        if adapter not in self._registry.adapters:
            raise AdapterNotFoundError(f"adapter {adapter!r} was unloaded meanwhile; load it again")

    async def _pin(self, adapter: str) -> bool:
        """False on a LoRA Server, which decides by itself.  Raises CapacityError."""
        try:
            await self._adapters.call("pin_adapter", adapter, True)
        except CapacityError:
            infos = await self._registry.having(adapter)[0].client.list_adapters()
            if any(info.num_pages for info in infos if info.name == adapter):
                raise
            return False
        return True

    def _target(self, name: str, to: str) -> tuple[str, int | None]:
        """The adapter's name, and the registry's version to load, if any."""
        served = self._registry.adapters
        if to in served:
            return to, None
        version = VERSION.fullmatch(to)
        if version is None:
            raise AdapterNotFoundError(
                f"adapter {to!r} is not loaded; load it first, or name a version of the registry, as v8"
            )
        if self._versions is None:
            raise ConfigError(f"{to!r} is no loaded adapter, and without --registry there are no versions")
        target = version_name(name, int(version[1]))
        return target, int(version[1])

    async def _send(self) -> None:
        """Have live instances remember the aliases."""
        for instance in self._registry.live:
            with suppress(EngineDeadError):
                await instance.client.call("remember_aliases", self._registry.aliases)

    def _release(self, adapter: str, loaded: bool, pinned: bool) -> None:
        """Undo a rollout's load and pin; running requests end first."""
        task = self._releasing[adapter] = asyncio.create_task(self._free(adapter, loaded, pinned))
        task.add_done_callback(partial(self._forget, adapter))

    def _forget(self, adapter: str, task: asyncio.Task[None]) -> None:
        if self._releasing.get(adapter) is task:
            del self._releasing[adapter]

    async def _free(self, adapter: str, loaded: bool, pinned: bool) -> None:
        try:
            if pinned:
                await self._adapters.call("pin_adapter", adapter, False)
            if loaded:
                await self._adapters.call("unload_adapter", adapter)
        except MoeLoraError as error:
            logger.warning("adapter %s stays loaded or pinned after its rollout: %s", adapter, error)
