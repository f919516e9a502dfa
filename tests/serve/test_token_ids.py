# SPDX-License-Identifier: Apache-2.0
"""Token ids in and out, and prompts rendered for it."""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from io import BytesIO

import httpx
import numpy as np
import pytest

from moe_lora.engine.text.text import load_tokenizer

from .test_prompt_side import MODEL, NAMES, ask, demo, refused  # noqa: F401  (the fixture)
from .test_tools import saying

TOKENIZER = load_tokenizer(MODEL)
GENERATE = "/inference/v1/generate"
CHAT = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IDS = TOKENIZER.encode("hello world=")


def events(client, **body):
    with client.http.stream("POST", GENERATE, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("model", NAMES)
def test_token_ids_are_those_of_a_completion(demo, model):  # noqa: F811
    common = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    plain = ask(demo, "/v1/completions", model=model, prompt=IDS, return_token_ids=True, **common)
    found = ask(demo, GENERATE, model=model, token_ids=IDS, sampling_params=common)
    expected = plain["choices"][0]
    ended = {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
    ended |= {} if model == "demo" else {"adapter_version": 1}
    assert found["choices"] == [{"index": 0, "logprobs": None, **ended, "token_ids": expected["token_ids"]}]
    assert found["usage"]["completion_tokens"] == 8
    assert found["request_id"].startswith("generate-tokens-")
    text = ask(demo, GENERATE, model=model, token_ids=IDS, sampling_params=common, output_mode="text")
    assert text["choices"][0]["text"] == expected["text"]
    chunks = events(
        demo, model=model, token_ids=IDS, sampling_params=common, output_mode="text", return_token_ids=True
    )
    assert "".join(one["choices"][0]["text"] for one in chunks) == expected["text"]
    assert [i for one in chunks for i in one["choices"][0]["token_ids"]] == expected["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == IDS
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_without_max_tokens_the_answer_takes_the_rest_of_the_context(demo):  # noqa: F811
    found = ask(demo, GENERATE, token_ids=IDS, sampling_params={"ignore_eos": True})
    assert len(found["choices"][0]["token_ids"]) == 256 - len(IDS)


@pytest.mark.parametrize("num", [0, 1, 5])
def test_log_probabilities_name_tokens_by_id(demo, num):  # noqa: F811
    sampling = {"max_tokens": 3, "temperature": 0, "logprobs": num, "prompt_logprobs": num, "n": 2}
    found = ask(demo, GENERATE, token_ids=IDS, sampling_params=sampling, return_token_ids=True)
    assert [one["index"] for one in found["choices"]] == [0, 1]
    for choice in found["choices"]:
        for token_id, one in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            assert (one["token_id"], one["rank"]) == (token_id, 1)
            assert len(one["top_logprobs"]) == max(num, 1)
    assert len(found["prompt_logprobs"]) == len(IDS) == len(found["prompt_token_ids"])


def test_listed_tokens_score_at_each_place_of_the_prompt(demo):  # noqa: F811
    rows = [[IDS[place], 5, 7][: place % 3 + 1] for place in range(2, len(IDS))]
    sampling = {"max_tokens": 2, "prompt_logprobs": -1, "prompt_logprob_start": 1}
    found = ask(demo, GENERATE, token_ids=IDS, sampling_params={**sampling, "prompt_logprob_token_ids": rows})
    scores = np.load(BytesIO(b64decode(found["prompt_token_id_logprobs"])))
    assert (scores.shape, scores.dtype) == ((len(IDS) - 2, 3), np.float32)
    for row, ids, entries in zip(scores, rows, found["prompt_logprobs"][2:], strict=True):
        for value, token_id in zip(row, ids, strict=False):
            assert value == pytest.approx(entries[str(token_id)]["logprob"], abs=1e-5)
        assert np.isneginf(row[len(ids) :]).all()
    alone = ask(demo, GENERATE, token_ids=IDS, sampling_params={"prompt_logprob_token_ids": [[4]] * 12})
    assert alone["prompt_logprobs"] is None
    assert len(IDS) == 13
    error = refused(demo, GENERATE, token_ids=IDS, sampling_params={"prompt_logprob_token_ids": [[4]]})
    assert "has 1 rows, but the prompt of 13 tokens has 12 scored rows" in error["message"]
    error = refused(demo, GENERATE, token_ids=IDS, sampling_params={"prompt_logprob_token_ids": [[128]] * 12})
    assert "prompt_logprob_token_ids has token id 128, outside the vocabulary of 128" in error["message"]


SENT_BY_VLLM = {
    **{"n": 1, "max_tokens": 4, "temperature": 0.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": []},
    **{"stop_token_ids": [], "ignore_eos": False, "detokenize": True, "skip_special_tokens": True},
    **{"spaces_between_special_tokens": True, "include_stop_str_in_output": False, "output_kind": 2},
    **{"extra_args": None, "logits_processors": None, "structured_outputs": None, "logit_bias": None},
    **{"allowed_token_ids": None, "bad_words": None, "flat_logprobs": False, "_all_stop_token_ids": []},
    **{"logprobs": None, "prompt_logprobs": None, "repetition_penalty": 1.0, "presence_penalty": 0.0},
}


def test_all_sampling_parameters_of_vllm_s_clients_are_taken(demo):  # noqa: F811
    answer = demo.post(GENERATE, {"token_ids": IDS, "sampling_params": SENT_BY_VLLM, "features": None})
    assert answer.status_code == 200, answer.text
    assert "X-Ignored-Fields" not in answer.headers
    assert answer.json()["prompt_logprobs"] is answer.json()["kv_transfer_params"] is None
    error = refused(demo, GENERATE, token_ids=IDS, sampling_params={"logit_bias": {"a": 1, "1": 2, "b": 3}})
    assert "'a', 'b'" in error["message"]
    error = refused(demo, GENERATE, token_ids=[128])
    assert "128 is out of vocabulary; the 128 token ids go from 0 to 127" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "hello"}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": IDS, "prompt": "x"}, "prompt"),
        ({"token_ids": IDS, "sampling_params": [1]}, "sampling_params"),
        ({"token_ids": IDS, "sampling_params": {"token_ids": [1]}}, "token_ids"),
        ({"token_ids": IDS, "temperature": 0, "sampling_params": {"temperature": 1}}, "temperature"),
        ({"token_ids": IDS, "sampling_params": {"echo": True}}, "echo"),
        ({"token_ids": IDS, "sampling_params": {"max_tokens": None, "min_tokens": 2**31}}, "min_tokens"),
        ({"token_ids": IDS, "sampling_params": {"detokenize": False, "stop": ["x"]}}, "stop"),
        ({"token_ids": IDS, "sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode"),
        ({"token_ids": IDS, "output_mode": "bogus"}, "output_mode"),
        ({"token_ids": IDS, "output_mode": "text", "skip_special_tokens": False}, "skip_special_tokens"),
        ({"token_ids": IDS, "output_mode": "derender", "stream": True}, "stream"),
        ({"token_ids": IDS, "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": IDS, "parse_context": {"messages": CHAT}}, "parse_context"),
        ({"token_ids": IDS, "parse_context": {"tools": [TOOL], "tool_choice": {"type": "x"}}}, "tool_choice"),
        ({"token_ids": IDS, "parse_context": []}, "parse_context"),
        ({"token_ids": IDS, "prompt_logprob_token_ids": [[1]], "stream": True}, "prompt_logprob_token_ids"),
        ({"token_ids": IDS, "prompt_logprob_token_ids": [[]]}, "prompt_logprob_token_ids"),
        ({"token_ids": IDS, "prompt_logprob_token_ids": [[-2]]}, "prompt_logprob_token_ids"),
        ({"token_ids": IDS, "prompt_logprob_token_ids": [[1] * 129]}, "prompt_logprob_token_ids"),
        ({"token_ids": IDS, "prompt_logprob_start": 1}, "prompt_logprob_start"),
        ({"token_ids": IDS, "reasoning_ended": False}, "reasoning_ended"),
        ({"token_ids": IDS, "reasoning_ended": 1}, "reasoning_ended"),
        ({"token_ids": IDS, "stream": True, "sampling_params": {"output_kind": 0}}, "output_kind"),
        ({"token_ids": IDS, "stream": True, "sampling_params": {"output_kind": 2}}, "output_kind"),
        ({"token_ids": IDS, "sampling_params": {"output_kind": 3}}, "output_kind"),
        ({"token_ids": IDS, "return_token_offsets": True}, "return_token_offsets"),
    ],
)
def test_wrong_bodies_are_refused(demo, body, param):  # noqa: F811
    answer = demo.post(GENERATE, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_rendered_bodies_have_the_answers_of_their_originals(demo):  # noqa: F811
    common = {"model": "upper", "temperature": 0, "max_tokens": 12, "seed": 3, "logit_bias": {"5": -1.0}}
    chat = {**common, "messages": CHAT}
    body = ask(demo, "/v1/chat/completions/render", request_id="abc", **chat)
    assert body["request_id"] == "chatcmpl-abc"
    assert body["sampling_params"]["logit_bias"] == {"5": -1.0}
    answer = ask(demo, "/v1/chat/completions", return_token_ids=True, **chat)
    assert body["token_ids"] == answer["prompt_token_ids"]
    found = ask(demo, GENERATE, **{**body, "output_mode": "derender"})["choices"][0]
    assert found["message"] == answer["choices"][0]["message"]
    assert found["token_ids"] == answer["choices"][0]["token_ids"]
    prompts = ask(demo, "/v1/completions/render", request_id="abc", prompt=["a", "b"], **common)
    assert [one["request_id"] for one in prompts] == ["cmpl-abc-0", "cmpl-abc-1"]
    whole = ask(demo, "/v1/completions", prompt=["a", "b"], return_token_ids=True, **common)["choices"]
    assert [ask(demo, GENERATE, **one)["choices"][0]["token_ids"] for one in prompts] == [
        one["token_ids"] for one in whole
    ]


def test_rendered_bad_words_and_joined_reasoning_bind_the_answer(demo):  # noqa: F811
    chat = {"messages": CHAT, "temperature": 0, "max_tokens": 6}
    free = ask(demo, "/v1/chat/completions", return_token_ids=True, **chat)["choices"][0]
    word = free["message"]["content"][-1]
    bound = {**chat, "bad_words": [word], "separate_reasoning": False}
    answer = ask(demo, "/v1/chat/completions", return_token_ids=True, **bound)["choices"][0]
    assert word not in answer["message"]["content"]
    body = ask(demo, "/v1/chat/completions/render", **bound)
    assert body["sampling_params"]["bad_words"] == [word]
    assert body["parse_context"]["separate_reasoning"] is False
    assert ask(demo, GENERATE, **body)["choices"][0]["token_ids"] == answer["token_ids"]
    found = ask(demo, GENERATE, **{**body, "output_mode": "derender"})["choices"][0]
    assert found["message"] == answer["message"]


def test_a_rendered_score_has_no_answer_and_a_timeout_is_rendered(demo):  # noqa: F811
    body = {"prompt": IDS, "max_tokens": 0, "prompt_logprobs": 1, "timeout": 9.5}
    (found,) = ask(demo, "/v1/completions/render", **body)
    assert (found["sampling_params"]["max_tokens"], found["timeout"]) == (0, 9.5)
    answer = ask(demo, GENERATE, **found)
    assert len(answer["prompt_logprobs"]) == len(IDS)
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "text", ["naïve café = 日本", "hello 日本 " * 2000]
)  # the second in the other process
def test_rendered_prompts_have_the_places_of_their_tokens(demo, text):  # noqa: F811
    wanted = {"max_tokens": 1, "truncate_prompt_tokens": 200, "return_token_offsets": True}
    for side in ("left", "right"):
        rows = ask(demo, "/v1/completions/render", prompt=[text, "a"], truncation_side=side, **wanted)
        for row, source in zip(rows, (text, "a"), strict=True):
            whole = TOKENIZER.backend.encode(source)
            kept = slice(200) if side == "right" else slice(-200, None)
            assert row["token_ids"] == whole.ids[kept]
            assert list(map(tuple, row["token_offsets"])) == whole.offsets[kept]
    chat = ask(demo, "/v1/chat/completions/render", messages=CHAT, **wanted)
    assert len(chat["token_offsets"]) == len(chat["token_ids"])
    assert ask(demo, "/v1/completions/render", prompt="a")[0]["token_offsets"] is None
    assert ask(demo, "/v1/completions/render", prompt=IDS, **wanted)[0]["token_offsets"] is None


def test_a_rendered_grammar_and_a_rendered_call_bind_the_answer(demo):  # noqa: F811
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = ask(demo, "/v1/chat/completions/render", messages=CHAT, response_format=wanted, max_tokens=60)
    text = ask(demo, GENERATE, **{**body, "output_mode": "text"})["choices"][0]["text"]
    assert json.loads(text)["a"] in (1, 2)
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    chat = {"messages": CHAT, "tools": tools, "tool_choice": "required", "max_tokens": 90}
    body = ask(demo, "/v1/chat/completions/render", parallel_tool_calls=False, **chat)
    message = ask(demo, GENERATE, **{**body, "output_mode": "derender"})["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["a"] in (1, 2)


def test_messages_and_responses_are_rendered_as_chats(demo):  # noqa: F811
    chat = ask(demo, "/v1/chat/completions/render", messages=CHAT, max_tokens=5)
    message = ask(demo, "/v1/messages/render", model="demo", messages=CHAT, max_tokens=5)
    response = ask(demo, "/v1/responses/render", input="hello", max_output_tokens=5)
    assert chat["token_ids"] == message["token_ids"] == response["token_ids"]
    assert response["request_id"].startswith("resp_")
    assert {one["sampling_params"]["max_tokens"] for one in (chat, message, response)} == {5}
    error = demo.post("/v1/responses/render", {"input": "x", "previous_response_id": "resp_1"})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "previous_response_id")
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": CHAT})):
        assert demo.post(f"/v1/{path}/render", {**body, "model": "none"}).status_code == 404
        assert demo.post(f"/v1/{path}/render", {**body, "echo": True}).status_code == 400


def test_a_body_states_where_its_reasoning_ends():
    special = ("<think>", "</think>")
    with saying("<think>because</think>so", special=special, reasoning_parser="qwen3") as (client, engine):
        found = {}
        for ended in (True, False, None):
            body = {"token_ids": [5], "reasoning_ended": ended, "parse_context": {}}
            body["structured_outputs"] = {"choice": ["so"]}
            root = str(client.base_url).removesuffix("/v1/")
            httpx.post(f"{root}{GENERATE}", json=body).raise_for_status()
            found[ended] = engine.requests[-1].sampling.grammar
        assert "thought" in found[False] == found[None]
        assert "thought" not in found[True]


def test_an_abort_ends_a_stream_with_its_reason(demo):  # noqa: F811
    found, first = [], threading.Event()
    body = {"token_ids": IDS, "sampling_params": {"ignore_eos": True}, "request_id": "x", "stream": True}
    answer = demo.post("/inference/v1/abort_requests", {"request_ids": ["unknown"]})
    assert answer.status_code == 200
    with demo.http.stream("POST", GENERATE, json=body) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            found.append(json.loads(line[6:]))
            if not first.is_set():
                first.set()
                ids = {"request_ids": [found[0]["request_id"]]}
                assert demo.post("/inference/v1/abort_requests", ids).status_code == 200
    assert found[-1]["choices"][0]["finish_reason"] in ("abort", "length")  # a short answer may end first
    assert demo.post("/inference/v1/abort_requests", {}).status_code == 400


def test_listed_tokens_have_log_probabilities(demo):  # noqa: F811
    common = {"temperature": 0, "max_tokens": 2, "logprob_token_ids": [5, 9, 5], "allowed_token_ids": [42]}
    common["return_tokens_as_token_ids"] = True
    answer = ask(demo, prompt=IDS, logprobs=5, **common)["choices"][0]["logprobs"]
    assert [set(one) for one in answer["top_logprobs"]] == [{"token_id:5", "token_id:9", "token_id:42"}] * 2
    assert [next(iter(one)) for one in answer["top_logprobs"]] == answer["tokens"]  # the chosen token first
    chat = ask(demo, "/v1/chat/completions", messages=CHAT, logprobs=True, **common)["choices"][0]
    for one in chat["logprobs"]["content"]:
        assert {top["token"] for top in one["top_logprobs"]} == {"token_id:5", "token_id:9", "token_id:42"}
    for body in ({"logprob_token_ids": [5]}, {"logprobs": 1, "logprob_token_ids": [128]}):
        assert refused(demo, prompt=IDS, **body)["param"] == "logprob_token_ids"
    many = {"logprobs": 1, "logprob_token_ids": list(range(129))}
    assert "logprob_token_ids" in refused(demo, prompt=IDS, **many)["param"]
