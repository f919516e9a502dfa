# SPDX-License-Identifier: Apache-2.0
"""/v1/responses with the client of OpenAI: the same engine requests as chats, items and events, the store."""

from __future__ import annotations

import json
from dataclasses import replace
from http.client import HTTPConnection

import httpx
import openai
import pytest
from pydantic import BaseModel

from moe_lora.serve.api_keys import add_key
from moe_lora.serve.openai.responses.store import MAX_STORED_BYTES, OVERHEAD_BYTES, ResponseStore, Stored
from tests.grids import diagonal
from tests.patience import PATIENCE_S

from .conftest import app_of, scripted, serving
from .live_server import ServerThread, wait_until
from .test_access import rights
from .test_tools import CALL, CITY, QWEN, TOOL, saying

WEATHER = {"type": "function", "strict": True, **TOOL["function"]}
THINKING = f"<think>\nmulling</think>\n\nLet me see. {CALL}"


def respond(client, **body):
    return client.responses.create(model="base", **{"input": "hello", **body})


def asked(engine):
    """Prompt and sampling of the last engine request."""
    last = engine.requests[-1]
    return last.prompt_token_ids, replace(last.sampling, seed=None), last.adapter


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}),
        (
            {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
                "instructions": "be short",
            },
            {"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]},
        ),
        (
            {
                "instructions": "one",
                "input": [{"role": "developer", "content": "two"}, {"role": "user", "content": "hi"}],
            },
            {
                "messages": [
                    {"role": "system", "content": "one"},
                    {"role": "developer", "content": "two"},
                    {"role": "user", "content": "hi"},
                ]
            },
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "hi"},
                    {"type": "reasoning", "id": "rs_1", "summary": []},
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
                    },
                    {
                        "type": "function_call",
                        "id": "fc_1",
                        "call_id": "c1",
                        "name": "weather",
                        "arguments": '{"city": "Oslo"}',
                    },
                    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                ],
                "tools": [WEATHER],
                "temperature": 0.5,
                "top_p": 0.9,
                "max_output_tokens": 7,
                "reasoning": {"effort": "low"},
            },
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {
                        "role": "assistant",
                        "content": "I look.",
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                ],
                "tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}],
                "temperature": 0.5,
                "top_p": 0.9,
                "max_tokens": 7,
                "reasoning_effort": "low",
            },
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "input": "hi"},
            {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}},
        ),
    ],
)
def test_the_engine_gets_the_request_of_the_equal_chat(body, chat):
    with saying("ok") as (client, engine):
        answer = respond(client, **body)
        found = asked(engine)
        whole = client.chat.completions.create(model="base", **chat)
        assert found == asked(engine)
    assert answer.output_text == whole.choices[0].message.content == "ok"
    assert answer.usage.input_tokens == whole.usage.prompt_tokens
    assert answer.usage.output_tokens == whole.usage.completion_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 1


def test_an_adapter_answers_under_its_name(server):
    answer = server.post("/v1/responses", {"model": "shout", "input": "hello"}).json()
    assert (answer["model"], answer["output"][0]["content"][0]["text"]) == ("shout", "fox")
    assert answer["id"].startswith("resp_")
    assert answer["adapter_version"] == 1
    assert "adapter_version" not in server.post("/v1/responses", {"model": "base", "input": "hello"}).json()


