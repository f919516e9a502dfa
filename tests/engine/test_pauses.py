# SPDX-License-Identifier: Apache-2.0
"""Pauses of one engine: covered requests, versions across a pause, and the ways to its end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_lora import LLM, SamplingParams
from moe_lora.core.composed import Part, name_of, path_of
from moe_lora.core.request import BACKGROUND, GenerateRequest, TokenOutput
from moe_lora.engine.client.messages import PauseScope
from moe_lora.engine.step.grammar_masks import Grammars
from moe_lora.engine.text.grammars import json_grammar
from tests.patience import PATIENCE_S

DEMO = Path(__file__).parents[2] / "demo"
UPPER, REVERSE = (str(DEMO / "adapters" / name) for name in ("upper", "reverse"))
ALL = PauseScope()
LONG = 40


@pytest.fixture
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {"eager": True, "num_threads": 1, "max_num_seqs": 4}
    with LLM(str(DEMO / "model"), adapters={"policy": UPPER, "other": REVERSE}, **settings) as engine:
        yield engine


class Stream:
    """The outputs of one request.  gated: the engine's thread waits in the first output until a pause."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        adapter: str | None = None,
        tenant: str = "",
        tokens: int = LONG,
        gated: bool = False,
        **fields: Any,
    ) -> None:
        sampling = {name: fields.pop(name) for name in ("grammar", "on_publish") if name in fields}
        self.request = GenerateRequest(
            request_id=name,
            prompt_token_ids=(1, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55),
            sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **sampling),
            adapter=adapter,
            tenant=tenant,
            **fields,
        )
        self.outputs: list[TokenOutput] = []
        self._arrived: queue.SimpleQueue[TokenOutput | Exception] = queue.SimpleQueue()
        self.gate = threading.Event()
        if not gated:
            self.gate.set()
        llm.client.submit(self.request, self._put)

    def _put(self, item: TokenOutput | Exception) -> None:
        self._arrived.put(item)
        self.gate.wait(PATIENCE_S)

    def get(self) -> TokenOutput:
        found = self._arrived.get(timeout=PATIENCE_S)
        if isinstance(found, Exception):
            raise found
        self.outputs.append(found)
        return found

    def rest(self) -> str | None:
        while not (self.outputs and self.outputs[-1].finish_reason):
            self.get()
        return self.outputs[-1].finish_reason

    def received(self) -> int:
        """Tokens so far, without a wait."""
        while not self._arrived.empty():
            self.get()
        return len(self.tokens)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def versions(self) -> set[int | None]:
        return {output.adapter_version for output in self.outputs}


def call(llm: LLM, verb: str, *args: object) -> Any:
    return llm.client.start_call(verb, *args).result(timeout=PATIENCE_S)


def pause(llm: LLM, mode: str, *gated: Stream, scope: PauseScope = ALL, timeout_s: float = 600.0) -> None:
    """Pause after the first token of the gated streams."""
    for stream in gated:
        stream.get()
    asked = llm.client.start_call("pause_requests", scope, mode, timeout_s, False)
    for stream in gated:
        stream.gate.set()
    asked.result(timeout=PATIENCE_S)


def is_still(llm: LLM, *streams: Stream) -> bool:
    """True if no stream gains a token between calls of the engine."""
    before = [stream.received() for stream in streams]
    for _ in range(5):
        call(llm, "stats")
    return before == [stream.received() for stream in streams]


def test_kept_answers_go_on_by_their_version_and_delayed_ones_get_the_next(llm):
    alone = Stream(llm, "alone", "policy")
    alone.rest()
    running = Stream(llm, "running", "policy", gated=True)
    pause(llm, "keep", running)
    late = Stream(llm, "late", "policy")
    assert is_still(llm, running, late)
    assert running.received() < LONG
    assert (call(llm, "stats").num_waiting, call(llm, "stats").num_deferred) == (1, 1)
    llm.publish_adapter("policy", REVERSE)
    call(llm, "resume_requests", None)
    assert (running.rest(), late.rest()) == ("length", "length")
    assert running.tokens == alone.tokens
    assert running.versions == {1}
    assert late.versions == {2}
    fresh = Stream(llm, "fresh", "other")
    fresh.rest()
    assert late.tokens == fresh.tokens, "the new version has the other adapter's content"
    assert late.tokens != alone.tokens


def test_history_of_one_version_is_not_read_by_the_next(llm):
    """Prefix from one policy version, decode from the next: never, with the cache full of the prefix."""
    first = Stream(llm, "first", "policy")
    first.rest()
    again = Stream(llm, "again", "policy", tokens=4)
    again.rest()
    assert again.outputs[0].num_cached_tokens > 0
    pause(llm, "keep")
    llm.publish_adapter("policy", REVERSE)
    call(llm, "resume_requests", None)
    late, fresh = Stream(llm, "late", "policy"), Stream(llm, "fresh", "other")
    late.rest()
    fresh.rest()
    assert late.outputs[0].num_cached_tokens == 0
    assert late.tokens == fresh.tokens


