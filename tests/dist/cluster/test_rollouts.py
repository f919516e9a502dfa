# SPDX-License-Identifier: Apache-2.0
"""Pins and loads of rollouts are undone once, by the last alias of an adapter."""

import asyncio
from types import SimpleNamespace

import pytest

from moe_lora.adapters.registry.registry import Registry
from moe_lora.core.errors import AdapterError, AdapterNotFoundError, CapacityError, RegistryError
from moe_lora.dist.cluster.aliases import learn
from moe_lora.dist.cluster.controller.saved_aliases import SavedAliases, save
from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
from moe_lora.dist.cluster.instances import ServedVersion
from moe_lora.dist.cluster.rollouts import Rollouts
from moe_lora.engine.client.messages import Alias, AliasChange, KnownAliases

BASE = "0" * 64


class Fleet:
    """Calls of adapters without instances: pins change the registry, as they do on a fleet."""

    def __init__(self, *names: str) -> None:
        adapters = {name: ServedVersion(f"/{name}", 1) for name in names}
        self.instance_registry = SimpleNamespace(
            adapters=adapters, aliases={}, live=[], dialled_in=self.wait, having=lambda name: [self]
        )
        self.client = SimpleNamespace(list_adapters=self.list_adapters)
        self.refused = self.lost = ""

    async def wait(self, condition: object) -> None:
        await asyncio.sleep(0)

    async def list_adapters(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=self.refused, num_pages=1)]

    async def call(self, verb: str, name: str, pinned: bool) -> None:
        assert verb == "pin_adapter"
        await asyncio.sleep(0)
        if pinned and name == self.refused:
            raise CapacityError("no room")
        adapters = self.instance_registry.adapters
        adapters[name] = ServedVersion(f"/{name}", 1, pinned)
        adapters.pop(self.lost, None)

    async def remember(self, verb: str, aliases: object) -> None:
        assert verb == "remember_aliases"
        self.remembered = aliases

    @property
    def pinned(self) -> set[str]:
        return {name for name, one in self.instance_registry.adapters.items() if one.pinned}


async def change(rollouts: Rollouts, name: str, step: str, to: str = "", share: float | None = None) -> None:
    await rollouts.change(name, AliasChange(step, to, share))
    for _ in range(5):  # what it frees
        await asyncio.sleep(0)


def test_adapter_of_two_aliases_is_unpinned_by_the_last():
    async def run() -> None:
        fleet = Fleet("a", "b", "c")
        rollouts = Rollouts(fleet, None)
        await change(rollouts, "first", "rollout", "a")
        await change(rollouts, "second", "rollout", "a")
        await change(rollouts, "first", "remove")
        assert fleet.pinned == {"a"}
        await change(rollouts, "second", "remove")
        assert fleet.pinned == set()

    asyncio.run(run())


def test_adapter_that_is_unloaded_during_a_step_gets_no_alias():
    async def run() -> None:
        fleet = Fleet("a", "b")
        rollouts = Rollouts(fleet, None)
        await change(rollouts, "support", "rollout", "a")
        fleet.lost = "b"
        with pytest.raises(AdapterNotFoundError, match="'b' was unloaded meanwhile"):
            await change(rollouts, "support", "rollout", "b", 0.5)
        assert fleet.instance_registry.aliases["support"].second == ""

    asyncio.run(run())


class Versions:
    """A registry with version 1 of each name.  saved: the aliases of the next start."""

    base_hash = BASE

    def __init__(self, fails: bool = False) -> None:
        self.saved: dict[str, Alias] = {}
        self.registry = SimpleNamespace(get=self.get)
        self._fails = fails

    def get(self, name: str, version: int) -> SimpleNamespace:
        return SimpleNamespace(path=f"/store/{name}-{version}")

    def save_alias(self, name: str, alias: Alias, paths: object) -> bool:
        if self._fails:
            raise RegistryError("the disk is full")
        self.saved[name] = alias
        return True


