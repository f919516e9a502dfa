# SPDX-License-Identifier: Apache-2.0
"""What clients count on beside the answer: usage in every chunk, request ids, calls from browsers, a page."""

from __future__ import annotations

import asyncio
import json

import pytest

from moe_lora.core.errors import PeerUnreachableError
from moe_lora.serve.openai import load_report
from moe_lora.serve.openai.protocol import MAX_ID_CHARS
from tests.patience import PATIENCE_S

from .conftest import app_of, as_served, scripted, serving
from .live_server import ServerThread, wait_until

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
ENDPOINTS = pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [("/v1/completions", {"prompt": "hello"}, "cmpl-"), ("/v1/chat/completions", CHAT, "chatcmpl-")],
)


def chunks(server, path, body):
    text = server.post(path, {**body, "stream": True}).text
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@ENDPOINTS
@pytest.mark.parametrize("include", [{"include_usage": True}, {}])
def test_usage_is_in_every_chunk_where_it_is_asked_for(any_server, path, body, prefix, include):
    options = {"stream_options": {**include, "continuous_usage_stats": True}, "max_tokens": 3}
    *parts, last = chunks(any_server, path, {**body, **options, "ignore_eos": True})
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    for part in parts:
        usage = part["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


def test_usage_in_chunks_is_that_of_their_choice(any_server):
    body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 2, "ignore_eos": True}
    *parts, last = chunks(
        any_server, "/v1/completions", {**body, "stream_options": {"continuous_usage_stats": True}}
    )
    found = {part["choices"][0]["index"]: part["usage"] for part in parts}
    assert [found[index]["prompt_tokens"] for index in range(4)] == [2, 2, 1, 1]
    assert all(usage["completion_tokens"] == 2 for usage in found.values())
    assert last["usage"]["completion_tokens"] == 8


@ENDPOINTS
def test_usage_is_in_no_chunk_where_it_is_switched_off(any_server, path, body, prefix):
    options = {"include_usage": False, "continuous_usage_stats": True}
    parts = chunks(any_server, path, {**body, "max_tokens": 2, "stream_options": options})
    assert all("usage" not in part and part["choices"] for part in parts)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_the_chunk_with_the_role_counts_no_token(tokenizer, tokens_per_step):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "n": 2, "max_tokens": 3, "ignore_eos": True, "stream_options": options}
    with serving(scripted(tokenizer, tokens_per_step=tokens_per_step), tokenizer) as server:
        *parts, _ = chunks(server, "/v1/chat/completions", body)
    for index in range(2):
        mine = [part for part in parts if part["choices"][0]["index"] == index]
        assert mine[0]["choices"][0]["delta"]["role"] == "assistant"
        counts = [part["usage"]["completion_tokens"] for part in mine]
        assert counts == ([0, 1, 2, 3] if tokens_per_step == 1 else [0, 3])


def test_ids_of_the_prompt_come_with_those_of_the_answer(any_server):
    body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
    choices = any_server.post("/v1/completions", body).json()["choices"]
    prompts = [[5, 6], [5, 6], [7], [7]]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert all(len(choice["token_ids"]) == 2 for choice in choices)
    shown: dict[int, list] = {}
    for part in chunks(any_server, "/v1/completions", body):
        [choice] = part["choices"]
        shown.setdefault(choice["index"], []).append(choice.get("prompt_token_ids"))
    assert [shown[index][0] for index in range(4)] == prompts
    assert not any(any(later) for _, *later in shown.values())


