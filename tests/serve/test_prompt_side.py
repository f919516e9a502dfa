# SPDX-License-Identifier: Apache-2.0
"""Echo, log probabilities of prompts and shortened prompts over HTTP, against transformers' numbers."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from moe_lora.core.request import TokenLogprobs
from moe_lora.engine.text.text import Tokenizer, load_tokenizer
from moe_lora.serve.http_errors import to_json
from moe_lora.serve.openai import prompt_side
from tests.oracle import reference_logits
from tests.small_tokenizers import characters

from .conftest import scripted, serving
from .demo_server import DEMO
from .live_server import Served

MODEL, UPPER = DEMO / "model", DEMO / "adapters" / "upper"
NAMES = {"demo": None, "upper": UPPER}
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


def ask(server, path="/v1/completions", **body) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server, path="/v1/completions", **body) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def reference(model: str, prompt: list[int]) -> torch.Tensor:
    """Log probabilities of the prompt's tokens but the first."""
    found = torch.log_softmax(reference_logits(MODEL, NAMES[model], prompt)[:-1], dim=-1)
    return found.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


@pytest.fixture
def demo(exact) -> Served:
    """The demo in fp32."""
    return exact


@pytest.fixture(scope="module")
def demo_ids():
    tokenizer = load_tokenizer(MODEL)
    return lambda text: tokenizer.encode(text)


