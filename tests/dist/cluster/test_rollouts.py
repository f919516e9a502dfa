# SPDX-License-Identifier: Apache-2.0
"""Pins and loads of rollouts are undone once, by the last alias of an adapter."""

import asyncio
from types import SimpleNamespace

import pytest

from moe_lora.core.errors import AdapterNotFoundError, CapacityError
from moe_lora.dist.cluster.instances import ServedVersion
from moe_lora.dist.cluster.rollouts import Rollouts
from moe_lora.engine.client.messages import AliasChange


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
