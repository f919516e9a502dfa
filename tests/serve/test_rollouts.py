# SPDX-License-Identifier: Apache-2.0
"""Aliases over real servers: rollouts during streams, restarts of each process, rights, metrics, commands."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from moe_lora.adapters.registry.base_model import base_model_hash
from moe_lora.adapters.registry.registry import Registry
from moe_lora.cli.main import main
from moe_lora.serve.api_keys import add_key
from tests.dist.cluster_jobs import until

from .demo_server import DEMO, DemoServer, demo_server
from .live_server import completion_events, wait_until
from .test_access import rights
from .test_controls import SEVERAL, Http

V1, V2 = "support@v1", "support@v2"
PROMPT = "abcdefgh="
TEXTS = {V1: "ABCDEFGH", V2: "nopqrstu", "upper": "ABCDEFGH", "rot13": "nopqrstu"}
NUM_STREAMS, NUM_OF_PHASE = 16, 64
PATIENT = ("--set", "front_end.heartbeat_timeout_s=60", "--set", "front_end.heartbeat_dead_s=120")
"""An instance on a busy machine is slow, not silent."""


def stocked(folder: Path) -> tuple[str, ...]:
    """Options of a server with a registry: `support` has two versions, and only `other` is loaded."""
    model = DEMO / "model"
    with Registry(folder, create=True) as registry:
        for name, files in (("support", "upper"), ("support", "rot13"), ("other", "reverse")):
            registry.add(name, DEMO / "adapters" / files, base_hash=base_model_hash(model))
    return ("--registry", str(folder), "--set", "registry.adapters=other", "--eager", "--dtype", "float32")


def pids(server: DemoServer) -> dict[str, int]:
    """Of the latest process of each role."""
    found = re.findall(r"(\S+) started \(process (\d+)\)", server.log.read_text())
    return {name: int(pid) for name, pid in found}


def until_whole(server: DemoServer, num: int = 6) -> None:
    said = r"instance instance-\d dialled in"
    until(lambda: len(re.findall(said, server.log.read_text())) >= num, server.log.read_text)


@pytest.fixture
def server(tmp_path) -> Iterator[DemoServer]:
    with demo_server(tmp_path / "log", *stocked(tmp_path / "registry"), *SEVERAL, *PATIENT) as server:
        until_whole(server)
        yield server


def run(server: DemoServer, *words: str) -> str:
    """The output of `moe-lora adapters`."""
    found = CliRunner().invoke(main, ["adapters", *words, "--url", server.url])
    assert found.exit_code == 0, found.output
    return found.output.strip()


def adapter_of(http: Http, **fields: Any) -> str:
    body = {"model": "support", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
    return http.ok("POST", "/v1/completions", json=body)["model"]


def streamed(url: str) -> str:
    """The adapter that one stream names in each event."""
    body = {"model": "support", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    text, models = "", set()
    for event in completion_events(url, body):
        models.add(event["model"])
        text += event["choices"][0]["text"]
    [model] = models
    assert text == TEXTS[model], "an answer is of one version"
    return model


class Streams:
    """Clients that stream all the time.  `answers`: the adapters by phase, of streams within the phase."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.phase = 0
        self.answers: dict[int, Counter[str]] = {}
        self._stop, self._lock = threading.Event(), threading.Lock()

    def _work(self) -> None:
        while not self._stop.is_set():
            before = self.phase
            model = streamed(self._url)
            with self._lock:
                if before == self.phase:
                    self.answers.setdefault(before, Counter())[model] += 1

    def __enter__(self) -> Streams:
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._running = [self._pool.submit(self._work) for _ in range(NUM_STREAMS)]
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def check(self) -> None:
        """Raises the first error of a stream."""
        for one in self._running:
            one.result()

    def of_phase(self) -> Counter[str]:
        """The answers of a new phase."""
        with self._lock:
            self.phase += 1

        def is_over() -> bool:
            assert not any(one.done() and one.exception() for one in self._running), self._failure()
            return self.answers.get(self.phase, Counter()).total() >= NUM_OF_PHASE

        wait_until(is_over, "answers of a phase")
        with self._lock:
            return Counter(self.answers[self.phase])

    def _failure(self) -> list[object]:
        return [one.exception() for one in self._running if one.done()]


