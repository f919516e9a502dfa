# SPDX-License-Identifier: Apache-2.0
"""When an engine is drained, brought back and given up, on a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from moe_lora.core.errors import EngineDeadError
from moe_lora.dist.cluster.health import HealthMonitor
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.engine.client.messages import Beat, DrainOrder, Hearing, Heartbeat, Pulse
from tests.virtual_clock import VirtualClock

from .fleet_parts import CountingEngine


class Engine(CountingEngine):
    """Beats as the script says.  script: what happens at each look, on its way to the end."""

    def __init__(self, clock: VirtualClock, script: list[Callable[[], Any]]) -> None:
        super().__init__()
        self.hearing = Hearing(clock)
        self.on_beat: Callable[[Beat], None] = lambda beat: None
        self.ended = asyncio.Event()
        self.failed: list[Exception] = []
        self._script = script

    async def wait(self, timeout_s: float) -> bool:
        """In place of the wait for the end: the next of the script, and whether it is over."""
        if self._script and (waited := self._script.pop(0)()) is not None:
            await waited
        return not self._script

    def fail_all(self, error: Exception) -> None:
        self.failed.append(error)


class Watched:
    """An engine that is in routing, watched while the clock goes on by the script's steps."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.script: list[Callable[[], Any]] = []
        self.engine = Engine(self.clock, self.script)
        self.instance_registry = InstanceRegistry(
            [self.engine], heartbeat=Heartbeat(timeout_s=5.0, dead_s=30.0)
        )
        self.instance = self.instance_registry.instances[0]
        self.instance.incarnation = "the same"
        self.seen: list[tuple[bool, bool]] = []
        self.num_given_up = 0
        self.unheard_s: list[float] = []
        self.instance_registry.on_unheard = lambda _: self.unheard_s.append(self.clock.now_s())
        self.came = asyncio.Event()

    def pass_s(self, *steps_s: float, beat: Beat | None = None) -> None:
        """Let time go by; then perhaps a beat comes; then note whether it is (live, silent)."""

        def step(step_s: float) -> None:
            self.seen.append((self.instance.live, self.instance.silent))
            self.clock.advance(step_s)
            if beat is not None:
                self.engine.hearing.hear(beat)
                self.engine.on_beat(beat)

        self.script += [lambda step_s=step_s: step(step_s) for step_s in steps_s]

    def run(self, come: Callable[[], Awaitable[None]] | None = None) -> None:
        def give_up() -> None:
            self.num_given_up += 1

        self.script.append(lambda: None)
        client: Any = self.engine
        health = HealthMonitor(
            self.instance_registry,
            self.instance,
            client,
            come or self._come,
            give_up,
            self.clock,
            self.engine.wait,
        )
        asyncio.run(health.run())

    async def _come(self) -> None:
        await self.instance_registry.join(self.instance, self.engine, {}, set(), "the same")
        self.came.set()


LIVE, SILENT = (True, False), (False, True)


def test_engine_that_beats_stays():
    watched = Watched()
    watched.pass_s(*[1.0] * 60, beat=Beat())
    watched.run()
    assert set(watched.seen) == {LIVE}
    assert watched.engine.failed == []


def test_engine_that_says_nothing_is_drained_and_then_given_up(caplog):
    watched = Watched()
    watched.pass_s(*[1.0] * 32)
    watched.run()
    assert watched.seen == [LIVE] * 5 + [SILENT] * 27
    assert watched.unheard_s == [float(second) for second in range(5, 30)]
    assert watched.num_given_up == 3
    assert len(watched.engine.failed) == 25
    assert "give heartbeat_dead_s more" in caplog.text


def test_what_a_drained_engine_still_has_is_moved_again_and_again():
    watched = Watched()
    registry, moved_s = watched.instance_registry, []
    watched.pass_s(*[1.0] * 8, beat=Beat())
    watched.script.append(lambda: registry.drains.follow({"0": DrainOrder(True, 1)}, ()))
    registry.on_drain = lambda _: moved_s.append(watched.clock.now_s())
    watched.pass_s(*[1.0] * 11, beat=Beat())
    watched.run()
    assert moved_s == [8.0, 8.0, 13.0, 18.0]


def test_engine_that_says_it_hangs_is_silent_all_the_same():
    watched = Watched()
    for second in range(8):
        watched.pass_s(1.0, beat=Beat(stuck_s=second + 1.0))
    watched.run()
    assert watched.seen == [LIVE] * 5 + [SILENT] * 3
    assert watched.unheard_s == []  # its process is there, at one step


def test_engine_that_beats_again_is_brought_back():
    watched = Watched()
    watched.pass_s(*[1.0] * 7)
    watched.pass_s(1.0, beat=Beat())
    watched.script += [lambda: None, watched.came.wait]
    watched.pass_s(0.0)
    watched.run()
    assert watched.seen[-3:] == [SILENT, SILENT, LIVE]
    assert watched.instance.num_restarts == 0


def test_front_end_that_stood_still_takes_nobody_for_silent():
    watched = Watched()
    watched.pass_s(100.0, 1.0, 1.0)
    watched.run()
    assert set(watched.seen) == {LIVE}
    assert watched.num_given_up == 0


def test_engine_that_can_not_be_brought_is_given_up():
    watched = Watched()
    watched.instance.live = False
    tried = asyncio.Event()

    async def come() -> None:
        tried.set()
        raise EngineDeadError("it left")

    watched.script.append(tried.wait)
    watched.run(come)
    assert watched.num_given_up >= 1


def test_a_beat_tells_the_router_what_others_ask_of_the_engine():
    watched = Watched()
    watched.pass_s(1.0, beat=Beat(num_running=2, num_waiting=1, outstanding_tokens=70, held_back=True))
    watched.instance.outstanding_tokens = 30
    watched.run()
    assert watched.instance.outstanding_tokens == 100
    assert watched.instance.load.num_requests == 3
    assert watched.instance.load.held_back


def test_pulse_counts_from_the_beginning_of_the_work_under_way():
    clock = VirtualClock()
    pulse = Pulse(clock)
    clock.advance(3.0)
    assert pulse.stuck_s() == 0.0
    pulse.work()
    clock.advance(2.0)
    assert pulse.stuck_s() == 2.0
    pulse.work()
    assert pulse.stuck_s() == 0.0
    clock.advance(2.0)
    pulse.rest()
    assert pulse.stuck_s() == 0.0