def shape(response):
    """A response without ids and times."""
    found = json.loads(response.to_json())
    for name in ("id", "created_at", "completed_at"):
        found.pop(name, None)
    for item in found["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return found


TEXTS = ("hello", THINKING, "<think>\nonly", f"{CALL}\n{CALL}", f"a {CALL} b", "")


@pytest.mark.parametrize(("text", "tokens_per_step"), diagonal(TEXTS, [1, 5, 200]))
def test_a_stream_ends_in_the_whole_answer(text, tokens_per_step):
    with saying(text, tokens_per_step=tokens_per_step, reasoning_parser="qwen3") as (client, _):
        whole = respond(client, tools=[WEATHER])
        with client.responses.stream(model="base", input="hello", tools=[WEATHER]) as stream:
            events = list(stream)
            final = stream.get_final_response()
    assert shape(final) == shape(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    assert kinds.count("response.output_item.done") == len(whole.output)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]


def test_events_are_in_the_order_of_the_interface():
    with saying(THINKING, reasoning_parser="qwen3") as (client, _):
        events = list(respond(client, tools=[WEATHER], stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    plain = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    added, part = ["output_item.added"], ["content_part.added"]
    text = ["output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    reasoning = [kind.replace("output_text", "reasoning_text") for kind in text]
    call = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    expected = ["created", "in_progress", *added, *part, *reasoning, *added, *part, *text, *added, *call]
    assert plain == [*expected, "completed"]
    for kind, field in (("output_text", "text"), ("function_call_arguments", "arguments")):
        pieces = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        [done] = [event for event in events if event.type == f"response.{kind}.done"]
        assert "".join(pieces) == getattr(done, field)
        assert len(pieces) > 3


def test_a_cut_answer_is_incomplete():
    with saying("hello world") as (client, _):
        whole = respond(client, max_output_tokens=1)
        *_, last = respond(client, max_output_tokens=1, stream=True)
    assert last.type == "response.incomplete"
    for answer in (whole, last.response):
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete"


@pytest.mark.parametrize(("after", "items"), [("", []), (" well", [("message", "incomplete")])])
def test_a_complete_call_is_completed_in_a_cut_answer(after, items):
    with saying(f"{CALL}{after}") as (client, engine):
        body = {"tools": [WEATHER], "max_output_tokens": len(engine.answers[None]) - 1}
        whole = respond(client, **body)
        *_, last = respond(client, stream=True, **body)
    for answer in (whole, last.response):
        found = [(item.type, item.status) for item in answer.output]
        assert found == [("function_call", "completed"), *items]


@pytest.mark.parametrize("cut", [2, 8])
def test_a_call_cut_by_the_limit_is_an_incomplete_call(cut):
    with saying('[{"name": "weather", "arguments": {"city": "Oslo"}}]') as (client, engine):
        body = {"tools": [WEATHER], "tool_choice": "required", "store": False}
        body["max_output_tokens"] = len(engine.answers[None]) - 1 - cut
        whole = respond(client, **body)
        *_, last = respond(client, stream=True, **body)
    shown = []
    for answer in (whole, last.response):
        [call] = answer.output
        assert (answer.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")
        shown.append((call.name, call.arguments))
    assert shown[0] == shown[1]
    assert shown[0][1].startswith('{"city":')


def test_a_call_after_a_malformed_one_is_the_single_call():
    malformed = CALL.replace('"Oslo"', "Oslo")
    with saying(f"{malformed}\n{CALL}\n{CALL}") as (client, _):
        body = {"tools": [WEATHER], "parallel_tool_calls": False}
        text, call = respond(client, **body).output
        *_, last = respond(client, stream=True, **body)
    assert text.content[0].text.strip() == malformed
    assert call.arguments == last.response.output[-1].arguments == '{"city": "Oslo"}'


@pytest.mark.parametrize("cut", [18, 0])
def test_a_stream_with_a_malformed_call_is_continued_as_the_whole_answer_is(cut):
    """Clients saw pieces of its arguments; the conversation has the model's text."""
    text = CALL if cut else CALL.replace('"Oslo"', "Oslo") + " ok"
    with saying(text, tool_call_parser="hermes") as (client, engine):
        body = {"tools": [{**WEATHER, "strict": None}]}
        if cut:
            body["max_output_tokens"] = len(engine.answers[None]) - cut
        whole = respond(client, **body)
        *_, last = respond(client, stream=True, **body)
        prompts = []
        for answer in (whole, last.response):
            respond(client, **body, previous_response_id=answer.id, input="go on")
            prompts.append(engine.prompts()[-1])
        assert prompts[0] == prompts[1]
        kept = [client.responses.retrieve(one.id).output for one in (whole, last.response)]
    assert [item.type for item in last.response.output] != [item.type for item in kept[1]]
    shown = [[one.to_dict() | {"id": None} for one in output] for output in kept]
    assert shown[0] == shown[1]


def test_reasoning_is_an_item_and_comes_back():
    include = ["reasoning.encrypted_content"]
    with saying("<think>\nmulling</think>\n\nok", QWEN_REASONING, reasoning_parser="qwen3") as (
        client,
        engine,
    ):
        answer = respond(client, include=include, store=False)
        reasoning, message = answer.output
        assert (reasoning.content[0].text, message.content[0].text) == ("mulling", "ok")
        usage = answer.usage
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        hidden = reasoning.to_dict() | {"content": None}
        for item in (reasoning.to_dict(), hidden):
            history = [{"role": "user", "content": "hello"}, item, message.to_dict()]
            respond(client, input=[*history, {"role": "user", "content": "more"}])
            assert "(mulling)ok" in engine.prompts()[-1]


QWEN_REASONING = QWEN.replace("[{{ m.role }}]", "[{{ m.role }}]({{ m.reasoning_content }})")


@pytest.mark.parametrize(
    ("tokens_per_step", "stop", "after"), diagonal([1, 5, 200], [None, "is"], [f" {CALL}", ""])
)
def test_log_probabilities_are_of_the_text(tokens_per_step, stop, after):
    text = f"<think>\nmulling</think>\n\nok this{after}"
    more = {"top_logprobs": 2, "tools": [WEATHER], "extra_body": {"stop": stop}}
    with saying(text, tokens_per_step=tokens_per_step, reasoning_parser="qwen3") as (client, _):
        for include in (["message.output_text.logprobs"], []):
            message = respond(client, include=include, **more).output[1]
            logprobs = message.content[0].logprobs
            events = list(respond(client, include=include, stream=True, **more))
            deltas = [event for event in events if event.type == "response.output_text.delta"]
            [done] = [event for event in events if event.type == "response.output_text.done"]
            plain = [one.to_dict() for one in logprobs]
            assert [one.to_dict() for event in deltas for one in event.logprobs] == plain
            assert [one.to_dict() for one in done.logprobs] == plain
            if tokens_per_step == 1:
                assert "".join(one.token for one in logprobs).startswith("ok th")
                assert {len(one.top_logprobs) for one in logprobs} == {2}


def test_a_forced_call_is_the_only_item():
    with saying('[{"name": "weather", "arguments": {"city": "Oslo"}}]') as (client, engine):
        named = {"type": "function", "name": "weather"}
        for choice in ("required", named):
            [call] = respond(
                client, tools=[{"type": "function", **CITY["function"]}], tool_choice=choice
            ).output
            assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Oslo"}')
            assert engine.requests[-1].sampling.grammar


class Person(BaseModel):
    name: str


def test_the_client_parses_a_schema():
    with saying('{"name": "Ann"}') as (client, engine):
        answer = client.responses.parse(model="base", input="who?", text_format=Person)
    assert answer.output_parsed == Person(name="Ann")
    assert engine.requests[-1].sampling.grammar


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"background": True, "store": False}, "background", "when `store` is true"),
        ({"background": True, "stream": True}, "background", "leave stream out"),
        ({"background": 1}, "background", "background"),
        ({"enable_response_messages": True, "stream": True}, "enable_response_messages", "whole answer"),
        ({"enable_response_messages": True, "background": True}, "enable_response_messages", "background"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "x"}}, "prompt", "not supported"),
        ({"max_tool_calls": 3}, "max_tool_calls", "not supported"),
        ({"include": ["file_search_call.results"]}, "include", "reasoning.encrypted_content"),
        ({"service_tier": "flex"}, "service_tier", "default"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning", "reasoning.summary"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", ""),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "include_obfuscation"),
        ({"tools": [{"type": "web_search"}]}, "tools", "allowed is function"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed are"),
        ({"input": None}, "input", "a text or a list"),
        ({"input": []}, "input", "input: "),
        ({"instructions": "\ud800"}, "instructions", "instructions: half a surrogate"),
        ({"input": 5}, "input", "must be a list"),
        ({"input": "\ud800"}, "input", "surrogate"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "allowed are message"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input", "allowed are user"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input", "call_id"),
        ({"input": [{"type": "reasoning", "encrypted_content": "?"}]}, "input", "not of this server"),
        ({"input": [{"role": "user", "contents": "x"}]}, "input", "content"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "lower max_output_tokens"),
        ({"temperature": -1}, "temperature", ""),
        ({"top_logprobs": 99}, "", ""),
        ({"metadata": {"[": 1}}, "metadata", "characters"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"messages": [{}]}, "messages", "send input"),
        ({"n": 2}, "n", "leave it out"),
        ({"previous_response_id": "bad"}, "previous_response_id", "must begin with resp_"),
        ({"max_output_token": 5}, "max_output_token", "did you mean"),
        ({"reasoning": {"Effort": "low"}}, "Effort", "did you mean effort"),
        ({"lora_name": "shout"}, "lora_name", "name the adapter in model"),
    ],
)
def test_a_refusal_names_the_field(unchanged, body, param, words):
    answer = unchanged.post("/v1/responses", {"input": "hello", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert words in error["message"]
    if param:
        assert error["param"] == param


def test_unknown_fields_are_named_or_refused(server, engine, tokenizer):
    body = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello", "zz1": 1}], "zz2": 2}],
        "zz3": 3,
        "user": "me",
        "prompt_cache_key": "k",
    }
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-ignored-fields"].split(", ")
    assert sorted(named) == ["input[].content[].zz1", "input[].zz2", "zz3"]
    with ServerThread(app_of(engine, tokenizer, unknown_fields="error")) as thread:
        refused = httpx.post(f"{thread.url}/v1/responses", json=body, timeout=PATIENCE_S)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "zz3")


