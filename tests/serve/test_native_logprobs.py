# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of /generate: of prompts, of the likeliest and of listed tokens, as in SGLang."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_lora.core.request import PromptReport, TokenLogprobs
from moe_lora.engine.text.text import load_tokenizer
from moe_lora.serve.http_errors import to_json
from moe_lora.serve.openai import native_logprobs
from tests.oracle import reference_logits

from .test_prompt_side import MODEL, NAMES, ask, demo, reference, refused  # noqa: F401  (the fixture)

TOKENIZER = load_tokenizer(MODEL)
IDS = TOKENIZER.encode("hello world=")
GREEDY = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


def generate(server, sampling: dict[str, Any] = GREEDY, **body) -> Any:
    return ask(server, "/generate", sampling_params=sampling, return_logprob=True, **body)


def text_of(token: int) -> str:
    return TOKENIZER.decode([token], skip_special_tokens=False)


@pytest.mark.parametrize("start", [0, 3, len(IDS) - 1])
@pytest.mark.parametrize("model", NAMES)
def test_prompts_and_answers_have_transformers_s(demo, model, start):  # noqa: F811
    body = {"lora_path": model, "input_ids": IDS, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    found = generate(demo, **body, logprob_start_len=start)
    about = found["meta_info"]
    (none, first, text), *rest = about["input_token_logprobs"]
    assert (none, first, text) == (None, IDS[start], text_of(IDS[start]))
    assert [token for _, token, _ in rest] == IDS[start + 1 :]
    values = [value for value, _, _ in rest]
    assert values == pytest.approx(reference(model, IDS)[start:].tolist(), abs=5e-4)
    none, *tops = about["input_top_logprobs"]
    assert (none, {len(top) for top in tops} or {3}) == (None, {3})
    assert all(one in top or one[0] < top[-1][0] for one, top in zip(rest, tops, strict=True))
    for one, top in zip(about["output_token_logprobs"], about["output_top_logprobs"], strict=True):
        assert (top[0], len(top)) == (one, 3)
    assert "".join(text for *_, text in about["output_token_logprobs"]) == found["text"]
    assert [token for _, token, _ in about["output_token_logprobs"]] == found["output_ids"]


def test_the_likeliest_are_of_the_distribution_that_was_drawn_from(demo):  # noqa: F811
    body = {"input_ids": IDS, "top_logprobs_num": 5}
    for sampling in ({"temperature": 2.0, "top_k": 3}, {"temperature": 1.0, "regex": "[ab]+"}):
        about = generate(demo, {**GREEDY, **sampling}, **body)["meta_info"]
        for (value, token, _), top in zip(
            about["output_token_logprobs"], about["output_top_logprobs"], strict=True
        ):
            assert {other: one for one, other, _ in top}[token] == value
            assert sum(math.exp(one) for one, *_ in top) == pytest.approx(1.0, abs=1e-5)


def test_listed_tokens_have_values_at_each_place(demo):  # noqa: F811
    found = generate(demo, {**GREEDY, "temperature": 1.0}, input_ids=IDS, token_ids_logprob=[40, 7])
    logits = reference_logits(MODEL, None, [*IDS, *found["output_ids"]])[len(IDS) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)[:, [40, 7]].tolist()
    for listed, values in zip(found["meta_info"]["output_token_ids_logprobs"], expected, strict=True):
        assert [token for _, token, _ in listed] == [40, 7]
        assert [value for value, _, _ in listed] == pytest.approx(values, abs=5e-4)


def test_minus_one_is_the_whole_vocabulary(demo):  # noqa: F811
    about = generate(demo, input_ids=IDS, top_logprobs_num=-1, logprob_start_len=0)["meta_info"]
    for tops in (about["input_top_logprobs"][1:], about["output_top_logprobs"]):
        assert {len(top) for top in tops} == {128}


def test_a_prompt_alone_is_scored(demo):  # noqa: F811
    whole = generate(demo, input_ids=IDS, logprob_start_len=0)
    again = generate(demo, {"max_new_tokens": 0}, input_ids=[*IDS, *whole["output_ids"]], logprob_start_len=0)
    about = again["meta_info"]
    assert (again["text"], again["output_ids"], about["completion_tokens"]) == ("", [], 0)
    assert about["output_token_logprobs"] == []
    values = [value for value, *_ in whole["meta_info"]["output_token_logprobs"]]
    assert [value for value, *_ in about["input_token_logprobs"][len(IDS) :]] == pytest.approx(
        values, abs=5e-4
    )


def test_lists_of_prompts_have_lists_of_answers_with_counts_of_cached_tokens(demo):  # noqa: F811
    prompt = "an answer for the prefix cache="
    for num_cached in (0, 16):
        [found] = ask(demo, "/generate", text=[prompt], sampling_params=GREEDY)
        assert found["meta_info"]["cached_tokens"] == num_cached
    assert isinstance(ask(demo, "/generate", text=prompt, sampling_params=GREEDY), dict)
    both = generate(demo, text=["abc", "hello world="], logprob_start_len=2)
    assert [len(one["meta_info"]["input_token_logprobs"]) for one in both] == [2, len(IDS) - 2]


def test_without_log_probabilities_the_start_changes_nothing(demo):  # noqa: F811
    body = {"text": "abc=", "sampling_params": GREEDY}
    fields = {"logprob_start_len": 0, "top_logprobs_num": 0, "return_text_in_logprobs": True}
    assert ask(demo, "/generate", **body, **fields)["text"] == ask(demo, "/generate", **body)["text"]


def test_streams_have_the_likeliest_so_far(demo):  # noqa: F811
    body = {"input_ids": IDS, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}
    answer = demo.post("/generate", {**body, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    whole = ask(demo, "/generate", **body)["meta_info"]["output_top_logprobs"]
    tops = [event["meta_info"]["output_top_logprobs"] for event in events]
    assert [len(top) for top in tops] == [len(event["output_ids"]) for event in events]
    assert [[token for _, token, _ in top] for top in tops[-1]] == [
        [token for _, token, _ in top] for top in whole
    ]


def test_skipped_tokens_make_no_objects_and_others_make_one_each(monkeypatch):
    made, init = [], TokenLogprobs.__init__

    def noted(report: TokenLogprobs, logprob: float, *args: Any) -> None:
        made.append(logprob)
        init(report, logprob, *args)

    monkeypatch.setattr(TokenLogprobs, "__init__", noted)
    monkeypatch.setattr(native_logprobs, "structs_top", lambda one, num: one)
    rows = [struct.pack("<3f3i", -place, -1, -2, 1, 40, 7) for place in range(1, 9)]
    delta = SimpleNamespace(prompt=PromptReport(scores=(2, b"".join(rows))), finish_reason="length", index=0)
    body = SimpleNamespace(logprob_start_len=5, logprobs=2, return_text_in_logprobs=False)
    item: dict[str, Any] = {"meta_info": {}}
    generation = SimpleNamespace(prompt_of=lambda index: list(range(10, 19)))
    asyncio.run(native_logprobs.add_prompt_side([item], [delta], generation, body, str))
    assert made == [-6.0, -7.0, -8.0]
    assert json.loads(to_json(item["meta_info"])) == {
        "input_token_logprobs": [[None, 15, None], *([-place, 10 + place, None] for place in (6, 7, 8))],
        "input_top_logprobs": [None, *[[[-1, 40, None], [-2, 7, None]]] * 3],
    }


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"logprob_start_len": len(IDS)}, "logprob_start_len", "below the prompt's"),
        ({"logprob_start_len": -2}, "logprob_start_len", "-1"),
        ({"logprob_start_len": 0, "stream": True}, "logprob_start_len", "leave stream out"),
        ({"top_logprobs_num": 21}, "top_logprobs_num", "between 0 and 20"),
        ({"token_ids_logprob": [[5]]}, "token_ids_logprob", "flat list of integers"),
        ({"token_ids_logprob": [128]}, "token_ids_logprob", "128 is out of vocabulary"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob", "0"),
        ({"token_ids_logprob": [5], "logprob_start_len": 0}, "token_ids_logprob", "prompt tokens"),
        ({"token_ids_logprob": [5], "return_logprob": False}, "token_ids_logprob", "needs return_logprob"),
        ({"token_ids_logprob": [5], "top_logprobs_num": 2}, "token_ids_logprob", "send one of them"),
        ({"return_logprob": "false"}, "return_logprob", "true or false"),
        ({"input_ids": []}, "input_ids", "empty"),
        ({"sampling_params": {"logprob_start_len": 0}}, "logprob_start_len", "not a field"),
    ],
)
def test_wrong_values_are_refused_by_sglang_s_names(demo, body, param, message):  # noqa: F811
    error = refused(demo, "/generate", **{"input_ids": IDS, "return_logprob": True, **body})
    assert error["param"] == param
    assert message in error["message"]
