# SPDX-License-Identifier: Apache-2.0
"""A cluster on this host that outlives its command: a stand-in for the server, and the server."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner, Result

from moe_lora.cli import cluster as commands
from moe_lora.cli.main import main
from moe_lora.dist.launch import local_cluster, progress
from tests.dist.cluster_jobs import (
    ADAPTERS,
    DEMO,
    ROOT,
    Drive,
    Host,
    alive,
    free_port,
    local_answers,
    make_requests,
    until,
)
from tests.patience import PATIENCE_S


class Local:
    """Commands of a user, and processes of the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "cluster.yaml"
        self.state = folder / "state"
        self.place = ["--state-dir", str(self.state)]
        self.port = free_port()

    def write(self, name: str, **content: Any) -> None:
        front_end = {"port": self.port, "drain_s": 1, **content.pop("front_end", {})}
        given = {"model_dir": "/models/base", "served_model_name": name, "front_end": front_end, **content}
        self.file.write_text(yaml.safe_dump(given))

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(main, ["cluster", *words, *self.place])

    def up(self, name: str = "demo", *options: str, **content: Any) -> Result:
        self.write(name, **content)
        return self.run("up", str(self.file), "--on", "local", *options)

    def server(self) -> local_cluster._Server:
        return local_cluster._server("moe-lora", str(self.state))

    def status(self) -> dict[str, list[str]]:
        """Fields of each role."""
        done = self.run("status")
        assert done.exit_code == 0, done.output
        return {words[0]: words[1:] for words in map(str.split, done.output.splitlines()[1:])}


def kill(server: local_cluster._Server) -> None:
    for pid in (processes := server.processes()):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(local_cluster._is_ending, processes)), lambda: "all end")


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    for module in (local_cluster, progress):
        monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(commands, "_ray", lambda: pytest.fail("Ray is not needed"))
    monkeypatch.setattr(commands, "_may_be_on_ray", lambda address: False)
    found = Local(tmp_path)
    try:
        yield found
    finally:
        for state in tmp_path.rglob("state.json"):
            kill(local_cluster._Server(**json.loads(state.read_text())))


@pytest.fixture
def local(real: Local, monkeypatch: pytest.MonkeyPatch) -> Local:
    """With a stand-in for the server."""
    monkeypatch.setattr(local_cluster, "_SERVE", ("-m", "tests.dist.launch.local_server", "serve"))
    return real


def assert_nothing_is_left(local: Local) -> None:
    assert not local_cluster.is_known("moe-lora", str(local.state))


def test_a_process_is_awaited_until_the_kernel_shows_its_environment(local, monkeypatch) -> None:
    looks, processes = [{}, {}], local_cluster._Server.processes
    monkeypatch.setattr(
        local_cluster._Server, "processes", lambda self: looks.pop() if looks else processes(self)
    )
    assert local.up().exit_code == 0
    assert not looks
    assert local.run("down").exit_code == 0


def test_a_cluster_starts_scales_and_ends(local: Local) -> None:
    done = local.up(scaling={"max_instances": 4})
    assert done.exit_code == 0, done.output
    url = f"http://127.0.0.1:{local.port}"
    assert done.output.splitlines()[-1] == url
    assert "front-end-0: ready" in done.output
    shown = local.status()
    processes = local.server().processes()
    assert {int(process) for _, process, *_ in shown.values()} == set(processes)
    assert [shown[role][0] for role in ("front-end-0", "instance-0", "instance-1")] == [
        *("ready", "running", "running")
    ]
    assert shown["front-end-0"][2:] == [url, "0"]
    assert shown["instance-1"][2:] == ["2"]

    again = local.run("up", str(local.file), "--on", "local")
    assert again.exit_code == 1
    assert "a cluster named moe-lora is on this host; see moe-lora cluster status" in again.output
    assert local.run("scale", "instance", "3").exit_code == 0
    assert set(local.status()) == {"front-end-0", "instance-0", "instance-1", "instance-2"}
    for command in ("drain", "undrain"):
        done = local.run(command, "10.0.0.1")
        assert done.exit_code == 1
        assert f"call moe-lora drain INSTANCE --url {url}" in done.output

    processes = local.server().processes()
    assert local.run("down").output == "moe-lora has ended\n"
    assert not any(map(alive, processes))
    assert_nothing_is_left(local)


