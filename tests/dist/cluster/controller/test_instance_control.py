# SPDX-License-Identifier: Apache-2.0
"""Instances drained and started again, over scripted engines that dial in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from anyio import move_on_after

from moe_lora.core.errors import AdapterError, ConfigError, EngineDeadError, EngineSilentError
from moe_lora.core.request import EngineStats
from moe_lora.dist.cluster import instances as cluster_instances
from moe_lora.dist.cluster.controller import instance_control
from moe_lora.dist.cluster.controller.instance_control import InstanceControl
from moe_lora.dist.cluster.listener import DialledClient
from tests.dist.cluster.listener_parts import FrontEnd, Instance, until
from tests.patience import PATIENCE_S


@pytest.fixture
def made() -> Iterator[list]:
    things: list = []
    yield things
    for thing in reversed(things):
        thing.stop() if isinstance(thing, Instance) else thing.close()


@pytest.fixture
def front_end(made, monkeypatch) -> FrontEnd:
    """Two instances behind it, numbered 0 and 1, each of which has answered."""
    monkeypatch.setattr(cluster_instances, "DIAL_IN_S", 0.3)
    made.append(front_end := FrontEnd())
    made.extend(Instance(name, front_end.socket, number=number) for number, name in enumerate(("one", "two")))
    until(lambda: front_end.names() == ["one", "two"])
    assert {front_end.ask(f"first {n}") for n in range(2)} == {(0,), (1,)}
    return front_end


@pytest.fixture
def control(front_end, monkeypatch) -> InstanceControl:
    monkeypatch.setattr(instance_control, "SETTLE_S", 0.05)
    monkeypatch.setattr(instance_control, "WARM_S", PATIENCE_S)
    return InstanceControl(front_end.instance_registry, drain_s=20.0)


def called(front_end: FrontEnd, function, *args) -> None:
    async def call() -> None:
        function(*args)

    front_end.run(call())


def answers(front_end: FrontEnd, name: str) -> set[tuple[int, ...]]:
    return {front_end.ask(f"{name} {number}") for number in range(4)}


def test_a_drained_instance_gets_no_requests_but_all_adapters(front_end, control, made):
    front_end.run(control.drain_instance("one"))
    assert answers(front_end, "drained") == {(1,)}
    assert front_end.names() == ["one", "two"]
    front_end.run(front_end.fleet.call("load_adapter", "later", "places/later", replace=True))
    assert "later" in made[1].loop.adapters
    front_end.run(control.undrain_instance("one"))
    assert answers(front_end, "back") == {(0,), (1,)}


@pytest.mark.parametrize("verb", ["drain", "restart", "remove"])
def test_others_load_the_adapters_that_a_leaving_instance_uses_before_they_get_its_requests(
    front_end, control, made, verb
):
    first, second = made[1:]
    loads = []

    def preload(names):
        loads.append((names, front_end.instance_registry.drained))
        raise AdapterError("no host memory")  # the drain goes on

    first.loop.used_adapters, second.loop.preload_adapters = lambda: {"a": 2, "b": 1}, preload

    async def end() -> None:
        first.dial.stop()

    if verb == "drain":
        front_end.run(control.drain_instance("one"))
    elif verb == "remove":
        front_end.run(control.check_leaving(["one"]))
        front_end.run(control.remove(["one"], end))
    else:
        restarting, errors = restart_aside(front_end, control)
        until(lambda: first.dial.restarts)
        made.append(Instance("one", front_end.socket, number=7))
        restarting.join(PATIENCE_S)
        assert errors == []
    assert loads == [(["a", "b"], frozenset())]


@pytest.fixture
def five(front_end, made, monkeypatch) -> list[Instance]:
    """Four alike, and one for prompts; one uses adapters, and three has one of these."""
    monkeypatch.setattr(instance_control, "WARM_S", PATIENCE_S)
    made.extend(Instance(name, front_end.socket, number=5) for name in ("three", "four", "prompts"))
    until(lambda: len(front_end.names()) == 5)
    made[1].loop.used_adapters = lambda: {"there": 4, "waits": 3, "b": 2, "a": 1}
    made[3].loop.ready_adapters = lambda names: ["there"] if names == [*made[1].loop.used_adapters()] else []
    return made[1:]


def preloads(instances: list[Instance]) -> list[list]:
    return [[args for verb, *args in one.loop.calls if verb == "preload_adapters"] for one in instances]


def test_each_adapter_loads_at_one_instance_of_the_role_unless_one_has_it_and_routers_hear_where(
    front_end, five
):
    registry = front_end.instance_registry
    control = InstanceControl(registry, 20.0, ["prompts"], by_adapter=True)
    front_end.run(control.drain_instance("one"))
    calls = preloads(five[1:])
    loads = [names for [[names]] in calls[:-1]]
    assert calls[-1] == []
    assert len(loads) == 3
    assert sorted(name for names in loads for name in names) == ["a", "b", "waits"]
    noted = {one.name: set(one.load.recent) for one in registry.instances}
    told = {name: set(names) for name, [[names]] in zip(("two", "three", "four"), calls[:3], strict=True)}
    assert noted == {"one": set(), "prompts": set(), **told, "three": {*told["three"], "there"}}


def test_a_router_that_does_not_read_adapters_finds_them_at_all_others_of_the_role(front_end, five):
    control = InstanceControl(front_end.instance_registry, 20.0, ["prompts"])
    front_end.run(control.drain_instance("one"))
    everything = [[["there", "waits", "b", "a"]]]
    assert preloads(five) == [[], everything, everything, everything, []]
    assert not any(one.load.recent for one in front_end.instance_registry.instances)


def test_adapters_of_instances_that_leave_together_load_by_the_sum_of_their_requests(front_end, five):
    five[0].loop.used_adapters = lambda: {"a": 4, "b": 3}
    five[1].loop.used_adapters = lambda: {"c": 5, "b": 3}
    control = InstanceControl(front_end.instance_registry, 20.0, ["prompts"])
    front_end.run(control.check_leaving(["one", "two"]))
    assert preloads(five)[2:4] == [[[["b", "c", "a"]]]] * 2


def test_an_older_version_of_a_missing_adapter_is_no_place_for_its_requests(front_end, five):
    registry = front_end.instance_registry
    [lacks] = (one for one in registry.instances if one.name == "three")
    lacks.missing.add("there")
    five[3].loop.ready_adapters = lambda names: ["a", "waits"]
    front_end.run(InstanceControl(registry, 20.0, ["prompts"], by_adapter=True).drain_instance("one"))
    loaded = [name for calls in preloads(five) for [names] in calls for name in names]
    assert sorted(loaded) == ["b", "there"]
    assert "there" not in lacks.load.recent
    [has_two] = (one.load.recent for one in registry.instances if one.name == "four")
    assert [name for name in has_two if name in ("a", "waits")] == ["a", "waits"], "the most used is latest"


def num_lists(instances: list[Instance]) -> int:
    return [verb for one in instances for verb, *_ in one.loop.calls].count("list_adapters")


@pytest.fixture
def limits_s(monkeypatch) -> list[float]:
    """Limits of answers before a drain, by call; in fact 0.2 s after the first call."""
    found: list[float] = []

    def record(limit_s):
        found.append(limit_s)
        return move_on_after(PATIENCE_S if len(found) == 1 else 0.2)

    monkeypatch.setattr(instance_control, "move_on_after", record)
    return found


@pytest.mark.parametrize("by_adapter", [False, True])
def test_a_busy_instance_keeps_no_other_from_loading(front_end, five, limits_s, by_adapter):
    five[2].loop.unanswered = {"list_adapters", "ready_adapters", "preload_adapters"}
    control, num_before = (
        InstanceControl(front_end.instance_registry, 20.0, by_adapter=by_adapter),
        num_lists(five),
    )
    front_end.run(control.drain_instance("one"))
    used = {"there", "waits", "b", "a"}
    until(lambda: {name for calls in preloads(five[1:]) for [names] in calls for name in names} == used)
    assert num_lists(five) == num_before, "answers don't grow with the adapters"


def test_a_drain_goes_on_without_an_answer_of_the_leaving_instance(front_end, five, monkeypatch, caplog):
    monkeypatch.setattr(instance_control, "WARM_S", 0.2)
    five[0].loop.unanswered = {"used_adapters"}
    front_end.run(InstanceControl(front_end.instance_registry, 20.0).drain_instance("one"))
    assert front_end.instance_registry.drained == {"one"}
    assert "one doesn't name its adapters" in caplog.text


@pytest.mark.parametrize("by_adapter", [False, True])
def test_all_answers_before_a_drain_share_one_limit(front_end, five, limits_s, by_adapter):
    five[1].loop.unanswered = {"ready_adapters", "preload_adapters"}
    control = InstanceControl(front_end.instance_registry, 20.0, by_adapter=by_adapter)
    front_end.run(control.drain_instance("one"))
    used_s, next_s, last_s = limits_s[0], limits_s[1], limits_s[-1]
    assert used_s <= PATIENCE_S / 3
    assert next_s < (PATIENCE_S / 2 if by_adapter else PATIENCE_S)
    assert last_s < PATIENCE_S


@pytest.mark.parametrize("other", ["drain", "restart"])
def test_of_two_instances_that_leave_at_once_one_stays(front_end, control, other):
    async def both() -> list:
        ends = control.drain_instance("two") if other == "drain" else control.restart_instance("two", 0.3)
        return await asyncio.gather(control.drain_instance("one"), ends, return_exceptions=True)

    problems = front_end.run(both())
    assert [type(one) for one in problems].count(ConfigError) == 1
    assert len(front_end.instance_registry.drained) == (other == "drain" or problems[0] is None)


def test_an_instance_is_not_drained_if_it_is_undrained_or_the_others_are_lost_while_they_load(
    front_end, control, made
):
    control = InstanceControl(front_end.instance_registry, drain_s=20.0, by_adapter=True)
    first, second = made[1:]
    first.loop.used_adapters = lambda: {"a": 1}
    may_load = threading.Event()
    second.loop.preload_adapters = lambda names: int(may_load.wait(PATIENCE_S))

    async def drain(num_loads: int, meanwhile) -> None:
        draining = asyncio.create_task(control.drain_instance("one"))
        while second.loop.calls.count(("preload_adapters", ["a"])) < num_loads:
            await asyncio.sleep(0.005)
        await meanwhile()
        await draining

    async def lose() -> None:
        [other] = (one for one in front_end.instance_registry.instances if one.name == "two")
        front_end.instance_registry.lose(other, other.client)
        may_load.set()

    async def undrain() -> None:
        await control.undrain_instance("one")
        may_load.set()

    with pytest.raises(ConfigError, match="'one' was undrained before"):
        front_end.run(drain(1, undrain))
    may_load.clear()
    with pytest.raises(ConfigError, match="no other takes requests"):
        front_end.run(drain(2, lose))
    assert not front_end.instance_registry.drained
    assert not front_end.instance_registry.drains.warmed


def test_the_last_that_takes_requests_and_a_stranger_are_not_drained(front_end, control):
    front_end.run(control.drain_instance("one"))
    with pytest.raises(ConfigError, match="no other takes requests"):
        front_end.run(control.drain_instance("two"))
    with pytest.raises(ConfigError, match="choose one of one, two"):
        front_end.run(control.undrain_instance("three"))
    assert answers(front_end, "still") == {(1,)}


def test_others_that_have_not_dialled_in_yet_are_waited_for(made, monkeypatch):
    monkeypatch.setattr(cluster_instances, "DIAL_IN_S", 20.0)
    made.append(front_end := FrontEnd())
    control = InstanceControl(front_end.instance_registry, drain_s=20.0)
    draining = threading.Thread(target=lambda: front_end.run(control.drain_instance("one")))
    draining.start()
    for number, name in enumerate(("one", "two")):
        draining.join(0.3)
        assert front_end.instance_registry.drained == frozenset()
        made.append(Instance(name, front_end.socket, number=number))
        until(lambda name=name: name in front_end.names())
    draining.join(PATIENCE_S)
    assert front_end.instance_registry.drained == {"one"}
    assert answers(front_end, "drained") == {(1,)}


def test_a_drained_instance_takes_requests_when_the_others_have_gone(front_end, control, made):
    front_end.run(control.drain_instance("one"))
    made[2].dial.stop()
    until(lambda: front_end.names() == ["one"])
    assert answers(front_end, "alone") == {(0,)}


def test_it_stays_drained_when_it_comes_back(front_end, control, made):
    front_end.run(control.drain_instance("one"))
    made[1].dial.stop()
    until(lambda: front_end.names() == ["two"])
    made.append(Instance("one", front_end.socket, number=5))
    until(lambda: front_end.names() == ["one", "two"])
    assert answers(front_end, "again") == {(1,)}


def restart_aside(front_end: FrontEnd, control: InstanceControl) -> tuple[threading.Thread, list[Exception]]:
    """Instance one is being started again by a thread; what that raises."""
    errors: list[Exception] = []

    def restart() -> None:
        try:
            front_end.run(control.restart_instance("one", 20.0))
        except Exception as error:
            errors.append(error)

    restarting = threading.Thread(target=restart)
    restarting.start()
    return restarting, errors


def test_one_that_is_started_again_is_drained_until_its_next_process_takes_part(front_end, control, made):
    first, second = made[1:]
    restarting, errors = restart_aside(front_end, control)
    until(lambda: front_end.names() == ["two"])
    assert first.dial.restarts
    assert not second.dial.restarts
    assert answers(front_end, "meanwhile") == {(1,)}
    made.append(Instance("one", front_end.socket, number=7))
    restarting.join(PATIENCE_S)
    assert errors == []
    assert answers(front_end, "after") == {(1,), (7,)}


def test_one_with_requests_of_a_batch_ends_after_them(front_end, control, made, monkeypatch):
    first, looks = made[1], []

    def stats() -> EngineStats:
        looks.append(first.dial.restarts)
        return EngineStats(num_background=max(0, 3 - len(looks)))

    monkeypatch.setattr(first.loop, "stats", stats)
    restarting, errors = restart_aside(front_end, control)
    until(lambda: first.dial.restarts)
    assert looks == [False] * 3
    made.append(Instance("one", front_end.socket, number=7))
    restarting.join(PATIENCE_S)
    assert errors == []


def test_one_that_does_not_come_back_is_an_error_that_names_the_limit(front_end, control):
    with pytest.raises(EngineDeadError, match=r"not back after limit_s=0\.2"):
        front_end.run(control.restart_instance("one", 0.2))
    assert front_end.instance_registry.drained == frozenset()
    with pytest.raises(EngineDeadError, match="does not take part"):
        front_end.run(control.restart_instance("one", 0.2))


def test_one_that_is_just_coming_back_is_waited_for_and_then_started_again(front_end, control, made):
    made[1].dial.stop()
    until(lambda: front_end.names() == ["two"])
    restarting, errors = restart_aside(front_end, control)
    made.append(back := Instance("one", front_end.socket, number=5))
    until(lambda: back.dial.restarts)
    made.append(Instance("one", front_end.socket, number=7))
    restarting.join(PATIENCE_S)
    assert errors == []
    assert answers(front_end, "after") == {(1,), (7,)}


def test_the_last_that_takes_requests_is_not_started_again(front_end, control, made):
    front_end.run(control.drain_instance("two"))
    with pytest.raises(ConfigError, match="no other takes requests"):
        front_end.run(control.restart_instance("one", 20.0))
    assert not made[1].dial.restarts


@pytest.mark.parametrize("drained_after", [False, True])
def test_what_an_operator_says_while_one_is_started_again_counts_after_it(
    front_end, control, made, drained_after
):
    if not drained_after:
        front_end.run(control.drain_instance("one"))
    restarting, errors = restart_aside(front_end, control)
    until(lambda: front_end.names() == ["two"])
    front_end.run(control.drain_instance("one") if drained_after else control.undrain_instance("one"))
    assert front_end.instance_registry.drained == {"one"}
    made.append(Instance("one", front_end.socket, number=7))
    restarting.join(PATIENCE_S)
    assert errors == []
    assert front_end.instance_registry.drained == (frozenset({"one"}) if drained_after else frozenset())


def test_one_that_falls_silent_before_it_was_told_to_end_is_not_told(front_end, control, made):
    [entry] = (one for one in front_end.instance_registry.instances if one.name == "one")
    made[1].loop.may_go_on.clear()
    restarting, errors = restart_aside(front_end, control)

    def fail() -> list[Exception]:
        called(front_end, entry.client.fail_all, EngineSilentError("it does not get on"))
        return errors

    until(fail)
    restarting.join(PATIENCE_S)
    with pytest.raises(EngineDeadError, match="end its process"):
        raise errors[0]
    assert not made[1].dial.restarts
    assert front_end.instance_registry.drained == frozenset()


def test_none_is_ended_before_another_is_seen_by_all_front_ends(front_end, control, made):
    control.seen_by_all = lambda name, incarnation: name == "one"
    with pytest.raises(EngineDeadError, match="was not ended"):
        front_end.run(control.restart_instance("one", 0.2))
    assert not made[1].dial.restarts
    assert front_end.names() == ["one", "two"]


def test_one_that_has_left_for_good_can_be_undrained(front_end, control):
    front_end.instance_registry.drains.order("gone", drained=True)
    front_end.run(control.undrain_instance("gone"))
    assert front_end.instance_registry.drained == frozenset()


def successor(front_end: FrontEnd, made) -> tuple[FrontEnd, InstanceControl]:
    """The only front end is started again, and both instances are there."""
    front_end.close()
    made.append(new := FrontEnd(socket=front_end.socket))
    until(lambda: new.names() == ["one", "two"])
    return new, InstanceControl(new.instance_registry, drain_s=20.0)


def test_the_next_front_end_learns_from_the_instances_who_is_drained(front_end, control, made):
    front_end.run(control.drain_instance("one"))
    second, control = successor(front_end, made)
    assert second.instance_registry.drained == {"one"}
    assert answers(second, "second") == {(1,)}
    second.run(control.undrain_instance("one"))
    third, _ = successor(second, made)
    assert third.instance_registry.drained == frozenset()
    assert answers(third, "third") == {(0,), (1,)}


def test_a_process_younger_than_the_order_is_told_it_and_tells_the_next_front_end(front_end, control, made):
    front_end.run(control.drain_instance("one"))
    made[1].dial.stop()
    until(lambda: front_end.names() == ["two"])
    made.append(young := Instance("one", front_end.socket, number=5))
    until(lambda: young.dial._mux.drain.drained)
    second, _ = successor(front_end, made)
    assert second.instance_registry.drained == {"one"}


def test_an_order_given_while_an_instance_was_away_goes_before_what_it_remembers(front_end, control, made):
    front_end.run(control.drain_instance("one"))
    with patch.object(DialledClient, "call", side_effect=EngineSilentError("it does not get on")):
        front_end.run(control.undrain_instance("one"))
    [entry] = (one for one in front_end.instance_registry.instances if one.name == "one")
    front_end.thread.loop.call_soon_threadsafe(entry.client.hang_up, "a cut")
    until(lambda: not made[1].dial._mux.drain.drained)
    assert front_end.instance_registry.drained == frozenset()
