# SPDX-License-Identifier: Apache-2.0
"""The loop between its inbox and the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from moe_lora.config import EngineConfig
from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.messages import (
    Call,
    Dead,
    Event,
    Generate,
    Inbox,
    Outputs,
    Pulse,
    Reply,
    Stop,
)
from moe_lora.engine.core import EngineCore
from moe_lora.engine.loop import EngineLoop
from tests.virtual_clock import VirtualClock

DEMO = Path(__file__).parents[2] / "demo"
CONFIG = EngineConfig(model_dir=str(DEMO / "model"), eager=True, max_num_seqs=2, num_threads=1)


def ask(request_id: str, max_tokens: int) -> Generate:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Generate(GenerateRequest(request_id=request_id, prompt_token_ids=(1, 40, 41), sampling=sampling))


class SlowSteps:
    """A core whose steps take 2 s of the clock, and which is sent a request in the midst of the first."""

    def __init__(self, core: EngineCore, clock: VirtualClock, inbox: Inbox, late: Generate) -> None:
        self._core, self._clock, self._inbox = core, clock, inbox
        self._to_send = [late]
        self.stuck_s: list[float] = []
        self.pulse = Pulse(clock)

    def __getattr__(self, name: str):
        return getattr(self._core, name)

    def step(self):
        outputs = self._core.step()
        self._clock.advance(0.5)
        if self._to_send:
            self._inbox.put(self._to_send.pop())
        self._clock.advance(1.5)
        self.stuck_s.append(self.pulse.stuck_s())
        return outputs


@pytest.fixture
def clock(monkeypatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr("moe_lora.engine.build.WallClock", lambda: clock)
    return clock


def test_wait_for_the_step_under_way_is_queueing(clock):
    inbox = Inbox(clock)
    core = SlowSteps(build_engine(CONFIG), clock, inbox, ask("late", max_tokens=3))
    timings = {}

    def emit(event: Event) -> None:
        assert isinstance(event, Outputs), event
        timings.update({one.request_id: one.timing for one in event.outputs if one.timing is not None})
        if len(timings) == 2:
            inbox.put(Stop())

    loop = EngineLoop(core, emit, inbox)
    core.pulse = loop.pulse
    inbox.put(ask("first", max_tokens=6))
    loop.run()
    late = timings["late"]
    assert (late.queue_s, late.first_decode_s) == (1.5, 2.0)
    assert late.decode_ttft_s == 3.5
    assert timings["first"].queue_s == 0.0
    # Each step counts from its own beginning.
    assert set(core.stuck_s) == {2.0}


def test_beats_tell_while_an_adapter_finds_no_place(clock):
    """One slot: the second adapter waits until the first one's request has ended."""
    inbox = Inbox(clock)
    adapters = tuple((path.name, str(path)) for path in sorted((DEMO / "adapters").iterdir()))[:2]
    core = build_engine(replace(CONFIG, adapters=adapters, max_loras=1))
    told: dict[str, set[bool]] = {}

    def emit(event: Event) -> None:
        assert isinstance(event, Outputs), event
        for output in event.outputs:
            told.setdefault(output.request_id, set()).add(loop.pulse.held_back)
            if (output.request_id, output.finish_reason) == ("second", "length"):
                inbox.put(Stop())

    loop = EngineLoop(core, emit, inbox)
    for request_id, (name, _) in zip(("first", "second"), adapters, strict=True):
        inbox.put(Generate(replace(ask(request_id, max_tokens=6).request, adapter=name)))
    loop.run()
    assert True in told["first"]
    assert told["second"] == {False}, "nobody waits any more"


def test_steps_are_counted_by_their_tokens():
    core = build_engine(CONFIG)
    core.add_request(ask("one", max_tokens=6).request)
    while core.has_work:
        core.step()
    stats = core.stats()
    core.close()
    assert stats.step_tokens == 3 + 6, "of the prompt and of the answer"
    assert sum(stats.step_counts) == stats.num_steps == 6
    assert stats.step_counts[:2] == (5, 1)


def test_a_verb_that_finds_a_rank_dead_ends_the_engine(monkeypatch):
    inbox, core = Inbox(), build_engine(CONFIG)
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        inbox.put(lambda: inbox.put(Stop()))

    error = EngineDeadError("rank 1 is gone")
    monkeypatch.setattr(core, "remove_adapter", Mock(side_effect=error))
    loop = EngineLoop(core, emit, inbox)
    inbox.put(Call(1, "unload_adapter", ("a",)))
    loop.run()
    assert events == [Reply(1, error=error), Dead(error)]