def test_a_server_with_keys_gets_the_administrator_s(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.up("keys", scaling={"max_instances": 4}).exit_code == 0
    assert local.status()["instance-0"][2:] == ["1"], "restarts by the command line"
    assert "a key is needed" in local.run("scale", "instance", "1").output
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert local.status()["instance-0"][2:] == ["2"]
    assert local.run("scale", "instance", "1").exit_code == 0


@pytest.mark.parametrize(
    ("name", "limit_s", "said"),
    [
        ("unfit", "600", "the server has ended:\nError: it can't be:\n  one more line\nsee "),
        ("slow", "0.1", "no front end is ready after --limit-s 0.1: front-end-0: starting"),
    ],
)
def test_a_failed_start_leaves_nothing(local: Local, name: str, limit_s: str, said: str) -> None:
    done = local.up(name, "--limit-s", limit_s)
    assert done.exit_code == 1
    assert said in done.output
    assert "ending all roles" in done.output
    assert_nothing_is_left(local)


def test_ctrl_c_ends_the_start(local: Local) -> None:
    local.write("slow")
    found: list[set[int]] = []

    def say(line: str) -> None:
        if line == "instance-1: starting":
            found.append(set(local.server().processes()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local_cluster.up(
            str(local.file), "moe-lora", num_front_ends=1, state_dir=str(local.state), limit_s=600.0, say=say
        )
    assert len(found[0]) == 3
    assert not any(map(alive, found[0]))
    assert_nothing_is_left(local)


def test_a_killed_server_s_roles_end_and_stuck_ones_are_named(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "STOP_S", 0.0)
    assert local.up("stuck").exit_code == 0
    server, *roles = local.server().processes()
    os.kill(server, signal.SIGKILL)
    until(lambda: len(local.server().processes()) == 2, lambda: "the server ends")
    assert "the server has ended:" in local.run("status").output
    assert "a cluster named moe-lora is on this host" in local.up().output
    done = local.run("down")
    assert done.exit_code == 1
    for number, pid in enumerate(roles):
        assert f"instance-{number} ({pid})" in done.output
    assert "did not end within 1 s; call moe-lora cluster down again, or end the processes" in done.output
    for pid in roles:
        os.kill(pid, signal.SIGKILL)
    assert local.run("down").exit_code == 0
    assert_nothing_is_left(local)


def test_an_old_state_is_of_no_process(local: Local) -> None:
    """As after a restart of the machine, whose processes have the old numbers."""
    assert local.up().exit_code == 0
    server = local.server()
    kill(server)
    state = server.log.parent / "state.json"
    state.write_text(state.read_text().replace(server.token, 32 * "0"))
    assert "the server has ended:" in local.run("status").output
    assert local.up().exit_code == 0
    state.write_text(state.read_text().replace(local.server().token, 32 * "0"))
    [running] = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _serves(pid, local)]
    assert local.run("down").exit_code == 0
    assert alive(running)
    os.kill(running, signal.SIGTERM)


def _serves(pid: int, local: Local) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return "serve" in words and str(local.file) in words


def test_an_occupied_port_is_refused(local: Local) -> None:
    assert local.up().exit_code == 0
    done = local.up("demo", "--name", "other")
    assert f"another server answers at http://127.0.0.1:{local.port}; give another" in done.output
    local.write("demo", front_end={"port": 0})
    done = local.run("up", str(local.file), "--on", "local", "--name", "other")
    assert "front_end.port=0 has an unknown URL; give another port" in done.output
    assert not local_cluster.is_known("other", str(local.state))


def test_an_end_forgets_no_later_start_and_none_of_another_host(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local.up().exit_code == 0
    former = local.server()
    assert local.run("down").exit_code == 0
    again = local.up()
    assert again.exit_code == 0, again.output
    former.stop()
    assert local.status()["front-end-0"][0] == "ready"
    with monkeypatch.context() as other:
        other.setattr(platform, "node", lambda: "another")
        assert "no cluster named moe-lora is on this host" in local.run("down", "--on", "local").output
    assert local.run("down").exit_code == 0


def test_a_repeated_end_sends_no_second_signal(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "STOP_S", 0.0)
    assert local.up("busy", front_end={"drain_s": 0.1}).exit_code == 0
    sent: list[int] = []
    send = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: (sent.append(pid), send(pid, number)))
    for _ in range(2):
        assert "did not end within 0.1 s" in local.run("down").output
    assert sent == list(local.server().processes())[:1], "the server's"
    kill(local.server())
    assert local.run("down").exit_code == 0


@pytest.mark.parametrize("text", ["", '{"folder": ', "[]", "{}"])
def test_a_damaged_state_is_named_and_replaced(local: Local, text: str) -> None:
    assert local.up().exit_code == 0
    kill(local.server())
    state = local.server().log.with_name("state.json")
    state.write_text(text)
    for command in ("status", "down"):
        done = local.run(command)
        assert done.exit_code == 1
        assert f"{state} is damaged" in done.output
    assert local.up().exit_code == 0
    assert local.run("down").exit_code == 0


def test_a_path_may_be_no_text(local: Local) -> None:
    local.file = local.folder / os.fsdecode(b"\xff.yaml")
    assert local.up().exit_code == 0
    assert set(local.status()) == {"front-end-0", "instance-0", "instance-1"}
    assert local.run("down").exit_code == 0


def test_roles_have_names_and_states_without_lines_of_the_log(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local.up("ranks").exit_code == 0
    shown = local.status()
    assert shown["front-end-0"][0] == "ready"
    assert "a" not in shown["front-end-0"]
    assert {"lora-server-0", "lora-server-1"} < set(shown)
    assert shown["instance-0"] == ["running", "2"]
    assert shown["instance-1"] == ["starting", "2", "it", "was", "killed"]
    monkeypatch.setattr(local_cluster._Server, "is_ready", lambda self: False)
    assert local.status()["front-end-0"][-3:] == ["0", "a", "port"]


@contextmanager
def foreign(port: int) -> Iterator[list[str]]:
    """Another server at the port: requests that it got."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield got
        finally:
            server.shutdown()
            thread.join()


def test_another_server_at_the_port_is_not_the_cluster(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert local.up().exit_code == 0
    server = local.server()
    kill(server)
    with foreign(local.port) as got:
        assert "the server has ended" in local.run("scale", "instance", "1").output
        monkeypatch.setattr(local_cluster._Server, "living", lambda self: {})
        assert "moe-lora is not ready at http" in local.run("scale", "instance", "1").output
        assert got == ["/ready None"]
        assert "another server answers" in local.up().output


def test_an_error_of_another_form_is_shown(local: Local) -> None:
    assert local.up("odd").exit_code == 0
    assert 'answers 404: {"detail": "Not Found"}' in local.run("scale", "instance", "1").output


def test_another_server_that_takes_the_port_makes_no_start_ready(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = local_cluster._started
    with ExitStack() as later:
        monkeypatch.setattr(
            local_cluster,
            "_started",
            lambda *given: (later.enter_context(foreign(local.port)), start(*given))[1],
        )
        done = local.up()
    assert done.exit_code == 1
    assert "the server has ended" in done.output
    assert_nothing_is_left(local)


def test_the_name_finds_the_place(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    local.place = []
    monkeypatch.setenv("XDG_STATE_HOME", str(local.folder / "home"))
    on_ray = SimpleNamespace(
        is_known=lambda name, address: name == "moe-lora", down=lambda name, address: None
    )
    assert local.up().exit_code == 0
    monkeypatch.setattr(commands, "_ray", lambda: on_ray)
    assert local.run("status").exit_code == 0
    monkeypatch.setattr(commands, "_may_be_on_ray", lambda address: True)
    done = local.run("down")
    assert done.exit_code == 1
    assert (
        "a cluster named moe-lora is on this host and another on Ray; give --on local or ray" in done.output
    )
    assert local.run("down", "--on", "ray").exit_code == 0
    assert local.run("status", "--on", "local").exit_code == 0
    assert local.run("down", "--on", "local").exit_code == 0
    assert local.run("down").output == "moe-lora has ended\n", "on Ray"
    monkeypatch.setattr(commands, "_may_be_on_ray", lambda address: False)
    assert "no cluster named moe-lora is on this host; is it on Ray?" in local.run("down").output
    assert "no cluster named moe-lora is on this host; start" in local.run("status", "--on", "local").output


@pytest.mark.parametrize("command", ["down", "up"])
def test_options_name_one_place(command: str, local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    on_ray = SimpleNamespace(
        up=lambda *_, address, **__: calls.append(address) or [],
        down=lambda _, address: calls.append(address),
    )
    monkeypatch.setattr(commands, "_ray", lambda: on_ray)
    assert local.up().exit_code == 0
    words = [command, str(local.file)] if command == "up" else [command]
    on = {kind: ["--on", kind] if command == "up" else [] for kind in ("local", "ray")}
    for kind in on:
        done = local.run(*words, *on[kind], "--ray-address", "10.0.0.1:6379")
        assert "--ray-address goes with --on ray, --state-dir with --on local" in done.output
    assert "leave one out" in local.run(*words, "--on", "ray").output
    local.place = []
    assert "leave one out" in local.run(*words, "--on", "local", "--ray-address", "10.0.0.1:6379").output
    assert local.run(*words, *on["ray"], "--ray-address", "10.0.0.1:6379").exit_code == 0
    assert calls == ["10.0.0.1:6379"]
    assert local.server().processes(), "on this host"


@pytest.mark.slow
def test_a_server_outlives_its_starter_and_ends_after_open_requests(real: Local) -> None:
    requests = make_requests(16)
    expected = local_answers(requests)
    adapters = {name: str(DEMO / "adapters" / name) for name in ADAPTERS}
    engine = {"num_instances": 2, "dtype": "float32", "eager": True, "num_threads": 1, "device": "cpu"}
    patient = {"drain_s": PATIENCE_S, "heartbeat_timeout_s": PATIENCE_S, "heartbeat_dead_s": 2 * PATIENCE_S}
    model = str(DEMO / "model")
    real.write("demo", model_dir=model, adapters=adapters, engine=engine, front_end=patient)
    words = ["cluster", "up", str(real.file), "--on", "local", "--front-ends", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "moe_lora.cli.main", *words, "--state-dir", str(real.state)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline()
        starter.kill()
    until(
        lambda: "ready" in [one[0] for one in real.status().values()], lambda: real.server().log.read_text()
    )

    def drive(times: int) -> Drive:
        more = {"max_tokens": 8, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        bodies = [{"model": one or "demo", "prompt": prompt, **more} for one, prompt in requests * times]
        return Drive(
            Host("client", "127.0.0.1", real.folder),
            {"url": real.server().url, "bodies": bodies, "pause_s": 0.0},
        )

    assert drive(1).answers() == expected
    os.kill(int(real.status()["instance-1"][1]), signal.SIGKILL)
    assert drive(1).answers() == expected
    until(lambda: real.status()["instance-1"][::2] == ["running", "1"], lambda: str(real.status()))
    assert set(real.status()) >= {"keeper", "controller", "front-end-0", "front-end-1", "instance-0"}

    processes = real.server().processes()
    url = real.server().url
    body = {"model": "demo", "prompt": "a=", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        down = subprocess.Popen(
            [sys.executable, "-m", "moe_lora.cli.main", "cluster", "down", "--state-dir", str(real.state)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert down.wait(PATIENCE_S) == 0
    assert not any(map(alive, processes))
    assert_nothing_is_left(real)