def test_waiting_requests_of_a_keep_get_the_next_version(llm):
    pause(llm, "keep")
    running = [Stream(llm, str(number), "policy", gated=not number) for number in range(4)]
    queued = Stream(llm, "queued", "policy", tokens=3)  # max_num_seqs is 4
    call(llm, "resume_requests", None)
    pause(llm, "keep", running[0])
    llm.publish_adapter("policy", REVERSE)
    call(llm, "resume_requests", "")
    assert queued.rest() == "length"
    assert queued.versions == {2}
    assert {stream.rest() for stream in running} == {"length"}
    assert all(stream.versions == {1} for stream in running)


def test_a_moved_request_without_a_step_is_held(llm):
    running = Stream(llm, "running", "policy", gated=True)
    running.get()
    moved = Stream(llm, "moved", "policy", held=True)
    arrived = llm.client.start_call("resume_request", "moved", [], 0, 0, False)
    paused = llm.client.start_call("pause_requests", ALL, "keep", 600.0, False)
    running.gate.set()
    arrived.result(timeout=PATIENCE_S)
    paused.result(timeout=PATIENCE_S)
    assert is_still(llm, moved)
    call(llm, "resume_requests", None)
    assert (running.rest(), moved.rest()) == ("length", "length")
    assert moved.tokens == running.tokens


def test_a_paused_request_is_not_reported_as_held_for_a_move(llm):
    paused, moved = Stream(llm, "paused", gated=True), Stream(llm, "moved")
    pause(llm, "keep", paused)
    call(llm, "hold_request", "moved", 0)
    assert {load.name: load.held for load in call(llm, "request_loads")} == {"paused": False, "moved": True}
    call(llm, "resume_request", "moved", [], 0, 0, False)
    assert {load.held for load in call(llm, "request_loads")} == {False}
    call(llm, "resume_requests", None)
    assert (paused.rest(), moved.rest()) == ("length", "length")


def test_a_paused_batch_is_no_waiting_request(llm):
    pause(llm, "keep")
    late = [Stream(llm, f"{priority}", tokens=2, priority=priority) for priority in (0, BACKGROUND)]
    assert is_still(llm, *late)
    found = call(llm, "stats")
    assert (found.num_waiting, found.num_deferred, found.num_background) == (1, 1, 1)
    call(llm, "resume_requests", None)
    assert [one.rest() for one in late] == ["length", "length"]


def test_abort_ends_covered_answers_with_their_version(llm):
    running = Stream(llm, "running", "policy", gated=True)
    pause(llm, "abort", running)
    late = Stream(llm, "late")
    assert running.rest() == "abort"
    assert running.versions == {1}
    assert is_still(llm, late)
    call(llm, "abort_requests", ALL)
    assert late.rest() == "abort"
    assert call(llm, "stats").num_waiting == 0


def test_a_keep_after_an_abort_pause_goes_on_with_the_delayed_requests(llm):
    pause(llm, "abort")
    late = Stream(llm, "late", tokens=2)
    pause(llm, "keep")
    assert is_still(llm, late)
    call(llm, "resume_requests", None)
    assert late.rest() == "length"


@pytest.mark.parametrize("verb", ["abort_requests", "pause_requests"])
def test_abort_ends_requests_that_wait_for_a_grammar(llm, monkeypatch, verb):
    compiled = threading.Event()
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: compiled.wait(PATIENCE_S))
    asked = Stream(llm, "asked", "policy", grammar=json_grammar({"type": "object"}))
    call(llm, verb, *([ALL] if verb == "abort_requests" else [ALL, "abort", 600.0]))
    assert asked.rest() == "abort"
    compiled.set()
    assert call(llm, "stats").num_waiting == 0


def test_wait_returns_after_the_last_running_answer(llm):
    running = Stream(llm, "running", "policy", gated=True)
    pause(llm, "wait", running)
    assert running.received() == LONG
    late = Stream(llm, "late", tokens=2)
    assert is_still(llm, late)
    call(llm, "resume_requests", None)
    assert late.rest() == "length"


def test_a_repeated_wait_leaves_the_first_waiting_for_the_last_answer(llm):
    running, known = Stream(llm, "running", "policy", gated=True), []
    waits = [llm.client.start_call("pause_requests", ALL, "wait", 600.0) for _ in range(2)]
    for one in waits:
        one.add_done_callback(lambda _: known.append(running.received()))
    running.gate.set()
    for one in waits:
        one.result(timeout=PATIENCE_S)
    assert known == [LONG, LONG]