def check_share(found: Counter[str], share: float) -> None:
    """Of independent requests, within five standard deviations."""
    spread = 5 * (found.total() * share * (1 - share)) ** 0.5
    assert abs(found[V2] - found.total() * share) <= spread, found


@pytest.mark.slow
def test_no_stream_fails_from_rollout_to_rollback_while_an_instance_is_killed(server):
    assert run(server, "rollout", "support", "--to", "v1") == f"support: {V1} 1 (settled)"
    with Streams(server.url) as streams:
        assert streams.of_phase().keys() == {V1}
        assert run(server, "rollout", "support", "--to", "v2", "--share", "5%").endswith(
            f"{V2} 0.05 (rollout)"
        )
        check_share(streams.of_phase(), 0.05)
        run(server, "rollout", "support", "--to", "v2", "--share", "0.5")
        check_share(streams.of_phase(), 0.5)
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        check_share(streams.of_phase(), 0.5)
        until_whole(server, 9)
        check_share(streams.of_phase(), 0.5)
        assert run(server, "promote", "support") == f"support: {V2} 1, {V1} 0 (promoted)"
        assert streams.of_phase().keys() == {V2}
        assert run(server, "rollback", "support") == f"support: {V1} 1, {V2} 0 (rolled_back)"
        assert streams.of_phase().keys() == {V1}
    streams.check()


@pytest.mark.slow
def test_users_keep_their_adapter_over_front_ends_shares_and_restarts(server):
    http = Http(server.url)
    users = [f"user-{number}" for number in range(40)]

    def by_user() -> dict[str, str]:
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda user: adapter_of(http, user=user), users)
            return dict(zip(users, found, strict=True))

    def roll(share: float) -> set[str]:
        http.ok("POST", "/v1/aliases/support/rollout", json={"to": "v2", "share": share})
        found = by_user()
        assert by_user() == found
        return {user for user, model in found.items() if model == V2}

    http.ok("POST", "/v1/aliases/support/rollout", json={"to": "v1"})
    small, large = roll(0.2), roll(0.5)
    assert small < large < set(users)
    large_body = {"user": "user-0", "model": "demo:support", "cache_salt": "x", "stop": ["y" * 900] * 20}
    assert adapter_of(http, **large_body) == by_user()["user-0"], "a large body is checked elsewhere"
    front_ends = ("front-end-0", "front-end-1")
    for names in (("front-end-0",), ("controller",), ("controller", *front_ends)):
        before = pids(server)
        for name in names:
            os.kill(before[name], signal.SIGKILL)
        for name in names:
            until(lambda name=name, old=before: pids(server)[name] != old[name], server.log.read_text)
        wait_until(lambda: whole(http), "the processes are back")
        assert {user for user, model in by_user().items() if model == V2} == large
    http.ok("POST", "/v1/aliases/support/rollback")
    assert set(by_user().values()) == {V1}


def whole(http: Http) -> bool:
    """True if calls reach the controller from each of many connections."""
    try:
        return all(
            http("POST", "/v1/unload_lora_adapter", json={"lora_name": "nobody"}).status_code == 404
            and http("POST", "/v1/completions", json={"model": "support", "prompt": "a="}).status_code == 200
            for _ in range(8)
        )
    except httpx.HTTPError:
        return False


@pytest.fixture
def alone(tmp_path) -> Iterator[tuple[Http, dict[str, Http]]]:
    """One instance with a key file: an administrator, and a key for each of three names."""
    file = tmp_path / "keys.json"
    keys = {
        "ops": add_key(file, rights("ops", admin=True)),
        **{one: add_key(file, rights(one, one)) for one in ("support", "upper", "blue")},
    }
    options = (*stocked(tmp_path / "registry"), "--api-keys", str(file))
    with demo_server(tmp_path / "log", *options) as server:
        clients = {name: Http(server.url, key) for name, key in keys.items()}
        yield clients.pop("ops"), clients