def test_a_response_continues_a_stored_one():
    with saying(f"Let me see. {CALL}", tokens_per_step=9) as (client, engine):
        first = respond(client, tools=[WEATHER], instructions="be kind")
        call = first.output[-1]
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = respond(client, tools=[WEATHER], previous_response_id=first.id, input=[answer])
        stateful = engine.prompts()[-1]
        history = [{"role": "user", "content": "hello"}, *[item.to_dict() for item in first.output], answer]
        respond(client, tools=[WEATHER], input=history, store=False)
        assert stateful == engine.prompts()[-1]
        assert "be kind" not in stateful
        *_, last = respond(client, previous_response_id=second.id, input="more", stream=True)
        assert last.response.previous_response_id == second.id
        assert engine.prompts()[-1].count("[tool]sunny") == 1
        assert client.responses.retrieve(last.response.id).output_text == last.response.output_text
        client.responses.delete(first.id)
        for gone in (
            lambda: client.responses.retrieve(first.id),
            lambda: client.responses.delete(first.id),
            lambda: respond(client, previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError, match="at most 1024 responses and 64 MiB"):
                gone()
        with pytest.raises(openai.BadRequestError, match="include is not supported for a stored response"):
            client.responses.retrieve(second.id, include=["message.output_text.logprobs"])
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            client.responses.cancel(second.id)


def test_a_response_without_items_is_continued():
    with saying("ok") as (client, engine):
        first = respond(client, input=[], instructions="hi")
        respond(client, previous_response_id=first.id, input="more")
        stateful = engine.prompts()[-1]
        history = [item.to_dict() for item in first.output]
        respond(client, input=[*history, {"role": "user", "content": "more"}])
        assert stateful == engine.prompts()[-1]


def test_a_stored_conversation_counts_as_the_body():
    with saying("ok", max_body_bytes=3000) as (client, _):
        first = respond(client, input="word " * 400)
        with pytest.raises(openai.APIStatusError, match="a body may have 3000") as error:
            respond(client, previous_response_id=first.id, input="word " * 300)
        assert error.value.status_code == 413


def test_only_stored_responses_are_found():
    with saying("ok") as (client, _):
        raw = client.responses.with_raw_response
        kept = raw.create(model="base", input="hello")
        assert kept.headers["x-response-store"] == (
            "the memory of this front end, at most 1024 responses and 64 MiB"
        )
        left_out = raw.create(model="base", input="hello", store=False)
        assert "x-response-store" not in left_out.headers
        assert client.responses.retrieve(kept.parse().id).store is True
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(left_out.parse().id)


def test_a_key_never_reads_the_responses_of_another(engine, tokenizer, tmp_path):
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, rights("acme")) for name in ("one", "two")}
    with ServerThread(app_of(engine, tokenizer, api_keys=str(file))) as thread:

        def call(key, method, path, **words):
            headers = {"Authorization": f"Bearer {keys[key]}"}
            return httpx.request(method, f"{thread.url}{path}", headers=headers, timeout=PATIENCE_S, **words)

        made = call("one", "POST", "/v1/responses", json={"input": "hello"}).json()
        path, body = f"/v1/responses/{made['id']}", {"input": "hello", "previous_response_id": made["id"]}
        assert call("two", "GET", path).status_code == 404
        assert call("two", "DELETE", path).status_code == 404
        assert call("two", "POST", f"{path}/cancel").status_code == 404
        assert call("two", "POST", "/v1/responses", json=body).status_code == 404
        assert call("one", "POST", "/v1/responses", json=body).status_code == 200
        assert call("one", "GET", path).json() == made
        assert call("one", "DELETE", path).json()["deleted"] is True
        assert call("one", "GET", path).status_code == 404
        assert httpx.get(f"{thread.url}{path}", timeout=PATIENCE_S).status_code == 401


