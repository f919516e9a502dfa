# SPDX-License-Identifier: Apache-2.0
"""What an engine that was away is told to load, pin and unload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from moe_lora.core.errors import CapacityError, EngineDeadError
from moe_lora.core.request import AdapterInfo
from moe_lora.dist.cluster.instances import InstanceRegistry, ServedVersion
from moe_lora.dist.cluster.listener import catch_up
from moe_lora.engine.client.client import CallableEngine
from moe_lora.engine.client.messages import PauseOrder, PauseScope
from tests.patience import PATIENCE_S

from .listener_parts import caught_up


class ToldClient(CallableEngine):
    """Notes what it is told.  fails: method -> what it raises."""

    def __init__(self, **fails: Exception) -> None:
        self.loaded: set[str] = set()
        self._fails = fails

    async def call(self, method: str, name: str, *args: Any) -> Any:
        if method in self._fails:
            raise self._fails[method]
        if method == "load_adapter":
            self.loaded.add(name)
            return AdapterInfo(
                name=name, version=1, lora_rank=1, nbytes=1, targets=(), path=args[0], residency="host"
            )
        if method == "unload_adapter":
            self.loaded.remove(name)
        return None


PINNED = {"a": ServedVersion("folder", 1, pinned=True)}


def test_adapter_that_was_loaded_and_could_not_be_pinned_is_unloaded_again():
    client, have, missing = ToldClient(pin_adapter=CapacityError("no room")), {}, set()
    asyncio.run(catch_up(client, PINNED, have, missing))
    assert (client.loaded, missing) == (set(), {"a"})


@pytest.mark.parametrize("before", [{}, {"a": ServedVersion("folder", 0)}])
def test_adapter_that_could_not_be_loaded_is_missing(before):
    client, missing = ToldClient(load_adapter=CapacityError("no room")), set()
    client.loaded = set(before)
    asyncio.run(catch_up(client, PINNED, dict(before), missing))
    assert (client.loaded, missing) == (set(), {"a"})


def test_missing_adapter_that_is_no_longer_served_is_not_unloaded_again():
    client, have, missing = ToldClient(pin_adapter=CapacityError("no room")), {}, set()
    asyncio.run(catch_up(client, PINNED, have, missing))
    asyncio.run(catch_up(client, {}, have, missing))
    assert (have, missing) == ({}, set())


def test_engine_that_ends_meanwhile_is_told_so():
    with pytest.raises(EngineDeadError):
        asyncio.run(catch_up(ToldClient(load_adapter=EngineDeadError("gone")), PINNED, {}, set()))


class PausedClient(CallableEngine):
    """Notes its pauses.  on_pause: called at each start of a pause."""

    def __init__(self, on_pause: Callable[[PausedClient], None]) -> None:
        self.paused: set[str] = set()
        self.calls: list[tuple[str, str, bool]] = []
        self._on_pause = on_pause

    async def settled(self) -> None:
        """All commands are done at once."""

    async def call(self, method: str, *args: Any, **words: Any) -> Any:
        if method == "paused_scopes":
            return [PauseScope(owner) for owner in self.paused]
        if method == "pause_requests":
            self.calls.append((args[0].owner, args[1], words["waits"]))
            self.paused.add(args[0].owner)
            self._on_pause(self)
        if method == "resume_requests":
            self.paused.discard(args[0])
        return []


def joined(on_pause: Callable[[InstanceRegistry, PausedClient], None]) -> set[str]:
    """Pauses of an instance that joined an administrator's and a key's pause."""

    async def join() -> set[str]:
        registry = InstanceRegistry([])
        client: Any = PausedClient(lambda client: on_pause(registry, client))
        instance = registry.enter("one", client)
        for owner in ("", "key a"):
            registry.pauses[owner] = PauseOrder(PauseScope(owner), "abort", time.monotonic() + PATIENCE_S)
        await caught_up(registry)(instance, client, "first")
        assert registry.live == [instance]
        paused: set[str] = client.paused
        return paused

    return asyncio.run(join())


def test_an_instance_is_paused_before_it_joins_routing():
    num_live: list[int] = []
    assert joined(lambda registry, client: num_live.append(len(registry.live))) == {"", "key a"}
    assert num_live[:2] == [0, 0]


@pytest.mark.parametrize("at_live", [False, True])
def test_a_resume_while_an_instance_joins_ends_its_pauses(at_live):
    def resume(registry: InstanceRegistry, client: PausedClient) -> None:
        if at_live and not registry.live:  # a pause that the instance hears of after the join
            late = PauseOrder(PauseScope("key b"), "keep", time.monotonic() + PATIENCE_S)
            registry.pauses["key b"] = late
        if registry.pauses and bool(registry.live) is at_live:
            registry.pauses = {}
            if at_live:  # as a resume's call
                client.paused.clear()

    assert joined(resume) == set()


def test_an_instance_gets_the_mode_of_a_pause_once():
    calls: list[list[tuple[str, str, bool]]] = []
    joined(lambda registry, client: calls.append(client.calls))
    assert calls[-1] == [("", "abort", False), ("key a", "abort", False)]