def test_rights_listings_metrics_and_errors(alone):
    ops, clients = alone
    tenant = clients["support"]
    ops.ok("POST", "/v1/aliases/support/rollout", json={"to": "v1"})
    ops.ok("POST", "/v1/aliases/support/rollout", json={"to": "v2", "share": 0.25})
    check_listings(ops, clients)
    check_answers(tenant)
    check_metrics(ops)
    assert tenant("POST", "/v1/aliases/support/promote").status_code == 403
    check_refusals(ops)
    check_kept_and_dropped(ops)


def check_listings(ops: Http, clients: dict[str, Http]) -> None:
    rows = [{"adapter": V1, "share": 0.75}, {"adapter": V2, "share": 0.25}]
    card = {"id": "support", "object": "alias", "stage": "rollout", "targets": rows}
    listed = ops.ok("GET", "/v1/adapters")
    assert listed["aliases"] == [card]
    assert {one["id"]: one["pinned"] for one in listed["data"]} == {"other": False, V1: True, V2: True}
    shown = {one["id"]: one for one in clients["support"].ok("GET", "/v1/models")["data"]}
    assert shown.keys() == {"demo", V1, V2, "support"}
    assert shown["support"]["alias"] == card
    assert shown["support"]["parent"] == "demo"
    assert [one["id"] for one in clients["upper"].ok("GET", "/v1/models")["data"]] == ["demo"]
    body = {"model": "support", "prompt": PROMPT}
    assert clients["upper"]("POST", "/v1/completions", json=body).status_code == 404


