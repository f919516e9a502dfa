# SPDX-License-Identifier: Apache-2.0
"""What a client gets wrong is answered 4xx with an OpenAI error body, and the server keeps serving."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import pytest

from tests.grids import with_quick
from tests.patience import PATIENCE_S

from .live_server import Served

HUGE = 10**400
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
LONG = {"messages": [{"role": "user", "content": "hello " * 4000}]}  # read in the other process


def error_of(response, status, kind="BadRequestError"):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert error["code"] in (status, "context_length_exceeded")
    return error["message"]


@pytest.fixture(params=with_quick(["unchanged", "demo"], ["unchanged"]))
def any_server(request) -> Iterator[Served]:
    """By default without a model: `test_fuzz.py` sends wrong bodies to both servers."""
    found = request.getfixturevalue(request.param)
    if request.param == "unchanged":
        yield found
        return
    with Served.at(found.url, "demo", "upper", max_model_len=256, vocab_size=128) as served:
        yield served


@pytest.fixture(autouse=True)
def keeps_serving(any_server):
    yield
    assert any_server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", CHAT)]
)
def test_unknown_model_is_404(any_server, path, body, stream):
    response = any_server.post(path, {**body, "model": "nobody", "stream": stream})
    assert "nobody" in error_of(response, 404, "NotFoundError")


def test_openai_client_sees_not_found(any_server):
    with openai.OpenAI(base_url=f"{any_server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.completions.create(model="nobody", prompt="hello")
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.models.retrieve("nobody")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=any_server.model, prompt="hello", temperature=-1)


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"[]", b"null", b'"text"', b'{"prompt": "a"', b"\xff\xfe", b"[" * 60_000, b"9" * 5000],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"])
def test_malformed_json_is_400(any_server, path, content):
    error_of(any_server.post_raw(path, content), 400)


def test_a_body_that_is_no_json_by_its_header_is_400(any_server):
    error_of(any_server.http.post("/v1/completions", data={"prompt": "hello"}), 400)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/load_lora_adapter", "/v1/adapters/x"])
def test_a_compressed_body_is_415_and_named(any_server, path):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    method, body = "PUT" if "adapters/" in path else "POST", gzip.compress(b'{"prompt": "hello"}')
    found = any_server.http.request(method, path, content=body, headers=headers)
    assert error_of(found, 415) == "Content-Encoding: gzip is not read; send the body uncompressed"
    plain = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    for coding in ("identity", "UTF-8"):
        headers["Content-Encoding"] = coding
        assert any_server.http.post("/v1/completions", content=plain, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "literal",
    ['{"prompt": "a", "temperature": NaN}', '{"prompt": "a", "top_p": Infinity}', '{"prompt": NaN}'],
)
def test_json_that_says_nan_is_400(any_server, literal):
    error_of(any_server.post_raw("/v1/completions", literal.encode()), 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 1e9),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2.5),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("min_tokens", 10**6),
        ("n", 0),
        ("n", 10**9),
        ("seed", HUGE),
        ("seed", 2**63),
        ("best_of", 3),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["x"] * 100),
        ("stop", "x" * 5000),
        ("stop", 5),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "a"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
        ("model", 7),
        ("model", "\ud800"),
        ("temperatures", 1),
        ("adapter_id", "upper"),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("frequency_penalty", "high"),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.1),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"9" * 40: 1}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [5]),
        ("allowed_token_ids", [10**6]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 2000),
        ("bad_words", "x"),
        ("return_tokens_as_token_ids", 1),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "xml"}),
        ("guided_regex", "("),
        ("use_beam_search", 1),
        ("skip_special_tokens", False),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", CHAT)]
)
def test_bad_values_are_400_and_name_the_field(any_server, path, body, field, value):
    answer = any_server.post(path, {**body, field: value})
    message = error_of(answer, 400)
    assert field in message
    assert answer.json()["error"]["param"] == field
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "thinking_token_budget": 2**64}, "thinking_token_budget"),
        ("/inference/v1/generate", {"token_ids": [5], "prompt_logprob_start": 2**64}, "prompt_logprob_start"),
        ("/inference/v1/generate", {"token_ids": [5], "prompt_logprob_token_ids": [[2**64]]}, "prompt_logp"),
        ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 2**64}, "logprob_start_len"),
        ("/v1/embeddings", {"messages": []}, "messages"),
        ("/pooling", {"messages": []}, "messages"),
        ("/v1/completions", {"prompt": "a", "mode\ud800": 1}, "mode"),
        ("/v1/load_lora_adapter", {"lora_nam\ud800": "a"}, "lora_nam"),
        (
            "/v1/chat/completions",
            {
                **CHAT,
                "tools": [{"type": "function", "function": {"name": "f\ud800"}}],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool",
        ),
    ],
)
def test_values_that_nothing_can_hold_are_400(any_server, path, body, field):
    answer = any_server.post(path, body)
    assert field in error_of(answer, 400)
    assert field in answer.json()["error"]["param"]


def test_a_chat_s_newer_limit_counts_beside_the_old_one(any_server):
    body = {**CHAT, "max_tokens": 0, "max_completion_tokens": 5, "temperature": 0}
    limited = any_server.post("/v1/chat/completions", {**body, "max_tokens": None})
    found = any_server.post("/v1/chat/completions", body)
    assert found.json()["choices"] == limited.json()["choices"]
    assert found.json()["usage"]["completion_tokens"] == limited.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [[]], ["hello", ""], [[5], []], [5, "hello"], [1.5], [True], {"a": 1}, 7, "\ud800"],
)
def test_bad_prompts_are_400(any_server, prompt):
    error_of(any_server.post("/v1/completions", {"prompt": prompt}), 400)


def test_a_missing_prompt_is_400(any_server):
    assert "prompt" in error_of(any_server.post("/v1/completions", {"model": any_server.model}), 400)


@pytest.mark.parametrize("wrong", [-1, HUGE, 10**6], ids=["negative", "huge", "large"])
def test_token_ids_outside_the_vocabulary_are_400(any_server, wrong):
    error_of(any_server.post("/v1/completions", {"prompt": [5, wrong]}), 400)
    error_of(any_server.post("/v1/completions", {"prompt": [[5], [wrong]]}), 400)


def test_too_long_a_prompt_is_400_with_the_limit(any_server):
    limit = any_server.max_model_len
    for prompt in ([5] * limit, [5] * (limit + 1), "hello " * limit):
        assert_too_long(any_server, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert_too_long(any_server, "/v1/completions", {"prompt": [[5], [5] * limit]})
    long_chat = {"messages": [{"role": "user", "content": "hello " * limit}]}
    assert_too_long(any_server, "/v1/chat/completions", long_chat)


def assert_too_long(server, path, body):
    """Clients that have a longer model try that one, by the message's words or by the code."""
    for stream in (False, True):
        response = server.post(path, {**body, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        start = f"This model's maximum context length is {server.max_model_len} tokens."
        assert error["message"].startswith(start)
        assert (error["type"], error["code"]) == ("BadRequestError", "context_length_exceeded")


def test_a_large_body_too_long_for_the_context_is_said_to_be_so(any_server):
    assert_too_long(any_server, "/v1/completions", {"prompt": "hello " * 5000})


def test_openai_client_sees_the_code_of_too_long_a_prompt(any_server):
    with openai.OpenAI(base_url=f"{any_server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=any_server.model, prompt=[5] * any_server.max_model_len)
        assert caught.value.code == "context_length_exceeded"


def test_max_tokens_beyond_the_context_is_400_with_the_limit(any_server):
    limit = any_server.max_model_len
    assert_too_long(any_server, "/v1/completions", {"prompt": [5] * 4, "max_tokens": limit - 3})
    assert_too_long(any_server, "/v1/completions", {"prompt": [5] * 4, "min_tokens": limit - 3})
    body = {"prompt": [5] * (limit - 1), "max_tokens": 1}
    assert any_server.post("/v1/completions", body).status_code == 200


def test_a_long_prompt_without_max_tokens_gets_what_room_there_is(any_server):
    body = {"prompt": [5] * (any_server.max_model_len - 3), "ignore_eos": True}
    assert any_server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 3


def test_too_many_choices_are_400(any_server):
    error_of(any_server.post("/v1/completions", {"prompt": [[5]] * 1000, "n": 100}), 400)


@pytest.mark.parametrize(
    "field", [{"length_penalty": 0.5}, {"suffix": "x"}, {"logprobs": 21}, {"logprobs": True}]
)
def test_unsupported_completion_fields_are_400(any_server, field):
    assert next(iter(field)) in error_of(
        any_server.post("/v1/completions", {"prompt": "hello", **field}), 400
    )


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [{}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "\udfff"}],
    ],
)
def test_bad_messages_are_400(any_server, messages):
    error_of(any_server.post("/v1/chat/completions", {"messages": messages}), 400)


