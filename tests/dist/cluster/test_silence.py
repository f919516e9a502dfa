# SPDX-License-Identifier: Apache-2.0
"""Instances whose processes are stopped: out of routing, then taken for dead, and back when they wake."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.harness.processes import engine_processes
from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.core.request import FleetStats, GenerateRequest, SamplingParams
from moe_lora.engine.client.client import EngineClient
from moe_lora.engine.client.messages import Heartbeat
from tests.dist.cluster_jobs import children
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

from .listener_parts import HELD_TOKENS, FrontEnd, tokens_out, until

ROOT = Path(__file__).parents[3]
START = [("start", "places/start")]


class Process:
    """A scripted instance in a process of its own."""

    def __init__(self, name: str, number: int, socket: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.cluster.scripted_instance", name, str(number), socket],
            stdin=subprocess.PIPE,
            cwd=ROOT,
        )

    def pause(self) -> None:
        stop(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()  # also one that is stopped
        self.process.communicate()


@pytest.fixture
def made():
    things: list = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def pair(made) -> Callable[[Heartbeat], tuple[FrontEnd, Process, Process]]:
    def make(heartbeat: Heartbeat) -> tuple[FrontEnd, Process, Process]:
        made.append(front_end := FrontEnd(adapters=START, heartbeat=heartbeat))
        made.extend(Process(name, number, front_end.socket) for name, number in (("one", 1), ("two", 2)))
        until(lambda: sorted(front_end.names()) == ["one", "two"])
        assert {front_end.ask(str(n)) for n in range(2)} == {(1,), (2,)}
        return front_end, made[1], made[2]

    return make


def ask_aside(front_end: FrontEnd, request_id: str, answers: list) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(front_end.ask(request_id, HELD_TOKENS)))
    thread.start()
    return thread


def test_request_of_a_stopped_instance_goes_on_elsewhere_long_before_it_counts_as_dead(pair):
    front_end, first, _ = pair(Heartbeat(timeout_s=5.0, dead_s=120.0))
    answers: list = []
    asking = [ask_aside(front_end, request_id, answers) for request_id in "ab"]
    until(lambda: tokens_out(front_end, "one") == tokens_out(front_end, "two") == HELD_TOKENS - 1)
    first.pause()
    # What is left of it is short enough not to be held.
    until(lambda: answers)
    assert answers == [(1, 2)]
    until(lambda: front_end.names() == ["two"])
    assert {front_end.ask(f"new {n}") for n in range(3)} == {(2,)}
    front_end.run(front_end.fleet.call("load_adapter", "later", "places/later", replace=True))
    first.go_on()
    until(lambda: sorted(front_end.names()) == ["one", "two"])
    for request_id in "ab":
        front_end.run(front_end.fleet.abort(request_id))
    for thread in asking:
        thread.join(PATIENCE_S)
    assert sorted(answers) == [(1, 2), (2,)]
    # It was never ended, and is the same as before.
    assert sum(one.num_resent for one in front_end.instance_registry.instances) >= 1
    assert [one.num_restarts for one in front_end.instance_registry.instances] == [0, 0]
    assert {front_end.ask(str(n)) for n in range(4)} == {(1,), (2,)}


def test_request_of_one_that_stays_stopped_alone_waits_until_another_is_there(made):
    made.append(front_end := FrontEnd(adapters=START, heartbeat=Heartbeat(timeout_s=5.0, dead_s=120.0)))
    made.append(first := Process("one", 1, front_end.socket))
    until(lambda: front_end.names() == ["one"])
    answers: list = []
    asking = ask_aside(front_end, "a", answers)
    until(lambda: tokens_out(front_end, "one") == HELD_TOKENS - 1)
    first.pause()
    until(lambda: front_end.names() == [])
    assert answers == []
    assert asking.is_alive()
    made.append(Process("two", 2, front_end.socket))
    asking.join(PATIENCE_S)
    assert answers == [(1, 2)]


CONFIG = EngineConfig(
    model_dir=str(ROOT / "demo" / "model"), dtype="float32", eager=True, num_threads=1, num_instances=2
)
FRONT_END = FrontEndConfig(routing="round_robin", heartbeat_timeout_s=5.0, heartbeat_dead_s=10.0)


@pytest.fixture
def engines() -> Iterator[tuple[EngineClient, list[int]]]:
    """Two engines behind a client, and the ids of their processes."""
    before = set(children(os.getpid()))
    with engine_processes(CONFIG, FRONT_END) as client:
        found = {*children(os.getpid())} - before
        yield client, sorted(pid for pid in found if b"run_role" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.slow
def test_stopped_engine_process_is_killed_and_started_again(engines):
    client, pids = engines

    async def ask(request_id: str) -> list[int]:
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=(1, 40, 41, 42),
            sampling=SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True),
        )
        return [token async for output in client.generate(request) for token in output.token_ids]

    async def ups() -> list[bool]:
        stats = await client.stats()
        assert isinstance(stats, FleetStats)
        return [one.live for one in stats.instances]

    async def run() -> None:
        undisturbed = await ask("first")
        victim = pids[0]
        requests = [asyncio.create_task(ask(str(n))) for n in range(4)]
        await asyncio.sleep(0)
        stop(victim)
        assert await asyncio.gather(*requests) == [undisturbed] * 4
        deadline = time.monotonic() + PATIENCE_S
        while await ups() != [True, True] or victim in set(children(os.getpid())):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        stats = await client.stats()
        assert isinstance(stats, FleetStats)
        assert sum(one.num_restarts for one in stats.instances) >= 1  # a slow machine may cost the other one
        assert await asyncio.gather(ask("x"), ask("y")) == [undisturbed] * 2

    asyncio.run(run())