def check_answers(http: Http) -> None:
    """Each interface names the adapter, and one user's requests have one adapter in all of them."""
    for user in ("u0", "u1", "u2", "u3", "u4", "u5"):
        adapter = adapter_of(http, user=user)
        chat = {"model": "support", "max_tokens": 2}
        said = [{"role": "user", "content": "abc="}]
        for path, body in (
            ("/v1/chat/completions", {**chat, "messages": said, "user": user}),
            ("/v1/responses", {"model": "support", "input": "abc=", "max_output_tokens": 2, "user": user}),
            ("/v1/responses", {"model": "support", "input": "abc=", "safety_identifier": user}),
            ("/v1/messages", {**chat, "messages": said, "metadata": {"user_id": user}}),
            ("/v1/embeddings", {"model": "support", "input": "abc=", "user": user}),
        ):
            answer = http("POST", path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == adapter, path


def check_metrics(ops: Http) -> None:
    text = ops.ok("GET", "/metrics")
    for adapter, share in ((V1, 0.75), (V2, 0.25)):
        line = f'moe_lora:alias_share{{adapter="{adapter}",alias="support",model_name="demo"}} {share}'
        assert line in text
        for name in ("requests_total", "prompt_tokens_total", "generation_tokens_total"):
            assert re.search(rf'moe_lora:adapter_{name}{{adapter="{adapter}",.*}} [1-9]', text), name


def check_refusals(ops: Http) -> None:
    def refused(status: int, path: str, body: Any, said: str) -> None:
        answer = ops("POST", path, json=body)
        assert answer.status_code == status, answer.text
        assert said in answer.json()["error"]["message"]

    rollout = "/v1/aliases/support/rollout"
    refused(400, rollout, {"to": "other", "share": 0.1}, "promote it or roll back first")
    refused(400, rollout, {"to": "v2", "share": 0}, "share=0 must be above 0")
    refused(400, rollout, {"to": "v2", "share": True}, "share")
    refused(404, rollout, {"to": "nobody", "share": 0.1}, "is not loaded")
    refused(400, rollout, {"to": "demo", "share": 0.1}, "base model")
    refused(400, rollout, {"to": "v2", "shares": 0.1}, "shares")
    refused(400, "/v1/aliases/demo/rollout", {"to": "other"}, "name 'demo' is the base model's name")
    refused(400, "/v1/load_lora_adapter", {"lora_name": "demo:support"}, "reaches the alias 'support'")
    prefixed = {"lora_name": "demo:blue", "lora_path": str(DEMO / "adapters" / "upper")}
    ops.ok("POST", "/v1/load_lora_adapter", json=prefixed)
    refused(400, "/v1/aliases/blue/rollout", {"to": "other"}, "would hide the adapter 'demo:blue'")
    ops.ok("POST", "/v1/unload_lora_adapter", json={"lora_name": "demo:blue"})
    refused(404, "/v1/aliases/nobody/promote", {}, "is no alias")
    refused(400, "/v1/unload_lora_adapter", {"lora_name": V1}, "keeps adapter")
    refused(400, "/v1/load_lora_adapter", {"lora_name": "support", "load_inplace": True}, "alias of adapter")
    answer = ops("DELETE", "/v1/registry/adapters/support?version=1")
    assert answer.status_code == 400, answer.text


def check_kept_and_dropped(ops: Http) -> None:
    def pinned() -> dict[str, bool]:
        return {one["id"]: one["pinned"] for one in ops.ok("GET", "/v1/adapters")["data"]}

    ops.ok("POST", "/v1/aliases/support/promote")
    assert pinned() == {"other": False, V1: True, V2: True}
    ops.ok("POST", "/v1/aliases/support/drop")
    wait_until(lambda: pinned() == {"other": False, V2: True}, "the former version is unloaded")
    missing = ops("POST", "/v1/aliases/support/rollout", json={"to": "v3", "share": 0.1})
    assert missing.status_code == 404, missing.text
    assert "version 3" in missing.json()["error"]["message"]
    ops.ok("POST", "/v1/aliases/support/rollout", json={"to": "other", "share": 1})
    assert pinned() == {"other": True, V2: True}
    assert adapter_of(ops) == "other"
    ops.ok("DELETE", "/v1/aliases/support")
    wait_until(lambda: pinned() == {"other": False}, "the alias's adapters are as before")
    assert ops("POST", "/v1/completions", json={"model": "support", "prompt": "a="}).status_code == 404
    assert "aliases" not in ops.ok("GET", "/v1/adapters") or not ops.ok("GET", "/v1/adapters")["aliases"]


def test_an_adapter_of_the_name_is_the_current_version_and_rights_decide_the_share(alone):
    ops, clients = alone
    for name, files in (("upper", "upper"), ("blue", "rot13")):
        body = {"lora_name": name, "lora_path": str(DEMO / "adapters" / files)}
        ops.ok("POST", "/v1/load_lora_adapter", json=body)
    card = ops.ok("POST", "/v1/aliases/upper/rollout", json={"to": "blue", "share": 1})
    assert [one["adapter"] for one in card["targets"]] == ["upper", "blue"]
    assert adapter_of(ops, model="upper") == "blue"
    for step in ("promote", "rollback"):
        assert adapter_of(clients["upper"], model="upper") == "blue", "by a right to the alias's name"
        refused = clients["upper"]("POST", "/v1/completions", json={"model": "blue", "prompt": PROMPT})
        assert refused.status_code == 404, "the right holds through the alias only"
        ops.ok("POST", f"/v1/aliases/upper/{step}")
    assert adapter_of(clients["upper"], model="upper") == "upper"
    check_key_of_one_adapter(ops, clients)


def check_key_of_one_adapter(ops: Http, clients: dict[str, Http]) -> None:
    """The key for `blue` alone sees and reaches nothing else."""
    blue = clients["blue"]
    unknown = blue("POST", "/v1/completions", json={"model": "upper", "prompt": PROMPT})
    assert unknown.status_code == 404
    ops.ok("POST", "/v1/aliases/team/rollout", json={"to": "upper"})
    hidden = blue("POST", "/v1/completions", json={"model": "team", "prompt": PROMPT})
    assert hidden.status_code == 404
    assert "'team'" in hidden.json()["error"]["message"]
    assert "upper" not in hidden.text
    assert [one["id"] for one in blue.ok("GET", "/v1/models")["data"]] == ["demo", "blue"]
    ops.ok("POST", "/v1/aliases/team/rollout", json={"to": "blue", "share": 0.5})
    shown = {one["id"]: one for one in blue.ok("GET", "/v1/models")["data"]}
    assert shown["team"]["alias"]["targets"] == [{"adapter": "blue", "share": 1.0}]
    assert {adapter_of(blue, model="team", user=f"u{number}") for number in range(8)} == {"blue"}
    body = {"prompt": PROMPT, "max_tokens": 2, "lora": [{"name": "team", "weight": 1.0}]}
    assert blue("POST", "/v1/completions", json=body).status_code == 200
    twice = {**body, "lora": [{"name": "team"}, {"name": "blue", "weight": 2}]}
    refused = blue("POST", "/v1/completions", json=twice)
    assert refused.status_code == 400
    assert "twice" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("several", "number"),
    [
        pytest.param(several, number, marks=() if several and number == signal.SIGKILL else pytest.mark.slow)
        for several in ((), SEVERAL)
        for number in (signal.SIGTERM, signal.SIGKILL)
    ],
)
def test_an_alias_outlives_the_end_of_all_processes(tmp_path, several, number):
    options = (*stocked(tmp_path / "registry"), *several, *PATIENT)
    with demo_server(tmp_path / "first", *options) as server:
        http = Http(server.url)
        run(server, "rollout", "support", "--to", "v1")
        run(server, "rollout", "support", "--to", "v2", "--share", "0.5")
        assert http.ok("POST", "/v1/aliases/team/rollout", json={"to": "other"})["saved"]
        sent = {"lora_name": "sent", "lora_path": str(DEMO / "adapters/upper")}
        http.ok("POST", "/v1/load_lora_adapter", json=sent)
        assert not http.ok("POST", "/v1/aliases/brief/rollout", json={"to": "sent"})["saved"]
        http.ok("POST", "/v1/aliases/gone/rollout", json={"to": "other"})
        http.ok("DELETE", "/v1/aliases/gone")
        found = {user: adapter_of(http, user=user) for user in map(str, range(24))}
        assert set(found.values()) == {V1, V2}
        server.stop(number)
    with Registry(tmp_path / "registry") as registry:  # the start serves it as `other`
        registry.add("other", DEMO / "adapters/upper", base_hash=base_model_hash(DEMO / "model"))
    with demo_server(tmp_path / "second", *options) as server:
        http = Http(server.url)
        wait_until(lambda: whole(http), "both front ends route to both instances")
        assert {user: adapter_of(http, user=user) for user in found} == found
        assert adapter_of(http, model="team") == "other@v1"
        listed = http.ok("GET", "/v1/adapters")
        assert [one["id"] for one in listed["aliases"]] == ["support", "team"]
        pinned = {"other": False, "other@v1": True, V1: True, V2: True}
        wait_until(lambda: pinned_at(http) == pinned, "the adapters are pinned again")
        assert run(server, "rollback", "support") == f"support: {V1} 1, {V2} 0 (rolled_back)"
        run(server, "drop", "support")
        del pinned[V2]
        wait_until(lambda: pinned_at(http) == pinned, "the former version is unloaded")


