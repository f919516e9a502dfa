# SPDX-License-Identifier: Apache-2.0
"""What an engine that was away is told to load, pin and unload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
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


def joined(
    on_pause: Callable[[InstanceRegistry, PausedClient], None],
    paused: Iterable[str] = (),
    silent: bool = False,
) -> set[str]:
    """Pauses of an instance that joined an administrator's and a key's pause.

    paused: owners of its pauses before.  silent: the instance was in routing before.
    """

    async def join() -> set[str]:
        registry = InstanceRegistry([])
        client: Any = PausedClient(lambda client: on_pause(registry, client))
        client.paused |= set(paused)
        instance = registry.enter("one", client)
        instance.silent = silent
        for owner in ("", "key a"):
            end_s = time.monotonic() + PATIENCE_S
            registry.standing_orders().pauses[owner] = PauseOrder(PauseScope(owner), "abort", end_s)
        await caught_up(registry)(instance, client, "first")
        assert registry.live == [instance]
        found: set[str] = client.paused
        return found

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
            registry.standing_orders().pauses["key b"] = late
        if registry.standing_orders().pauses and bool(registry.live) is at_live:
            registry.standing_orders().pauses = {}
            if at_live:  # as a resume's call
                client.paused.clear()

    assert joined(resume) == set()


class SleepyClient(CallableEngine):
    """An engine with parts asleep.  on_call: called before each call."""

    def __init__(self, asleep: Iterable[str], on_call: Callable[[str], object] = lambda method: None) -> None:
        self.asleep = set(asleep)
        self.dropped = False
        self._on_call = on_call

    async def settled(self) -> None:
        """All commands are done at once."""

    async def call(self, method: str, *args: Any, **words: Any) -> Any:
        self._on_call(method)
        if method == "sleep":
            self.asleep |= set(args[0])
            self.dropped |= args[1]
        elif method == "wake_up":
            self.asleep -= set(args[0])
        return sorted(self.asleep) if method == "parts_asleep" else []


PARTS = ("kv_cache", "weights")
Order = tuple[str, tuple[Any, ...]]
TO_SLEEP: Order = ("sleep", (PARTS, True, "abort", 1.0))
TO_WAKE: Order = ("wake_up", (PARTS,))


@pytest.mark.parametrize(
    ("orders", "before", "after"),
    [
        ([TO_SLEEP], (), PARTS),
        ([TO_SLEEP, ("wake_up", (["weights"],))], (), ["kv_cache"]),
        ([TO_SLEEP, ("wake_up", (["weights"],))], PARTS, ["kv_cache"]),
        ([TO_SLEEP, TO_WAKE], PARTS, ()),
        ([], PARTS, PARTS),
    ],
)
def test_an_instance_sleeps_as_the_last_order_says_or_as_the_first_one_does(orders, before, after):
    async def join() -> None:
        registry = InstanceRegistry([])
        for verb, args in orders:
            with registry.standing_orders().recording(verb, args):
                pass
        first, second = SleepyClient(before), SleepyClient(())
        for name, client in (("first", first), ("second", second)):
            found: Any = client
            await caught_up(registry)(registry.enter(name, found), found, "one")
        assert first.asleep == second.asleep == set(after)
        assert second.dropped is (orders == [TO_SLEEP])

    asyncio.run(join())


@pytest.mark.parametrize(("before", "order"), [((), TO_SLEEP), (PARTS, TO_WAKE)])
def test_an_order_while_an_instance_joins_reaches_it(before, order):
    async def join() -> None:
        registry = InstanceRegistry([])

        def on_call(method: str) -> None:
            if method == "list_adapters":
                with registry.standing_orders().recording(*order):
                    pass

        client: Any = SleepyClient(before, on_call)
        await caught_up(registry)(registry.enter("one", client), client, "one")
        assert client.asleep == (set(PARTS) if order is TO_SLEEP else set())

    asyncio.run(join())


@pytest.mark.parametrize(("first", "refused"), [(None, TO_SLEEP), (TO_SLEEP, TO_WAKE)])
def test_a_refused_order_changes_nothing_for_later_instances(first, refused):
    orders = InstanceRegistry([]).standing_orders()
    if first is not None:
        with orders.recording(*first):
            pass
    before = orders.sleep
    with suppress(TimeoutError), orders.recording(*refused):
        assert orders.sleep != before
        raise TimeoutError
    assert orders.sleep == before


def test_an_instance_gets_the_mode_of_a_pause_once():
    calls: list[list[tuple[str, str, bool]]] = []
    joined(lambda registry, client: calls.append(client.calls))
    assert calls[-1] == [("", "abort", False), ("key a", "abort", False)]


@pytest.mark.parametrize("silent", [False, True])
def test_an_instance_that_knows_an_abort_pause_keeps_the_requests_that_the_pause_delays(silent):
    calls: list[list[tuple[str, str, bool]]] = []
    joined(lambda registry, client: calls.append(client.calls), ["key a"], silent)
    assert calls[-1] == [("", "abort", False), ("key a", "keep", False)]
