# SPDX-License-Identifier: Apache-2.0
"""Several engine processes behind one server, and what happens when they are killed."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

import httpx
import pytest

from demo.tasks import TASKS
from tests.dist.cluster_jobs import children
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

from .demo_server import DEMO, demo_server
from .instance_parts import (  # noqa: F401  (fixtures)
    ADAPTERS,
    BY_TURNS,
    MODELS,
    NUM_TOKENS,
    OPTIONS,
    TRIES,
    WITHIN,
    bodies,
    check_same,
    complete,
    gone,
    hold_of_module,
    instance_values,
    pair_of_module,
    stream,
    stream_all,
    summary,
    until,
    until_both_up,
)


def test_killed_instance_costs_no_request_and_comes_back(pair):
    until_both_up(pair)
    requests = bodies(8)
    for number, body in enumerate(requests[::2]):
        body |= {"temperature": 1.0, "seed": number}
    undisturbed = [summary(events) for events in stream_all(pair, requests)]
    assert {summed[3:] for summed in undisturbed} == {("length", NUM_TOKENS)}
    assert all(re.fullmatch(f"{WITHIN}[a-z]?", text) for text, *_ in undisturbed[1::3])
    for _ in range(TRIES):
        victim, survivor = pair.engine_pids()
        resent_before = instance_values(pair, "requests_resent_total")
        restarts = instance_values(pair, "restarts_total")
        disturbed = stream_all(pair, requests, partial(os.kill, victim, signal.SIGKILL), after=1)
        check_same(undisturbed, map(summary, disturbed), logprobs=True)
        until(lambda victim=victim: victim not in pair.engine_pids())
        until_both_up(pair)
        resent = [
            b - a for a, b in zip(resent_before, instance_values(pair, "requests_resent_total"), strict=True)
        ]
        if sum(resent):
            break
    assert 1 <= sum(resent) <= 4
    assert min(resent) == 0
    assert sum(instance_values(pair, "restarts_total")) == sum(restarts) + 1
    assert survivor in pair.engine_pids()
    assert instance_values(pair, "outstanding_tokens") == [0.0, 0.0]


@pytest.mark.slow
def test_ten_kills_of_every_instance_in_a_row_leave_full_service(tmp_path):
    with demo_server(tmp_path / "log", *OPTIONS, *BY_TURNS) as server:
        until_both_up(server)
        before = summary(stream_all(server, bodies(1))[0])
        killed: set[int] = set()
        for _ in range(10):
            until(lambda: len(server.engine_pids()) == 2 and not killed & set(server.engine_pids()))
            for pid in server.engine_pids():
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        until_both_up(server)
        assert [summary(events) for events in stream_all(server, bodies(1) * 4)] == [before] * 4


def test_without_any_instance_requests_get_503_until_one_is_back_with_all_adapters(pair, hold):
    until_both_up(pair)
    path = str(DEMO / "adapters" / "upper")
    load = {"lora_name": "later", "lora_path": path}
    assert httpx.post(f"{pair.url}/v1/load_lora_adapter", json=load, trust_env=False).status_code == 200

    def kill_all() -> None:
        """Also the spare process, which would stand in; none starts meanwhile."""
        hold.touch()
        for pid in children(pair.process.pid):
            if b"run_role" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    try:
        cut = stream_all(pair, bodies(4), kill_all, after=1)
        errors = [events[-1]["error"] for events in cut if "error" in events[-1]]
        assert errors, "all streams were over before the kill"
        for error in errors:
            assert error["code"] == 503
            assert "no LLM instance is running: each that ended is being started again" in error["message"]
        response = complete(pair, "later")
        assert response.status_code == 503
        assert "is being started again" in response.json()["error"]["message"]
        assert httpx.get(f"{pair.url}/health", trust_env=False).status_code == 503
    finally:
        hold.unlink(missing_ok=True)
    until_both_up(pair)
    answers = [complete(pair, "later").json()["choices"][0]["text"] for _ in range(4)]
    assert answers == ["ABC"] * 4  # by turns, so each instance gave two of them
    assert httpx.post(
        f"{pair.url}/v1/unload_lora_adapter", json={"lora_name": "later"}, trust_env=False
    ).is_success
    assert complete(pair, "later").status_code == 404


def test_both_instances_answer_exactly(pair):
    until_both_up(pair)
    names = [name for name in ADAPTERS if name in TASKS][:12]
    requests = [
        {**body, "model": name, "min_tokens": 0, "guided_regex": None}
        for name, body in zip(names, bodies(12), strict=False)
    ]
    exact = [
        summary(events)[0] == TASKS[name](body["prompt"].removesuffix("="))
        for name, body, events in zip(names, requests, stream_all(pair, requests), strict=True)
    ]
    assert sum(exact) >= 0.9 * len(exact)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_end_of_the_front_end_ends_all_instances_also_one_that_is_starting(tmp_path, number):
    with demo_server(tmp_path / "log", *OPTIONS) as server:
        first, second = server.engine_pids()
        os.kill(first, signal.SIGKILL)
        until(lambda: len(server.engine_pids()) == 2 and first not in server.engine_pids())
        pids = server.engine_pids()
        assert second in pids
        with (
            httpx.Client(base_url=server.url, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json={**bodies(1)[0], "stream": True}) as response,
        ):
            next(response.iter_lines())
            if number == signal.SIGKILL:
                assert server.stop(number) == -signal.SIGKILL
        if number == signal.SIGINT:
            assert server.stop(number) == 0
        until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.slow
def test_a_second_signal_ends_at_once_also_a_stopped_instance(tmp_path):
    with demo_server(
        tmp_path / "log", *OPTIONS, "--lora-server", "EP1-PP1", "--set", "front_end.drain_s=1000"
    ) as server:
        everyone = server.engine_pids() + server.lora_server_pids()
        assert len(everyone) == 3
        stop(everyone[0])
        stop(everyone[2])
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "Ending:" in server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0  # STOP_S is 20 for each kind
        assert all(gone(pid) for pid in everyone)


def test_pinned_adapter_is_pinned_on_the_instance_that_comes_back(pair):
    until_both_up(pair)
    name = MODELS[0]

    def pages_and_pin() -> tuple[int, bool]:
        adapters = httpx.get(f"{pair.url}/v1/adapters", trust_env=False).json()["data"]
        [card] = [card for card in adapters if card["id"] == name]
        return card["pages"], card["pinned"]

    def change(what: str) -> None:
        answer = httpx.post(f"{pair.url}/v1/adapters/{name}/{what}", trust_env=False)
        assert answer.status_code == 200, answer.text

    change("pin")
    until(lambda: pages_and_pin()[0] > 0)
    pages = max(pages_and_pin()[0] for _ in range(5))
    os.kill(pair.engine_pids()[0], signal.SIGKILL)
    until(lambda: instance_values(pair, "up") != [1.0, 1.0])
    until_both_up(pair)
    until(lambda: pages_and_pin() == (pages, True))
    change("unpin")
    assert pages_and_pin()[1] is False
