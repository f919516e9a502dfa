# SPDX-License-Identifier: Apache-2.0
"""An instance of several front ends: each is served as if it were alone, and sees what the others ask."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from moe_lora.core.errors import EngineDeadError
from moe_lora.engine.client.messages import Heartbeat
from tests.dist.cluster.listener_parts import HELD_TOKENS, FrontEnd, Instance, until
from tests.patience import PATIENCE_S

START = {"start": ("places/start", 1)}
PATIENT = Heartbeat(timeout_s=5.0, dead_s=60.0)


@pytest.fixture
def made():
    """What a test made, stopped after it, the latest first."""
    things: list = []
    yield things
    for thing in reversed(things):
        thing.stop() if isinstance(thing, Instance) else thing.close()


@pytest.fixture
def front_ends(made) -> list[FrontEnd]:
    made += [FrontEnd(adapters=[("start", "places/start")], heartbeat=PATIENT) for _ in range(2)]
    return list(made)


@pytest.fixture
def join(made, front_ends):
    def make(name: str, num_doors: int = 2, **facts) -> Instance:
        dialled = front_ends[:num_doors]
        made.append(Instance(name, *(one.socket for one in dialled), adapters=START, **facts))
        until(lambda: all(name in one.names() for one in dialled))
        return made[-1]

    return make


class Aside(threading.Thread):
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: object = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except EngineDeadError as error:
            self.result = error

    def done(self) -> object:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.result


def test_requests_of_one_id_at_two_front_ends_are_two(front_ends, join):
    instance = join("one", number=1)
    instance.loop.holds.set()
    held = [Aside(lambda one=one: one.ask("a")) for one in front_ends]
    until(lambda: len(instance.loop.held) == 2)
    assert instance.loop.held[0] == "a" != instance.loop.held[1]
    instance.loop.holds.clear()
    assert [one.ask("b") for one in front_ends] == [(1,), (1,)]
    front_ends[0].run(front_ends[0].fleet.abort("a"))
    assert held[0].done() == (1,)
    assert held[1].is_alive()
    front_ends[1].run(front_ends[1].fleet.abort("a"))
    assert held[1].done() == (1,)


def test_front_end_that_ends_takes_only_its_own_requests_with_it(front_ends, join):
    instance = join("one", number=1)
    held = [Aside(lambda one=one: one.ask("a", HELD_TOKENS)) for one in front_ends]
    until(lambda: len(instance.loop.held) == 2)
    leaving, staying = front_ends
    leaving.close()
    assert isinstance(held[0].done(), EngineDeadError)
    until(lambda: len(instance.loop.aborted) == 1)
    assert staying.ask("b") == (1,)
    assert held[1].is_alive()
    staying.run(staying.fleet.abort("a"))
    assert held[1].done() == (1,)
    assert len(instance.loop.aborted) == 2


def test_a_load_is_answered_to_the_front_end_that_asked(front_ends, join):
    instance = join("one")
    first, second = front_ends
    second.run(second.fleet.call("load_adapter", "later", "places/later", replace=True))
    assert instance.loop.adapters["later"] == ("places/later", 1)
    assert "later" in second.instance_registry.adapters
    assert "later" not in first.instance_registry.adapters


def test_front_ends_see_the_load_that_the_others_brought(front_ends, join):
    instance = join("one")
    first, second = front_ends
    held = Aside(lambda: first.ask("a", HELD_TOKENS))
    until(lambda: instance.loop.held)
    there = second.instance_registry.instances[0]
    until(lambda: there.outstanding_tokens)
    # One prompt token and the longest answer, of which one token is there.
    assert there.outstanding_tokens == HELD_TOKENS - 1
    assert there.load.num_requests == 1
    assert first.instance_registry.instances[0].outstanding_tokens == HELD_TOKENS - 1
    first.run(first.fleet.abort("a"))
    held.done()
    until(lambda: not there.outstanding_tokens)
    assert there.load.num_requests == 0


def test_loop_that_hangs_in_one_step_is_silent_until_it_goes_on(front_ends, join):
    hanging, other = join("one", 1, number=1), join("two", 1, number=2)
    front_end = front_ends[0]
    front_end.ask("first")  # so that it knows the model
    hanging.loop.may_go_on.clear()
    asked = [Aside(lambda n=n: front_end.ask(str(n))) for n in range(2)]
    until(lambda: front_end.names() == ["two"])
    silent, there = front_end.instance_registry.instances
    assert (silent.silent, there.silent) == (True, False)
    # New requests and loads do not wait for it; what it was asked before stays with it.
    assert [front_end.ask(f"new {n}") for n in range(3)] == [(2,)] * 3
    front_end.run(front_end.fleet.call("load_adapter", "later", "places/later", replace=True))
    assert "later" not in hanging.loop.adapters
    assert [one.is_alive() for one in asked].count(True) == 1
    hanging.loop.may_go_on.set()
    until(lambda: front_end.names() == ["one", "two"])
    assert sorted(one.done() for one in asked) == [(1,), (2,)]
    assert hanging.loop.adapters["later"] == other.loop.adapters["later"]
    assert silent.num_restarts == 0
    assert not silent.silent


def test_load_under_way_does_not_wait_for_one_that_falls_silent(front_ends, join):
    hanging = join("one", 1, number=1)
    join("two", 1, number=2)
    hanging.loop.may_go_on.clear()
    front_end = front_ends[0]
    front_end.run(front_end.fleet.call("load_adapter", "later", "places/later", replace=True))
    assert front_end.names() == ["two"]
    hanging.loop.may_go_on.set()
    until(lambda: front_end.names() == ["one", "two"])
    assert hanging.loop.adapters["later"][0] == "places/later"


def test_when_all_are_silent_requests_are_told_so(front_ends, join):
    hanging = join("one")
    front_ends[0].ask("first")
    hanging.loop.may_go_on.clear()
    asked = Aside(lambda: front_ends[0].ask("a"))
    until(lambda: not front_ends[0].names())
    with pytest.raises(EngineDeadError, match="instance one does not get on"):
        front_ends[0].ask("b")
    hanging.loop.may_go_on.set()
    assert asked.done() == (0,)
