# SPDX-License-Identifier: Apache-2.0
"""Rows within a grammar beside others: slow masks, slow grammars, moves; rows without an allowed token."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_lora import LLM
from moe_lora.config import EngineConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.engine.build import build_engine
from moe_lora.engine.client.messages import (
    Call,
    Event,
    Generate,
    Inbox,
    Outputs,
    PauseScope,
    Rejected,
    Reply,
    Stop,
)
from moe_lora.engine.core import EngineCore
from moe_lora.engine.loop import EngineLoop
from moe_lora.engine.step import grammar_masks
from moe_lora.engine.text.grammars import regex_grammar
from tests.grids import with_quick
from tests.patience import PATIENCE_S

DEMO = Path(__file__).parents[3] / "demo"
CONFIG = EngineConfig(model_dir=str(DEMO / "model"), eager=True, max_num_seqs=4, num_threads=1)
PROMPT = (1, 40, 41)


@pytest.fixture(params=with_quick(("off", "on"), ("on",)))
def core(request) -> Iterator[EngineCore]:
    engine = build_engine(EngineConfig(**{**vars(CONFIG), "async_scheduling": request.param}))
    yield engine
    engine.close()


def ask(name: str, **sampling: Any) -> GenerateRequest:
    given = {"max_tokens": 12, "temperature": 1.5, "seed": 3, **sampling}
    return GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling=SamplingParams(**given))


def step(core: EngineCore, answers: dict[str, list[int]], num: float = math.inf) -> None:
    """Up to `num` steps.  answers: gains the tokens."""
    while core.has_work and num > 0:
        num -= 1
        for output in core.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)


class Gate(grammar_masks.Follower):
    """Masks wait for `opened`."""

    opened = threading.Event()

    def advance(self, tokens):
        assert self.opened.wait(PATIENCE_S)
        return super().advance(tokens)


def test_others_go_on_while_a_mask_is_computed(core, monkeypatch):
    grammar = regex_grammar("[a-d]{9}")
    expected: dict[str, list[int]] = {}
    core.add_request(ask("within", grammar=grammar))
    step(core, expected)
    monkeypatch.setattr(grammar_masks, "Follower", Gate)
    Gate.opened.clear()
    answers: dict[str, list[int]] = {}
    core.sampler.grammars.compile(grammar).result(PATIENCE_S)
    core.add_request(ask("within", grammar=grammar))
    core.add_request(ask("plain", ignore_eos=True))
    step(core, answers, 40)
    assert len(answers["plain"]) == 12
    assert not answers.get("within")
    assert core.stalled, "the loop waits for an event"
    assert core._moves is None, "no request moves"
    Gate.opened.set()
    step(core, answers)
    assert answers["within"] == expected["within"]


def test_the_loop_wakes_after_a_slow_mask(monkeypatch):
    monkeypatch.setattr(grammar_masks, "Follower", Gate)
    Gate.opened.clear()
    inbox, tokens, ended = Inbox(), [], threading.Event()

    def emit(event: Event) -> None:
        assert isinstance(event, Outputs), event
        for output in event.outputs:
            tokens.extend(output.token_ids)
            if output.finish_reason is not None:
                ended.set()

    loop = EngineLoop(build_engine(CONFIG), emit, inbox)
    loop.start()
    inbox.put(Generate(ask("within", grammar=regex_grammar("abc"))))
    threading.Timer(0.3, Gate.opened.set).start()
    assert ended.wait(PATIENCE_S)
    inbox.put(Stop())
    loop.join(PATIENCE_S)
    assert len(tokens) == 4


@pytest.fixture
def patient(monkeypatch) -> None:
    """All masks come soon."""
    for name in ("SOON_S", "ALL_SOON_S"):
        monkeypatch.setattr(grammar_masks, name, PATIENCE_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("pattern", ["[ab](xyz|xyw)[0-9]", "yes|no", "[a-d]{3}(xyz){3}", "(ab){40}"])
def test_tokens_without_an_alternative_need_no_step(core, pattern):
    """A report of each token's step, here log probabilities, asks for all steps."""
    found = []
    for fields in ({"logprobs": 0}, {}):
        answers: dict[str, list[int]] = {}
        before, counted = core.stats().num_steps, core.stats().step_tokens
        core.add_request(ask("within", grammar=regex_grammar(pattern), max_tokens=20, **fields))
        core.add_request(ask("upper", temperature=0.0, max_tokens=3))
        step(core, answers)
        found.append((answers, core.stats().step_tokens - counted, core.stats().num_steps - before))
    [(expected, all_counted, all_steps), (reached, counted, steps)] = found
    assert reached == expected
    assert abs(counted - all_counted) <= 1  # the first mask comes before the prompt's last token or after
    assert steps < all_steps
    if pattern == "(ab){40}":  # the prompt's step, and those of the other request
        assert steps <= 4 + core.sampler.ahead
    assert core.stats().num_running == 0


