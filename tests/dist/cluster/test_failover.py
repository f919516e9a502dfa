# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from moe_lora.core.request import GenerateRequest, RequestTiming, SamplingParams, TokenOutput, token_work
from moe_lora.dist.cluster.resumable_request import ResumableRequest

TIMING = RequestTiming(queue_s=0.5, adapter_load_s=0.0, prefill_s=0.25, first_decode_s=0.125)


def resumable(**sampling) -> ResumableRequest:
    params = SamplingParams(**{"max_tokens": 10, **sampling})
    request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=params, adapter="a")
    return ResumableRequest(request, 1, arrival_s=100.0)


def output(*token_ids: int, cached: int = 0, ends: bool = False) -> TokenOutput:
    return TokenOutput(
        request_id="r",
        token_ids=token_ids,
        finish_reason="length" if ends else None,
        num_cached_tokens=cached,
        timing=TIMING if ends else None,
    )


def test_request_of_which_nothing_was_delivered_is_sent_as_it_came():
    started = resumable(seed=3)
    assert started.continued() is started.request
    started.lose(101.0)
    assert started.continued() == replace(started.request, request_id="r~1")


def test_what_was_delivered_travels_beside_the_prompt_and_changes_nothing_else():
    started = resumable(min_tokens=4, stop=("x",), stop_token_ids=(9,), logprobs=2, seed=3)
    started.take(output(7, 8))
    started.take(output(9))
    started.lose(101.0)
    continued = started.continued("hash")
    assert (continued.prompt_token_ids, continued.generated) == ((1, 2), (7, 8, 9))
    assert continued.sampling == started.request.sampling
    assert (continued.request_id, continued.adapter) == ("r~1", "a")
    assert (continued.adapter_version, continued.adapter_content) == (1, "hash")


@given(st.lists(st.integers(0, 99), max_size=9), st.sets(st.integers(0, 9)))
def test_continued_request_has_all_tokens_however_often_it_was_cut(tokens, cuts):
    started = resumable()
    for place, token in enumerate(tokens):
        if place in cuts:
            started.lose(101.0)
        started.take(output(token))
    started.lose(101.0)
    continued = started.continued()
    assert continued.generated == tuple(tokens)
    assert continued.known_tokens == 2 + len(tokens)
    assert token_work(continued, 256) == 2 + 10


def test_outputs_of_an_undisturbed_request_are_passed_on_as_they_are():
    started, last = resumable(), output(7, cached=1, ends=True)
    assert started.take(last) is last


def test_cached_tokens_are_those_of_the_instance_that_delivered_first():
    started = resumable()
    started.take(output(7, cached=1))
    started.lose(103.0)
    assert started.take(output(8, cached=3)).num_cached_tokens == 1
    fresh = resumable()
    fresh.lose(103.0)
    assert [fresh.take(output(8, cached=2)).num_cached_tokens for _ in range(2)] == [2, 2]


def test_time_with_a_lost_instance_is_queueing_while_nothing_was_delivered():
    fresh = resumable()
    fresh.lose(103.0)
    assert fresh.take(output(7, ends=True)).timing.queue_s == 3.5
    cut = resumable()
    cut.take(output(7))
    cut.lose(103.0)
    assert cut.take(output(8, ends=True)).timing == TIMING


@pytest.mark.parametrize(("max_tokens", "work"), [(10, 12), (None, 64), (1000, 64)])
def test_work_is_the_prompt_and_the_longest_answer(max_tokens, work):
    assert token_work(resumable(max_tokens=max_tokens).request, 64) == work


def test_answer_goes_on_with_the_version_that_began_it_whatever_was_served_when_it_came():
    started = resumable()
    assert started.continued().adapter_version is None
    started.take(structs.replace(output(7), adapter_version=2))
    started.lose(101.0)
    assert started.continued().adapter_version == started.adapter_version == 2
