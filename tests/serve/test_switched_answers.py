# SPDX-License-Identifier: Apache-2.0
"""Versions of tokens over HTTP under `on_publish`: each interface, refusals, publications under streams."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from safetensors.torch import save

from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.engine.text.text import load_tokenizer
from tests.engine.publishing import check_greedy
from tests.patience import PATIENCE_S

from .conftest import scripted, serving
from .demo_server import DEMO, demo_server
from .live_server import Served, completion_events, wait_until
from .scripted_engine import ScriptedEngine
from .test_controls import OPTIONS, SEVERAL, Http
from .test_received import headers, tensors

CHAT = [{"role": "user", "content": "a"}]
SWITCH = {"on_publish": "switch"}
NUM_TOKENS = 64
"""Of each stream beside publications."""
RUNS = [{"version": 1, "num_tokens": 2}, {"version": 2, "num_tokens": 3}]


class PublishingEngine(ScriptedEngine):
    """A version is published after the second token of each answer."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        num_tokens = 0
        async for output in super().generate(request):
            version = output.adapter_version and 1 + (num_tokens >= 2)
            num_tokens += len(output.token_ids)
            yield structs.replace(output, adapter_version=version)


@pytest.fixture
def server(tokenizer) -> Iterator[Served]:
    plain = scripted(tokenizer)
    engine = PublishingEngine(plain.answers, vocab_size=plain.vocab_size)
    with serving(engine, tokenizer) as served:
        yield served


def ok(server: Served, path: str, **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


LIMITS = {"max_tokens": 5, "ignore_eos": True, **SWITCH}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1}),
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": CHAT, "n": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "separate_reasoning": True}),
        ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT]}),
    ],
)
def test_a_whole_answer_has_its_versions_in_order(server, path, body):
    for choice in ok(server, path, model="shout", **body, **LIMITS)["choices"]:
        assert (choice["adapter_version"], choice["adapter_versions"]) == (2, RUNS)
    kept = ok(server, path, model="shout", **body, **{**LIMITS, "on_publish": "keep"})
    assert "adapter_versions" not in kept["choices"][0]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})],
)
@pytest.mark.parametrize("num_choices", [1, 2])
def test_each_chunk_has_the_version_of_its_tokens(server, path, body, num_choices):
    given = {"model": "shout", "return_token_ids": True, "n": num_choices, **LIMITS}
    found = [event["choices"][0] for event in events(server, path, **body, **given)]
    for index in range(num_choices):
        own = [one for one in found if one["index"] == index and one.get("token_ids")]
        assert [one["adapter_version"] for one in own] == [1, 1, 2, 2, 2]
        assert own[-1]["adapter_versions"] == RUNS
        assert not any("adapter_versions" in one for one in own[:-1])


def test_token_ids_in_and_out_have_their_versions(server, tokenizer):
    ids = tokenizer.encode("a")
    sampling = {"max_tokens": 5, "ignore_eos": True}
    body = {"model": "shout", "token_ids": ids, "sampling_params": sampling, **SWITCH}
    [choice] = ok(server, "/inference/v1/generate", **body)["choices"]
    assert choice["adapter_versions"] == RUNS
    native = {
        "lora_path": "shout",
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 5, "ignore_eos": True},
        **SWITCH,
    }
    about = ok(server, "/generate", **native)["meta_info"]
    assert (about["weight_version"], about["adapter_versions"]) == ("2", RUNS)
    found = [event["meta_info"] for event in events(server, "/generate", **native)]
    assert [one["weight_version"] for one in found] == ["1", "1", "2", "2", "2"]
    assert found[-1]["adapter_versions"] == RUNS


def test_a_stop_string_ends_the_last_run(server):
    body = {"model": "shout", "prompt": "a", "stop": "ox", **LIMITS}
    [choice] = ok(server, "/v1/completions", **body)["choices"]
    assert choice["text"] == "f"
    assert choice["adapter_versions"] == [{"version": 1, "num_tokens": 2}, {"version": 2, "num_tokens": 1}]


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/v1/completions", {"model": "base", "prompt": "a"}, "the base model has no versions"),
        (
            "/v1/completions",
            {"model": "shout", "prompt": "a", "use_beam_search": True},
            "on_publish is not supported with use_beam_search",
        ),
        ("/v1/completions", {"model": "shout", "prompt": "a", "on_publish": "later"}, "'keep' or 'switch'"),
        ("/v1/responses", {"model": "shout", "input": "a"}, "on_publish is a field of /v1/chat/completions"),
        (
            "/v1/messages",
            {"model": "shout", "messages": CHAT, "max_tokens": 2},
            "on_publish is a field of /v1/chat/completions",
        ),
    ],
)
def test_a_request_that_can_not_switch_is_refused(server, path, body, problem):
    answer = server.post(path, {**SWITCH, **body})
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


