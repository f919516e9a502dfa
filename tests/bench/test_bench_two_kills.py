# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest

from bench.cluster.bench_two_kills import Load, newest
from tests.patience import PATIENCE_S


def test_shares_gaps_and_waits_are_those_of_the_answers():
    load = Load("http://unused", 1.0, 4.0)
    load.answers = [(0.0, 0.5, 200), (1.0, 1.1, 503), (2.0, 6.0, 200), (3.0, 33.0, 0)]
    assert load.result() == {
        "statuses": {"0": 1, "200": 2, "503": 1},
        "share_503": 0.25,
        "longest_gap_s": 27.0,
        "p99_s": 0.5,
        "latest_arrival_s": 0.0,
    }


def test_a_server_without_any_good_answer_is_one_gap():
    load = Load("http://unused", 1.0, 2.0)
    load.answers = [(0.0, 0.1, 503), (1.0, 1.5, 503)]
    found = load.result()
    assert (found["share_503"], found["longest_gap_s"], found["p99_s"]) == (1.0, 1.5, None)


def test_requests_arrive_at_the_rate_and_the_process_is_killed(monkeypatch):
    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        return httpx.Response(200)

    client, seen = httpx.AsyncClient, []

    def scripted(**settings):
        seen.append(settings)
        return client(transport=httpx.MockTransport(answer), base_url=settings["base_url"])

    monkeypatch.setattr(httpx, "AsyncClient", scripted)
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    load = Load("http://served", 20.0, 0.5)
    asyncio.run(load.run([(0.1, victim.pid)]))
    assert load.result()["latest_arrival_s"] >= 0
    assert victim.wait(PATIENCE_S) == -9
    assert sorted(arrival_s for arrival_s, _, _ in load.answers) == pytest.approx([n / 20 for n in range(10)])
    assert all(end_s >= arrival_s and status == 200 for arrival_s, end_s, status in load.answers)


def test_the_newest_process_of_an_instance_is_the_last_in_the_log():
    log = "instance-0 started (process 7)\ninstance-1 started (process 8)\n"
    assert newest(log + "instance-0 started (process 12)\n", "instance-0") == 12