@pytest.mark.parametrize("kwargs", [{"messages": []}, {"tokenize": True}, {"add_generation_prompt": True}, 5])
def test_bad_template_variables_are_400(any_server, kwargs):
    error_of(any_server.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": kwargs}), 400)


def test_top_logprobs_need_logprobs(any_server):
    error_of(any_server.post("/v1/chat/completions", {**CHAT, "top_logprobs": 3}), 400)


def test_fields_that_ask_for_nothing_are_taken(any_server):
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "best_of": 1,
        "n": None,
        "seed": None,
        "stop": None,
        "top_k": -1,
        "repetition_penalty": 1.0,
    }
    assert (
        any_server.post("/v1/completions", {"prompt": "hello", "echo": False, **neutral}).status_code == 200
    )
    chat = {**CHAT, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, **neutral}
    assert any_server.post("/v1/chat/completions", chat).status_code == 200


def test_unknown_paths_and_methods_have_error_bodies(any_server):
    error_of(any_server.get("/v2/nothing"), 404, "NotFoundError")
    error_of(any_server.get("/v1/completions"), 405, "MethodNotAllowedError")


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt", "prompt: allowed are a text, a list of texts"),
        ("/v1/completions", {"prompt": "\ud800"}, "prompt", "prompt: half a surrogate pair"),
        ("/v1/completions", {"prompt": "a", "stop": [1]}, "stop", "stop: allowed are a text or a list"),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 99}, "stop", "stop: List should have at most"),
        (
            "/v1/completions",
            {"prompt": "a", "suffix": "b"},
            "suffix",
            "suffix is not supported; leave it out",
        ),
        ("/v1/completions", [], None, "the body must be a JSON object, sent with Content-Type"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": 3}]},
            "messages",
            "messages: allowed",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "messages.0.content.0.type: Input should be 'text'",
        ),
    ],
)
def test_messages_name_the_field_and_what_it_takes(any_server, path, body, param, message):
    response = any_server.post(path, body)
    assert error_of(response, 400).startswith(message)
    assert response.json()["error"]["param"] == param
    assert "function-" not in response.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("/v1/responses", {"input": "hello", "top_logprobs": 99}, "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 10**6}, "max_completion_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 10**6}, "max_tokens"),
        ("/v1/chat/completions", {**LONG, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("/generate", {"text": "a", "rid": ""}, "rid"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"sampling_seed": 2**70}}, "sampling_seed"),
        ("/generate", {"text": "a", "lora_path": ["upper"]}, "lora_path"),
        ("/generate", {"text": "a", "max_tokens": 3}, "max_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"prompt": 3}}, "prompt"),
        ("/generate", {"text": ""}, "text"),
        ("/generate", {"text": []}, "text"),
        ("/generate", {"text": ["a", ""]}, "text"),
        ("/generate", {"text": 5}, "text"),
        ("/generate", {"input_ids": []}, "input_ids"),
        ("/generate", {"input_ids": [10**6]}, "input_ids"),
        ("/generate", {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/score", {"query": "", "items": [""], "label_token_ids": [5]}, "query"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [10**6]}, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5], "prompt": "c"}, "prompt"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [10**6]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5], "prompt": "x"}, "prompt"),
        ("/v2/embed", {"texts": [""]}, "texts"),
        ("/v2/embed", {}, "texts"),
        ("/v1/embeddings", {"input": "hello " * 1000}, "input"),
        ("/v1/embeddings", {"input": [10**6]}, "input"),
    ],
)
def test_errors_name_the_field_as_the_client_does(any_server, path, body, param):
    response = any_server.post(path, body)
    assert re.search(rf"\b{param}\b", error_of(response, 400))
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "a", "lora_path": "nobody"}, "lora_path"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
def test_what_is_not_found_is_named_as_the_client_does(any_server, path, body, param):
    response = any_server.post(path, body)
    error_of(response, 404, "NotFoundError")
    assert response.json()["error"]["param"] == param


