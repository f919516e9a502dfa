# SPDX-License-Identifier: Apache-2.0
"""The OpenAI interface, as any client may rely on it, whatever model answers."""

from __future__ import annotations

import openai
import pytest

from .live_server import wait_until

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(any_server):
    with openai.OpenAI(base_url=f"{any_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_lists_the_base_and_its_adapters(any_server, client):
    cards = {card.id: card for card in client.models.list()}
    assert cards[any_server.model].parent is None
    assert cards[any_server.model].max_model_len == any_server.max_model_len
    assert cards[any_server.adapter].parent == any_server.model
    assert client.models.retrieve(any_server.adapter).id == any_server.adapter


def test_openai_client_completes(any_server, client):
    answer = client.completions.create(model=any_server.adapter, prompt="hello", max_tokens=4, temperature=0)
    assert answer.object == "text_completion"
    assert answer.model == any_server.adapter
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 1 <= answer.usage.completion_tokens <= 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_client_streams_the_text_of_the_whole_answer(any_server, client):
    body = {"model": any_server.model, "prompt": "hello", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_client_chats(any_server, client):
    answer = client.chat.completions.create(
        model=any_server.adapter, messages=MESSAGES, max_completion_tokens=3, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_openai_client_streams_a_chat_that_names_the_role_first(any_server, client):
    body = {"model": any_server.model, "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_token_ids_in_and_out_with_a_forced_length(any_server):
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "ignore_eos": True,
        "min_tokens": 9,
        "return_token_ids": True,
    }
    answer = any_server.post("/v1/completions", body).json()
    assert len(answer["choices"][0]["token_ids"]) == 9
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 9


def test_usage_tells_where_the_time_went(any_server):
    usage = any_server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3}).json()["usage"]
    assert set(usage["timing"]) == {
        "queue_ms",
        "adapter_load_ms",
        "kv_load_ms",
        "prefill_ms",
        "decode_ttft_ms",
    }
    assert all(value >= 0 for value in usage["timing"].values())
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(any_server):
    for prompt in (["hello", "hello there"], [[5, 6], [7]]):
        answer = any_server.post("/v1/completions", {"prompt": prompt, "n": 2, "max_tokens": 2}).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_a_stream_of_several_choices_ends_each_of_them(any_server, client):
    chunks = client.completions.create(
        model=any_server.model, prompt=["hello", "there"], n=2, max_tokens=3, stream=True
    )
    ended = [c.choices[0].index for c in chunks if c.choices[0].finish_reason is not None]
    assert sorted(ended) == [0, 1, 2, 3]


def test_events_are_framed_and_closed_by_done(any_server):
    body = {"prompt": "hello", "max_tokens": 3, "stream": True}
    with any_server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]


def test_leaving_a_stream_aborts_it_in_the_engine(any_server):
    body = {
        "prompt": "hello",
        "ignore_eos": True,
        "max_tokens": any_server.max_model_len - 20,
        "stream": True,
    }
    running = f'vllm:num_requests_running{{model_name="{any_server.model}"}} 0.0'
    for _ in range(50):  # a quick engine may be done before the client has left
        with any_server.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        wait_until(lambda: running in any_server.get("/metrics").text, "no request runs")
        if 'finished_reason="abort"' in any_server.get("/metrics").text:
            return
    raise AssertionError("no request was aborted")


def test_health_version_and_openapi(any_server):
    assert any_server.get("/health").status_code == 200
    assert any_server.get("/version").json()["version"]
    assert "/v1/completions" in any_server.get("/openapi.json").json()["paths"]
