# SPDX-License-Identifier: Apache-2.0
"""Roles that can't start say why, in one line that names the setting."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from anyio import move_on_after

from moe_lora.config import EngineConfig
from moe_lora.config.cluster import read_cluster
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch import roles, server_role
from moe_lora.dist.launch.roles import JobPlace, serve_instance
from moe_lora.dist.launch.server_role import serve_lora_server
from moe_lora.dist.net.keys import make_keys
from moe_lora.engine.client.messages import Pulse
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
SERVER = "lora_server: {layout: EP2-PP1, address: '127.0.0.1:1', store_dir: store}\n"
FRONT_END = "front_end: {engines_address: '127.0.0.1:1'}\n"


@pytest.fixture
def write(tmp_path):
    def write_text(text: str) -> Path:
        if not (tmp_path / "certificates").exists():
            make_keys(tmp_path / "certificates")
        (tmp_path / "cluster.yaml").write_text(f"model_dir: base\ncertificates: certificates\n{text}")
        return tmp_path / "cluster.yaml"

    return write_text


def test_lora_server_needs_as_many_processes_as_its_layout_has_ranks(write):
    cluster = read_cluster(write(SERVER))
    with pytest.raises(ConfigError, match=r"EP2-PP1 has 2 ranks, but this job has 1 .* --nproc-per-node 2"):
        serve_lora_server(cluster, JobPlace())


def test_lora_server_without_its_section(write):
    with pytest.raises(ConfigError, match="no lora_server section"):
        serve_lora_server(read_cluster(write("")), JobPlace())


@pytest.mark.parametrize(
    ("device_puts", "given", "found"),
    [("none", None, (None, None)), ("ibgda", None, ("EAGER", "32")), ("ibgda", "LAZY", ("LAZY", "32"))],
)
def test_rank_whose_streams_wait_loads_all_kernels_at_once_unless_told_not_to(
    device_puts, given, found, write, monkeypatch
):
    """A kernel loaded when it is first launched may wait for a device that never comes to rest."""
    names = ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {} if given is None else {names[0]: given}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(server_role, "serve_rank", lambda *_: 0)
    server = SERVER.replace("EP2-PP1", "EP1-PP1").replace("}", f", device_puts: {device_puts}}}")
    assert serve_lora_server(read_cluster(write(server)), JobPlace()) == 0
    assert tuple(environment.get(name) for name in names) == found


def test_instance_needs_one_process_or_one_for_each_of_its_ranks(write):
    cluster = read_cluster(write(f"engine: {{expert_parallel: 4}}\n{FRONT_END}"))
    with pytest.raises(ConfigError, match=r"has 2 processes, but engine\.expert_parallel=4"):
        serve_instance(cluster, JobPlace(0, 2), "instance-1")


def test_instance_must_know_where_to_dial(write):
    with pytest.raises(ConfigError, match="engines_address is needed"):
        serve_instance(read_cluster(write("")), JobPlace(), "instance-1")


def test_place_is_what_torchrun_says(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert JobPlace.here() == JobPlace(0, 1, under_torchrun=False)
    for name, value in (("RANK", "2"), ("WORLD_SIZE", "3"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    assert JobPlace.here() == JobPlace(2, 3, under_torchrun=True)


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--role", "lora-server"], 1, "Error: lora_server.layout=EP2-PP1 has 2 ranks"),
        (["--role", "instance"], 1, "Error: front_end.engines_address is needed"),
        (["--role", "lora-server", "--name", "x"], 2, "--name is an instance's"),
        ([], 2, "the following arguments are required: --role"),
    ],
)
def test_command_ends_with_one_line(write, options, code, reason):
    command = [
        sys.executable,
        "-m",
        "moe_lora.dist.launch.run_role",
        "--config",
        str(write(SERVER)),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


class Hangs:
    """Links whose process was told to restart, and an engine loop that does not end."""

    restarts, stop, emit, pulse = True, None, None, None

    def __init__(self, *_: object) -> None:
        self.start = lambda: None

    async def run(self, *_: object) -> None:
        pass

    def join(self) -> None:
        time.sleep(600)


def test_a_process_that_is_to_be_started_again_ends_whatever_its_engine_hangs_at(monkeypatch):
    core = SimpleNamespace(info=SimpleNamespace(max_model_len=64), attach_notes=lambda notes: None)
    monkeypatch.setattr("moe_lora.dist.cluster.instance_links.FrontEndLinks", Hangs)
    monkeypatch.setattr("moe_lora.engine.loop.EngineLoop", Hangs)
    monkeypatch.setattr("moe_lora.engine.build.build_engine", lambda *_: core)
    monkeypatch.setattr(roles, "RESTART_S", 0.1)
    pid = os.fork()
    if not pid:
        roles._serve_engine(EngineConfig(model_dir="base"), JobPlace(), {}, None, None, 600.0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == roles.RESTART_CODE


def ends(scenario: Callable[[Pulse], None], limit_s: float, watched_s: float) -> int | None:
    """The exit code of a process that ends if it is stuck; None: it went on for watched_s."""

    async def watched() -> None:
        threading.Thread(target=scenario, args=(pulse,), daemon=True).start()
        with move_on_after(watched_s):
            await roles.end_stuck(pulse, limit_s)

    pid, pulse = os.fork(), Pulse()
    if not pid:
        asyncio.run(watched())
        os._exit(99)
    if scenario is stopped_for_a_while:
        time.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(pid, signal.SIGCONT)
    found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if found == 99 else found


def stuck(pulse: Pulse) -> None:
    pulse.work()


def stopped_for_a_while(pulse: Pulse) -> None:
    pulse.work()
    time.sleep(0.6)
    pulse.rest()


def many_steps(pulse: Pulse) -> None:
    while True:
        pulse.work()
        time.sleep(0.1)


def test_an_engine_that_is_stuck_ends_its_process_and_one_that_gets_on_does_not(monkeypatch):
    monkeypatch.setattr(roles, "LOOK_S", 0.05)
    assert ends(stuck, 1.0, PATIENCE_S) == 1
    assert ends(many_steps, 1.0, 3.0) is None
    assert ends(stopped_for_a_while, 1.5, 3.0) is None
