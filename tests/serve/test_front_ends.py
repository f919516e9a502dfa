# SPDX-License-Identifier: Apache-2.0
"""`moe-lora serve --front-ends 2`: one port, several processes behind it, and nothing left of them."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from demo.tasks import prompt_for
from moe_lora.cli.main import main
from tests.dist.cluster_jobs import alive, until
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

from .demo_server import DEMO, DemoServer, demo_server, few_adapters

NAMES = list(json.loads((DEMO / "adapters" / "index.json").read_text()))[:4]
OPTIONS = (*few_adapters(*NAMES), "--eager", "--dtype", "float32")
SEVERAL = ("--front-ends", "2", "--instances", "2", "--placement", "loraserve")


@pytest.fixture
def server(tmp_path) -> Iterator[DemoServer]:
    with demo_server(tmp_path / "log", *OPTIONS, *SEVERAL) as server:
        until_whole(server)
        yield server


def until_whole(server: DemoServer) -> None:
    """Each instance has dialled in to the controller and both front ends."""
    said = r"instance instance-\d dialled in"
    until(lambda: len(re.findall(said, server.log.read_text())) >= 6, server.log.read_text)


def pids(server: DemoServer) -> dict[str, int]:
    """Of the latest process of each role."""
    found = re.findall(r"(\S+) started \(process (\d+)\)", server.log.read_text())
    return {name: int(pid) for name, pid in found}


def ask(server: DemoServer, model: str) -> tuple[int, str]:
    """Over a connection of its own, which either front end may take: status, and the text or what it says."""
    body = {"model": model, "prompt": prompt_for("abc"), "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.is_success else answer.text


def complete(server: DemoServer, model: str = "upper") -> str:
    status, text = ask(server, model)
    assert status == 200, text
    return text


def load(server: DemoServer, name: str) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(DEMO / "adapters" / "upper"), "load_inplace": True}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, trust_env=False)


def test_one_port_outlives_a_front_end_and_all_end_together(server):
    first = pids(server)
    assert sorted(first) == ["controller", "front-end-0", "front-end-1", "instance-0", "instance-1"]
    text = complete(server)
    assert load(server, "new").status_code == 200
    assert [complete(server, "new") for _ in range(8)] == [text] * 8
    large = {
        "model": "new",
        "prompt": prompt_for("abc"),
        "max_tokens": 4,
        "temperature": 0,
        "user": "x" * 20_000,
    }
    for _ in range(8):
        answer = httpx.post(f"{server.url}/v1/completions", json=large, trust_env=False)
        assert answer.json()["choices"][0]["text"] == text
    os.kill(first["front-end-0"], signal.SIGKILL)
    until(lambda: pids(server)["front-end-0"] != first["front-end-0"], server.log.read_text)
    assert [complete(server, "new") for _ in range(8)] == [text] * 8
    everyone = pids(server).values()
    assert server.stop() == 0
    assert not any(map(alive, everyone))


@pytest.mark.slow
def test_administrators_have_a_place_of_their_own_before_all_front_ends(tmp_path):
    place = tmp_path / "admin"
    options = (*OPTIONS, *SEVERAL, "--set", f"front_end.admin_address={place}")
    body = {"lora_name": "new", "lora_path": str(DEMO / "adapters" / "upper")}
    with demo_server(tmp_path / "log", *options) as server:
        until_whole(server)
        assert load(server, "new").status_code == 404
        with administrator(place) as admin:
            assert admin.post("/v1/load_lora_adapter", json=body).status_code == 200
        os.kill(pids(server)["front-end-0"], signal.SIGKILL)
        until(lambda: server.log.read_text().count("Serving demo at") >= 3, server.log.read_text)
        os.kill(pids(server)["front-end-1"], signal.SIGKILL)
        with administrator(place) as admin:  # the one that was started again
            assert admin.get("/metrics").status_code == 200
        assert httpx.get(f"{server.url}/metrics", trust_env=False).status_code == 404
        assert complete(server, "new")
        assert server.stop() == 0
    assert not place.exists()


def administrator(place: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(place)), base_url="http://admin")


@pytest.mark.slow
def test_killed_outright_it_leaves_no_process(server):
    everyone = pids(server).values()
    server.process.kill()
    server.process.wait()
    until(lambda: not any(map(alive, everyone)), lambda: "roles outlive what started them")


@pytest.mark.slow
def test_no_request_fails_while_controller_and_instances_are_killed_in_turn(server):
    alone = {model: complete(server, model) for model in NAMES}
    assert load(server, "new").status_code == 200
    alone["new"] = alone["upper"]
    over = threading.Event()

    def client(number: int) -> list[tuple[str, tuple[int, str]]]:
        found = []
        while not over.is_set() or len(found) < 150:
            model = [*alone][(number + 5 * len(found)) % len(alone)]
            found.append((model, ask(server, model)))
        return found

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        try:
            for name in ("controller", "instance-0", "controller", "instance-1"):
                kill_and_await(server, name)
                until(lambda: load(server, "new").status_code == 200, server.log.read_text)
        finally:
            over.set()
    found = [one for each in clients for one in each.result()]
    assert len(found) >= 600
    assert [one for one in found if one[1] != (200, alone[one[0]])] == []


@pytest.mark.slow
def test_all_front_ends_read_their_settings_again_when_their_parent_is_told_to(tmp_path):
    file, text = tmp_path / "cluster.yaml", f"model_dir: {DEMO / 'model'}\nengine: {{eager: true}}\n"
    file.write_text(text)
    with demo_server(tmp_path / "log", "--config", str(file), "--front-ends", "2") as server:
        until(lambda: server.log.read_text().count("Serving ") >= 2, server.log.read_text)
        everyone = pids(server)
        file.write_text(f"{text}front_end: {{max_choices: 2}}\n")
        server.process.send_signal(signal.SIGHUP)
        said = "settings were read again: max_choices=2"
        until(lambda: server.log.read_text().count(said) >= 4, server.log.read_text)
        file.write_text("no: settings\n")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "stay as they are" in server.log.read_text(), server.log.read_text)
        body = {"prompt": "a=", "max_tokens": 1, "n": 3}
        for _ in range(8):
            answer = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)
            assert answer.status_code == 400
        assert pids(server) == everyone


HANGS = """
import os, sys, threading, time

