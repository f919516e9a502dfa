# SPDX-License-Identifier: Apache-2.0
"""Controls of trainers over real servers: one instance, and two instances behind two front ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from demo.tasks import prompt_for
from moe_lora.serve.api_keys import add_key
from tests.patience import PATIENCE_S

from .demo_server import DEMO, DemoServer, demo_server, few_adapters
from .live_server import wait_until
from .test_access import rights

FEW = few_adapters("upper", "lower", "reverse", "reverse-r16", "rot13")
OPTIONS = (*FEW, "--eager", "--dtype", "float32")
SEVERAL = ("--front-ends", "2", "--instances", "2", "--routing", "round_robin")
NUM = 6


@pytest.fixture(
    scope="module",
    params=[pytest.param((), marks=pytest.mark.slow), SEVERAL],
    ids=["alone", "several"],
)
def server(request, tmp_path_factory) -> Iterator[DemoServer]:
    with demo_server(tmp_path_factory.mktemp("controls") / "log", *OPTIONS, *request.param) as server:
        if request.param:
            server.wait_for_instances()
        yield server


of_one = pytest.mark.parametrize("server", [()], indirect=True, ids=["alone"])
"""Tests of one front end: several have the same code."""


class Http:
    """Each request has a connection of its own, which any front end may accept."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def __call__(self, method: str, path: str, **words: Any) -> httpx.Response:
        headers = {**self._headers, **words.pop("headers", {})}
        return httpx.request(
            method, f"{self._url}{path}", headers=headers, timeout=PATIENCE_S, trust_env=False, **words
        )

    def ok(self, method: str, path: str, **words: Any) -> Any:
        answer = self(method, path, **words)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content and "json" in answer.headers["content-type"] else answer.text

    def complete(self, model: str, num_tokens: int = 4, **fields: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt_for("abc"), "max_tokens": num_tokens, "temperature": 0}
        found: dict[str, Any] = self.ok("POST", "/v1/completions", json={**body, **fields})["choices"][0]
        return found

    def num_waiting(self) -> int:
        """Of all instances, by one front end's account."""
        text = self.ok("GET", "/metrics")
        return round(sum(map(float, re.findall(r"^vllm:num_requests_waiting\{.*\} (\S+)$", text, re.M))))


@pytest.fixture
def http(server) -> Iterator[Http]:
    found = Http(server.url)
    yield found
    found.ok("POST", "/resume")


@contextlib.contextmanager
def several(http: Http, model: str, num: int = NUM) -> Iterator[list[Future[dict[str, Any]]]]:
    with ThreadPoolExecutor(num) as pool:
        yield [pool.submit(http.complete, model) for _ in range(num)]


