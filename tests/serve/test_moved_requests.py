# SPDX-License-Identifier: Apache-2.0
"""Requests that are moved between instances while they stream: by hand, by a drain, at a kill."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import PATIENCE_S

from .demo_server import DemoServer
from .instance_parts import (  # noqa: F401  (fixtures)
    MODELS,
    TRIES,
    bodies,
    check_same,
    command,
    complete,
    hold_of_module,
    instance_values,
    pair_of_module,
    stream_all,
    summary,
    until,
    until_both_up,
)


def moves(server: DemoServer) -> float:
    """Requests that were moved so far."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(sample.value for sample in samples if sample.name == "moe_lora:migrations_total")


def migrate(server: DemoServer, source: int, num_requests: int = 20) -> httpx.Response:
    names = [f"instance-{number}" for number in (source, 1 - source)]
    body = {"source": names[0], "target": names[1], "num_requests": num_requests}
    return httpx.post(f"{server.url}/v1/migrate", json=body, trust_env=False)


def requests_of(num: int) -> list[dict]:
    """Every other request is sampled with a seed."""
    requests = bodies(num)
    for number, body in enumerate(requests[::2]):
        body |= {"temperature": 1.0, "seed": number}
    return requests


@pytest.fixture(scope="module")
def undisturbed(pair) -> list[tuple]:
    """Answers of six requests that stay where they begin."""
    until_both_up(pair)
    return [summary(events) for events in stream_all(pair, requests_of(6))]


def test_requests_are_moved_over_http_while_they_stream(pair, undisturbed):
    until_both_up(pair)
    requests = requests_of(6)
    before, answers = moves(pair), []
    for _ in range(TRIES):
        there_and_back = threading.Thread(
            target=lambda: answers.extend(migrate(pair, source) for source in (0, 1, 0, 1))
        )
        moved = [summary(events) for events in stream_all(pair, requests, there_and_back.start, after=5)]
        there_and_back.join()
        check_same(moved, undisturbed, logprobs=True)
        if moves(pair) - before >= 4:
            break
    assert {answer.status_code for answer in answers} == {200}
    assert moves(pair) - before >= 4
    assert instance_values(pair, "outstanding_tokens") == [0.0, 0.0]
    for target in ("nobody", "instance-0"):
        refused = httpx.post(
            f"{pair.url}/v1/migrate", json={"source": "instance-0", "target": target}, trust_env=False
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "target")


def test_a_drained_instance_has_no_request_left_while_its_streams_go_on(pair, undisturbed):
    until_both_up(pair)
    requests = requests_of(6)
    before = moves(pair)
    try:
        for _ in range(TRIES):
            command(pair, "undrain", "instance-0")
            said: list[str] = []
            draining = threading.Thread(
                target=lambda said=said: said.append(command(pair, "drain", "instance-0"))
            )
            moved = [summary(events) for events in stream_all(pair, requests, draining.start, after=5)]
            draining.join()
            assert said == ["instance-0 is drained and has no requests\n"]
            check_same(moved, undisturbed)
            if moves(pair) > before:
                break
        assert moves(pair) > before
        assert instance_values(pair, "drained") == [1.0, 0.0]
        listed = httpx.get(f"{pair.url}/v1/instances", trust_env=False).json()
        assert [one["devices"] for one in listed["data"]] == [["cpu"], ["cpu"]]
        # A controller that has just begun waits for what dials in.
        last = httpx.post(f"{pair.url}/v1/instances/instance-1/drain", trust_env=False, timeout=PATIENCE_S)
        assert (last.status_code, "no other takes" in last.text) == (400, True)
        unknown = httpx.post(f"{pair.url}/v1/instances/nobody/drain", trust_env=False, timeout=PATIENCE_S)
        assert (unknown.status_code, "instance-1" in unknown.text) == (404, True)
        unknown = httpx.post(f"{pair.url}/v1/instances/nobody/undrain", trust_env=False, timeout=PATIENCE_S)
        assert (unknown.status_code, "instance-1" in unknown.text) == (400, True)
    finally:
        command(pair, "undrain", "instance-0")
    assert instance_values(pair, "drained") == [0.0, 0.0]


@pytest.mark.slow
def test_instances_are_started_again_one_by_one_under_load_without_a_failed_request(pair):
    until_both_up(pair)
    right, restarts = complete(pair, MODELS[0]).json()["choices"][0]["text"], []
    pids, over = pair.engine_pids(), threading.Event()

    def client() -> list[tuple[int, str]]:
        found = []
        while not over.is_set():
            answer = complete(pair, MODELS[0])
            found.append((answer.status_code, answer.text if answer.is_error else ""))
            assert answer.is_error or answer.json()["choices"][0]["text"] == right
        return found

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client) for _ in range(3)]
        try:
            restarts = instance_values(pair, "restarts_total")
            said = command(pair, "restart")
        finally:
            over.set()
    assert said.count("was started again and takes part") == 2
    answers = [answer for each in clients for answer in each.result()]
    assert set(answers) == {(200, "")}
    assert not set(pids) & set(pair.engine_pids())
    assert instance_values(pair, "restarts_total") == [number + 1 for number in restarts]
    assert instance_values(pair, "drained") == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_instance_killed_while_requests_are_moved_costs_no_token(pair, victim):
    """Whatever each of the moves had come to: it is killed as moves from 0 to 1 begin."""
    until_both_up(pair)
    requests = requests_of(16)
    undisturbed = [summary(events) for events in stream_all(pair, requests)]
    answers: list[httpx.Response] = []
    for attempt in range(TRIES):
        pid = pair.engine_pids()[victim]

        def kill(pid: int = pid, ahead_s: float = 0.02 * 2**attempt) -> None:
            moving = threading.Thread(target=lambda: answers.append(migrate(pair, 0)))
            moving.start()
            time.sleep(ahead_s)
            os.kill(pid, signal.SIGKILL)

        disturbed = [summary(events) for events in stream_all(pair, requests, kill, after=3)]
        check_same(disturbed, undisturbed)
        until(lambda attempt=attempt: len(answers) > attempt)
        until_both_up(pair)
        until(lambda: instance_values(pair, "outstanding_tokens") == [0.0, 0.0])
        if answers[-1].status_code == 200:
            return
        # The server read the request after the kill.
        assert (answers[-1].status_code, "none of the instances" in answers[-1].text) == (400, True)
    pytest.fail("no move had begun before a kill")
