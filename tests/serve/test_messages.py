# SPDX-License-Identifier: Apache-2.0
"""/v1/messages by its public specification: the same engine requests as chats, blocks and events, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from http.client import HTTPConnection

import httpx
import pytest

from moe_lora.serve.anthropic.request import messages_of
from moe_lora.serve.api_keys import add_key
from moe_lora.serve.server import create_app
from tests.patience import PATIENCE_S

from .conftest import app_of, as_served, frontend_of, scripted, serving
from .live_server import ServerThread, wait_until
from .test_access import rights
from .test_responses import asked
from .test_tools import CALL, CITY, TOOL, saying

USER = {"role": "user", "content": "hi"}
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": TOOL["function"]["parameters"],
}
THINKING = f"<think>\nmulling</think>\n\nLet me see. {CALL}"
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def send(client, path="messages", **body):
    """The HTTP answer; client: of OpenAI, for its address."""
    whole = {"model": "base", "max_tokens": 200, "messages": [USER], **body}
    headers = {"x-api-key": "x", "anthropic-version": "2023-06-01"}
    return httpx.post(f"{client.base_url}{path}", json=whole, headers=headers, timeout=PATIENCE_S)


def streamed(client, **body):
    """The events of a stream; each has its type as name."""
    lines = send(client, stream=True, **body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [one["type"] for one in events]
    return events


def collected(events):
    """The message of a stream, as clients collect it."""
    message, partial = events[0]["message"], {}
    for event in events[1:]:
        index = event.get("index")
        if event["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(event["content_block"])
            partial[index] = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][index]
            if delta["type"] == "input_json_delta":
                partial[index] += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop" and message["content"][index]["type"] == "tool_use":
            message["content"][index]["input"] = json.loads(partial[index])
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def plain(message):
    """A message without ids."""
    blocks = [{name: value for name, value in one.items() if name != "id"} for one in message["content"]]
    return {**message, "id": None, "content": blocks}


OBJECT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({}, {"messages": [USER]}),
        (
            {
                "system": "be short",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            },
            {"messages": [{"role": "system", "content": "be short"}, USER]},
        ),
        (
            {
                "system": [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}],
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 7,
                "stop_sequences": ["zz"],
                "output_config": {"effort": "low"},
            },
            {
                "messages": [{"role": "system", "content": "be short"}, USER],
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 7,
                "stop": ["zz"],
                "reasoning_effort": "low",
            },
        ),
        (
            {
                "tools": [WEATHER],
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "mulling", "signature": "x"},
                            {"type": "text", "text": "I look."},
                            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "c1",
                                "content": [{"type": "text", "text": "sunny"}],
                            },
                            {"type": "text", "text": "and?"},
                        ],
                    },
                ],
            },
            {
                "tools": [TOOL],
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": "I look.",
                        "reasoning_content": "mulling",
                        "tool_calls": [CALLED],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                    {"role": "user", "content": "and?"},
                ],
            },
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "I say"}]},
            {
                "messages": [USER, {"role": "assistant", "content": "I say"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
        ),
        (
            {"messages": [USER, {"role": "user", "content": "more"}]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": t} for t in ("hi", "more")]}
                ]
            },
        ),
        (
            {"thinking": {"type": "disabled"}},
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"messages": [USER], "response_format": OBJECT},
        ),
        (
            {
                "output_format": {"type": "json_schema", "schema": {"type": "object"}},
                "output_config": {"effort": "low"},
            },
            {"messages": [USER], "response_format": OBJECT, "reasoning_effort": "low"},
        ),
    ],
)
def test_the_engine_gets_the_request_of_the_equal_chat(body, chat):
    with saying("ok") as (client, engine):
        answer = send(client, **body)
        assert answer.status_code == 200, answer.text
        found = asked(engine)
        whole = send(client, "chat/completions", **chat).json()
        assert found == asked(engine)
        counted = send(client, "messages/count_tokens", **body).json()
    message, usage = answer.json(), answer.json()["usage"]
    assert message["content"] == [{"type": "text", "text": "ok", "citations": None}]
    assert usage["cache_read_input_tokens"] == whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    parts = [usage[f"{name}input_tokens"] for name in ("", "cache_creation_", "cache_read_")]
    assert sum(parts) == whole["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == whole["usage"]["completion_tokens"]
    assert counted == {"input_tokens": whole["usage"]["prompt_tokens"]}


def test_a_message_counts_the_whole_pages_that_its_prompt_adds_to_the_cache(tokenizer):
    engine = scripted(tokenizer)
    for is_on in (True, False):
        frontend = frontend_of(engine, tokenizer)
        config = replace(frontend.cluster.engine, prefix_caching=is_on)
        frontend.cluster = replace(frontend.cluster, engine=config)
        with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
            body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 50}]}
            whole = served.post("/v1/messages", body).json()["usage"]
            lines = served.post("/v1/messages", {**body, "stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        [start] = [one["message"]["usage"] for one in events if one["type"] == "message_start"]
        num, pages = start["input_tokens"], start["input_tokens"] // 16
        assert pages >= 3
        assert "cache_read_input_tokens" not in start, "the prompt is not computed yet"
        assert whole["cache_read_input_tokens"] == 1  # this engine finds one token
        assert whole["cache_creation_input_tokens"] == (16 * pages - 1 if is_on else 0)
        assert whole["input_tokens"] == num - 1 - whole["cache_creation_input_tokens"]
        assert [one["usage"] for one in events if one["type"] == "message_delta"] == [whole]


@pytest.mark.parametrize("tokens_per_step", [1, 5, 200])
@pytest.mark.parametrize("text", ["hello", THINKING, "<think>\nonly", f"{CALL}\n{CALL}", f"a {CALL} b", ""])
def test_a_stream_collects_to_the_whole_message(text, tokens_per_step):
    with saying(text, tokens_per_step=tokens_per_step, reasoning_parser="qwen3") as (client, _):
        whole = send(client, tools=[WEATHER]).json()
        events = streamed(client, tools=[WEATHER])
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert plain(collected(events)) == plain(whole)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole["content"])


@pytest.mark.parametrize(
    ("cut", "given"), [(1, {"city": "Oslo", "days": 3}), (12, {"city": "Oslo"}), (20, {})]
)
def test_a_call_cut_by_the_limit_has_the_whole_values_of_its_input(cut, given):
    with saying('[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]') as (client, engine):
        body = {"tools": [WEATHER], "tool_choice": {"type": "any"}}
        body["max_tokens"] = len(engine.answers[None]) - 1 - cut
        message = send(client, **body).json()
        events = streamed(client, **body)
    [call] = message["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", given)
    assert message["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"
    [start] = [one["content_block"] for one in events if one["type"] == "content_block_start"]
    assert (start["type"], start["name"]) == ("tool_use", "weather")


def test_an_adapter_s_message_has_its_version(server):
    body = {"model": "shout", "max_tokens": 20, "messages": [USER]}
    assert server.post("/v1/messages", body).json()["adapter_version"] == 1
    assert "adapter_version" not in server.post("/v1/messages", {**body, "model": "base"}).json()
    lines = server.post("/v1/messages", {**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [one["adapter_version"] for one in events if one["type"] == "message_delta"] == [1]


def test_blocks_are_thinking_text_and_calls():
    with saying(THINKING, reasoning_parser="qwen3") as (client, _):
        message = send(client, tools=[WEATHER]).json()
    thinking, text, call = message["content"]
    assert (thinking["thinking"], text["text"]) == ("mulling", "Let me see.")
    assert (call["name"], call["input"]) == ("weather", {"city": "Oslo"})
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "tool_use")
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_the_reason_of_the_end():
    with saying("one two STOP three") as (client, _):
        for body, reason, stop in (
            ({}, "end_turn", None),
            ({"max_tokens": 1}, "max_tokens", None),
            ({"stop_sequences": ["three", "STOP"]}, "stop_sequence", "STOP"),
            ({"stop_sequences": ["zz"]}, "end_turn", None),
        ):
            for message in (send(client, **body).json(), collected(streamed(client, **body))):
                assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


def test_calls_are_forced_and_single():
    forced = [{"name": "weather", "arguments": {"city": "Oslo"}}] * 2
    tool = {"name": "weather", "input_schema": CITY["function"]["parameters"]}
    with saying(json.dumps(forced)) as (client, engine):
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            assert len(send(client, tools=[tool], tool_choice=choice).json()["content"]) == 2
            single = {**choice, "disable_parallel_tool_use": True}
            [call] = send(client, tools=[tool], tool_choice=single).json()["content"]
            assert (call["type"], call["input"]) == ("tool_use", {"city": "Oslo"})
            assert engine.requests[-1].sampling.grammar
    with saying(CALL) as (client, _):
        [text] = send(client, tools=[WEATHER], tool_choice={"type": "none"}).json()["content"]
        assert text["type"] == "text"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "maximum context length"),
        ({"messages": []}, "messages: is empty"),
        ({"messages": [{"role": "user", "content": []}]}, "no content"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0]: the role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]: the type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "not supported for user"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a list"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]},
                ]
            },
            "content[0].input: must be an object",
        ),
        ({"system": [{"type": "image"}]}, "system[0]: the type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),  # no parser
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": "1"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "allowed is custom"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "not in tools"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"output_format": "json"}, "output_format: must be an object"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_config.format; send one of them",
        ),
        ({"format": "json"}, "format is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"context_management": {"edits": [{}]}}, "context_management is not supported"),
        ({"service_tier": "priority"}, "standard_only"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -5}, "top_k"),
        ({"stop": ["x"]}, "send stop_sequences"),
        ({"n": 2}, "leave it out"),
        ({"max_token": 2}, "did you mean max_tokens"),
        ({"lora_name": "shout"}, "name the adapter in model"),
    ],
)
def test_a_refusal_has_the_form_of_the_interface(unchanged, body, words):
    whole = {"messages": [USER], "max_tokens": 5, **body}
    answer = unchanged.post("/v1/messages", whole)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]


def test_every_error_has_the_form_of_the_interface(tokenizer, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, rights("acme", requests_per_minute=3))
    engine = scripted(tokenizer, fail_after=2)
    body = {"messages": [USER], "max_tokens": 50}
    with ServerThread(app_of(engine, tokenizer, api_keys=str(file))) as thread:

        def call(path="/v1/messages", headers=(("x-api-key", key),), **words):
            return httpx.post(f"{thread.url}{path}", headers=dict(headers), timeout=PATIENCE_S, **words)

        failed = [
            call(headers=(), json=body),
            call(headers=(("x-api-key", "wrong"),), json=body),
            call(json={**body, "model": "nobody"}),
            call("/v1/messages/count_tokens", json={**body, "model": "nobody"}),
            call(json=body),
            call(json=body),
            call("/v1/messages/count_tokens", json=body),
        ]
    assert [(one.status_code, one.json()["error"]["type"]) for one in failed] == [
        (401, "authentication_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (404, "not_found_error"),
        (503, "overloaded_error"),
        (429, "rate_limit_error"),
        (429, "rate_limit_error"),
    ]
    assert "retry-after" in failed[-1].headers


def test_either_header_has_the_key(engine, tokenizer, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, rights("acme"))
    body = {"messages": [USER], "max_tokens": 50}
    with ServerThread(app_of(engine, tokenizer, api_keys=str(file))) as thread:
        for headers in (
            {"x-api-key": key},
            {"Authorization": f"Bearer {key}"},
            {"Authorization": f"Bearer {key}", "x-api-key": "wrong"},
        ):
            answer = httpx.post(f"{thread.url}/v1/messages", json=body, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == 200, headers
        assert httpx.get(f"{thread.url}/v1/models", headers={"x-api-key": key}).status_code == 200
    assert {request.tenant for request in engine.requests} == {"acme"}


def test_an_error_in_a_stream_is_an_event(tokenizer):
    with serving(scripted(tokenizer, fail_after=2), tokenizer) as served:
        text = served.post("/v1/messages", {"messages": [USER], "max_tokens": 50, "stream": True}).text
    name, data = text.split("\n\n")[-2].splitlines()
    assert name == "event: error"
    assert json.loads(data[6:])["error"]["type"] == "overloaded_error"


def test_a_count_goes_beyond_the_context(server):
    long = [{"role": "user", "content": "hello " * 500}]
    counted = server.post("/v1/messages/count_tokens", {"messages": long, "zz": 1})
    assert counted.json()["input_tokens"] > 1000
    assert counted.headers["x-ignored-fields"] == "zz"
    assert server.post("/v1/messages", {"messages": long, "max_tokens": 1}).status_code == 400


def test_large_bodies_go_through_the_checking_process():
    long = {"role": "user", "content": "word " * 8000}
    with saying("ok", max_model_len=100_000) as (client, engine):
        assert send(client, messages=[long]).json()["content"][0]["text"] == "ok"
        assert long["content"] in engine.prompts()[-1]
        error = send(client, messages=[{**long, "role": "critic"}]).json()["error"]
    assert "messages[0]: the role" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_with_it(tokenizer, stream):
    engine = scripted(tokenizer, hang_after=2)
    body = {"messages": [USER], "ignore_eos": True, "max_tokens": 90, "stream": stream}
    with serving(engine, tokenizer) as served:
        connection = HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE_S)
        connection.request("POST", "/v1/messages", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: engine.num_tokens == 2, "the request runs")
        connection.close()
        wait_until(lambda: len(engine.aborted) == 1 and not engine.running, "the request is cancelled")


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such city", "Error: no such city"),
        ("Error: no such city", "Error: no such city"),
        ("error 404", "error 404"),
        (None, "Error"),
        ([], "Error"),
        ([{"type": "text", "text": "none"}], "Error: none"),
        (
            [{"type": "text", "text": "none"}, {"type": "text", "text": "here"}],
            [{"type": "text", "text": "Error: none"}, {"type": "text", "text": "here"}],
        ),
    ],
)
def test_a_failed_tool_is_an_error_for_the_model(content, shown):
    """Templates print a result's content alone."""
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    given = [{"role": "user", "content": [{**result, "is_error": failed}]} for failed in (True, False)]
    [error], [other] = (messages_of([one], {}) for one in given)
    assert error == {"role": "tool", "tool_call_id": "c1", "content": shown, "is_error": True}
    assert other["content"] != shown or shown == content