def test_files_under_the_name_of_a_version_are_not_that_version():
    async def run() -> None:
        fleet, adapters = Fleet("support@v1"), "/support@v1"
        rollouts = Rollouts(fleet, Versions())
        with pytest.raises(AdapterError, match=f"has files of {adapters}, not of the registry's version 1"):
            await change(rollouts, "support", "rollout", "v1")
        fleet.instance_registry.adapters["support@v1"] = ServedVersion("/store/support-1", 1)
        await change(rollouts, "support", "rollout", "v1")
        assert fleet.instance_registry.aliases["support"].current == "support@v1"

    asyncio.run(run())


def test_each_step_is_saved_and_a_step_that_is_not_says_that_it_is_done():
    async def run() -> None:
        fleet, versions = Fleet("a", "b"), Versions()
        await change(Rollouts(fleet, versions), "support", "rollout", "a")
        await change(Rollouts(fleet, versions), "support", "rollout", "b", 0.5)
        assert versions.saved["support"] == fleet.instance_registry.aliases["support"]
        with pytest.raises(RegistryError, match="is changed, but a later start"):
            await change(Rollouts(fleet, Versions(fails=True)), "support", "rollback")
        assert fleet.instance_registry.aliases["support"].stage == "rolled_back"

    asyncio.run(run())


@pytest.mark.parametrize("refused", ["", "b"])
def test_adapters_of_saved_aliases_are_pinned_if_there_is_room(refused, caplog):
    async def run() -> None:
        fleet = Fleet("a", "b", "c")
        fleet.refused = refused
        registry = fleet.instance_registry
        registry.live, registry.aliases = [], KnownAliases()
        registry.aliases |= {"first": Alias("a", "b", 0.5, "rollout"), "gone": Alias("d")}
        pinning = asyncio.create_task(Rollouts(fleet, Versions()).pin_all())
        await asyncio.sleep(0)
        registry.live = [SimpleNamespace(client=SimpleNamespace(call=fleet.remember))]
        await pinning
        assert fleet.pinned == {"a", "b"} - {refused}
        assert set(registry.aliases["first"].pinned) == fleet.pinned
        assert fleet.remembered == registry.aliases

    asyncio.run(run())
    assert ("is not pinned" in caplog.text) is bool(refused)


def test_a_controller_that_starts_beside_an_instance_undoes_the_pins_of_its_alias(tmp_path):
    async def run() -> None:
        fleet = Fleet("a", "b")
        await change(Rollouts(fleet, None), "support", "rollout", "a")
        await change(Rollouts(fleet, None), "support", "rollout", "b", 0.5)
        registry, living = fleet.instance_registry, fleet.instance_registry.aliases["support"]
        assert fleet.pinned == {"a", "b"}
        with Registry(tmp_path, create=True) as kept:
            save(ServedRegistry(kept, BASE), "support", living, {})
            saved = SavedAliases({"a": "/a", "b": "/b"}, (), lambda name, version: "")
            saved.load(kept.aliases(BASE))
        registry.aliases = KnownAliases()
        registry.aliases |= saved.aliases
        learn(registry.aliases, {"support": living})
        registry.live = [SimpleNamespace(client=SimpleNamespace(call=fleet.remember))]
        rollouts = Rollouts(fleet, Versions())
        await rollouts.pin_all()
        await change(rollouts, "support", "remove")
        assert fleet.pinned == set()

    asyncio.run(run())


def test_failed_step_leaves_no_pin():
    async def run() -> None:
        fleet = Fleet("support", "b")
        fleet.refused = "b"
        rollouts = Rollouts(fleet, None)
        with pytest.raises(CapacityError):
            await change(rollouts, "support", "rollout", "b", 0.5)
        for _ in range(5):
            await asyncio.sleep(0)
        assert fleet.pinned == set()
        assert fleet.instance_registry.aliases == {}

    asyncio.run(run())
