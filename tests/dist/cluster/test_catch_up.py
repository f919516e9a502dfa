# SPDX-License-Identifier: Apache-2.0
"""What an engine that was away is told to load, pin and unload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest

from moe_lora.core.errors import BusyError, CapacityError, ConfigError, EngineDeadError
from moe_lora.core.request import AdapterInfo
from moe_lora.dist.cluster.instances import InstanceRegistry, ServedVersion
from moe_lora.dist.cluster.listener import catch_up
from moe_lora.engine.client.client import CallableEngine
from moe_lora.engine.client.messages import CurrentPause, PauseOrder, PauseScope, SleepOrder, SleepPart
from tests.patience import PATIENCE_S

from .listener_parts import caught_up


class ToldClient(CallableEngine):
    """Notes what it is told.  fails: method -> what it raises."""

    def __init__(self, **fails: Exception) -> None:
        self.loaded: set[str] = set()
        self._fails = fails

    async def call(self, method: str, name: str, *args: Any, **words: Any) -> Any:
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
        if method == "current_pauses":
            return [CurrentPause(PauseScope(owner), "keep", PATIENCE_S) for owner in self.paused]
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


@pytest.mark.parametrize("resumed", [(), ("a",), (None,)])
def test_a_controller_without_orders_adopts_the_first_instances_pauses(resumed):
    """resumed: owners of resumes here before the instances join; None: of all pauses."""

    async def run() -> list[set[str]]:
        registry = InstanceRegistry([])
        for owner in resumed:
            async with registry.standing_orders().recording("resume_requests", (owner,)):
                pass
        clients = [PausedClient(lambda client: None) for _ in range(3)]
        clients[0].paused, clients[1].paused = {"a", "b"}, {"a", "b"}
        for name, client in zip("xyz", clients, strict=True):
            await join(registry, name, client)
        return [client.paused for client in clients]

    first, *_, last = asyncio.run(run())
    assert first == {"a", "b"}
    assert last == (set() if resumed else {"a", "b"})


class SleepyClient(CallableEngine):
    """An engine that sleeps.  on_call: called before each call."""

    def __init__(
        self, order: SleepOrder | None = None, on_call: Callable[[str], object] = lambda method: None
    ) -> None:
        self.order = order or SleepOrder()
        self._on_call = on_call

    @property
    def asleep(self) -> frozenset[str]:
        return self.order.parts

    async def settled(self) -> None:
        """All commands are done at once."""

    async def call(self, method: str, *args: Any, **words: Any) -> Any:
        self._on_call(method)
        await asyncio.sleep(0)
        if method == "sleep":
            self.order = self.order.start(*args[:3])
        elif method == "wake_up":
            self.order = self.order.stop(*args)
        return [self.order] if method == "sleep_orders" and self.asleep else []


PARTS: tuple[SleepPart, ...] = ("kv_cache", "weights")
ASLEEP = SleepOrder(frozenset(PARTS), True, "keep")
Order = tuple[str, tuple[Any, ...]]
TO_SLEEP: Order = ("sleep", (PARTS, True, "keep", 1.0))
TO_WAKE: Order = ("wake_up", (PARTS,))


async def join(registry: InstanceRegistry, name: str, client: Any) -> None:
    await caught_up(registry)(registry.enter(name, client), client, "one")


@pytest.mark.parametrize(
    ("orders", "before", "after"),
    [
        ([TO_SLEEP], None, ASLEEP),
        ([TO_SLEEP, ("wake_up", (["weights"],))], None, SleepOrder(frozenset(["kv_cache"]), False, "keep")),
        ([TO_SLEEP, ("wake_up", (["weights"],))], ASLEEP, SleepOrder(frozenset(["kv_cache"]), False, "keep")),
        ([TO_SLEEP, TO_WAKE], ASLEEP, SleepOrder(mode="keep")),
        ([], ASLEEP, ASLEEP),
    ],
)
def test_an_instance_sleeps_as_the_last_order_says_or_as_the_first_one_does(orders, before, after):
    """Also by the mode, and with the weights given back."""

    async def run() -> None:
        registry = InstanceRegistry([])
        for order in orders:
            async with registry.standing_orders().recording(*order):
                pass
        first, second = SleepyClient(before), SleepyClient()
        await join(registry, "first", first)
        await join(registry, "second", second)
        assert first.order == after
        assert second.order == (after if after.parts else SleepOrder())

    asyncio.run(run())


@pytest.mark.parametrize(("before", "order"), [(None, TO_SLEEP), (ASLEEP, TO_WAKE)])
def test_an_order_while_an_instance_joins_reaches_it(before, order):
    async def run() -> None:
        registry = InstanceRegistry([])
        others: list[asyncio.Task[None]] = []

        async def change() -> None:
            async with registry.standing_orders().recording(*order):
                pass

        def on_call(method: str) -> None:
            if method == "list_adapters":
                others.append(asyncio.ensure_future(change()))

        client = SleepyClient(before, on_call)
        await join(registry, "one", client)
        await asyncio.gather(*others)
        assert client.asleep == (set(PARTS) if order is TO_SLEEP else set())

    asyncio.run(run())


def test_a_refused_sleep_wakes_instances_up_that_sleep_already_or_that_join_meanwhile():
    async def run() -> None:
        registry, clients = InstanceRegistry([]), [SleepyClient(), SleepyClient()]
        await join(registry, "first", clients[0])
        with suppress(TimeoutError):
            async with registry.standing_orders().recording(*TO_SLEEP):
                await clients[0].call(*TO_SLEEP[:1], *TO_SLEEP[1])
                await join(registry, "second", clients[1])
                assert [one.asleep for one in clients] == [set(PARTS)] * 2
                raise TimeoutError
        assert [one.asleep for one in clients] == [set()] * 2
        late = SleepyClient()
        await join(registry, "late", late)
        assert not late.asleep

    asyncio.run(run())


def test_a_refused_sleep_leaves_the_part_of_an_earlier_sleep_asleep():
    async def run() -> None:
        registry, client = InstanceRegistry([]), SleepyClient()
        async with registry.standing_orders().recording("sleep", (["kv_cache"], False, "abort", 1.0)):
            pass
        await join(registry, "one", client)
        with suppress(TimeoutError):
            async with registry.standing_orders().recording(*TO_SLEEP):
                await client.call(*TO_SLEEP[:1], *TO_SLEEP[1])
                raise TimeoutError
        assert client.asleep == {"kv_cache"}

    asyncio.run(run())


def test_an_instance_that_is_awake_after_a_refused_wake_up_stays_awake(caplog):
    """The other instance, without its checkpoint, takes part asleep, with a warning."""

    def refuse(method: str) -> None:
        if method == "wake_up":
            raise ConfigError("the checkpoint is gone")

    async def run() -> None:
        registry = InstanceRegistry([])
        async with registry.standing_orders().recording(*TO_SLEEP):
            pass
        with suppress(ConfigError):
            async with registry.standing_orders().recording(*TO_WAKE):
                raise ConfigError("the checkpoint is gone")
        awake, asleep = SleepyClient(), SleepyClient(ASLEEP, refuse)
        await join(registry, "awake", awake)
        await join(registry, "asleep", asleep)
        assert (awake.asleep, asleep.asleep) == (set(), set(PARTS))
        assert len(registry.live) == 2

    asyncio.run(run())
    assert "the checkpoint is gone" in caplog.text


def test_a_wake_up_beside_a_sleep_changes_no_order():
    async def run() -> None:
        orders = InstanceRegistry([]).standing_orders()
        async with orders.recording(*TO_SLEEP):
            with pytest.raises(BusyError, match="falls asleep"):
                async with orders.recording(*TO_WAKE):
                    pass
        assert orders.sleep == ASLEEP

    asyncio.run(run())


def test_an_instance_gets_the_mode_of_a_pause_once():
    calls: list[list[tuple[str, str, bool]]] = []
    joined(lambda registry, client: calls.append(client.calls))
    assert calls[-1] == [("", "abort", False), ("key a", "abort", False)]


@pytest.mark.parametrize("silent", [False, True])
def test_an_instance_that_knows_an_abort_pause_keeps_the_requests_that_the_pause_delays(silent):
    calls: list[list[tuple[str, str, bool]]] = []
    joined(lambda registry, client: calls.append(client.calls), ["key a"], silent)
    assert calls[-1] == [("", "abort", False), ("key a", "keep", False)]