def test_a_wait_that_a_resume_ended_is_not_given_by_the_next_pause(llm):
    running = Stream(llm, "running", "policy", gated=True)
    ended = llm.client.start_call("pause_requests", ALL, "wait", 600.0)
    llm.client.start_call("resume_requests", "")
    later = llm.client.start_call("pause_requests", ALL, "wait", 600.0)
    running.gate.set()
    with pytest.raises(TimeoutError, match="a resume ended the pause before the last running request"):
        ended.result(timeout=PATIENCE_S)
    later.result(timeout=PATIENCE_S)
    assert running.received() == LONG


def test_the_rest_of_an_answer_goes_on_under_wait(llm):
    alone = Stream(llm, "alone", "policy")
    alone.rest()
    pause(llm, "wait")
    rest = Stream(llm, "rest", "policy", generated=tuple(alone.tokens[:5]))
    assert rest.rest() == "length"
    assert rest.tokens == alone.tokens[5:]
    pause(llm, "keep")
    again = Stream(llm, "again", "policy", generated=tuple(alone.tokens[:5]))
    assert is_still(llm, again)


def test_a_client_leaves_a_delayed_request(llm):
    pause(llm, "keep")
    late = Stream(llm, "late", tokens=2)
    assert is_still(llm, late)
    llm.client.abort_now("late")
    assert call(llm, "stats").num_waiting == 0
    call(llm, "resume_requests", None)
    assert late.received() == 0


def test_a_pause_of_a_tenant_covers_its_adapters_alone(llm):
    scope = PauseScope("key", "ours", ("pol*",))
    ours = Stream(llm, "ours", "policy", "ours", gated=True)
    theirs = Stream(llm, "theirs", "policy", "theirs")
    base, other = Stream(llm, "base", None, "ours"), Stream(llm, "other", "other", "ours")
    pause(llm, "keep", ours, scope=scope)
    assert {one.rest() for one in (theirs, base, other)} == {"length"}
    assert is_still(llm, ours)
    pause(llm, "keep")
    call(llm, "resume_requests", "key")
    assert is_still(llm, ours), "the full pause still covers the request"
    assert call(llm, "paused_scopes") == [ALL]
    call(llm, "resume_requests", "")
    assert ours.rest() == "length"


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_pause_of_a_tenant_covers_weighted_sums_of_its_adapters(llm, mode):
    found = {one.name: one for one in call(llm, "list_adapters")}
    parts = [Part(name, found[name].path, found[name].content_hash, 0.5) for name in ("other", "policy")]
    name = name_of(parts)
    call(llm, "load_adapter", name, path_of(parts))
    ours = Stream(llm, "ours", name, "ours", gated=True)
    theirs = Stream(llm, "theirs", name, "theirs")
    pause(llm, mode, ours, scope=PauseScope("key", "ours", ("pol*",)))
    assert theirs.rest() == "length"
    late = Stream(llm, "late", name, "ours")
    assert is_still(llm, ours, late)
    assert not late.tokens
    call(llm, "resume_requests", "key")
    assert (ours.rest(), late.rest()) == ("abort" if mode == "abort" else "length", "length")


def test_a_pause_ends_by_itself(llm):
    running = Stream(llm, "running", "policy", gated=True)
    pause(llm, "keep", running, timeout_s=0.2)
    late = Stream(llm, "late", tokens=2)
    assert (running.rest(), late.rest()) == ("length", "length")
    assert call(llm, "paused_scopes") == []


def test_wait_says_that_the_pause_ended_before_the_last_answer(llm):
    running = Stream(llm, "running", "policy", gated=True)
    pause(llm, "keep", running, scope=PauseScope("other"))
    with pytest.raises(TimeoutError, match=r"the pause ended after 0.1 s, before the last running request"):
        pause(llm, "wait", timeout_s=0.1)
    waiting = llm.client.start_call("pause_requests", ALL, "wait", 600.0, False)
    call(llm, "resume_requests", "")
    with pytest.raises(TimeoutError, match="a resume ended the pause before the last running request"):
        waiting.result(timeout=PATIENCE_S)
    call(llm, "resume_requests", None)
    assert running.rest() == "length"


def test_a_cleared_cache_has_no_prefix_and_running_answers_keep_theirs(llm):
    first = Stream(llm, "first", "policy")
    first.rest()
    running = Stream(llm, "running", "policy", gated=True)
    pause(llm, "keep", running)
    call(llm, "pause_requests", ALL, "keep", 600.0, True)
    call(llm, "resume_requests", None)
    assert running.rest() == "length"
    assert running.tokens == first.tokens
    call(llm, "clear_cache")
    late = Stream(llm, "late", "policy", tokens=2)
    late.rest()
    assert late.outputs[0].num_cached_tokens == 0
