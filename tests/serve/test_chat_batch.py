# SPDX-License-Identifier: Apache-2.0
"""Several conversations in one body: the choices of single chats, errors, parsers of each."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from moe_lora.engine.text.text import Tokenizer
from tests.small_tokenizers import byte_level

from .conftest import app_of, as_served
from .live_server import ServerThread
from .scripted_engine import ScriptedEngine
from .test_prompt_side import ask, demo, refused  # noqa: F401  (the fixture)

PATH = "/v1/chat/completions/batch"
CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be short"}, {"role": "user", "content": "abc="}],
    [{"role": "user", "content": [{"type": "text", "text": "world"}]}],
]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@contextmanager
def spoken(text, **settings):
    """A server whose model says this text."""
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(byte_level(), special_tokens=marks, chat_template=TEMPLATE)
    answer = [*tokenizer.encode(text, add_special_tokens=False), 1]
    engine = ScriptedEngine({None: answer}, vocab_size=tokenizer.vocab_size, max_model_len=500)
    with (
        ServerThread(app_of(engine, tokenizer, **settings)) as thread,
        as_served(thread.url, engine) as served,
    ):
        yield served


@pytest.mark.parametrize("model", ["demo", "upper"])
def test_each_conversation_has_the_choice_of_its_own_chat(demo, model):  # noqa: F811
    body = {"model": model, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    body["return_token_ids"] = True
    found = ask(demo, PATH, messages=CHATS, **body)
    alone = [ask(demo, "/v1/chat/completions", messages=one, **body) for one in CHATS]
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    for choice, answer in zip(found["choices"], alone, strict=True):
        expected = answer["choices"][0]
        for key in ("message", "finish_reason", "token_ids"):
            assert choice[key] == expected[key]
        tokens = [one["token"] for one in expected["logprobs"]["content"]]
        assert [one["token"] for one in choice["logprobs"]["content"]] == tokens
    assert found["object"] == "chat.completion"
    assert found["model"] == model
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(one["usage"][name] for one in alone)


def test_a_large_body_and_a_grammar(demo):  # noqa: F811
    chats = [[{"role": "user", "content": f"{number}="}] for number in range(100)]
    chats[0][0]["content"] = "a" * 200
    body = {"max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}, "user": "x" * 16_384}
    found = ask(demo, PATH, messages=chats, **body)
    assert len(found["choices"]) == 100
    assert {one["message"]["content"] for one in found["choices"]} <= {"yes", "no"}


def test_echo_repeats_the_continued_message_of_each():
    with spoken("hello") as server:
        begun = [[*CHATS[0], {"role": "assistant", "content": "so"}], CHATS[1]]
        found = ask(server, PATH, messages=begun, max_tokens=200, echo=True, **CONTINUED)
        assert [one["message"]["content"] for one in found["choices"]] == ["sohello", "hello"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": CHATS[0]}, "messages"),
        ({"messages": [*CHATS, "hello"]}, "messages"),
        ({"messages": [*CHATS, [{"role": "user", "content": "a" * 300}]]}, "maximum context length"),
        ({"messages": CHATS * 100}, "choices"),
        ({"stream": True}, "stream is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported"),
        ({"n": 2}, "n must be 1"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_wrong_bodies_are_refused(demo, fields, message):  # noqa: F811
    assert message in refused(demo, PATH, **{"messages": CHATS, **fields})["message"]


def test_unknown_models_are_404(demo):  # noqa: F811
    assert demo.post(PATH, {"model": "none", "messages": CHATS}).status_code == 404


def test_reasoning_is_parsed_by_the_end_of_each_prompt():
    ends = [[{"role": "user", "content": text}] for text in ("a<think>", "a<think>b</think>")]
    with spoken("why</think>so", reasoning_parser="qwen3") as server:
        body = {"messages": ends, "max_tokens": 200, **CONTINUED}
        opened, closed = (one["message"] for one in ask(server, PATH, **body)["choices"])
        assert (opened["reasoning"], opened["content"]) == ("why", "so")
        assert closed["content"] == "why</think>so"
        for fields in ({"structured_outputs": {"choice": ["so"]}}, {"thinking_token_budget": 5}):
            error = refused(server, PATH, **body, **fields)
            assert "reasoning" in json.dumps(error)