class Publications:
    """Publishes versions by turns, until the end."""

    def __init__(self, http: Http, names: tuple[str, ...]) -> None:
        self._http, self.names = http, names
        self._bodies = {name: save(tensors(name)) for name in names}
        self.num_done = 0

    def name_of(self, version: int) -> str:
        return self.names[version % len(self.names)]

    def publish(self) -> None:
        name = self.name_of(self.num_done + 1)
        content, head = self._bodies[name], headers(name)
        card = self._http.ok("PUT", "/v1/adapters/policy", content=content, headers=head)
        self.num_done += 1
        assert card["version"] == self.num_done


def streamed(url: str, ids: list[int], model: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(version, tokens) of one stream, in order."""
    body = {"model": model, "prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= SWITCH
    found: list[tuple[int, tuple[int, ...]]] = []
    for event in completion_events(url, {**body, "return_token_ids": True}):
        [choice] = event["choices"]
        version, tokens = choice["adapter_version"], tuple(choice["token_ids"])
        before = found.pop()[1] if found and found[-1][0] == version else ()
        found.append((version, before + tokens))
        runs = choice.get("adapter_versions", [])
    assert [(one["version"], one["num_tokens"]) for one in runs] == [(v, len(t)) for v, t in found]
    assert sum(len(tokens) for _, tokens in found) == NUM_TOKENS
    return tuple(found)


@pytest.mark.parametrize(
    "options", [(), pytest.param(SEVERAL, marks=pytest.mark.slow)], ids=["alone", "several"]
)
def test_streams_follow_the_publications(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The last version of each answer is the newest at its end, or the one before; tokens are peft's.

    A stream through an alias follows the publications of the alias's adapter.
    """
    ids = load_tokenizer(DEMO / "model").encode("stream=")
    with demo_server(tmp_path / "log", "--eager", "--dtype", "float32", *options) as server:
        if options:
            server.wait_for_instances()
        found, stop = set(), threading.Event()
        publications = Publications(Http(server.url), ("reverse", "upper"))
        publications.publish()
        Http(server.url).ok("POST", "/v1/aliases/team/rollout", json={"to": "policy"})

        def stream(model: str) -> None:
            while not stop.is_set():
                found.add((model, streamed(server.url, ids, model)))

        with ThreadPoolExecutor(3) as pool:
            streams = [pool.submit(stream, model) for model in ("policy", "policy", "team")]
            try:
                while {model for model, runs in [*found] if len(runs) > 1} != {"policy", "team"}:
                    publications.publish()
                    assert not any(one.done() for one in streams)
            finally:
                stop.set()
            for one in streams:
                one.result()
    switched = sorted((runs for _, runs in found if len(runs) > 1), key=len)[:2]
    folders = {
        version: DEMO / "adapters" / publications.name_of(version)
        for version in range(1, publications.num_done + 1)
    }
    for runs in switched:
        versions = [version for version, _ in runs]
        assert versions == sorted(versions)
        check_greedy(DEMO / "model", folders, tuple(ids), list(runs))


def test_an_alias_that_moves_switches_nothing_and_its_adapter_s_publication_does(tmp_path: Path) -> None:
    """Requests that a pause delays have the adapter of their arrival, in its newest version."""
    body = {"model": "blue", "prompt": "abc=", "max_tokens": 4, "temperature": 0, **SWITCH}
    with demo_server(tmp_path / "log", *OPTIONS) as server:
        http = Http(server.url)
        http.ok("POST", "/v1/aliases/blue/rollout", json={"to": "upper"})
        http.ok("POST", "/pause?mode=keep")
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(http.ok, "POST", "/v1/completions", json=body) for _ in range(2)]
            wait_until(lambda: http.num_waiting() == 2, "both wait")
            http.ok("POST", "/v1/aliases/blue/rollout", json={"to": "reverse", "share": 1})
            loaded = {"lora_name": "upper", "lora_path": str(DEMO / "adapters" / "rot13")}
            http.ok("POST", "/load_lora_adapter", json=loaded)
            http.ok("POST", "/resume")
            answers = [one.result(PATIENCE_S) for one in asked]
        later = http.ok("POST", "/v1/completions", json=body)
    assert {one["model"] for one in answers} == {"upper"}
    assert {one["choices"][0]["adapter_version"] for one in answers} == {2}
    assert (later["model"], later["choices"][0]["adapter_version"]) == ("reverse", 1)