def test_ids_of_a_chats_prompt_lie_beside_its_choices(any_server):
    body = {**CHAT, "n": 2, "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
    whole = any_server.post("/v1/chat/completions", body).json()
    ids = whole["prompt_token_ids"]
    assert len(ids) == whole["usage"]["prompt_tokens"]
    assert [set(choice) >= {"token_ids"} for choice in whole["choices"]] == [True, True]
    for options in ({}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
        for part in chunks(any_server, "/v1/chat/completions", {**body, **options}):
            has_role = any("role" in choice["delta"] for choice in part["choices"])
            assert part.get("prompt_token_ids") == (ids if has_role else None)


@ENDPOINTS
def test_ids_are_null_where_nobody_asks_for_them(any_server, path, body, prefix):
    answer = any_server.post(path, {**body, "max_tokens": 1}).json()
    places = [answer, *answer["choices"]]
    found = [place[name] for place in places for name in ("prompt_token_ids", "token_ids") if name in place]
    assert found == [None, None]


@ENDPOINTS
def test_a_seed_of_minus_one_is_no_seed(server, engine, path, body, prefix):
    for seed in (-1, None, 7):
        assert server.post(path, {**body, "seed": seed, "n": 2, "max_tokens": 1}).status_code == 200
    assert [request.sampling.seed for request in engine.requests] == [None, None, None, None, 7, 8]


def test_the_root_of_the_base_is_its_name(any_server):
    cards = {card["id"]: card for card in any_server.get("/v1/models").json()["data"]}
    assert cards[any_server.model]["root"] == any_server.model
    assert cards[any_server.adapter]["parent"] == any_server.model
    assert any_server.get(f"/v1/models/{any_server.model}").json()["root"] == any_server.model


@ENDPOINTS
def test_an_empty_name_is_no_model(any_server, path, body, prefix):
    assert any_server.post(path, {**body, "model": ""}).status_code == 404


@ENDPOINTS
def test_the_header_names_the_request_before_the_body_does(any_server, path, body, prefix):
    url, body = f"{any_server.url}{path}", {**body, "max_tokens": 1}

    def ask(headers, **fields):
        answer = any_server.http.post(url, json={**body, **fields}, headers=headers)
        return answer.headers["x-request-id"], answer.json()["id"]

    assert ask({"X-Request-Id": "mine"}) == ("mine", f"{prefix}mine")
    assert ask({"X-Request-Id": "mine"}, request_id="other") == ("mine", f"{prefix}mine")
    longest, longer = "a" * MAX_ID_CHARS, "a" * (MAX_ID_CHARS + 1)
    assert ask({"X-Request-Id": longest}, request_id="other") == (longest, f"{prefix}{longest}")
    assert ask({"X-Request-Id": longer}, request_id="other") == ("other", f"{prefix}other")
    assert longer not in ask({"X-Request-Id": longer})[1]
    assert ask({}, request_id="other") == ("other", f"{prefix}other")
    assert ask({}, request_id="ö\n")[1] == f"{prefix}ö\n"
    made, shown = ask({})
    assert shown == f"{prefix}{made}"
    assert made != ask({})[0]


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_gets_the_load_in_a_header(server, path, body, prefix, stream):
    def report(form):
        header = {"Endpoint-Load-Metrics-Format": form}
        return server.http.post(path, json={**body, "max_tokens": 1, "stream": stream}, headers=header)

    text = report("TEXT").headers["endpoint-load-metrics"]
    assert text == "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=5.0"
    kind, _, found = report("json").headers["endpoint-load-metrics"].partition(" ")
    named = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 5.0}
    assert (kind, json.loads(found)) == ("JSON", {"named_metrics": named})
    assert "endpoint-load-metrics" not in server.http.post(path, json={**body, "max_tokens": 1}).headers


TEXT = {"Endpoint-Load-Metrics-Format": "TEXT"}


def answer_with(server, header):
    answer = server.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1}, headers=header)
    assert answer.status_code == 200
    return answer


def test_an_unknown_format_of_the_load_is_logged_once_and_gets_no_report(server, caplog):
    for form in ("BIN", "BIN", "proto"):
        answer = answer_with(server, {"Endpoint-Load-Metrics-Format": form})
        assert "endpoint-load-metrics" not in answer.headers
    assert caplog.text.count("'BIN' is not allowed") == 1
    assert "proto" not in caplog.text
    assert "endpoint-load-metrics" in answer_with(server, TEXT).headers


def test_requests_share_a_call_for_the_load(server, engine, monkeypatch):
    monkeypatch.setattr(load_report, "FRESH_S", PATIENCE_S)
    stats, calls = engine.stats, []

    async def counted():
        calls.append(1)
        return await stats()

    monkeypatch.setattr(engine, "stats", counted)
    reports = {answer_with(server, TEXT).headers["endpoint-load-metrics"] for _ in range(3)}
    assert len(reports) == len(calls) == 1
    monkeypatch.setattr(load_report, "FRESH_S", 0.0)
    answer_with(server, TEXT)
    assert len(calls) == 2


def test_an_instance_that_refuses_its_figures_costs_the_report_alone(server, engine, monkeypatch):
    async def refused():
        raise PeerUnreachableError("gone")

    monkeypatch.setattr(engine, "stats", refused)
    assert "endpoint-load-metrics" not in answer_with(server, TEXT).headers