@pytest.mark.usefixtures("patient")
def test_tokens_without_a_step_count_for_their_tenant(core):
    fields = {"grammar": regex_grammar("(ab){40}"), "max_tokens": 20}
    for tenant, report in (("first", {"logprobs": 0}), ("second", {})):
        core.add_request(replace(ask(tenant, **fields, **report), tenant=tenant))
    step(core, {})
    counters = core._scheduler.tenants.counter.counters
    assert counters["first"] == counters["second"] > 20


def test_a_step_waits_for_few_tokens_without_an_alternative(core, patient, monkeypatch):
    monkeypatch.setattr(grammar_masks, "ALL_SOON_S", 0.0)
    core.add_request(ask("within", grammar=regex_grammar("(ab){40}"), max_tokens=20))
    step(core, {})
    assert core.stats().num_steps >= 20


def test_a_pause_holds_a_request_whose_slow_mask_is_computed(monkeypatch):
    monkeypatch.setattr(grammar_masks, "Follower", Gate)
    Gate.opened.clear()
    inbox, paused = Inbox(), threading.Event()

    def emit(event: Event) -> None:
        if isinstance(event, Reply):
            paused.set()
        elif isinstance(event, Outputs) and event.outputs[-1].finish_reason is not None:
            inbox.put(Call(1, "pause_requests", (PauseScope(owner="trainer"), "keep", PATIENCE_S)))

    core, grammar = build_engine(CONFIG), regex_grammar("[a-d]{9}")
    core.sampler.grammars.compile(grammar).result(PATIENCE_S)  # else the request starts later
    loop = EngineLoop(core, emit, inbox)
    inbox.put(Generate(ask("within", grammar=grammar)))
    inbox.put(Generate(ask("plain", max_tokens=2)))
    loop.start()
    assert paused.wait(PATIENCE_S)
    assert loop._engine.pauses.held == {"within"}
    Gate.opened.set()
    inbox.put(Stop())
    loop.join(PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_tokens_without_an_alternative_equal_those_of_steps_beside_adapters_and_preemption():
    """Chunks of several tokens follow a jump; the arena is too small for all."""
    sampling = [
        ask("", grammar=regex_grammar("([ab]xyz){9}[0-9]{3}"), seed=seed, max_tokens=60, **fields).sampling
        for seed in range(6)
        for fields in ({}, {"logprobs": 0})
    ]
    small = {"eager": True, "num_threads": 1, "dtype": "float32", "arena_mb": 1, "max_model_len": 128}
    with LLM(str(DEMO / "model"), adapters={"upper": str(DEMO / "adapters" / "upper")}, **small) as llm:
        adapters = [None, None, "upper", "upper"] * 3
        found = [one.token_ids for one in llm.generate(["hello"] * 12, adapters, sampling)]
        assert llm.stats().num_preemptions
    assert found[::2] == found[1::2]
    assert all(len(one) == 40 for one in found)


def test_a_grammar_that_compiles_for_long_stops_no_mask(core):
    answers: dict[str, list[int]] = {}
    held, going = threading.Event(), threading.Event()

    def compile_for_long() -> None:
        going.set()
        held.wait(PATIENCE_S)

    core.sampler.grammars.compile(regex_grammar("[a-d]{9}")).result(PATIENCE_S)
    core.sampler.grammars._compiler.submit(compile_for_long)
    assert going.wait(PATIENCE_S)
    core.add_request(ask("within", grammar=regex_grammar("[a-d]{9}")))
    step(core, answers)
    held.set()
    assert len(answers["within"]) == 10


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_a_request_that_moves_goes_on_within_its_grammar(core, cut):
    request = ask("within", grammar=regex_grammar("([a-d][0-9]){5}"))
    whole: dict[str, list[int]] = {}
    core.add_request(request)
    step(core, whole)
    tokens = tuple(whole["within"])
    moved = GenerateRequest(
        request_id="moved",
        prompt_token_ids=PROMPT,
        sampling=request.sampling,
        generated=tokens[:cut],
        held=True,
    )
    answers: dict[str, list[int]] = {}
    core.add_request(moved)
    while "moved" not in answers:  # the sign of a ready request
        step(core, answers, 1)
    core.moves.resume("moved", tokens[cut : cut + 3], 0, 0, False)
    step(core, answers)
    assert (*tokens[: cut + 3], *answers["moved"]) == tokens


@pytest.mark.parametrize(
    "edits",
    [
        {"allowed_token_ids": (50,), "bad_word_ids": ((50,),)},
        {"allowed_token_ids": (2,), "min_tokens": 3},
        {"allowed_token_ids": (60,), "grammar": regex_grammar("abc")},
    ],
    ids=["bad", "ends", "grammar"],
)
def test_edits_that_leave_no_token_end_their_request_alone(core, edits):
    plain = ask("plain", ignore_eos=True)
    core.add_request(plain)
    alone: dict[str, list[int]] = {}
    step(core, alone)
    core.add_request(ask("none", **edits))
    core.add_request(plain)
    answers, ends = {}, {}
    while core.has_work:
        for output in core.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = (output.finish_reason, output.error)
    assert ends["none"][0] == "error"
    assert ends["none"][1].startswith("no token can follow: ")
    assert (answers["plain"], ends["plain"]) == (alone["plain"], ("length", None))


def test_a_failing_compiler_rejects_its_request_alone(monkeypatch):
    def broken(*_: object) -> Future:
        raise RuntimeError("no thread")

    monkeypatch.setattr(grammar_masks.Grammars, "compile", broken)
    inbox, events = Inbox(), []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, Outputs) and event.outputs[-1].finish_reason is not None:
            inbox.put(Stop())

    loop = EngineLoop(build_engine(CONFIG), emit, inbox)
    inbox.put(Generate(ask("within", grammar="start: x")))
    inbox.put(Generate(ask("plain", max_tokens=2)))
    loop.run()
    rejected = [one for one in events if isinstance(one, Rejected)]
    assert [one.request_id for one in rejected] == ["within"]
    assert events[-1].outputs[-1].request_id == "plain"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel": 2}, pytest.param({"expert_parallel": 2}, marks=pytest.mark.slow)], ids=str
)
def test_edits_and_grammars_of_several_ranks_are_those_of_one(ranks):
    edits = [
        {"grammar": regex_grammar("([a-d]xyz[0-9]){5}")},
        {"grammar": regex_grammar("[^a-x]+"), "bad_word_ids": ((60,),)},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {40: 5.0}},
        {"allowed_token_ids": (50, 51, 52)},
        {},
    ]
    sampling = [ask("", **one).sampling for one in edits]
    adapters = [None, "upper", "upper", None, "upper"]
    found = []
    for settings in ({}, ranks):
        with LLM(
            str(DEMO / "model"),
            adapters={"upper": str(DEMO / "adapters" / "upper")},
            **{"eager": True, "num_threads": 1, "dtype": "float32", **settings},
        ) as llm:
            found.append([one.token_ids for one in llm.generate(["hello"] * 5, adapters, sampling)])
    assert found[0] == found[1]
