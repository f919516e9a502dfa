# SPDX-License-Identifier: Apache-2.0
"""Engines that dial in, one by one, and leave."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError, EngineDeadError, UnreadError
from moe_lora.core.request import AdapterInfo, GenerateRequest, TokenOutput
from moe_lora.dist.cluster import instances
from moe_lora.dist.cluster.instances import Holding, InstanceRegistry, Served, ServedVersion
from moe_lora.dist.cluster.listener import CatchUp, DialledClient
from moe_lora.dist.net.keys import make_keys
from moe_lora.engine.client.messages import Abort, Alias, Dead, Heartbeat, Outputs
from moe_lora.engine.client.step_notes import StepNotes
from tests.patience import PATIENCE_S

from .fleet_parts import INFO
from .listener_parts import ADVICE, FrontEnd, Instance, tokens_out, until


@pytest.fixture(autouse=True)
def all_messages(caplog):
    """What the code logs is looked at, whatever level other tests left behind."""
    caplog.set_level(logging.INFO, logger="moe_lora")


@pytest.fixture
def made():
    """What a test made, stopped after it, the latest first."""
    things: list = []
    yield things
    for thing in reversed(things):
        thing.stop() if isinstance(thing, Instance) else thing.close()


@pytest.fixture
def front_end(made) -> FrontEnd:
    made.append(FrontEnd(adapters=START_PATHS))
    return made[0]


@pytest.fixture
def join(made, front_end):
    def make(name: str, socket: str | None = None, **facts) -> Instance:
        made.append(Instance(name, socket or front_end.socket, **facts))
        return made[-1]

    return make


START = {"start": ("places/start", 1)}
START_PATHS = [("start", "places/start")]


def test_nobody_there_is_an_error_that_says_so(front_end):
    with pytest.raises(EngineDeadError, match=ADVICE):
        front_end.ask("a")


def test_a_load_waits_for_instances_that_may_still_be_dialling_in(front_end, join):
    loads = front_end.fleet.call("load_adapter", "new", "places/new", replace=True)
    loading = threading.Thread(target=lambda: front_end.run(loads))
    loading.start()
    loading.join(0.3)
    assert loading.is_alive()
    first = join("one", adapters=START)
    loading.join(PATIENCE_S)
    assert first.loop.adapters == {**START, "new": ("places/new", 1)}


def test_a_load_is_refused_where_none_dials_in(made, monkeypatch):
    monkeypatch.setattr(instances, "DIAL_IN_S", 0.2)
    made.append(front_end := FrontEnd())
    with pytest.raises(EngineDeadError, match=ADVICE):
        front_end.run(front_end.fleet.call("load_adapter", "new", "places/new"))


def test_instances_that_dial_in_share_the_requests(front_end, join):
    for number, name in enumerate(("one", "two")):
        join(name, number=number, adapters=START)
    until(lambda: front_end.names() == ["one", "two"])
    assert sorted(front_end.ask(str(n)) for n in range(4)) == [(0,), (0,), (1,), (1,)]
    assert [one.num_restarts for one in front_end.instance_registry.instances] == [0, 0]


def test_requests_of_one_that_leaves_go_on_at_another(front_end, join):
    leaving = join("one", number=1, adapters=START)
    leaving.loop.holds.set()
    until(lambda: front_end.names() == ["one"])
    answers: list[tuple[int, ...]] = []
    asking = threading.Thread(target=lambda: answers.append(front_end.ask("a")))
    asking.start()
    until(lambda: tokens_out(front_end, "one") == 3)
    join("two", number=2, adapters=START)
    until(lambda: front_end.names() == ["one", "two"])
    leaving.dial.stop()
    asking.join(PATIENCE_S)
    assert answers == [(1, 2)]
    assert front_end.names() == ["two"]


def until_both(front_end: FrontEnd) -> None:
    until(lambda: front_end.names() == ["one", "two"])


@pytest.mark.slow
def test_what_a_late_waker_says_of_a_request_that_went_on_elsewhere_is_refused(made):
    made.append(front_end := FrontEnd(heartbeat=Heartbeat(timeout_s=3.0, dead_s=120.0)))
    made.append(late := Instance("one", front_end.socket, number=1))
    late.loop.holds.set()
    until(lambda: front_end.names() == ["one"])
    answers: list[tuple[int, ...]] = []
    asking = threading.Thread(target=lambda: answers.append(front_end.ask("a", 4)))
    asking.start()
    until(lambda: tokens_out(front_end, "one") == 3)
    made.append(other := Instance("two", front_end.socket, number=2))
    other.loop.holds.set()
    until_both(front_end)
    wakes = threading.Event()
    late.in_its_loop(wakes.wait)  # no beats, and nothing is sent
    until(lambda: other.loop.held == ["a~1"])
    for token in (98, 99):
        late.loop.say("a", token)
    wakes.set()
    until(lambda: late.loop.aborted == ["a"])
    until_both(front_end)
    for loop in (late.loop, other.loop):
        loop.holds.clear()
    assert {front_end.ask(str(n)) for n in range(2)} == {(1,), (2,)}  # behind all that was said
    other.loop.say("a~1", 2, "length")
    asking.join(PATIENCE_S)
    assert answers == [(1, 2, 2)]


def test_what_is_said_of_a_request_that_was_given_up_is_refused(front_end, join):
    silent = join("one", number=1, adapters=START)
    silent.loop.holds.set()
    until(lambda: front_end.names() == ["one"])
    answers: list[tuple[int, ...]] = []
    asking = threading.Thread(target=lambda: answers.append(front_end.ask("a", 4)))
    asking.start()
    until(lambda: tokens_out(front_end, "one") == 3)
    other = join("two", number=2, adapters=START)
    other.loop.holds.set()
    until_both(front_end)
    registry = front_end.instance_registry
    entry = next(one for one in registry.instances if one.name == "one")

    async def fall_silent() -> None:
        entry.live = False
        registry.on_unheard(entry)

    front_end.run(fall_silent())
    until(lambda: other.loop.held == ["a~1"])
    silent.loop.say("a", 98)
    until(lambda: silent.loop.aborted == ["a"])
    until_both(front_end)
    other.loop.say("a~1", 2, "length")
    asking.join(PATIENCE_S)
    assert answers == [(1, 2, 2)]


@pytest.mark.slow
def test_request_of_an_engine_at_one_long_step_stays_with_it(made):
    made.append(front_end := FrontEnd(heartbeat=Heartbeat(timeout_s=3.0, dead_s=120.0)))
    for number, name in enumerate(("one", "two")):
        made.append(Instance(name, front_end.socket, number=number))
    until_both(front_end)
    assert {front_end.ask(f"before {n}") for n in range(2)} == {(0,), (1,)}
    hangs = made[1].loop
    hangs.may_go_on.clear()
    answers: list[tuple[int, ...]] = []
    asking = threading.Thread(target=lambda: answers.extend(front_end.ask(str(n)) for n in range(2)))
    asking.start()
    until(lambda: front_end.names() == ["two"])
    time.sleep(1.0)  # some looks later, which beats come between
    hangs.may_go_on.set()
    asking.join(PATIENCE_S)
    assert sorted(answers) == [(0,), (1,)]
    assert [one.num_resent for one in front_end.instance_registry.instances] == [0, 0]


def test_one_that_joins_gets_what_was_loaded_and_loses_what_was_unloaded(front_end, join):
    first = join("one", adapters=START)
    until(lambda: front_end.names() == ["one"])
    front_end.run(front_end.fleet.call("load_adapter", "later", "places/later", replace=True))
    front_end.run(front_end.fleet.call("load_adapter", "left", "places/left", replace=True))
    front_end.run(front_end.fleet.call("unload_adapter", "left"))
    second = join("two", adapters={**START, "left": ("places/left", 1)})
    until(lambda: front_end.names() == ["one", "two"])
    assert second.loop.adapters == {**START, "later": ("places/later", 1)}
    assert (
        "load_adapter",
        "start",
        "places/start",
        True,
        1,
        None,
    ) not in first.loop.calls + second.loop.calls


def served_as(front_end: FrontEnd, name: str, path: str) -> None:
    """As if all instances had loaded it."""
    info = AdapterInfo(name=name, version=1, lora_rank=1, nbytes=1, targets=(), path=path, residency="host")

    async def serve() -> None:
        front_end.instance_registry.serve(info, path)

    front_end.run(serve())


def test_what_changes_while_one_catches_up_is_caught_up_too(front_end, join):
    late = join("one")
    late.loop.may_go_on.clear()
    until(lambda: front_end.instance_registry.instances and front_end.instance_registry.instances[0].starting)
    served_as(front_end, "more", "places/more")
    late.loop.may_go_on.set()
    until(lambda: front_end.names() == ["one"])
    assert late.loop.adapters == {**START, "more": ("places/more", 1)}


def test_nothing_comes_in_while_an_adapter_is_being_loaded(front_end, join):
    loading = ExitStack()

    async def begin() -> None:
        loading.enter_context(front_end.instance_registry.loading())

    front_end.run(begin())
    join("one", adapters=START)
    until(lambda: front_end.instance_registry.instances)
    time.sleep(0.3)
    assert front_end.names() == []
    front_end.thread.loop.call_soon_threadsafe(loading.close)
    until(lambda: front_end.names() == ["one"])


@pytest.fixture
def loading(front_end, monkeypatch):
    """Adapters load everywhere, one after another, without an end."""
    monkeypatch.setattr(instances, "REST_S", 0.1)
    with ExitStack() as loads:

        async def begin() -> None:
            loads.enter_context(front_end.instance_registry.loading())

        front_end.run(begin())
        yield lambda: front_end.thread.loop.call_soon_threadsafe(loads.close)


def test_one_comes_in_though_others_never_stop_to_load(front_end, join, loading):
    old = join("old", number=1, adapters=START)
    until(lambda: front_end.names() == ["old"])
    front_end.run(front_end.fleet.call("load_adapter", "left", "places/left", replace=True))
    front_end.run(front_end.fleet.call("unload_adapter", "left"))
    front_end.run(front_end.fleet.call("load_adapter", "more", "places/more", replace=True))
    new = join("new", number=2, adapters={**START, "left": ("places/left", 1)})
    until(lambda: front_end.names() == ["new", "old"])
    until(lambda: len(front_end.instance_registry.candidates("more")) == 2)
    until(lambda: new.loop.adapters == {**START, "more": ("places/more", 1)})
    assert [call[1] for call in old.loop.calls if call[0] == "load_adapter"] == ["left", "more"]


def test_one_that_comes_in_during_a_load_gets_the_adapter_after_it(front_end, join, loading):
    old = join("old", number=1, adapters=START)
    until(lambda: front_end.names() == ["old"])
    old.loop.may_go_on.clear()
    change = front_end.fleet.call("load_adapter", "later", "places/later", replace=True)
    load = asyncio.run_coroutine_threadsafe(change, front_end.thread.loop)
    new = join("new", number=2, adapters=START)
    until(lambda: front_end.names() == ["new", "old"])
    assert "later" not in new.loop.adapters
    old.loop.may_go_on.set()
    assert load.result(PATIENCE_S).version == 1
    assert new.loop.adapters == old.loop.adapters == {**START, "later": ("places/later", 1)}
    assert len(front_end.instance_registry.candidates("later")) == 2


def test_one_that_died_before_it_came_in_does_not_end_its_successor(front_end, join, loading, monkeypatch):
    monkeypatch.setattr(instances, "REST_S", PATIENCE_S)
    served_as(front_end, "more", "places/more")
    first = join("one", adapters=START)
    registry = front_end.instance_registry
    until(lambda: ("current_pauses",) in first.loop.calls)
    client = registry.instances[0].starting
    first.dial.stop()
    until(client.ended.is_set)
    join("one", adapters=START)
    loading()
    until(lambda: front_end.names() == ["one"])
    assert front_end.given_up == []


def test_one_that_was_silent_during_an_unload_comes_back_before_the_adapters_last_request(made):
    made.append(front_end := FrontEnd(adapters=START_PATHS, heartbeat=Heartbeat(timeout_s=1.0, dead_s=60.0)))
    made.append(one := Instance("one", front_end.socket, adapters=START))
    until(lambda: front_end.names() == ["one"])
    one.loop.unanswered.add("unload_adapter")  # a request runs with it
    change = front_end.fleet.call("unload_adapter", "start")
    unload = asyncio.run_coroutine_threadsafe(change, front_end.thread.loop)
    until(lambda: not one.loop.adapters)
    one.loop.may_go_on.clear()
    one.loop.inbox.put(lambda: None)
    with pytest.raises(EngineDeadError):
        unload.result(PATIENCE_S)
    assert front_end.names() == []
    one.loop.may_go_on.set()
    until(lambda: front_end.names() == ["one"])


def test_adapter_that_one_can_not_load_is_served_by_the_others(front_end, join):
    join("one", number=1, adapters=START)
    until(lambda: front_end.names() == ["one"])
    served_as(front_end, "later", "places/later")
    two = join("two", number=2, adapters=START, refused={"places/later"})
    until(lambda: front_end.names() == ["one", "two"])
    assert [one.name for one in front_end.instance_registry.candidates("later")] == ["one"]
    assert len(front_end.instance_registry.candidates("start")) == 2
    assert "later" not in two.loop.adapters


def test_instance_stays_as_it_is_when_the_front_end_is_another(front_end, join, made):
    instance = join("one", adapters=START)
    until(lambda: front_end.names() == ["one"])
    front_end.run(front_end.fleet.call("load_adapter", "later", "places/later", replace=True))
    front_end.close()
    other = FrontEnd(front_end.socket, [("start", "places/start")])
    made.insert(0, other)
    until(lambda: other.names() == ["one"])
    assert instance.loop.adapters == {**START, "later": ("places/later", 1)}
    assert instance.loop.is_alive()
    assert other.ask("a") == (0,)


def test_lost_front_end_ends_its_requests(front_end, join, made):
    instance = join("one", adapters=START)
    until(lambda: front_end.names() == ["one"])
    instance.loop.holds.set()
    errors: list[EngineDeadError] = []

    def ask() -> None:
        with pytest.raises(EngineDeadError) as caught:
            front_end.ask("a")
        errors.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: instance.loop.held)
    front_end.close()
    asking.join(PATIENCE_S)
    assert len(errors) == 1
    until(lambda: instance.loop.aborted == ["a"])
    # The same id may come again, and what is said of the first is not taken for the second's.
    instance.loop.holds.clear()
    other = FrontEnd(front_end.socket, [("start", "places/start")])
    made.insert(0, other)
    until(lambda: other.names() == ["one"])
    assert other.ask("a") == (0,)


def test_connection_that_comes_back_is_no_restart_and_counts_nothing_twice(front_end, join):
    instance = join("one", adapters=START)
    until(lambda: front_end.names() == ["one"])
    for n in range(3):
        front_end.ask(str(n))
    assert front_end.run(front_end.fleet.stats()).num_steps == 3
    front_end.run(front_end.instance_registry.instances[0].client.close())
    entry = front_end.instance_registry.instances[0]
    before = entry.client
    until(lambda: entry.live and entry.client is not before)
    assert front_end.run(front_end.fleet.stats()).num_steps == 3
    assert entry.num_restarts == 0
    instance.stop()
    until(lambda: not entry.live)
    join("one", adapters=START)
    until(lambda: entry.live)
    front_end.ask("again")
    assert front_end.run(front_end.fleet.stats()).num_steps == 4
    assert entry.num_restarts == 1


def test_second_of_a_name_waits_until_the_first_has_left(front_end, join, caplog):
    first = join("one", number=1, adapters=START)
    until(lambda: front_end.names() == ["one"])
    join("one", number=2, adapters=START)
    until(lambda: "give each its own --name" in caplog.text)
    assert front_end.ask("a") == (1,)
    first.stop()
    until(lambda: front_end.names() == ["one"] and front_end.instance_registry.instances[0].num_restarts == 1)
    assert front_end.ask("b") == (2,)


def test_another_model_is_refused_with_the_difference(front_end, join, caplog):
    join("one", adapters=START)
    until(lambda: front_end.names() == ["one"])
    join("two", info=replace(INFO, max_model_len=4096))
    until(lambda: "max_model_len is 4096 there and 64 at the other instances" in caplog.text)
    assert front_end.names() == ["one"]


def test_between_hosts_only_certificates_of_the_same_authority_let_in(tmp_path, made, caplog):
    ours, others = make_keys(tmp_path / "ours"), make_keys(tmp_path / "others")
    front_end = FrontEnd(Address("127.0.0.1"), [("start", "places/start")], keys=ours)
    made.append(front_end)
    made.append(Instance("stranger", front_end.socket, keys=others, adapters=START))
    until(lambda: "are its certificates of the same authority?" in caplog.text)
    assert front_end.instance_registry.instances == []
    made.append(Instance("one", front_end.socket, number=3, keys=ours, adapters=START))
    until(lambda: front_end.names() == ["one"])
    assert front_end.ask("a") == (3,)


def test_stranger_who_says_nothing_holds_up_nobody(front_end, join):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(front_end.socket)
        join("one", adapters=START)
        until(lambda: front_end.names() == ["one"])


def test_engine_that_fails_leaves_and_its_process_is_told(front_end, join):
    instance = join("one", adapters=START)
    until(lambda: front_end.names() == ["one"])
    instance.dial.emit(Dead(EngineDeadError("it broke")))
    until(lambda: front_end.names() == [])
    assert instance.dial.failed
    instance.stop()


def test_taken_address_is_an_error_that_names_the_setting(front_end):
    with pytest.raises(ConfigError, match=f"engines_address={front_end.socket}"):
        FrontEnd(front_end.socket)


def test_new_front_end_takes_over_what_instances_serve(front_end, join, made):
    one, two = join("one", adapters=START), join("two", adapters=START)
    until(lambda: front_end.names() == ["one", "two"])
    for path in ("places/later", "places/latest"):
        front_end.run(front_end.fleet.call("load_adapter", "later", path, replace=True))
    two.stop()
    front_end.close()
    entries: list[CatchUp] = []

    def recovering(instance_registry: InstanceRegistry) -> CatchUp:
        entries.append(CatchUp(instance_registry, 60))
        return entries[0]

    other = FrontEnd(
        front_end.socket, [("start", "places/start"), ("new", "places/new")], make_entry=recovering
    )
    made.insert(0, other)
    third = Instance("three", other.socket, adapters=START)  # it has only what it started with
    made.append(third)
    until(
        lambda: (
            [one.name for one in other.instance_registry.instances if one.starting]
            and "later" in other.instance_registry.adapters
        )
    )
    assert other.names() == []
    other.thread.loop.call_soon_threadsafe(entries[0].end_recovery)
    until(lambda: other.names() == ["one", "three"])
    served = {"start": ("places/start", 1), "new": ("places/new", 1), "later": ("places/latest", 2)}
    assert one.loop.adapters == third.loop.adapters == served
    assert one.loop.calls.count(("load_adapter", "later", "places/latest", True, 2, None)) == 1
    assert other.run(other.fleet.call("load_adapter", "later", "places/last", replace=True)).version == 3


LOADED = ("places/loaded", 3)
"""An adapter that an earlier front end loaded."""


def test_what_is_found_after_the_recovery_is_served_everywhere(front_end, join):
    first = join("one", adapters=START)
    until(lambda: front_end.names() == ["one"])
    held = {"new": LOADED, "start": ("places/start-changed", 2)}
    late = join("late", adapters=held)
    until(lambda: front_end.names() == ["late", "one"])
    assert late.loop.adapters == first.loop.adapters == held
    assert [call[0] for call in late.loop.calls if call[0] in ("load_adapter", "unload_adapter")] == []
    assert [len(front_end.instance_registry.candidates(name)) for name in held] == [2, 2]
    later = join("later", adapters=START)  # its process lost the adapters
    until(lambda: len(front_end.names()) == 3)
    assert later.loop.adapters == held
    newer = front_end.run(front_end.fleet.call("load_adapter", "new", "places/newer", replace=True))
    assert newer.version == 4


def test_what_is_found_late_and_can_not_be_loaded_elsewhere_stays_where_it_is(front_end, join):
    first = join("one", adapters=START, refused={LOADED[0]})
    until(lambda: front_end.names() == ["one"])
    late = join("late", adapters={**START, "new": LOADED})
    until(lambda: front_end.names() == ["late", "one"])
    assert (first.loop.adapters, late.loop.adapters) == (START, {**START, "new": LOADED})
    assert [one.name for one in front_end.instance_registry.candidates("new")] == ["late"]


@pytest.mark.parametrize("loads_again", [True, False])
@pytest.mark.parametrize("name", ["new", "start"])
def test_what_was_changed_since_the_recovery_goes_before_what_is_found_late(
    front_end, join, name, loads_again
):
    join("one", adapters=START)
    until(lambda: front_end.names() == ["one"])
    front_end.run(front_end.fleet.call("load_adapter", name, "places/changed", replace=True))
    if not loads_again:
        front_end.run(front_end.fleet.call("unload_adapter", name))
    served = dict(front_end.instance_registry.adapters)
    late = join("late", adapters={**START, name: LOADED})
    until(lambda: front_end.names() == ["late", "one"])
    assert front_end.instance_registry.adapters == served
    assert late.loop.adapters == {one: (its.path, its.version) for one, its in served.items()}


@pytest.fixture
def directed(front_end, made) -> FrontEnd:
    """A front end whose adapters a controller looks after."""
    front_end.close()
    made.insert(0, FrontEnd(front_end.socket, [("start", "places/start")], make_entry=lambda _: None))
    return made[0]


def test_directed_front_end_changes_nothing_of_an_instance(directed, join):
    instance = join("one", adapters={"other": ("places/other", 3)})
    until(lambda: directed.names() == ["one"])
    # Nobody has said what is served, so that is what the file says and what is there.
    assert directed.instance_registry.adapters == {
        "start": ServedVersion("places/start", 1),
        "other": ServedVersion("places/other", 3),
    }
    assert {method for method, *_ in instance.loop.calls} == {"list_adapters"}
    assert [one.name for one in directed.instance_registry.candidates("other")] == ["one"]
    with pytest.raises(EngineDeadError, match="'start' is unavailable"):
        directed.instance_registry.candidates("start")


@pytest.mark.parametrize("has_heard", [False, True])
def test_front_end_takes_an_instance_s_aliases_until_its_controller_speaks(directed, join, has_heard):
    registry = directed.instance_registry
    if has_heard:
        registry.follow({}, {}, {})
    join("one", adapters=START, aliases={"support": Alias("start", number=3)})
    until(lambda: directed.names() == ["one"])
    assert ("support" in registry.aliases) is not has_heard


def test_directed_front_end_routes_to_an_instance_after_the_orders_of_its_controller(directed, join):
    registry = directed.instance_registry
    registry.standing_orders().elsewhere = True
    first, second = join("first", adapters=START), join("second", adapters=START)
    until(lambda: {one.name for one in registry.instances if one.starting} == {"first", "second"})
    assert directed.names() == []
    served = Served.of({"start": ServedVersion("places/start", 1)})
    holdings = {"first": Holding(first.incarnation), "second": Holding("an earlier process")}
    registry.follow(served.adapters, served.versions, holdings)
    until(lambda: directed.names() == ["first"])
    assert {method for method, *_ in second.loop.calls} == set()
    registry.standing_orders().elsewhere = False
    until(lambda: directed.names() == ["first", "second"])


def test_directed_front_end_routes_by_what_its_controller_says(directed, join):
    seen, unseen = join("seen", adapters=START), join("unseen", adapters=START)
    until(lambda: directed.names() == ["seen", "unseen"])
    served = Served.of({"start": ServedVersion("places/start", 1), "new": ServedVersion("places/new", 1)})
    follow = partial(directed.instance_registry.follow, served.adapters, served.versions)
    follow({"seen": Holding(seen.incarnation)})
    assert [one.name for one in directed.instance_registry.candidates("new")] == ["seen"]
    assert sorted(one.name for one in directed.instance_registry.candidates("start")) == ["seen", "unseen"]
    follow({"unseen": Holding("an earlier process")})
    assert [one.name for one in directed.instance_registry.candidates("new")] == ["seen"]
    follow({"unseen": Holding(unseen.incarnation, frozenset({"start"}))})
    assert sorted(one.name for one in directed.instance_registry.candidates("new")) == ["seen", "unseen"]
    assert [one.name for one in directed.instance_registry.candidates("start")] == ["seen"]


class RecordingPeer:
    """The other end of a connection: says these messages, and keeps what it is told."""

    problem = "it was closed"
    cut = False

    def __init__(self, said) -> None:
        self.ended = asyncio.Event()
        self.sent: list[object] = []
        self._said = said

    def send(self, message) -> None:
        self.sent.append(message)

    async def messages(self):
        for message in self._said:
            yield message


def test_request_whose_outputs_nobody_takes_ends_and_is_aborted_and_others_go_on():
    def output(name, token):
        return TokenOutput(request_id=name, token_ids=(token,), finish_reason=None)

    def asked(name):
        return GenerateRequest(request_id=name, prompt_token_ids=(1,))

    async def run():
        said = [Outputs([output("unread", token), output("read", token)]) for token in range(9)]
        peer = RecordingPeer(said[:6])
        client = DialledClient(peer, "one", max_unread=6)
        streams = [
            client.generate(GenerateRequest(request_id=name, prompt_token_ids=(1,)))
            for name in ("unread", "read")
        ]
        await client.read()
        taken = [(await anext(streams[1])).token_ids for _ in range(6)]
        assert taken == [(token,) for token in range(6)]
        assert (await anext(streams[0])).token_ids == (0,)

        peer = RecordingPeer(said[:7])
        client = DialledClient(peer, "two", max_unread=6)
        stream = client.generate(asked("unread"))
        await client.read()
        with pytest.raises(UnreadError, match="more than 6 steps"):
            await anext(stream)
        assert isinstance(peer.sent[-1], Abort)

    asyncio.run(run())


@pytest.mark.parametrize("on_this_host", [True, False])
def test_adapters_at_work_are_known_from_notes_or_else_from_the_requests(on_this_host):
    async def run():
        peer = RecordingPeer(
            [Outputs([TokenOutput(request_id="over", token_ids=(1,), finish_reason="stop")])]
        )
        peer.cut = True
        notes = StepNotes()
        notes.step({"noted"})
        client = DialledClient(peer, "one", notes=notes.place if on_this_host else "")
        for name in ("over", "asked", None):
            client.generate(GenerateRequest(request_id=str(name), prompt_token_ids=(1,), adapter=name))
        deaths = []
        client.on_death = lambda adapters, notes: deaths.append(adapters)
        await client.read()
        assert deaths == [frozenset({"noted" if on_this_host else "asked"})]

    asyncio.run(run())
