# SPDX-License-Identifier: Apache-2.0
"""What the endpoints make of the tokens that an engine gives."""

from __future__ import annotations

import json

import pytest

from moe_lora.engine.text.text import Tokenizer

from .conftest import scripted, serving
from .live_server import wait_until
from .scripted_engine import ScriptedEngine

CHAT = [{"role": "user", "content": "hello"}]


def events(server, path, body):
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def choice(server, **body):
    response = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 50, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_model_names_the_adapter(server, engine):
    assert choice(server)["text"] == "hello world"
    assert choice(server, model="base")["text"] == "hello world"
    assert choice(server, model="shout")["text"] == "fox"
    assert [request.adapter for request in engine.requests] == [None, None, "shout"]


def test_the_end_token_is_no_text_but_counted_and_returned(server, tokenizer):
    got = choice(server, return_token_ids=True)
    assert (got["text"], got["finish_reason"]) == ("hello world", "stop")
    assert got["token_ids"][-1] == 2
    assert len(got["token_ids"]) == len("hello world") + 1


def test_a_stop_id_is_no_text(server, tokenizer):
    world = tokenizer.encode("w", add_special_tokens=False)
    got = choice(server, stop_token_ids=world, return_token_ids=True)
    assert (got["text"], got["finish_reason"], got["token_ids"][-1:]) == ("hello ", "stop", world)


@pytest.mark.parametrize(
    ("fields", "reason", "matched"),
    [
        ({"stop": ["zzz", "wor"]}, "wor", "wor"),
        ({"stop_token_ids": "w"}, "w", "w"),
        ({}, None, "</s>"),
        ({"max_tokens": 3}, None, None),
    ],
)
def test_the_last_entry_of_a_choice_names_what_ended_it(server, tokenizer, fields, reason, matched):
    """`stop_reason` is vLLM's, `matched_stop` SGLang's; neither comes before the end."""
    ids = {"w": tokenizer.encode("w", add_special_tokens=False)[0], "</s>": 2}
    if "stop_token_ids" in fields:
        fields, reason, matched = {"stop_token_ids": [ids["w"]]}, ids["w"], ids["w"]
    want = {"stop_reason": reason, "matched_stop": ids.get(matched, matched)}
    for path, prompt in (("/v1/completions", "hello"), ("/v1/chat/completions", CHAT)):
        body = {"prompt" if isinstance(prompt, str) else "messages": prompt, "max_tokens": 50, **fields}
        whole = server.post(path, body).json()["choices"][0]
        *first, last = [event["choices"][0] for event in events(server, path, body)]
        assert {name: whole[name] for name in want} == {name: last[name] for name in want} == want
        assert not any(want.keys() & entry.keys() for entry in first)


@pytest.mark.parametrize("asked", [False, True])
def test_an_end_token_of_the_tokenizer_is_a_stop_reason_if_the_client_asks_for_it(tokenizer, asked):
    words = tokenizer.encode("fox", add_special_tokens=False)
    [end] = tokenizer.encode("q", add_special_tokens=False)
    other = Tokenizer(tokenizer.backend, special_tokens={"eos_token": "q"}, chat_template="{{ messages }}")
    engine = ScriptedEngine({None: [*words, end]}, vocab_size=tokenizer.vocab_size)
    body = {"max_tokens": 50, **({"stop_token_ids": [end]} if asked else {})}
    with serving(engine, other) as server:
        for path, prompt in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": CHAT}),
        ):
            [found] = server.post(path, {**body, **prompt}).json()["choices"]
            assert found["finish_reason"] == "stop"
            assert (found["stop_reason"], found["matched_stop"]) == (end if asked else None, end)


