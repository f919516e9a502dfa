# SPDX-License-Identifier: Apache-2.0
"""Instances, ranks of a LoRA Server and the front end, each killed in the middle of a replay."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from demo.tasks import MAX_CHARS, MIN_CHARS, prompt_for, sample_text
from tests.stopped_processes import stop

from .demo_server import DEMO, DemoServer, demo_server, few_adapters
from .instance_parts import command, gone, until

ADAPTERS = list(json.loads((DEMO / "adapters" / "index.json").read_text()))[:10]
# Fewer places than adapters, so that leases are waited for and adapters come and go.
OPTIONS = (
    *few_adapters(*ADAPTERS),
    *("--eager", "--dtype", "float32", "--instances", "2"),
    *("--lora-server", "EP2-PP1", "--lora-capacity", "6"),
)
NUM_REQUESTS, IN_FLIGHT = 32, 16
Answer = tuple[int, str, tuple[int, ...]]


def bodies() -> list[dict]:
    rng = random.Random(3)
    return [
        {
            "model": rng.choice([*ADAPTERS, "demo"]),
            "prompt": prompt_for(sample_text(rng, rng.randint(MIN_CHARS, MAX_CHARS))),
            "max_tokens": 8,
            "min_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        }
        for _ in range(NUM_REQUESTS)
    ]


def replay(
    server: DemoServer, disturb: Callable[[], None] | None = None, num_requests: int = NUM_REQUESTS
) -> list[Answer | None]:
    """Status, text and tokens of each request, None where the connection broke.

    `disturb` is called when a fifth of NUM_REQUESTS is done.
    """
    done = 0

    async def ask(http: httpx.AsyncClient, gate: asyncio.Semaphore, body: dict) -> Answer | None:
        nonlocal done
        async with gate:
            try:
                response = await http.post("/v1/completions", json=body)
            except httpx.TransportError:
                return None
        done += 1
        if done == NUM_REQUESTS // 5 and disturb is not None:
            disturb()
        if response.status_code != 200:
            return response.status_code, response.json()["error"]["message"], ()
        choice = response.json()["choices"][0]
        return 200, choice["text"], tuple(choice["token_ids"])

    async def run() -> list[Answer | None]:
        gate = asyncio.Semaphore(IN_FLIGHT)
        limits = httpx.Limits(max_connections=IN_FLIGHT)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, limits=limits) as http:
            return await asyncio.gather(*(ask(http, gate, body) for body in bodies()[:num_requests]))

    answers = asyncio.run(run())
    assert disturb is None or done >= NUM_REQUESTS // 5
    return answers


class Cluster:
    """The server under test.  ranks: process of each rank of its LoRA Server; undisturbed: its answers."""

    def __init__(self, server: DemoServer) -> None:
        self.server = server
        self.ranks = [self._new(0), self._new(1)]
        self.undisturbed = replay(server)
        assert {answer[0] for answer in self.undisturbed if answer} == {200}

    def counter(self, name: str) -> float:
        text = httpx.get(f"{self.server.url}/metrics", trust_env=False).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        [value] = [s.value for s in samples if s.name == f"moe_lora:{name}_total"]
        return value

    def until_rank_is_back(self, number: int) -> None:
        """The killed rank's process was replaced, and no other one's."""
        others = [pid for pid in self.ranks if pid != self.ranks[number]]
        until(lambda: self._new(number) != self.ranks[number])
        assert set(others) <= set(self.server.lora_server_pids())
        self.ranks[number] = self._new(number)

    def _new(self, number: int) -> int:
        """The process of a rank that was started last."""
        return int(re.findall(rf"lora-server-{number} started \(process (\d+)\)", self.log())[-1])

    def log(self) -> str:
        return self.server.log.read_text()

    def until_all_is_remote(self) -> None:
        """Until deltas of requests to every adapter all come from the LoRA Server."""

        def all_remote() -> bool:
            requests, rows = self.counter("lora_server_requests"), self.counter("lora_server_fallback_rows")
            answers = replay(self.server)
            assert answers == self.undisturbed
            assert self.counter("lora_server_requests") > requests
            return self.counter("lora_server_fallback_rows") == rows

        until(all_remote)


@pytest.fixture(scope="module")
def directories() -> Iterator[Callable[[], list[Path]]]:
    """What the server leaves in a directory for temporary files of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield lambda: list(Path(folder).glob("moe_lora-*"))