def raw(server, *parts):
    """The first bytes that answer what is sent, over a connection of its own."""
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.02)  # a part of its own at the other side
        except ConnectionError:
            pass  # it was answered before it had read everything
        return connection.recv(1 << 16)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize(
    "start",
    [
        b"GET /v1/models?",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nEndless: ",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 100,
        CHUNKED,
        CHUNKED + b"Endless: ",
    ],
    ids=["address", "header", "headers", "trailers", "trailer"],
)
def test_an_endless_head_is_refused_before_it_fills_the_memory(any_server, start):
    more = b"a: b\r\n" * 2000 if start.endswith(b"\r\n") else b"a" * 12_000
    assert raw(any_server, start, *[more] * 6).startswith(b"HTTP/1.1 400")


def test_a_body_in_many_small_chunks_is_taken(any_server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "user": "a" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    found = raw(any_server, head + b"Transfer-Encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_http_1_0_ends_with_its_connection_and_has_no_chunks(any_server, stream):
    """Also behind a header that keeps connections."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 3, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nConnection: keep-alive\r\n"
    place = urlsplit(any_server.url)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    fields, _, text = answer.partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in fields.lower()
    assert b"\r\nconnection: close" in fields.lower()
    if stream:
        *events, done = text.decode().removesuffix("\n\n").split("\n\n")
        assert [json.loads(one.removeprefix("data: "))["object"] for one in events]
        assert done == "data: [DONE]"
    else:
        assert int(re.search(rb"(?i)content-length: (\d+)", fields)[1]) == len(text)
        assert json.loads(text)["usage"]["completion_tokens"] == 3


def test_a_request_that_offers_http_2_is_answered(any_server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head += offer + b"Content-Length: %d\r\n\r\n" % len(body)
    assert raw(any_server, head + body).startswith(b"HTTP/1.1 200")
    assert raw(any_server, head, body).startswith(b"HTTP/1.1 200")
