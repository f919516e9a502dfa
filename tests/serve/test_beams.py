# SPDX-License-Identifier: Apache-2.0
"""Beam search: beams by the logits of transformers, and errors for fields that a search does not follow."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch

from moe_lora.core.request import SamplingParams, TokenLogprobs, TokenOutput
from moe_lora.serve.openai.beams import Beam, BeamGeneration
from tests.oracle import reference_logits

from .conftest import scripted, serving
from .demo_server import DEMO

PROMPT = [20, 31, 12, 23]
WIDTH, LENGTH = 3, 4
BODY = {"prompt": PROMPT, "n": WIDTH, "max_tokens": LENGTH, "use_beam_search": True, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "use_beam_search": True, "max_tokens": 3}


@cache
def likeliest(adapter, tokens):
    """Log probabilities and ids of the oracle after the prompt and these tokens."""
    folder = None if adapter is None else DEMO / "adapters" / adapter
    logits = reference_logits(DEMO / "model", folder, [*PROMPT, *tokens])[-1]
    top = torch.log_softmax(logits, dim=-1).topk(2 * WIDTH)
    return list(zip(top.values.tolist(), top.indices.tolist(), strict=True))


def searched(adapter, ends=(), length_penalty=1.0):
    """Total and tokens of the best beams, from the oracle's logits after each beam."""
    beams, ended = [(0.0, ())], []
    for _ in range(LENGTH):
        longer = []
        for total, tokens in beams:
            for score, token_id in likeliest(adapter, tokens):
                longer.append((total + score, (*tokens, token_id)))
        longer.sort(reverse=True)
        ended += [one for one in longer if one[1][-1] in ends]
        beams = [one for one in longer if one[1][-1] not in ends][:WIDTH]
    found = sorted([*ended, *beams], key=lambda one: one[0] / len(one[1]) ** length_penalty, reverse=True)
    return found[:WIDTH]


def asked(server, **fields):
    answer = server.post("/v1/completions", {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("adapter", [None, "upper"])
def test_the_answers_are_the_oracle_s_beams(exact, adapter):
    found = asked(exact, model=adapter or "demo", ignore_eos=True, logprobs=2)
    expected = searched(adapter)
    assert [tuple(one["token_ids"]) for one in found["choices"]] == [tokens for _, tokens in expected]
    for choice, (total, _) in zip(found["choices"], expected, strict=True):
        assert math.isclose(sum(choice["logprobs"]["token_logprobs"]), total, abs_tol=1e-3)
    assert found["usage"]["completion_tokens"] == WIDTH * LENGTH
    assert found["usage"]["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("length_penalty", [0.0, 3.0])
def test_a_beam_ends_at_an_end_token_and_its_length_counts(exact, length_penalty):
    stop = searched("upper")[0][1][1]
    fields = {"ignore_eos": True, "stop_token_ids": [stop], "length_penalty": length_penalty}
    choices = asked(exact, model="upper", **fields)["choices"]
    expected = [tokens for _, tokens in searched("upper", (stop,), length_penalty)]
    assert [tuple(one["token_ids"]) for one in choices] == expected
    assert [one["finish_reason"] for one in choices] == [
        "stop" if tokens[-1] == stop else "length" for tokens in expected
    ]


def test_several_prompts_have_their_own_beams(exact):
    alone = [one["text"] for one in asked(exact, model="upper")["choices"]]
    both = asked(exact, model="upper", prompt=[PROMPT, PROMPT])["choices"]
    assert [one["index"] for one in both] == list(range(2 * WIDTH))
    assert [one["text"] for one in both] == 2 * alone
    assert len(set(alone)) == WIDTH


def test_a_chat_of_width_one_is_greedy(any_server):
    greedy = any_server.post("/v1/chat/completions", {**CHAT, "use_beam_search": False, "temperature": 0})
    found = any_server.post("/v1/chat/completions", CHAT)
    assert found.status_code == 200, found.text
    if any_server.model == "demo":
        assert found.json()["choices"][0]["message"] == greedy.json()["choices"][0]["message"]
    assert len(found.json()["choices"]) == 1


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_a_step_lengthens_few_beams_and_keeps_the_best_ended_ones(length_penalty, monkeypatch):
    """Every step has two end tokens beside each beam; the reference keeps all beams that ended."""
    search = object.__new__(BeamGeneration)
    search.num_choices, search.length_penalty, search.sampling = WIDTH, length_penalty, SamplingParams()
    draws, ends, longer, calls = random.Random(0), {0, 1}, Beam.longer, []
    monkeypatch.setattr(Beam, "longer", lambda *given: calls.append(1) or longer(*given))
    beams, ended, reference, all_ended = [Beam()], [], [((), 0.0)], []
    for number in range(1, 30):
        outputs = []
        for _ in beams:
            scores = sorted((-draws.uniform(0.1, 3.0) for _ in range(2 * WIDTH)), reverse=True)
            top = tuple(zip(draws.sample(range(2 * WIDTH), 2 * WIDTH), scores, strict=True))
            outputs.append(TokenOutput(request_id="", token_ids=(), logprobs=(TokenLogprobs(0.0, 1, top),)))
        pairs = zip(reference, outputs, strict=True)
        found = [
            ((*ids, one), total + score) for (ids, total), o in pairs for one, score in o.logprobs[0].top
        ]
        all_ended += [one for one in found if one[0][-1] in ends]
        going = [one for one in found if one[0][-1] not in ends]
        reference = sorted(going, key=lambda one: one[1], reverse=True)[:WIDTH]
        beams = search._best_steps(beams, outputs, ends, ended)
        assert [(beam.token_ids, beam.total) for beam in beams] == reference
        assert len(calls) <= number * 2 * WIDTH
        assert len(ended) <= WIDTH
    all_ended.sort(key=lambda one: one[1] / len(one[0]) ** length_penalty, reverse=True)
    assert [(beam.token_ids, beam.total) for beam in search._ranked(ended)] == all_ended[:WIDTH]
    assert all(beam.has_ended and len(beam.logprobs) == len(beam.token_ids) for beam in ended)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stream", True), ("temperature", 0.5), ("stop", "x"), ("echo", True), ("n", 11)),
        *(("frequency_penalty", 0.5), ("logprobs", -1), ("response_format", {"type": "json_object"})),
        *(("top_k", 5), ("top_p", 0.5), ("min_p", 0.1), ("seed", 0)),
    ],
)
def test_a_field_without_a_meaning_in_a_search_is_refused(server, field, value):
    error = server.post("/v1/completions", {**BODY, field: value})
    assert error.status_code == 400
    assert "use_beam_search" in error.text or "beam search" in error.text
    assert field in error.text or field == "response_format"


def test_neutral_values_of_a_draw_are_taken(server):
    neutral = {"temperature": 0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": -1}
    assert server.post("/v1/completions", {**BODY, **neutral}).status_code == 200


def test_a_length_penalty_needs_a_search(server):
    error = server.post("/v1/completions", {"prompt": "x", "length_penalty": 2.0})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "length_penalty"


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/inference/v1/generate"])
def test_other_endpoints_have_no_search(server, path):
    body = {**CHAT, "messages": [CHAT["messages"]]}
    if path == "/inference/v1/generate":
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}, "use_beam_search": True}
    error = server.post(path, body)
    assert error.status_code == 400
    assert "use_beam_search" in error.text


def test_a_search_ends_at_its_timeout(tokenizer):
    with serving(scripted(tokenizer, step_s=0.2), tokenizer) as served:
        error = served.post("/v1/completions", {**BODY, "max_tokens": 50, "timeout": 0.5})
    assert error.status_code == 408