@pytest.fixture(scope="module")
def cluster(directories, tmp_path_factory) -> Iterator[Cluster]:
    with demo_server(tmp_path_factory.mktemp("lora_server") / "log", *OPTIONS) as server:
        yield Cluster(server)


@pytest.mark.parametrize(
    "number", [pytest.param(1, id="other-rank", marks=pytest.mark.slow), pytest.param(0, id="leader")]
)
def test_killed_rank_costs_no_request_and_rejoins(cluster, number):
    instances = cluster.server.engine_pids()
    rows = cluster.counter("lora_server_fallback_rows")
    answers = replay(cluster.server, lambda: os.kill(cluster.ranks[number], signal.SIGKILL))
    assert answers == cluster.undisturbed
    assert cluster.counter("lora_server_fallback_rows") > rows, "the instances helped themselves meanwhile"
    cluster.until_rank_is_back(number)
    cluster.until_all_is_remote()
    assert cluster.server.engine_pids() == instances


@pytest.mark.slow
def test_stalled_rank_costs_no_request_and_is_used_again(cluster):
    before = cluster.server.engine_pids(), cluster.ranks
    rows = cluster.counter("lora_server_fallback_rows")
    try:
        answers = replay(cluster.server, lambda: stop(cluster.ranks[1]))
        assert answers == cluster.undisturbed
        assert cluster.counter("lora_server_fallback_rows") > rows
    finally:
        os.kill(cluster.ranks[1], signal.SIGCONT)
    cluster.until_all_is_remote()
    assert (cluster.server.engine_pids(), cluster.ranks) == before


@pytest.mark.slow
def test_killed_instance_costs_no_request_and_gets_leases_again(cluster):
    first, second = cluster.server.engine_pids()
    answers = replay(cluster.server, lambda: os.kill(first, signal.SIGKILL))
    assert answers == cluster.undisturbed
    assert f"process {first}" in cluster.log()
    until(lambda: len(re.findall(r"instance instance-\d dialled in", cluster.log())) >= 3)
    cluster.until_all_is_remote()
    assert second in cluster.server.engine_pids()
    assert cluster.server.lora_server_pids() == sorted(cluster.ranks)


@pytest.mark.slow
def test_ranks_are_started_again_one_by_one_under_load_without_a_failed_request(cluster):
    instances, said = cluster.server.engine_pids(), []
    restarting = threading.Thread(
        target=lambda: said.append(command(cluster.server, "restart", "--lora-server"))
    )
    assert replay(cluster.server, restarting.start) == cluster.undisturbed
    while restarting.is_alive():
        assert replay(cluster.server) == cluster.undisturbed
    assert said == ["the LoRA Server's 2 ranks were started again\n"]
    before, cluster.ranks = cluster.ranks, [cluster._new(0), cluster._new(1)]
    assert not set(before) & set(cluster.ranks)
    cluster.until_all_is_remote()
    assert cluster.server.engine_pids() == instances


def test_killed_front_end_takes_everything_with_it(cluster, directories):
    pids = cluster.server.engine_pids() + cluster.server.lora_server_pids()
    assert len(pids) == 4
    assert len(directories()) == 2  # of the LoRA Server, and of the socket of instances
    answers = replay(cluster.server, cluster.server.process.kill)
    assert None in answers
    whole = [
        answer is None or answer == same for answer, same in zip(answers, cluster.undisturbed, strict=True)
    ]
    assert all(whole)
    until(lambda: all(gone(pid) for pid in pids))
    until(lambda: not directories())


@pytest.mark.slow
def test_stopped_server_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with demo_server(tmp_path / "log", *OPTIONS) as server:
        pids = server.engine_pids() + server.lora_server_pids()
        assert list(tmp_path.glob("moe_lora-*"))
        assert server.stop(signal.SIGINT) == 0
        assert all(gone(pid) for pid in pids)
    assert not list(tmp_path.glob("moe_lora-*"))