def stored(owner, number, size=0):
    return Stored(owner, f"{owner}{number}", b"x" * size, b"[]")


def test_the_store_is_bounded_and_the_largest_owner_pays():
    store = ResponseStore(most=3, most_bytes=4 * OVERHEAD_BYTES)
    store.add(stored("small", 0))
    for number in range(5):
        store.add(stored("large", number, 100))
    assert store.get("small", "small0").answer == b""
    assert [number for number in range(5) if number >= 3] == [
        number for number in range(5) if f"large{number}" in store._owners["large"]
    ]
    store.add(stored("large", 9, OVERHEAD_BYTES))
    assert [list(found) for found in store._owners.values()] == [["small0"], ["large9"]]
    store.add(stored("small", 0, 1))  # its client repeats an id
    assert store._num == 2
    assert store.get("small", "small0").answer == b"x"
    store.remove("large", "large9")
    store.remove("small", "small0")
    assert (store._owners, store._bytes, store._num) == ({}, {}, 0)
    big = ResponseStore()
    big.add(stored("a", 0, MAX_STORED_BYTES))
    assert big._num == 0


def test_large_bodies_go_through_the_checking_process():
    with saying("ok", max_model_len=100_000) as (client, engine):
        long = "word " * 8000
        first = respond(client, input=long)
        assert long in engine.prompts()[-1]
        respond(client, previous_response_id=first.id, input="more")
        assert engine.prompts()[-1].endswith(f"{long}[assistant]ok[user]more[assistant]")
        with pytest.raises(openai.BadRequestError, match="allowed are message"):
            respond(client, input=[{"type": long}])
        with pytest.raises(openai.NotFoundError, match="not found"):
            respond(client, input=long, previous_response_id="resp_1")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_with_it(tokenizer, stream):
    engine = scripted(tokenizer, hang_after=2)
    body = {"input": "hello", "ignore_eos": True, "max_output_tokens": 90, "stream": stream}
    with serving(engine, tokenizer) as served:
        connection = HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE_S)
        connection.request("POST", "/v1/responses", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: engine.num_tokens == 2, "the request runs")
        connection.close()
        wait_until(lambda: len(engine.aborted) == 1 and not engine.running, "the request is cancelled")


def test_an_error_in_a_stream_is_a_failed_response(tokenizer):
    engine = scripted(tokenizer, fail_after=2)
    with serving(engine, tokenizer) as served:
        text = served.post("/v1/responses", {"input": "hello", "stream": True}).text
        assert served.post("/v1/responses", {"input": "hello"}).status_code == 503
    *_, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "[DONE]" not in text


def test_deadlines_and_unknown_models_are_errors_before_the_stream(server, engine):
    engine.hang_after = 0
    late = server.post("/v1/responses", {"input": "hello", "timeout": 0.1, "stream": True})
    assert late.status_code == 408
    unknown = server.post("/v1/responses", {"input": "hello", "model": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