def test_ignore_eos_goes_on_to_the_limit(server):
    got = choice(server, ignore_eos=True, max_tokens=14)
    assert (got["text"], got["finish_reason"]) == ("hello worldhe", "length")


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
def test_a_stop_string_across_tokens_cuts_the_text_and_aborts(tokenizer, tokens_per_step):
    engine = scripted(tokenizer, tokens_per_step=tokens_per_step)
    body = {"prompt": "hello", "max_tokens": 50, "stop": ["zzz", "o wo"], "return_token_ids": True}
    with serving(engine, tokenizer) as server:
        answer = server.post("/v1/completions", body).json()
        chunks = events(server, "/v1/completions", body)
        wait_until(lambda: not engine.running, "the engine works on no request")
    got = answer["choices"][0]
    assert (got["text"], got["finish_reason"]) == ("hell", "stop")
    assert len(got["token_ids"]) == answer["usage"]["completion_tokens"] == len("hello wo")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hell"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_leaves_the_timing_in(server):
    answer = server.post("/v1/completions", {"prompt": "hello", "stop": "w", "max_tokens": 50}).json()
    assert answer["usage"]["timing"]["prefill_ms"] == 3.0


def test_timing_follows_the_definitions(server):
    timing = server.post("/v1/completions", {"prompt": "hello"}).json()["usage"]["timing"]
    assert timing == {
        "queue_ms": 1.0,
        "adapter_load_ms": 2.0,
        "kv_load_ms": 5.0,
        "prefill_ms": 3.0,
        "decode_ttft_ms": 12.0,
    }


def test_cached_tokens_are_counted_once_per_prompt(server):
    body = {"prompt": ["hello", "there"], "n": 3, "max_tokens": 2}
    usage = server.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert usage["prompt_tokens"] == 2 * (1 + len("hello"))
    assert usage["completion_tokens"] == 12


def test_choices_of_a_seeded_request_have_seeds_of_their_own(server, engine):
    choice(server, n=3, seed=7)
    assert sorted(request.sampling.seed for request in engine.requests) == [7, 8, 9]


def test_sampling_reaches_the_engine(server, engine):
    choice(server, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, min_tokens=2, seed=3, max_tokens=9)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.min_tokens, sampling.seed, sampling.max_tokens) == (2, 3, 9)
    choice(server)
    assert engine.requests[1].sampling.temperature == 1.0
    choice(server, temperature=1e-9, top_k=-1)
    assert (engine.requests[2].sampling.temperature, engine.requests[2].sampling.top_k) == (0.0, 0)
    choice(server, top_k=10**30)
    assert engine.requests[3].sampling.top_k == 0


def test_edits_of_logits_reach_the_engine(server, engine, tokenizer):
    choice(server, frequency_penalty=0.5, presence_penalty=-1, repetition_penalty=1.2)
    sampling = engine.requests[0].sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (
        0.5,
        -1,
        1.2,
    )
    choice(
        server, logit_bias={"5": 1, "7": -2.5}, allowed_token_ids=[7, 5, 7], bad_words=["fox"], logprobs=-1
    )
    sampling = engine.requests[1].sampling
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ({5: 1.0, 7: -2.5}, (7, 5))
    assert sampling.bad_word_ids[0] == tuple(tokenizer.encode("fox", add_special_tokens=False))
    assert sampling.logprobs == -1
    choice(server, repetition_penalty=1, logit_bias={}, allowed_token_ids=None, bad_words=[])
    assert not engine.requests[2].sampling.edits_logits


def test_logprobs_name_tokens_by_their_ids(server, tokenizer):
    [h] = tokenizer.encode("h", add_special_tokens=False)
    body = {"logprobs": 0, "return_tokens_as_token_ids": True, "max_tokens": 1}
    found = choice(server, **body)
    assert (found["text"], found["logprobs"]["tokens"]) == ("h", [f"token_id:{h}"])
    chat = {"messages": CHAT, **body, "logprobs": True}
    found = server.post("/v1/chat/completions", chat).json()["choices"][0]
    [entry] = found["logprobs"]["content"]
    assert (found["message"]["content"], entry["token"]) == ("h", f"token_id:{h}")


def test_completion_logprobs(server):
    logprobs = choice(server, logprobs=2, max_tokens=3)["logprobs"]
    assert logprobs["tokens"] == ["h", "e", "l"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert min(logprobs["top_logprobs"][0].values()) == -9999.0
    assert next(iter(logprobs["top_logprobs"][0])) == "h"  # the chosen token is first
    assert choice(server)["logprobs"] is None


def test_streamed_logprobs_add_up_to_the_whole(server):
    body = {"prompt": "hello", "logprobs": 0, "max_tokens": 4}
    whole = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in events(server, "/v1/completions", body)]
    assert whole == {key: [entry for chunk in chunks for entry in chunk[key]] for key in whole}