def wait():
    while not os.path.exists(os.path.join(os.environ["HANGS"], str(os.getpid()))):
        time.sleep(0.1)
    sys.modules["moe_lora.engine.core"].EngineCore.step = lambda self: time.sleep(600)

threading.Thread(target=wait, daemon=True).start()
"""


@pytest.mark.slow
def test_an_instance_that_hangs_in_a_step_is_started_again(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HANGS", str(tmp_path))
    options = ("--set", "front_end.heartbeat_timeout_s=5", "--set", "front_end.heartbeat_dead_s=10")
    with demo_server(tmp_path / "log", *OPTIONS, *SEVERAL, *options) as server:
        until_whole(server)
        text, first = complete(server), pids(server)["instance-0"]
        (tmp_path / str(first)).touch()
        until(
            lambda: {complete(server) for _ in range(4)} == {text} and says_it_hangs(server),
            server.log.read_text,
        )
        until(lambda: pids(server)["instance-0"] != first, server.log.read_text)
        assert complete(server) == text


def says_it_hangs(server: DemoServer) -> bool:
    return "the engine does not get on" in server.log.read_text()


@pytest.mark.slow
def test_no_request_fails_while_instances_are_started_again_one_by_one(server):
    """Whichever of the front ends has it: both know who is drained, and who is back."""
    first, right, over = pids(server), complete(server), threading.Event()

    def client() -> list[tuple[int, str]]:
        found = []
        while not over.is_set():
            found.append(ask(server, "upper"))
        return found

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        try:
            for _ in range(2):
                done = CliRunner().invoke(main, ["restart", "--url", server.url])
                assert done.exit_code == 0, done.output
        finally:
            over.set()
    answers = [one for each in clients for one in each.result()]
    assert len(answers) > 50
    assert set(answers) == {(200, right)}
    assert {name for name, pid in pids(server).items() if pid != first[name]} == {"instance-0", "instance-1"}


def kill_and_await(server: DemoServer, name: str) -> None:
    """Kill a role's process, and return when the next one takes part."""
    back, times = (
        ("front end front-end-0 dialled in", 1) if name == "controller" else (f"{name} dialled in from", 3)
    )
    times += server.log.read_text().count(back)
    os.kill(pids(server)[name], signal.SIGKILL)
    until(lambda: server.log.read_text().count(back) >= times, server.log.read_text)


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(tmp_path):
    with demo_server(
        tmp_path / "log", *OPTIONS, "--front-ends", "2", "--set", "front_end.drain_s=1000"
    ) as server:
        until(
            lambda: len(re.findall(r"instance-0 dialled in", server.log.read_text())) >= 3,
            server.log.read_text,
        )
        everyone = pids(server)
        body = {"model": "upper", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, trust_env=False) as answer:
            next(answer.iter_lines())
            stop(everyone["instance-0"])
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "Ending:" in server.log.read_text(), server.log.read_text)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE_S) == 0
        assert not any(map(alive, everyone.values()))
