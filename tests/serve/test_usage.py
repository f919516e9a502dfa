# SPDX-License-Identifier: Apache-2.0
"""Usage of reasoning, reasoning in the content, usage in every stream, and null keys of whole answers."""

from __future__ import annotations

import pytest

from tests.small_tokenizers import byte_level

from .conftest import app_of, as_served, scripted
from .live_server import ServerThread
from .test_completions import CHAT, events
from .test_tools import CALL, QWEN, TOOL, ask, saying

BEFORE, AFTER = "<think>because</think>", "forty two"
PARSER = {"reasoning_parser": "qwen3"}


def counted(client, **body):
    """Tokens of reasoning in OpenAI's and SGLang's place, of a whole answer and of a stream."""
    common = {"model": "base", "messages": CHAT, **body}
    whole = client.chat.completions.create(**common).usage
    *_, last = client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == whole.completion_tokens
    found = set()
    for usage in (whole, last.usage):
        num = usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens
        assert num == getattr(usage, "reasoning_tokens", None)
        found.add(num)
    [num] = found
    return num


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}])
def test_usage_counts_tokens_of_reasoning_as_responses_do(tools, num, shown):
    num_before = len(byte_level().encode(BEFORE).ids)
    with saying(BEFORE + AFTER, **PARSER) as (client, _):
        response = client.responses.create(model="base", input="hello")
        assert response.usage.output_tokens_details.reasoning_tokens == num_before
        assert counted(client, n=num, extra_body={"include_reasoning": shown}, **tools) == num * num_before


def test_usage_of_reasoning_stands_beside_numbers_of_the_prompt():
    with saying(BEFORE + AFTER, **PARSER) as (client, _):
        asked = {"model": "base", "messages": CHAT, "extra_body": {"prompt_logprobs": 1}}
        usage = client.chat.completions.create(**asked).usage
        assert usage.completion_tokens_details.reasoning_tokens == len(byte_level().encode(BEFORE).ids)


def test_usage_of_an_answer_without_reasoning():
    for text, body in ((AFTER, {}), (CALL, {"tools": [TOOL]})):
        with saying(text, **PARSER) as (client, _):
            assert counted(client, **body) == 0
    with saying(BEFORE + AFTER) as (client, _):
        assert counted(client) is None


def test_reasoning_may_stay_in_the_content():
    with saying(BEFORE + AFTER, QWEN + "{# </think> #}", reasoning_parser="auto") as (client, _):
        joined = {"extra_body": {"separate_reasoning": False}}
        for tools in ([], [TOOL]):
            message = ask(client, tools=tools, **joined).choices[0].message
            assert message.content == BEFORE + AFTER
            assert getattr(message, "reasoning_content", None) is None
            chunks = ask(client, tools=tools, stream=True, **joined)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == BEFORE + AFTER
        message = ask(client, extra_body={"separate_reasoning": True}).choices[0].message
        assert (message.content, message.reasoning_content) == (AFTER, "because")


COMPLETION = ("/v1/completions", {"prompt": "hello", "max_tokens": 3})
MESSAGES = ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3})
IDS = ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 3}})


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
@pytest.mark.parametrize(("path", "body"), [COMPLETION, MESSAGES, IDS])
def test_a_server_may_send_usage_in_every_stream(tokenizer, path, body, options):
    engine = scripted(tokenizer)
    app = app_of(engine, tokenizer, force_include_usage=True)
    with ServerThread(app) as thread, as_served(thread.url, engine) as served:
        *chunks, last = events(served, path, {**body, **options})
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]][-1] == 3
        assert all(chunk["usage"] for chunk in chunks)


def test_a_server_may_name_tokens_by_id(tokenizer):
    engine = scripted(tokenizer)
    app = app_of(engine, tokenizer, return_tokens_as_token_ids=True)
    ids = [f"token_id:{one}" for one in engine.answers[None][:3]]
    with ServerThread(app) as thread, as_served(thread.url, engine) as served:
        for path, body in (COMPLETION, MESSAGES):
            wanted = {**body, "logprobs": 0 if path == COMPLETION[0] else True}
            [choice] = served.post(path, wanted).json()["choices"]
            assert "he" in str(choice.get("text") or choice["message"]["content"])
            assert all(one in str(choice["logprobs"]) for one in ids)
            [choice] = served.post(path, {**wanted, "return_tokens_as_token_ids": False}).json()["choices"]
            assert "token_id" not in str(choice["logprobs"])


def test_whole_answers_have_null_for_token_ids_unless_asked(server):
    for path, body in (COMPLETION, MESSAGES, (COMPLETION[0], {**COMPLETION[1], "echo": True})):
        answer = server.post(path, body).json()
        [choice] = answer["choices"]
        place = choice if path == COMPLETION[0] else answer
        assert choice["token_ids"] is place["prompt_token_ids"] is None
        answer = server.post(path, {**body, "return_token_ids": True}).json()
        [choice] = answer["choices"]
        place = choice if path == COMPLETION[0] else answer
        assert len(choice["token_ids"]) == 3
        assert place["prompt_token_ids"]


@pytest.mark.parametrize(("path", "body"), [COMPLETION, MESSAGES])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_server_may_add_the_metrics_of_each_request(tokenizer, path, body, max_tokens):
    engine = scripted(tokenizer)
    body = {**body, "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    for is_on in (True, False):
        app = app_of(engine, tokenizer, per_request_metrics=is_on)
        with ServerThread(app) as thread, as_served(thread.url, engine) as served:
            whole = served.post(path, {**body, "stream_options": None}).json()
            *chunks, last = events(served, path, body)
            none = served.post("/v1/completions", {"prompt": "hello", "echo": True, "max_tokens": 0}).json()
        assert not any("metrics" in chunk for chunk in chunks)
        assert "metrics" not in none
        for found in (whole, last):
            if not is_on:
                assert "metrics" not in found
                continue
            metrics, timing = found["metrics"], found["usage"]["timing"]
            assert metrics["queue_time_ms"] == timing["queue_ms"]
            parts = ("adapter_load_ms", "kv_load_ms", "prefill_ms")
            assert metrics["time_to_first_token_ms"] == pytest.approx(sum(timing[one] for one in parts))
            total = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
            assert metrics["tokens_per_second"] == pytest.approx(1e3 * max_tokens / total, rel=0.01)
            itl = metrics.get("mean_itl_ms")
            if max_tokens == 1:
                assert itl is None
            else:
                assert itl == pytest.approx(metrics["generation_time_ms"] / 2, abs=0.002)