def test_chat_logprobs_and_text_parts(server, engine, tokenizer):
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "fox"}]
    body = {"messages": [{"role": "user", "content": parts, "name": "me"}], "logprobs": True, "max_tokens": 2}
    got = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert got["message"] == {"role": "assistant", "content": "he", "refusal": None}
    assert [entry["token"] for entry in got["logprobs"]["content"]] == ["h", "e"]
    assert got["logprobs"]["content"][0]["bytes"] == [ord("h")]
    assert got["logprobs"]["content"][0]["top_logprobs"] == []
    want = tokenizer.encode("[user me]hello\nfox\n[assistant]", add_special_tokens=False)
    assert engine.requests[0].prompt_token_ids == tuple(want)


def test_a_chat_goes_on_to_the_context_limit_by_default(server, engine):
    body = {"messages": CHAT, "ignore_eos": True}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["total_tokens"] == engine.max_model_len


def test_every_step_is_a_chunk_even_while_text_is_held_back(server):
    body = {"prompt": "hello", "stop": "hello worlds", "max_tokens": 11}
    texts = [chunk["choices"][0]["text"] for chunk in events(server, "/v1/completions", body)]
    assert texts == [""] * 10 + ["hello world"]


def test_usage_comes_last_and_only_when_asked_for(server):
    body = {"prompt": "hello", "max_tokens": 3}
    assert all("usage" not in chunk for chunk in events(server, "/v1/completions", body))
    asked = {**body, "stream_options": {"include_usage": True}}
    *chunks, last = events(server, "/v1/completions", asked)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


def test_without_a_tokenizer_token_ids_go_in_and_out(tokenizer):
    with serving(scripted(tokenizer), None) as server:
        body = {"prompt": [5, 6], "max_tokens": 2, "logprobs": 1}
        got = server.post("/v1/completions", body).json()["choices"][0]
        assert got["token_ids"] == tokenizer.encode("he", add_special_tokens=False)
        assert got["logprobs"]["tokens"][0].startswith("token_id:")
        chunks = events(server, "/v1/completions", body)
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [
            [token] for token in got["token_ids"]
        ]
        for path, bad in [
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/completions", {"prompt": [5], "stop": "a"}),
            ("/v1/chat/completions", {"messages": CHAT}),
        ]:
            response = server.post(path, bad)
            assert response.status_code == 400
            assert "tokenizer" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_400(server, engine, stream):
    engine.refuse = "the prompt fits into no KV page"
    response = server.post("/v1/completions", {"prompt": "hello", "n": 2, "stream": stream})
    assert (response.status_code, response.json()["error"]["message"]) == (400, engine.refuse)


def test_end_tokens_that_only_the_tokenizer_knows_end_answers_too(engine, tokenizer, server, monkeypatch):
    monkeypatch.setattr("tests.serve.scripted_engine.EOS", 36)
    assert choice(server)["text"] == "hello world"
    assert engine.requests[0].sampling.stop_token_ids == (2,)
    assert choice(server, ignore_eos=True, max_tokens=14)["text"] == "hello worldhe"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_503(server, engine, stream):
    engine.alive = False
    for path in ("/health", "/v1/models"):
        assert server.get(path).status_code == 503
    response = server.post("/v1/completions", {"prompt": "hello", "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "ServiceUnavailableError"


def test_an_engine_that_dies_midway_ends_the_stream_with_an_error(tokenizer):
    with serving(scripted(tokenizer, fail_after=2), tokenizer) as server:
        *chunks, last = events(server, "/v1/completions", {"prompt": "hello"})
        assert len(chunks) == 2
        assert (last["error"]["code"], last["error"]["type"]) == (503, "ServiceUnavailableError")
        assert server.post("/v1/completions", {"prompt": "hello"}).status_code == 503
        assert server.post("/v1/completions", {"prompt": "hello", "n": 2}).status_code == 503


def test_a_bug_in_the_engine_is_500_with_an_error_body(server, engine, monkeypatch):
    async def broken():
        raise RuntimeError("secret")

    monkeypatch.setattr(engine, "list_adapters", broken)
    response = server.get("/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in response.text
