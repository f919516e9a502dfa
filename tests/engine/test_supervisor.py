"""Restarting, with stand-ins for engine processes; tests/serve/test_instances.py has the real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from moe_lora.core.clock import WallClock
from moe_lora.core.errors import AdapterError, EngineDeadError
from moe_lora.core.request import AdapterInfo
from moe_lora.engine.heartbeat import Hearing
from moe_lora.engine.roster import Roster
from moe_lora.engine.supervisor import RestartPolicy, Supervisor

AT_ONCE = RestartPolicy(first_pause_s=0.0)


class Process:
    """As much of `ProcessClient` as a supervisor sees."""

    exit_code = -9

    def __init__(self, adapters=(), *, fails: Exception | None = None, refuse: tuple[str, ...] = ()) -> None:
        self.pid = id(self)
        self.ended = threading.Event()
        self.hearing = Hearing()
        self.on_beat: Callable = lambda beat: None
        self.adapters = dict(adapters)
        self.versions: dict[str, object] = {}
        self.fails = fails
        self.refuse = refuse
        self.may_start = threading.Event()
        self.may_start.set()
        self.on_call: Callable[[], None] = lambda: None

    def await_start(self) -> None:
        self.may_start.wait()
        if self.ended.is_set():
            raise EngineDeadError("the engine's process ended with exit code -9 while starting")
        if self.fails is not None:
            raise self.fails

    def settle(self) -> None:
        pass

    def call(
        self, method: str, name: str = "", path: str = "", replace: bool = False, version: int = 1, *_: object
    ) -> Future[Any]:
        future: Future[Any] = Future()
        if method == "list_adapters":
            future.set_result([info_of(one, where) for one, where in self.adapters.items()])
            return future
        if path in self.refuse:
            future.set_exception(AdapterError(f"{path} is gone"))
            return future
        if method == "load_adapter":
            self.adapters[name] = path
            self.versions[name] = version
        else:
            del self.adapters[name]
        self.on_call()
        future.set_result(info_of(name, path))
        return future

    def kill(self) -> None:
        self.ended.set()

    def shut_down(self) -> None:
        self.ended.set()
        self.may_start.set()


def info_of(name: str, path: str) -> AdapterInfo:
    return AdapterInfo(name=name, version=1, lora_rank=1, nbytes=1, targets=(), path=path, residency="host")


class Fleet:
    """Two instances; `later` are the processes that will be launched, `launched` with what."""

    def __init__(self, later: list[Process], adapters=(), policy: RestartPolicy = AT_ONCE) -> None:
        self.first = [Process(adapters), Process(adapters)]
        self.later = later
        self.launched: list[tuple[int, int, tuple]] = []
        self.roster = Roster(self.first, tuple(adapters))
        names = [name for name, _ in adapters]
        before = set(threading.enumerate())
        Supervisor(self.roster, self.first, self.launch, names, WallClock(), policy)
        self.threads = set(threading.enumerate()) - before

    def launch(self, index: int, num_starts: int, adapters: tuple) -> Process:
        self.launched.append((index, num_starts, adapters))
        process = self.later.pop(0)
        # What can't be read is left out.
        process.adapters.update((name, path) for name, path in adapters if path not in process.refuse)
        return process

    def load(self, name: str, path: str) -> None:
        self.roster.serve(info_of(name, path), path)


@pytest.fixture
def make_fleet():
    fleets = []

    def make(*args, **keywords) -> Fleet:
        fleets.append(Fleet(*args, **keywords))
        return fleets[-1]

    yield make
    for fleet in fleets:
        for client in fleet.roster.close():
            client.shut_down()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_ended_process_is_replaced_and_the_others_are_left_alone(make_fleet):
    new = Process()
    fleet = make_fleet([new])
    fleet.first[1].ended.set()
    instance = fleet.roster.instances[1]
    until(lambda: instance.client is new and instance.live)
    assert fleet.launched == [(1, 1, ())]
    assert instance.num_restarts == 1
    assert fleet.roster.instances[0].client is fleet.first[0]


def test_instance_is_out_of_routing_until_its_process_has_started(make_fleet):
    new = Process()
    new.may_start.clear()
    fleet = make_fleet([new])
    fleet.first[0].ended.set()
    until(lambda: fleet.launched)
    assert [one.index for one in fleet.roster.candidates(None)] == [1]
    new.may_start.set()
    until(lambda: len(fleet.roster.live) == 2)


def test_new_process_has_what_was_loaded_replaced_and_unloaded_meanwhile(make_fleet, tmp_path):
    old, new_path = tmp_path / "old", tmp_path / "new"
    for path in (old, new_path):
        path.mkdir()
    start = [("kept", str(old)), ("replaced", str(old)), ("unloaded", str(old))]
    new = Process()
    fleet = make_fleet([new], adapters=start)
    fleet.load("later", str(old))
    fleet.load("replaced", str(new_path))
    fleet.roster.forget("unloaded")
    fleet.first[0].ended.set()
    until(lambda: len(fleet.roster.live) == 2 and fleet.launched)
    assert new.adapters == {"kept": str(old), "replaced": str(new_path), "later": str(old)}
    assert new.versions == {"replaced": 2, "later": 1}
    # Those of the start come with it, so that memory is sized for them again.
    assert [name for name, _ in fleet.launched[0][2]] == ["kept", "replaced"]


def test_what_changes_while_it_catches_up_is_caught_up_too(make_fleet):
    new = Process()
    fleet = make_fleet([new])
    fleet.load("a", "p")
    fleet.load("b", "p")

    def change() -> None:
        new.on_call = lambda: None
        fleet.load("a", "q")
        fleet.roster.forget("b")

    new.on_call = change
    fleet.first[0].ended.set()
    until(lambda: len(fleet.roster.live) == 2 and fleet.launched)
    assert new.adapters == {"a": "q"}


def test_nothing_comes_back_in_the_middle_of_a_load(make_fleet):
    fleet = make_fleet([new := Process()])
    with fleet.roster.loading():
        fleet.first[0].ended.set()
        until(lambda: fleet.roster.instances[0].starting is new)
        fleet.load("a", "p")
        assert len(fleet.roster.live) == 1
    until(lambda: len(fleet.roster.live) == 2)
    assert new.adapters == {"a": "p"}


def test_adapter_that_cannot_be_loaded_again_is_served_by_the_others(make_fleet):
    new = Process(refuse=("gone",))
    fleet = make_fleet([new], adapters=[("start", "gone")])
    fleet.load("later", "p")
    fleet.first[0].ended.set()
    until(lambda: len(fleet.roster.live) == 2 and fleet.launched)
    assert new.adapters == {"later": "p"}
    assert [one.index for one in fleet.roster.candidates("start")] == [1]
    assert len(fleet.roster.candidates("later")) == 2


def test_start_that_fails_is_tried_again(make_fleet):
    working = Process()
    fleet = make_fleet([Process(fails=EngineDeadError("no memory")), working])
    fleet.first[0].ended.set()
    until(lambda: fleet.roster.instances[0].client is working)
    assert len(fleet.launched) == 2


def test_instance_that_keeps_dying_is_given_up_with_a_log_line(make_fleet, caplog):
    processes = [Process() for _ in range(AT_ONCE.max_quick_deaths - 1)]
    fleet = make_fleet(list(processes))
    instance = fleet.roster.instances[0]
    for process in [fleet.first[0], *processes]:
        until(lambda process=process: instance.client is process)
        process.ended.set()
    until(lambda: instance.given_up)
    assert "instance 0 ended 5 times within 60 s of its start and is not started again" in caplog.text
    assert [one.index for one in fleet.roster.live] == [1]


def test_when_all_are_given_up_requests_are_told_to_look_at_the_log(make_fleet):
    fleet = make_fleet([], policy=RestartPolicy(max_quick_deaths=1))
    for process in fleet.first:
        process.ended.set()
    until(lambda: all(one.given_up for one in fleet.roster.instances))
    with pytest.raises(EngineDeadError, match="see the server's log"):
        fleet.roster.candidates(None)


def test_deaths_after_a_long_life_are_not_counted_together(make_fleet):
    processes = [Process() for _ in range(4)]
    fleet = make_fleet(list(processes), policy=RestartPolicy(quick_s=0.0, max_quick_deaths=2))
    for process in [fleet.first[0], *processes[:-1]]:
        until(lambda process=process: fleet.roster.instances[0].client is process)
        process.ended.set()
    until(lambda: fleet.roster.instances[0].client is processes[-1])


def test_closing_ends_a_process_that_is_starting_and_starts_no_other(make_fleet):
    starting = Process()
    starting.may_start.clear()
    fleet = make_fleet([starting])
    fleet.first[0].ended.set()
    until(lambda: fleet.roster.instances[0].starting is starting)
    clients = fleet.roster.close()
    assert starting in clients
    for client in clients:
        client.shut_down()
    until(lambda: not any(thread.is_alive() for thread in fleet.threads))
    assert len(fleet.launched) == 1


def test_pauses_grow_up_to_a_bound_and_end():
    policy = RestartPolicy(max_quick_deaths=9)
    pauses = [policy.pause_s(num_deaths) for num_deaths in range(1, 10)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]