def test_no_request_waits_for_the_figures_of_a_hanging_instance(server, engine, monkeypatch):
    ends, loops, stats = asyncio.Event(), [], engine.stats

    async def hanging():
        loops.append(asyncio.get_running_loop())
        await ends.wait()
        return await stats()

    monkeypatch.setattr(engine, "stats", hanging)
    for _ in range(2):
        assert "endpoint-load-metrics" not in answer_with(server, TEXT).headers
    [loop] = loops
    loop.call_soon_threadsafe(ends.set)
    wait_until(
        lambda: "endpoint-load-metrics" in answer_with(server, TEXT).headers, "a report after the call"
    )


def test_requests_of_one_id_run_side_by_side(any_server):
    body = {"prompt": "hello", "max_tokens": 5, "request_id": "same", "stream": True}
    with (
        any_server.http.stream("POST", "/v1/completions", json=body) as first,
        any_server.http.stream("POST", "/v1/completions", json=body) as second,
    ):
        texts = [answer.read().decode() for answer in (first, second)]
    assert all('"id": "cmpl-same"' in text and '"error"' not in text for text in texts)


def test_errors_and_other_answers_carry_the_id_too(any_server):
    for path in ("/health", "/v2/nothing"):
        answer = any_server.http.get(path, headers={"X-Request-Id": "mine"})
        assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("service_tier", "flex", 'null or "auto" or "default"'),
        ("watermarking", True, "null or false"),
        ("ec_transfer_params", {"5": 1}, "null or {}"),
        ("web_search_options", {}, "null"),
    ],
)
def test_a_refusal_names_the_values_that_its_field_takes(any_server, field, value, accepted):
    answer = any_server.post("/v1/chat/completions", {**CHAT, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"{field} is not supported; leave it out, or send {accepted}"
    )


@pytest.mark.parametrize("field", [{"priority": 0}, {"service_tier": "auto"}, {"service_tier": "default"}])
def test_neutral_priorities_are_taken(any_server, field):
    assert any_server.post("/v1/chat/completions", {**CHAT, **field, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_front_page_says_what_this_is(any_server, path):
    page = any_server.get(path)
    assert page.headers["content-type"].startswith("text/html")
    assert any_server.model in page.text
    assert "/v1/load_lora_adapter" in page.text
    assert "<script" not in page.text


def test_origins_that_are_named_may_call_from_a_browser(engine, tokenizer):
    app = app_of(engine, tokenizer, cors_origins=("https://app.example.com",))
    with ServerThread(app) as thread, as_served(thread.url, engine) as served:
        ask = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
        asked = served.http.options("/v1/completions", headers=ask)
        assert asked.headers["access-control-allow-origin"] == "https://app.example.com"
        answer = served.http.get("/v1/models", headers={"Origin": "https://app.example.com"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example.com"
        other = served.http.get("/v1/models", headers={"Origin": "https://other.example.com"})
        assert "access-control-allow-origin" not in other.headers


def test_no_origin_may_where_none_is_named(server):
    answer = server.http.get("/v1/models", headers={"Origin": "https://app.example.com"})
    assert "access-control-allow-origin" not in answer.headers


CHANGES = [
    *(("POST", path) for path in ("/wake_up", "/resume", "/continue_generation", "/v1/files")),
    *(("POST", "/v1/adapters/x/unpin"), ("POST", "/v1/load_lora_adapter"), ("GET", "/flush_cache")),
]


@pytest.mark.parametrize("origins", [(), ("https://app.example.com",), ("*",)])
def test_pages_of_other_sites_change_nothing(engine, tokenizer, origins):
    """Browsers send a POST without a JSON body, and a GET, without permission."""
    app = app_of(engine, tokenizer, cors_origins=origins)
    with ServerThread(app) as thread, as_served(thread.url, engine) as served:
        for origin in ("https://app.example.com", "null", thread.url, None):
            headers = {} if origin is None else {"Origin": origin}
            is_foreign = origin not in (*origins, thread.url, None) and origins != ("*",)
            for method, path in CHANGES:
                answer = served.http.request(method, path, headers=headers)
                assert (answer.status_code == 403) == is_foreign, (origin, method, path)
                assert ("front_end.cors_origins" in answer.text) == is_foreign
            assert served.http.get("/v1/models", headers=headers).status_code == 200
            body = {"model": "base", "prompt": "a", "max_tokens": 1}
            assert served.http.post("/v1/completions", json=body, headers=headers).status_code == 200