@pytest.mark.parametrize("model", NAMES)
def test_prompt_logprobs_are_transformers_s(demo, demo_ids, model):
    ids = demo_ids("hello world=")
    for _ in range(2):  # the second time with the prompt in the prefix cache
        body = {"model": model, "prompt": ids, "max_tokens": 2, "temperature": 0}
        [choice] = ask(demo, **body, prompt_logprobs=2)["choices"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        found = [entry[str(token)] for token, entry in zip(ids[1:], others, strict=True)]
        values = torch.tensor([one["logprob"] for one in found])
        torch.testing.assert_close(values, reference(model, ids), **CLOSE)
        for entry in others:
            ranks = sorted(one["rank"] for one in entry.values())
            assert ranks[:2] == [1, 2]
            assert len(ranks) in (2, 3)
        assert "".join(one["decoded_token"] for one in found) == "hello world="[-len(found) :]


def log_likelihood(demo, model: str, requests, max_tokens: int) -> list[tuple[float, bool]]:
    """An evaluator's client: context and continuation in one prompt of token ids, scores of the end."""
    body = {"model": model, "prompt": [context + end for context, end in requests], "temperature": 0}
    answer = ask(demo, **body, max_tokens=max_tokens, logprobs=1, seed=1234, echo=True)
    found = []
    choices = sorted(answer["choices"], key=lambda one: one["index"])
    for choice, (context, end) in zip(choices, requests, strict=True):
        scores = choice["logprobs"]
        part = slice(len(context), len(context) + len(end))
        values, top = scores["token_logprobs"][part], scores["top_logprobs"][part]
        greedy = all(value == max(one.values()) for value, one in zip(values, top, strict=True))
        found.append((sum(values), greedy))
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        assert len(scores["tokens"]) == len(context) + len(end) + max_tokens
    return found


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("model", NAMES)
def test_log_likelihoods_are_transformers_s(demo, demo_ids, model, max_tokens):
    texts = [("hello=", "HELLO"), ("hello=", "olleh"), ("abc=", "ABC"), ("a", "b")]
    requests = []
    for context, end in texts:
        ids = demo_ids(context)
        requests.append((ids, demo_ids(context + end)[len(ids) :]))
    found = log_likelihood(demo, model, requests, max_tokens)
    for (context, end), (value, greedy) in zip(requests, found, strict=True):
        logits = reference_logits(MODEL, NAMES[model], [*context, *end])
        expected = reference(model, [*context, *end])[-len(end) :].sum()
        assert value == pytest.approx(float(expected), abs=5e-4)
        best = logits[len(context) - 1 : -1].argmax(dim=1).tolist()
        assert greedy == (best == end)


def test_an_echo_is_the_prompt_and_the_answer(demo, demo_ids):
    plain = ask(demo, model="upper", prompt="hello=", max_tokens=5, temperature=0)
    echoed = ask(demo, model="upper", prompt="hello=", max_tokens=5, temperature=0, echo=True, logprobs=0)
    [one], [other] = plain["choices"], echoed["choices"]
    assert one["prompt_logprobs"] is None
    assert other["prompt_logprobs"] is None
    assert other["text"] == "hello=" + one["text"]
    scores = other["logprobs"]
    assert len(scores["tokens"]) == len(demo_ids("hello=")) + 5
    assert scores["text_offset"][0] == 0
    assert scores["text_offset"] == sorted(scores["text_offset"])
    assert echoed["usage"]["completion_tokens"] == 5
    ids = ask(demo, model="upper", prompt=demo_ids("hello="), max_tokens=5, temperature=0, echo=True)
    assert ids["choices"][0]["text"].endswith(other["text"])


def test_an_echo_without_an_answer(demo):
    answer = ask(demo, prompt=["hello", "abc"], max_tokens=0, echo=True, n=2)
    assert [one["text"] for one in answer["choices"]] == ["hello", "hello", "abc", "abc"]
    assert {one["finish_reason"] for one in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0


def streamed(server, path="/v1/completions", **body) -> list[dict[str, Any]]:
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_streamed_echo_joins_to_the_whole_one(demo, max_tokens):
    body = {"model": "upper", "prompt": ["hello=", "abc="], "max_tokens": max_tokens, "temperature": 0}
    body |= {"echo": True, "logprobs": 1}
    chunks = [one for chunk in streamed(demo, **body) for one in chunk["choices"]]
    for whole in ask(demo, **body)["choices"]:
        own = [one for one in chunks if one["index"] == whole["index"]]
        assert "".join(one["text"] for one in own) == whole["text"]
        for name, values in whole["logprobs"].items():
            assert [value for one in own for value in one["logprobs"][name]] == values
        assert not any("prompt_logprobs" in one for one in own)


def test_chats_have_prompt_logprobs_beside_the_choices(demo, demo_ids):
    body = {"model": "upper", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    plain = ask(demo, "/v1/chat/completions", **body)
    assert plain["prompt_logprobs"] is None
    answer = ask(demo, "/v1/chat/completions", **body, prompt_logprobs=0, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    found = answer["prompt_logprobs"]
    values = torch.tensor(
        [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], found[1:], strict=True)]
    )
    torch.testing.assert_close(values, reference("upper", ids), **CLOSE)


@pytest.mark.parametrize("more", [{"separate_reasoning": True}, {"stream_reasoning": False}])
def test_chats_with_separate_reasoning_have_prompt_logprobs_too(demo, more):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "prompt_logprobs": 0}
    plain = ask(demo, "/v1/chat/completions", **body)["prompt_logprobs"]
    assert ask(demo, "/v1/chat/completions", **body, **more)["prompt_logprobs"] == plain


ROLES = "{% for one in messages %}{{ one.role }}:{{ one.content }};{% endfor %}"


@pytest.mark.parametrize("echo", [False, True])
def test_a_chat_continues_and_echoes_the_last_message(echo):
    tokenizer = Tokenizer(characters(), special_tokens={"eos_token": "</s>"}, chat_template=ROLES)
    with serving(scripted(tokenizer), tokenizer) as server:
        check_continued_chat(server, tokenizer, echo)


def check_continued_chat(server, tokenizer, echo):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fox"}]
    body = {"messages": messages, "max_tokens": 5, "echo": echo, "return_token_ids": True}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    answer = ask(server, "/v1/chat/completions", **body)
    assert (
        tokenizer.decode(answer["prompt_token_ids"]) == "userhelloassistantfox"
    )  # without unknown characters
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"] == ("foxhello" if echo else "hello")
    chunks = streamed(server, "/v1/chat/completions", **body)
    parts = [one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"]]
    assert "".join(parts) == message["content"]


@pytest.mark.parametrize(
    ("side", "kept"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))]
)
def test_prompts_are_shortened(demo, demo_ids, side, kept):
    ids = demo_ids("hello world=")
    body = {"prompt": "hello world=", "max_tokens": 1, "return_token_ids": True, "truncation_side": side}
    answer = ask(demo, **body, truncate_prompt_tokens=3, echo=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids[kept]
    assert answer["usage"]["prompt_tokens"] == 3


def test_minus_one_shortens_to_the_context(demo, demo_ids):
    long = demo_ids("hello world=") * 100
    answer = ask(demo, prompt=long, max_tokens=6, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 256 - 6
    messages = [{"role": "user", "content": "hello " * 200}]
    chat = ask(demo, "/v1/chat/completions", messages=messages, max_tokens=2, truncate_prompt_tokens=-1)
    assert chat["usage"]["prompt_tokens"] == 256 - 2


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "between 0 and 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave stream out"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "integer"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between 1 and 256"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "between 1 and 256"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "between 1 and 256"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "top"}, "truncation_side", "left"),
        ({"echo": "yes"}, "echo", "bool"),
        ({"echo": True, "prompt": [-1]}, "prompt", "token id -1"),
        ({"echo": True, "prompt": [5, 1 << 40]}, "prompt", "out of vocabulary"),
    ],
)
def test_wrong_values_are_refused(demo, body, param, message):
    error = refused(demo, **{"prompt": "hello", **body})
    assert error["param"] == param
    assert message in error["message"]