def test_a_pause_delays_requests_at_all_instances_and_the_next_version_answers_them(http):
    before = http.complete("lower")
    assert http.ok("GET", "/is_paused") == {"is_paused": False}
    assert http.ok("POST", "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert [http.ok("GET", "/is_paused") for _ in range(4)] == [{"is_paused": True}] * 4
    with several(http, "lower") as answers:
        wait_until(lambda: http.num_waiting() == NUM, "all requests wait")
        body = {"lora_name": "lower", "lora_path": str(DEMO / "adapters" / "upper")}
        assert http.ok("POST", "/load_lora_adapter", json=body) == {"status": "ok", "success": True}
        assert not any(answer.done() for answer in answers)
        assert http.ok("POST", "/resume") == {"status": "resumed"}
        found = [answer.result(PATIENCE_S) for answer in answers]
    assert {one["adapter_version"] for one in found} == {before["adapter_version"] + 1}
    upper = http.complete("upper")
    assert {one["text"] for one in found} == {upper["text"]} != {before["text"]}
    assert http.ok("GET", "/get_weight_version")["adapters"]["lower"] == before["adapter_version"] + 1
    assert "adapter_version" not in http.complete("demo")


def test_abort_ends_requests_that_wait_with_the_reason_abort(http):
    http.ok("POST", "/pause_generation", json={"mode": "in_place"})
    with several(http, "upper") as answers:
        wait_until(lambda: http.num_waiting() == NUM, "all requests wait")
        http.ok("POST", "/pause_generation")
        assert {answer.result(PATIENCE_S)["finish_reason"] for answer in answers} == {"abort"}
    with several(http, "upper") as answers:
        wait_until(lambda: http.num_waiting() == NUM, "all requests wait")
        http.ok("POST", "/abort_request", json={"abort_all": True})
        assert {answer.result(PATIENCE_S)["finish_reason"] for answer in answers} == {"abort"}
    assert http.ok("POST", "/continue_generation", json={}) == {"status": "resumed"}
    assert http.complete("upper")["finish_reason"] in ("stop", "length")


def test_an_id_ends_its_requests_at_any_front_end(http):
    """Each call may come to another front end than its requests."""
    http.ok("POST", "/pause?mode=keep")
    ids = {"input_ids": [1, 40, 41], "sampling_params": {"max_new_tokens": 4}, "lora_path": "upper"}
    tokens = {"token_ids": [1, 40, 41], "sampling_params": {"max_tokens": 4}, "model": "upper"}
    asked = [("/generate", {**ids, "rid": f"rid-{number}"}) for number in range(8)]
    asked += [("/inference/v1/generate", {**tokens, "request_id": f"id-{number}"}) for number in range(8)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(http.ok, "POST", path, json=body) for path, body in asked]
        wait_until(lambda: http.num_waiting() == len(asked), "all requests wait")
        http.ok("POST", "/abort_request", json={"rid": [f"rid-{number}" for number in range(6)]})
        named = [f"generate-tokens-id-{number}" for number in range(6)]
        http.ok("POST", "/abort_requests", json={"request_ids": named})
        ended, others = [*answers[:6], *answers[8:14]], [*answers[6:8], *answers[14:]]
        assert all("'abort'" in str(answer.result(PATIENCE_S)) for answer in ended)
        assert not any(answer.done() for answer in others)
        http.ok("POST", "/resume")
        assert not any("'abort'" in str(answer.result(PATIENCE_S)) for answer in others)


@of_one
@pytest.mark.parametrize("path", ["/pause_generation", "/abort_request"])
def test_a_control_refuses_a_form_of_another_site(http, path):
    """A browser sends a form of any page; JSON of another site needs the server's permission."""
    answer = http("POST", path, content=b'{"abort_all": true}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/pause?mode=wait", "/pause?wait_for_inflight_requests=true", "/pause"])
@pytest.mark.parametrize("body", [None, {}])
def test_any_pause_of_an_idle_server_returns_and_ends(http, path, body):
    http.ok("POST", path, json=body)
    assert http.ok("GET", "/is_paused") == {"is_paused": True}
    http.ok("GET", "/health_generate")
    http.ok("POST", "/resume")
    http.ok("GET", "/health_generate")
    assert http.ok("GET", "/is_paused") == {"is_paused": False}


def num_cached(http: Http, model: str) -> int:
    """Tokens of a long prompt that earlier requests computed."""
    body = {"model": model, "prompt": [1, *range(40, 104)], "max_tokens": 1}
    usage = http.ok("POST", "/v1/completions", json=body)["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "/pause?mode=keep"])
def test_a_cleared_cache_computes_the_prompt_anew(http, path):
    # round_robin at each of two front ends: some request of five meets its own history
    assert max(num_cached(http, "upper") for _ in range(5)) > 0
    http.ok("POST", path)
    http.ok("POST", "/resume")
    assert num_cached(http, "upper") == 0


def test_facts_have_the_types_and_values_that_trainers_compare(http, server):
    config = http.ok("GET", "/server_info?config_format=json")["vllm_config"]
    assert config["lora_config"]["max_loras"] == 64
    assert config["lora_config"]["max_lora_rank"] >= 512
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["dtype"] == "torch.float32"
    num = 2 if "instance-1" in server.log.read_text() else 1
    assert http.ok("GET", "/get_world_size") == {"world_size": num}
    assert http.ok("GET", "/get_world_size?include_dp=false") == {"world_size": 1}
    http.ok("GET", "/liveness")
    http.ok("POST", "/abort_requests", json={"request_ids": ["none"]})


@of_one
@pytest.mark.parametrize("stream", [False, True])
def test_processed_values_come_beside_raw_ones(http, stream):
    fields = {
        "model": "upper",
        "prompt": [1, 40, 41],
        "max_tokens": 5,
        "temperature": 2.0,
        "top_k": 3,
        "seed": 1,
    }
    fields |= {"logprobs": 0, "processed_logprobs": True, "ignore_eos": True, "stream": stream}
    answer = http("POST", "/v1/completions", json=fields)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        events = [answer.json()]
    choices = [event["choices"][0] for event in events]
    raw = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    found = [value for choice in choices for value in choice["processed_logprobs"]]
    assert len(raw) == len(found) == 5
    assert all(before != after <= 0 for before, after in zip(raw, found, strict=True))
    assert choices[-1]["adapter_version"] == 1
    wrong = http("POST", "/v1/completions", json={**fields, "logprobs": None})
    assert wrong.status_code == 400
    assert "processed_logprobs" in wrong.json()["error"]["message"]


@of_one
def test_the_native_endpoint_answers_ids_with_values_and_version(http):
    sampling = {"max_new_tokens": 5, "temperature": 2.0, "top_k": 3, "sampling_seed": 1, "ignore_eos": True}
    body = {"input_ids": [1, 40, 41], "sampling_params": sampling, "return_logprob": True, "rid": "mine"}
    found = http.ok("POST", "/generate", json={**body, "lora_path": "upper"})
    about = found["meta_info"]
    assert (about["id"], about["weight_version"], about["prompt_tokens"]) == ("mine", "1", 3)
    assert about["finish_reason"] == {"type": "length", "length": 5}
    assert [token for _, token, _ in about["output_token_logprobs"]] == found["output_ids"]
    same = {
        "model": "upper",
        "prompt": [1, 40, 41],
        "max_tokens": 5,
        "temperature": 2.0,
        "top_k": 3,
        "seed": 1,
    }
    same |= {"ignore_eos": True, "logprobs": 0, "processed_logprobs": True, "return_token_ids": True}
    [choice] = http.ok("POST", "/v1/completions", json=same)["choices"]
    assert choice["token_ids"] == found["output_ids"]
    assert choice["processed_logprobs"] == pytest.approx([one[0] for one in about["output_token_logprobs"]])
    base = http.ok(
        "POST", "/generate", json={"text": [prompt_for("abc")] * 2, "sampling_params": {"temperature": 0}}
    )
    assert [one["meta_info"]["weight_version"] for one in base] == ["default"] * 2
    assert {one["text"] for one in base} == {"abc"}


@of_one
@pytest.mark.parametrize(
    ("method", "path", "body", "problem"),
    [
        ("POST", "/pause?mode=freeze", None, "mode"),
        ("POST", "/pause?mod=keep", None, "mod"),
        ("POST", "/pause?mode=keep&wait_for_inflight_requests=true", None, "contradicts mode=keep"),
        ("POST", "/pause_generation", {"mode": "retract"}, "mode"),
        ("POST", "/abort_request", {}, "abort_all"),
        ("POST", "/generate", {"sampling_params": {}}, "give either text or input_ids"),
        ("POST", "/generate", {"text": "a", "input_ids": [1]}, "give either text or input_ids"),
        ("POST", "/abort_request", {"rid": "a", "abort_all": True}, "either rid or abort_all"),
        ("POST", "/abort_request", {"rid": ""}, "either rid or abort_all"),
        ("POST", "/generate", {"text": "a", "max_tokens": 3}, "max_tokens"),
        ("POST", "/generate", {"text": "a", "sampling_params": {"max_new_token": 3}}, "max_new_token"),
        ("POST", "/generate", {"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ("POST", "/reset_prefix_cache?reset_running_requests=true", None, "reset_running_requests"),
        ("GET", "/server_info?config_format=text", None, "config_format"),
        ("POST", "/pause?mode=keep&mode=abort", None, "mode is given twice"),
        ("POST", "/pause", {"mode": "keep"}, "/pause?mode=VALUE"),
        ("POST", "/resume", {"mode": "keep"}, "not from the body"),
        ("POST", "/reset_prefix_cache", [1], "JSON object"),
        ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["gAR9"]}, "/v1/adapters/NAME"),
        ("POST", "/update_weights_from_disk", {"model_path": "x"}, "never change here"),
    ],
)
def test_a_wrong_value_is_named(http, method, path, body, problem):
    answer = http(method, path, json=body)
    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]["message"]
    assert http.ok("GET", "/is_paused") == {"is_paused": False}


def test_a_dead_trainer_s_pause_ends_by_itself(tmp_path):
    keys = tmp_path / "keys.json"
    trainers = add_key(keys, rights("trainer", "upper")), add_key(keys, rights("admin", admin=True))
    options = (*OPTIONS, "--api-keys", str(keys), "--set", "front_end.pause_timeout_s=1.0")
    with demo_server(tmp_path / "log", *options) as server:
        for key in trainers:
            http = Http(server.url, key)
            http.ok("POST", "/pause")
            assert http.complete("upper")["finish_reason"] in ("stop", "length")
            assert http.ok("GET", "/is_paused") == {"is_paused": False}


@pytest.mark.parametrize(
    "options", [(), pytest.param(SEVERAL, marks=pytest.mark.slow)], ids=["alone", "several"]
)
def test_a_shutdown_in_a_pause_finishes_answers(tmp_path, options):
    with demo_server(tmp_path / "log", *OPTIONS, *options) as server:
        if options:
            server.wait_for_instances()
        http = Http(server.url)
        http.ok("POST", "/pause?mode=keep")
        with several(http, "upper") as answers:
            wait_until(lambda: http.num_waiting() == NUM, "all requests wait")
            assert server.stop() == 0
            assert all(answer.result(PATIENCE_S)["text"] for answer in answers)


@pytest.mark.slow
def test_pauses_outlive_one_of_two_front_ends(tmp_path):
    with demo_server(tmp_path / "log", *OPTIONS, *SEVERAL) as server:
        server.wait_for_instances()
        http = Http(server.url)
        http.ok("POST", "/pause?mode=keep")
        [first, _] = server.front_end_pids()
        os.kill(first, signal.SIGTERM)
        wait_until(lambda: first not in server.front_end_pids(), "the front end has ended")
        wait_until(lambda: len(server.front_end_pids()) == 2, "its next process has started")
        assert http.ok("GET", "/is_paused") == {"is_paused": True}


def test_a_key_pauses_its_own_adapters_and_an_administrator_all(tmp_path):
    keys = tmp_path / "keys.json"
    ours = add_key(keys, rights("ours", "up*"))
    theirs = add_key(keys, rights("theirs", "upper"))
    admin = add_key(keys, rights("admin", admin=True))
    with demo_server(tmp_path / "log", *OPTIONS, "--api-keys", str(keys)) as server:
        trainer, other, root = (Http(server.url, key) for key in (ours, theirs, admin))
        cached = [num_cached(other, "upper") for _ in range(2)][-1]
        assert cached > 0
        kept = (
            trainer("POST", "/pause?mode=keep"),
            trainer("POST", "/pause_generation", json={"mode": "in_place"}),
        )
        assert [one.status_code for one in kept] == [403, 403]
        assert all("choose mode=wait or mode=abort" in one.json()["error"]["message"] for one in kept)
        assert trainer.ok("GET", "/is_paused") == {"is_paused": False}
        trainer.ok("POST", "/pause?mode=wait")
        assert trainer.ok("GET", "/is_paused") == {"is_paused": True}
        assert other.ok("GET", "/is_paused") == root.ok("GET", "/is_paused") == {"is_paused": False}
        with several(trainer, "upper", 2) as answers:
            wait_until(lambda: root.num_waiting() == 2, "both requests wait")
            assert num_cached(other, "upper") == cached, "a tenant's pause clears no prompts"
            assert trainer.complete("demo")["text"]
            other.ok("POST", "/resume")
            assert not any(answer.done() for answer in answers)
            other.ok("POST", "/abort_request", json={"rid": "", "abort_all": True})
            trainer.ok("POST", "/resume")
            assert all(answer.result(PATIENCE_S)["text"] for answer in answers)
        for path in ("/reset_prefix_cache", "/flush_cache", "/pause?clear_cache=true"):
            assert trainer("POST", path).status_code == 403
        root.ok("POST", "/pause?mode=keep")
        assert other.ok("GET", "/is_paused") == {"is_paused": True}
        trainer.ok("POST", "/resume")
        assert other.ok("GET", "/is_paused") == {"is_paused": True}, "a tenant ends no full pause"
        root.ok("POST", "/resume")
        assert Http(server.url)("POST", "/pause").status_code == 401
        assert Http(server.url)("GET", "/liveness").status_code == 200