def pinned_at(http: Http) -> dict[str, bool]:
    return {one["id"]: one["pinned"] for one in http.ok("GET", "/v1/adapters")["data"]}


def test_without_a_registry_the_command_says_that_the_alias_ends_with_the_server(demo):
    try:
        assert "forgets this alias" in run(demo, "rollout", "support", "--to", "upper")
    finally:
        Http(demo.url).ok("DELETE", "/v1/aliases/support")


def test_a_lora_server_keeps_adapters_by_itself(tmp_path):
    options = (*stocked(tmp_path / "registry"), "--lora-server", "EP1-PP1", "--set", "lora_server.sites=all")
    with demo_server(tmp_path / "log", *options) as server:
        http = Http(server.url)
        http.ok("POST", "/v1/aliases/support/rollout", json={"to": "v1"})
        card = http.ok("POST", "/v1/aliases/support/rollout", json={"to": "v2", "share": 1})
        assert card["targets"] == [{"adapter": V1, "share": 0}, {"adapter": V2, "share": 1}]
        assert adapter_of(http) == V2
        assert not any(one["pinned"] for one in http.ok("GET", "/v1/adapters")["data"])


@pytest.mark.parametrize("share", ["0", "0%", "101%", "much", "nan"])
def test_a_wrong_share_is_refused_by_the_command(share):
    found = CliRunner().invoke(main, ["adapters", "rollout", "a", "--to", "b", "--share", share])
    assert found.exit_code == 2
    assert "is no share" in found.output
