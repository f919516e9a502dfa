# SPDX-License-Identifier: Apache-2.0
"""Token ids in, token ids out over HTTP, beside the answers of completions and chats."""

from __future__ import annotations

import json

import pytest

from .conftest import scripted, serving
from .test_prompt_side import ask, demo, refused  # noqa: F401  (the fixture)

PATH = "/inference/v1/generate"
GREEDY = {"temperature": 0.0, "max_tokens": 6}
CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("model", ["demo", "upper"])
@pytest.mark.parametrize("scores", [{}, {"logprobs": 0}, {"logprobs": 2}])
def test_answers_are_those_of_completions(demo, model, scores):  # noqa: F811
    prompt, same = [5, 6, 7], {"model": model, "request_id": "mine"}
    found = ask(demo, PATH, token_ids=prompt, sampling_params={**GREEDY, **scores}, **same)
    expected = ask(demo, prompt=prompt, **GREEDY, **scores, return_token_ids=True, **same)
    assert found["request_id"] == "mine"
    assert found["kv_transfer_params"] is found["prompt_logprobs"] is None
    [choice], [other] = found["choices"], expected["choices"]
    assert choice.keys() == {"index", "logprobs", "finish_reason", "token_ids"}
    assert choice["token_ids"] == other["token_ids"]
    assert choice["finish_reason"] == other["finish_reason"]
    if not scores:
        assert choice["logprobs"] is None
        return
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert [one["logprob"] for one in content] == other["logprobs"]["token_logprobs"]
    assert all(len(one["top_logprobs"]) == max(1, scores["logprobs"]) for one in content)


def test_a_stream_has_the_whole_answer_s_tokens(demo):  # noqa: F811
    body = {"token_ids": [5, 6, 7], "sampling_params": {**GREEDY, "logprobs": 1}}
    [whole] = ask(demo, PATH, **body)["choices"]
    answer = demo.post(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}})
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    *chunks, usage = [json.loads(line) for line in lines[:-1]]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(whole["token_ids"])
    parts = [one for chunk in chunks for one in chunk["choices"]]
    assert [token for one in parts for token in one["token_ids"]] == whole["token_ids"]
    assert all(one["token_ids"] for one in parts)
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    assert [entry for one in parts for entry in one["logprobs"]["content"]] == whole["logprobs"]["content"]


def test_prompts_have_log_probabilities_and_several_answers(demo):  # noqa: F811
    sampling = {**GREEDY, "prompt_logprobs": 1, "n": 2, "detokenize": False}
    found = ask(demo, PATH, token_ids=[5, 6, 7], sampling_params=sampling)
    expected = ask(demo, prompt=[5, 6, 7], **GREEDY, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    shown = [
        one and {key: value["logprob"] for key, value in one.items()} for one in found["prompt_logprobs"]
    ]
    assert shown == [one and {key: value["logprob"] for key, value in one.items()} for one in expected]
    assert [one["index"] for one in found["choices"]] == [0, 1]


def test_absent_settings_are_the_model_s(tokenizer):
    with serving(scripted(tokenizer), tokenizer) as server:
        [choice] = ask(server, PATH, token_ids=[5])["choices"]
        text = tokenizer.decode(choice["token_ids"])
        assert text == "hello world"
        [cut] = ask(server, PATH, token_ids=[5], sampling_params={"stop": ["wor"]})["choices"]
        assert len(cut["token_ids"]) < len(choice["token_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_rendered_chat_gives_the_chat_s_answer(demo, stream):  # noqa: F811
    body = {"model": "upper", "messages": CHAT, **GREEDY, "logprobs": True, "top_logprobs": 2, "stop": ["zz"]}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    rendered = ask(demo, "/v1/chat/completions/render", **body, **options)
    assert rendered["stream"] is stream
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["sampling_params"] == {**GREEDY, "logprobs": 2, "stop": ["zz"]}
    [found] = ask(demo, PATH, **{**rendered, "stream": False, "stream_options": None})["choices"]
    [expected] = ask(demo, "/v1/chat/completions", **body, return_token_ids=True)["choices"]
    assert found["token_ids"] == expected["token_ids"]


def test_a_rendered_completion_has_a_body_for_each_prompt(demo):  # noqa: F811
    prompts = ["hello", "abc="]
    rendered = ask(demo, "/v1/completions/render", prompt=prompts, temperature=0.0)
    answers = ask(demo, prompt=prompts, temperature=0.0, return_token_ids=True)["choices"]
    assert len(rendered) == 2
    for body, expected in zip(rendered, answers, strict=True):
        assert body["model"] == "demo"
        assert body["token_ids"] == expected["prompt_token_ids"]
        [found] = ask(demo, PATH, **body)["choices"]
        assert found["token_ids"] == expected["token_ids"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "hello"}, "token_ids"),
        ({"token_ids": [[5]]}, "token_ids"),
        ({"token_ids": [5, "a"]}, "token_ids"),
        ({"token_ids": [5, 128]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [5], "sampling_params": []}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": 3}, "sampling_params"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [5], "sampling_params": {"temprature": 1}}, "temprature"),
        ({"token_ids": [5], "sampling_params": {"stop": ["a"], "detokenize": False}}, "stop"),
        ({"token_ids": [5], "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"token_ids": [5], "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": [5], "temperature": 1}, "temperature"),
        ({"token_ids": [5], "stream": True, "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused_by_name(demo, body, param):  # noqa: F811
    assert refused(demo, PATH, **body)["param"] == param


def test_models_that_do_not_exist_are_404(demo):  # noqa: F811
    for path, body in ((PATH, {"token_ids": [5]}), ("/v1/completions/render", {"prompt": "a"})):
        assert demo.post(path, {**body, "model": "none"}).status_code == 404


def test_a_chat_s_forced_call_is_not_rendered(demo):  # noqa: F811
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    error = refused(demo, "/v1/chat/completions/render", messages=CHAT, tools=tools, tool_choice="required")
    assert "can't be rendered" in error["message"]