def test_long_answers_are_encoded_in_slices(monkeypatch):
    monkeypatch.setattr(prompt_side, "SLICE_S", 0.0)

    async def run() -> tuple[bytes, list[int]]:
        seen: list[int] = []
        made = 0

        async def other() -> None:
            while made < 5:
                seen.append(made)
                await asyncio.sleep(0)

        def parts():
            nonlocal made
            for made in range(1, 6):
                yield b"%d" % made

        task = asyncio.create_task(other())
        found = await prompt_side.in_slices(parts())
        await task
        return bytes(found), seen

    found, seen = asyncio.run(run())
    assert found == b"12345"
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(("num_top", "most"), [(-1, 1), (20, 16)])
def test_an_echo_of_the_whole_vocabulary_lets_others_run_after_each_token(monkeypatch, num_top, most):
    monkeypatch.setattr(prompt_side, "SLICE_S", 0.0)
    made = 0

    def scores():
        nonlocal made
        for made in range(1, 40):
            yield TokenLogprobs(-made, 1, ((5, -1.0),))

    async def run() -> list[int]:
        body = SimpleNamespace(prompt_logprobs=None, num_choices=1)
        sampling = SimpleNamespace(logprobs=num_top, prompt_logprobs=num_top)
        prompt = list(range(40))
        prepared = SimpleNamespace(body=body, sampling=sampling, echo=("x",), prompts=[prompt])
        form = prompt_side.PromptCompletion(None, prepared, with_token_ids=False)
        form.token_text = lambda token_id, is_first=False: str(token_id)
        report = SimpleNamespace(logprobs=scores())
        delta = SimpleNamespace(index=0, prompt=report, finish_reason="length", token_ids=[], logprobs=[])

        async def whole() -> list[Any]:
            return [delta]

        seen = []
        generation = SimpleNamespace(prompt_of=lambda index: prompt, whole=whole)
        task = asyncio.create_task(form.collect(generation))
        while not task.done():
            seen.append(made)
            await asyncio.sleep(0)
        await task
        return [*seen, made]

    seen = asyncio.run(run())
    assert max(after - before for before, after in itertools.pairwise(seen)) == most
    assert seen[-1] == 39


def test_encoded_parts_are_json_beside_any_text():
    for text in ("plain", "é 😀 \x80", "half \ud83d of a pair"):
        found = to_json({"text": text, "scores": msgspec.Raw(b'[1,null,{"a":2}]')})
        assert found.isascii()
        assert json.loads(found) == {"text": text, "scores": [1, None, {"a": 2}]}


def test_many_log_probabilities_of_an_echo_are_refused_in_a_stream(tokenizer):
    body = {"prompt": [5] * 1500, "echo": True, "logprobs": 10, "max_tokens": 1}
    with serving(scripted(tokenizer, max_model_len=2000), tokenizer) as server:
        assert refused(server, **body, stream=True)["param"] == "stream"
