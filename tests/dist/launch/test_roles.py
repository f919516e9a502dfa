# SPDX-License-Identifier: Apache-2.0
"""Roles that can't start say why, in one line that names the setting."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_lora.config.cluster import read_cluster
from moe_lora.core import processes
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch import roles, server_role
from moe_lora.dist.launch.roles import JobPlace, serve_instance
from moe_lora.dist.launch.server_role import serve_lora_server
from moe_lora.dist.net.keys import make_keys
from moe_lora.engine.client.messages import Pulse
from tests.forked_programs import start_program
from tests.virtual_clock import VirtualClock

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
    done = processes.subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT)
    _, said = done.communicate()
    assert done.returncode == code
    assert reason in said.decode()
    assert "Traceback" not in said.decode()


HANGS = """
import sys, time
from types import SimpleNamespace
from unittest import mock

from moe_lora.config import EngineConfig
from moe_lora.dist.launch import roles
from moe_lora.engine.client.messages import Pulse


class Hangs:
    '''Links whose process was told to end, and an engine loop that does not end.'''

    restarts, stop, emit, pulse = RESTARTS, None, None, Pulse()

    def __init__(self, *_):
        self.start = lambda: None

    async def run(self, *_):
        pass

    def join(self):
        time.sleep(3600)


core = SimpleNamespace(info=SimpleNamespace(max_model_len=64), attach_notes=lambda notes: None)
with (
    mock.patch("moe_lora.dist.cluster.instance_links.FrontEndLinks", Hangs),
    mock.patch("moe_lora.engine.loop.EngineLoop", Hangs),
    mock.patch("moe_lora.engine.build.build_engine", lambda *_: core),
    mock.patch.multiple(roles, RESTART_S=0.1, LOOK_S=0.01),
):
    Hangs.pulse.work()
    roles._serve_engine(EngineConfig(model_dir="base"), roles.JobPlace(), {}, None, None, STUCK_S)
"""
RESTARTED = HANGS.replace("RESTARTS", "True").replace("STUCK_S", "3600.0")
STOPPED = HANGS.replace("RESTARTS", "False").replace("STUCK_S", "0.1")
STUCK = """
import asyncio
from moe_lora.dist.launch import roles
from moe_lora.engine.client.messages import Pulse

roles.LOOK_S, pulse = 0.01, Pulse()
pulse.work()
asyncio.run(roles.end_stuck(pulse, 0.1))
"""


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (RESTARTED, roles.RESTART_CODE, "it was told to end, to be started again, and hangs"),
        (STOPPED, 1, "the engine does not get on"),
        (STUCK, 1, "the engine does not get on"),
    ],
    ids=["restarted", "stopped", "stuck"],
)
def test_a_process_whose_engine_hangs_ends(program, code, said):
    ended = start_program(program, stderr=subprocess.PIPE)
    _, words = ended.communicate()
    assert ended.returncode == code, words
    assert said in words.decode()


class Ended(Exception):
    """Stands for the end of the process."""


class Looks:
    """A clock that only looks advance, each as the scenario says; the engine ends or the scenario does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Pulse, VirtualClock], Iterator]):
        self.clock = VirtualClock()
        self.pulse = Pulse(self.clock)
        self._scenario = scenario(self.pulse, self.clock)
        monkeypatch.setattr(roles, "WallClock", lambda: self.clock)
        monkeypatch.setattr(roles, "asyncio", SimpleNamespace(sleep=self._sleep))
        monkeypatch.setattr(roles, "faulthandler", SimpleNamespace(dump_traceback=lambda: None))
        monkeypatch.setattr(roles, "os", SimpleNamespace(_exit=self._exit))

    async def _sleep(self, time_s: float) -> None:
        self.clock.advance(time_s)
        try:
            next(self._scenario)
        except StopIteration:
            raise asyncio.CancelledError from None

    def _exit(self, code: int) -> None:
        raise Ended

    def end(self, limit_s: float) -> float | None:
        """When the process ends; None: it outlives the scenario."""
        try:
            asyncio.run(roles.end_stuck(self.pulse, limit_s))
        except Ended:
            return self.clock.now_s()
        except asyncio.CancelledError:
            pass
        return None


def stuck(pulse: Pulse, clock: VirtualClock) -> Iterator[None]:
    pulse.work()
    yield from [None] * 1000


def many_steps(pulse: Pulse, clock: VirtualClock) -> Iterator[None]:
    for _ in range(1000):
        pulse.work()
        yield


def stopped_for_a_while(pulse: Pulse, clock: VirtualClock) -> Iterator[None]:
    """The process stands still within one look, for longer than the limit."""
    pulse.work()
    yield
    clock.advance(10 * LIMIT_S)
    yield
    pulse.rest()
    yield from [None] * 1000


LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("scenario", "ends"), [(stuck, True), (many_steps, False), (stopped_for_a_while, False)]
)
def test_an_engine_that_is_stuck_ends_its_process_and_one_that_gets_on_does_not(monkeypatch, scenario, ends):
    ended_s = Looks(monkeypatch, scenario).end(LIMIT_S)
    assert (ended_s is not None) == ends
    assert ended_s is None or LIMIT_S <= ended_s <= 1.2 * LIMIT_S
