# SPDX-License-Identifier: Apache-2.0
"""SGLang's names in answers: reasoning of chats, counts of /generate, facts about the server."""

from __future__ import annotations

import httpx
import pytest

from .test_tools import THOUGHT, ask, saying

MARKS = ("<think>", "</think>")


def root_of(client) -> str:
    return str(client.base_url).removesuffix("v1/")


def deltas(client, **fields):
    return [chunk.choices[0].delta for chunk in ask(client, tools=[], stream=True, extra_body=fields)]


@pytest.mark.parametrize("parser", ["qwen3", "none"])
def test_every_entry_names_the_reasoning_once_asked(parser):
    with saying(THOUGHT, reasoning_parser=parser) as (client, _):
        for separate in (True, False):
            has_reasoning = separate and parser == "qwen3"
            message = ask(client, tools=[], extra_body={"separate_reasoning": separate}).choices[0].message
            assert message.reasoning_content == ("because" if has_reasoning else None)
            found = deltas(client, separate_reasoning=separate)
            assert "".join(one.reasoning_content or "" for one in found) == "because" * has_reasoning
            text = "".join(one.content or "" for one in found)
            assert text == message.content == ("forty two" if has_reasoning else THOUGHT)
        assert not all(hasattr(one, "reasoning_content") for one in deltas(client))


@pytest.mark.parametrize("text", [THOUGHT, "<think>because", "forty two"])
def test_a_stream_may_have_the_reasoning_in_one_event(text):
    with saying(text, reasoning_parser="qwen3") as (client, _):
        found = deltas(client, stream_reasoning=False)
        whole = ask(client, tools=[]).choices[0].message
    reasoning = [one.reasoning_content for one in found if one.reasoning_content]
    assert reasoning == ([whole.reasoning_content] if whole.reasoning_content else [])
    assert "".join(one.content or "" for one in found) == (whole.content or "")
    if reasoning and whole.content:
        first = next(place for place, one in enumerate(found) if one.reasoning_content)
        assert not any(one.content for one in found[:first])


@pytest.mark.parametrize("stream", [False, True])
def test_required_reasoning_is_counted_up_to_its_mark(stream):
    with saying(THOUGHT, special=MARKS, reasoning_parser="qwen3") as (client, engine):
        sampling = {"max_new_tokens": 100}
        body = {"text": "hi", "require_reasoning": True, "sampling_params": sampling, "stream": stream}
        found = httpx.post(f"{root_of(client)}generate", json=body)
        if stream:
            [*_, last] = [line for line in found.text.splitlines() if line.startswith("data: {")]
            found = httpx.Response(200, content=last.removeprefix("data: "))
        answer = found.json()
        closing = engine.vocab_size - 1
        assert answer["meta_info"]["reasoning_tokens"] == answer["output_ids"].index(closing) + 1
        body = {**body, "stream": False, "require_reasoning": False}
        assert (
            "reasoning_tokens" not in httpx.post(f"{root_of(client)}generate", json=body).json()["meta_info"]
        )
        for prompt, limit, expected in (("</think>", 5, 0), ("hi", 3, 3)):
            body |= {"text": prompt, "require_reasoning": True, "sampling_params": {"max_new_tokens": limit}}
            found = httpx.post(f"{root_of(client)}generate", json=body).json()
            assert found["meta_info"]["reasoning_tokens"] == expected


def test_required_reasoning_comes_before_a_grammar():
    with saying(THOUGHT, special=MARKS, reasoning_parser="qwen3") as (client, engine):
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 9, "regex": "[a-z]+"}}
        for requires in (False, True):
            found = httpx.post(f"{root_of(client)}generate", json={**body, "require_reasoning": requires})
            found.raise_for_status()
        plain, after = (one.sampling.grammar for one in engine.requests)
        assert plain != after


def test_required_reasoning_needs_marks():
    with saying(THOUGHT, reasoning_parser="none") as (client, _):
        found = httpx.post(f"{root_of(client)}generate", json={"text": "hi", "require_reasoning": True})
    assert found.status_code == 400
    assert "require_reasoning needs a reasoning parser" in found.json()["error"]["message"]


def test_facts_have_the_names_of_sglang(server, engine):
    info = server.http.get("/get_model_info").json()
    assert info == server.http.get("/model_info").json()
    assert (info["model_path"], info["is_generation"]) == ("base", True)
    facts = server.http.get("/get_server_info").json()
    assert (facts["served_model_name"], facts["tp_size"]) == ("base", 1)
    assert facts["context_length"] > 0
    assert server.http.get("/get_server_info?x=1").status_code == 400


def test_usage_of_responses_has_both_kinds_of_names(server):
    usage = server.post("/v1/responses", {"input": "hello", "max_output_tokens": 5}).json()["usage"]
    assert usage["prompt_tokens"] == usage["input_tokens"] > 0
    assert usage["completion_tokens"] == usage["output_tokens"] > 0


def test_a_render_refuses_a_continued_response_by_openais_type(server):
    body = {"input": "more", "previous_response_id": "resp_1"}
    error = server.post("/v1/responses/render", body).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "previous_response_id")
