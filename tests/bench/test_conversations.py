# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cache.conversations import DialogueShape, dialogues, mooncake_chats
from moe_lora.workload.popularity.popularity import uniform
from moe_lora.workload.traces.records import Trace, TraceRequest
from moe_lora.workload.traces.traces import read_trace

SHAPE = DialogueShape(
    prefix_tokens=20, turns=4, question_tokens=30, answer_tokens=20, think_s=3.0, max_tokens=400
)
SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
ADAPTERS = uniform(["a", "b", "c"])


def asked(shape=SHAPE, **changes):
    return dialogues(shape, ADAPTERS, **{"rate_per_s": 5.0, "duration_s": 200.0} | changes)


def by_dialogue(requests, shape=SHAPE):
    found = defaultdict(list)
    for request in requests:
        found[request.prompt[shape.prefix_tokens]].append(request)
    return found.values()


def test_a_turn_repeats_all_that_was_said():
    for turns in by_dialogue(asked()):
        for before, after in pairwise(turns):
            said = before.prompt + before.answer
            assert after.prompt[: len(said)] == said
            assert after.adapter == before.adapter
            assert after.arrival_s - before.arrival_s >= SHAPE.think_s / 2


def test_prompts_of_an_adapter_begin_alike_and_of_two_do_not():
    prefixes = {request.adapter: request.prompt[: SHAPE.prefix_tokens] for request in asked()}
    assert set(prefixes) == {"a", "b", "c"}
    assert len(set(prefixes.values())) == 3
    for request in asked():
        assert request.prompt[: SHAPE.prefix_tokens] == prefixes[request.adapter]


@settings(max_examples=30, deadline=None)
@given(
    turns=st.floats(1, 20),
    question=st.floats(1, 300),
    answer=st.floats(1, 300),
    max_tokens=st.integers(40, 500),
    seed=st.integers(0, 1000),
)
def test_no_request_is_longer_than_allowed_or_without_answer(turns, question, answer, max_tokens, seed):
    shape = DialogueShape(
        prefix_tokens=10,
        turns=turns,
        question_tokens=question,
        answer_tokens=answer,
        think_s=1.0,
        max_tokens=max_tokens,
    )
    requests = asked(shape, duration_s=20.0, seed=seed)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert [request.index for request in requests] == list(range(len(requests)))
    for request in requests:
        assert request.answer
        assert len(request.prompt) + len(request.answer) <= max_tokens


def test_rate_is_that_of_requests_once_dialogues_have_ended():
    late = [request for request in asked(duration_s=1000.0) if request.arrival_s > 100]
    assert len(late) / 900 == pytest.approx(5.0, rel=0.1)


def test_mean_lengths_are_those_of_the_shape():
    shape = DialogueShape(prefix_tokens=0, turns=1, question_tokens=40, answer_tokens=25, think_s=1.0)
    requests = asked(shape, duration_s=1000.0)
    assert np.mean([len(request.prompt) for request in requests]) == pytest.approx(40, rel=0.05)
    assert np.mean([len(request.answer) for request in requests]) == pytest.approx(25, rel=0.05)


def test_equal_arguments_give_equal_requests():
    assert asked(seed=3) == asked(seed=3)
    assert asked(seed=3) != asked(seed=4)


def test_a_prefix_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match="prefix_tokens=399 leaves no room in 400"):
        DialogueShape(
            prefix_tokens=399, turns=1, question_tokens=1, answer_tokens=1, think_s=1, max_tokens=400
        )


def mooncake(*rows):
    requests = tuple(TraceRequest(arrival_s, length, 7, hash_ids=ids) for arrival_s, length, ids in rows)
    return Trace("trace", "mooncake", requests)


def test_mooncake_prompts_share_what_their_hash_ids_share():
    trace = mooncake((0.0, 1024, (1, 2)), (2.0, 1400, (1, 2, 3)), (4.0, 512, (9,)))
    first, second, other = mooncake_chats(trace, ADAPTERS, rate_per_s=4.0, block_tokens=32)
    assert [request.arrival_s for request in (first, second, other)] == [0.0, 0.25, 0.5]
    assert (len(first.prompt), len(second.prompt), len(other.prompt)) == (64, 88, 32)
    assert second.prompt[:64] == first.prompt
    assert second.adapter == first.adapter
    assert not set(other.prompt) & set(second.prompt)
    assert not set(first.answer) & (set(second.answer) | set(second.prompt))


def test_mooncake_prompts_are_cut_at_their_end():
    trace = mooncake((0.0, 4096, tuple(range(8))), (1.0, 512, (0,)))
    long, _ = mooncake_chats(trace, ADAPTERS, rate_per_s=1.0, max_prompt_tokens=50, max_answer_tokens=3)
    assert len(long.prompt) == 50
    assert len(long.answer) == 3


def test_a_trace_without_hash_ids_is_refused():
    trace = Trace("trace", "azure", (TraceRequest(0.0, 5, 5), TraceRequest(1.0, 5, 5)))
    with pytest.raises(ValueError, match="give a Mooncake trace"):
        mooncake_chats(trace, ADAPTERS, rate_per_s=1.0)


@pytest.mark.shared_data
def test_the_real_trace_repeats_half_of_its_tokens():
    path = SHARED / "mooncake_synthetic.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not there")
    seen: set[tuple[int, ...]] = set()
    shared = total = 0
    for request in mooncake_chats(read_trace(path), ADAPTERS, rate_per_s=4.0):
        blocks = [request.prompt[i : i + 32] for i in range(0, len(request.prompt) - 31, 32)]
        shared += sum(block in seen for block in blocks)
        total += len(blocks)
        seen.update(blocks)
    assert 0.4 < shared / total < 0.8
