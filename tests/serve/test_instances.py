# SPDX-License-Identifier: Apache-2.0
"""Several engine processes behind one server, and what happens when they are killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from demo.tasks import TASKS, prompt_for
from moe_lora.cli.main import main
from tests.dist.cluster_jobs import children
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

from .demo_server import DEMO, DemoServer, demo_server

ADAPTERS = json.loads((DEMO / "adapters" / "index.json").read_text())
# In bfloat16 a prompt's rows are rounded differently from those of single steps, so that an answer that was
# cut may go another way where two tokens are nearly tied.
OPTIONS = ("--lora-dir", str(DEMO / "adapters"), "--eager", "--instances", "2", "--dtype", "float32")
BY_TURNS = ("--routing", "round_robin")
MODELS = [*list(ADAPTERS)[:7], "demo"]


HELD = """
import os, time

while os.path.exists(os.environ["HOLD_STARTS"]):
    time.sleep(0.01)
"""
TRIES = 10
"""How often a test sends its streams while they are over before what is to happen to them."""


@pytest.fixture(scope="module")
def hold(tmp_path_factory) -> Iterator[Path]:
    """While this file is there no process of a server starts its work."""
    folder = tmp_path_factory.mktemp("hold")
    (folder / "sitecustomize.py").write_text(HELD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("HOLD_STARTS", str(folder / "hold"))
        yield folder / "hold"


@pytest.fixture(scope="module")
def pair(tmp_path_factory, hold) -> Iterator[DemoServer]:
    with demo_server(tmp_path_factory.mktemp("pair") / "log", *OPTIONS, *BY_TURNS) as server:
        yield server


def until(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def instance_values(server: DemoServer, name: str) -> list[float]:
    """A metric of each instance, by index; [] while no engine runs."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    found = {
        int(s.labels["instance"].removeprefix("instance-")): s.value
        for s in samples
        if s.name == f"moe_lora:instance_{name}"
    }
    return [found[index] for index in sorted(found)]


def until_both_up(server: DemoServer) -> None:
    until(lambda: instance_values(server, "up") == [1.0, 1.0])


async def stream(http: httpx.AsyncClient, body: dict[str, Any], on_token: Callable[[], None]) -> list[dict]:
    """The events of a streamed completion."""
    events = []
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                on_token()
    return events


def stream_all(
    server: DemoServer, bodies: list[dict], kill: Callable[[], None] | None = None, after: int = 0
) -> list[list[dict]]:
    """The events of each; `kill` is called once every stream has `after` of them."""
    counts = [0] * len(bodies)
    state = {"kill": kill}

    def counted(place: int) -> Callable[[], None]:
        def count() -> None:
            counts[place] += 1
            if state["kill"] is not None and min(counts) >= after:
                state.pop("kill")()
                state["kill"] = None

        return count

    async def run() -> list[list[dict]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, limits=limits) as http:
            return await asyncio.gather(*(stream(http, b, counted(i)) for i, b in enumerate(bodies)))

    events = asyncio.run(run())
    assert state["kill"] is None, "the streams were over before the kill"
    return events


def summary(events: list[dict]) -> tuple[str, list[int], list[float], str | None, int]:
    choices = [event["choices"][0] for event in events if event.get("choices")]
    assert not [event for event in events if "error" in event]
    return (
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice["token_ids"]],
        [value for choice in choices for value in choice["logprobs"]["token_logprobs"]],
        choices[-1]["finish_reason"],
        events[-1]["usage"]["completion_tokens"],
    )


WITHIN = "([a-z][0-9])+"


def check_same(found: Iterable[tuple], right: Iterable[tuple], *, logprobs: bool = False) -> None:
    """Summaries have equal texts, tokens, reasons and counts; logprobs: up to rounding."""
    for one, other in zip(found, right, strict=True):
        assert one[:2] == other[:2]
        assert not logprobs or one[2] == pytest.approx(other[2], abs=1e-3)
        assert one[3:] == other[3:]


def bodies(num: int) -> list[dict]:
    """Streams over several adapters, long enough to be killed in the middle; every third has a grammar."""
    return [
        {
            "model": MODELS[i % len(MODELS)],
            "prompt": prompt_for("abcdefgh"[i % 7 :] + "xyz"),
            "max_tokens": 200,
            "min_tokens": 200,
            "temperature": 0,
            "logprobs": 0,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "guided_regex": WITHIN if i % 3 == 1 else None,
        }
        for i in range(num)
    ]


def test_killed_instance_costs_no_request_and_comes_back(pair):
    until_both_up(pair)
    requests = bodies(24)
    for number, body in enumerate(requests[::2]):
        body |= {"temperature": 1.0, "seed": number}
    undisturbed = [summary(events) for events in stream_all(pair, requests)]
    assert {summed[3:] for summed in undisturbed} == {("length", 200)}
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
    assert 1 <= sum(resent) <= 12
    assert min(resent) == 0
    assert sum(instance_values(pair, "restarts_total")) == sum(restarts) + 1
    assert survivor in pair.engine_pids()
    assert instance_values(pair, "outstanding_tokens") == [0.0, 0.0]


def moves(server: DemoServer) -> float:
    """Requests that were moved so far."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(sample.value for sample in samples if sample.name == "moe_lora:migrations_total")


def migrate(server: DemoServer, source: int, num_requests: int = 20) -> httpx.Response:
    names = [f"instance-{number}" for number in (source, 1 - source)]
    body = {"source": names[0], "target": names[1], "num_requests": num_requests}
    return httpx.post(f"{server.url}/v1/migrate", json=body, trust_env=False)


def test_requests_are_moved_over_http_while_they_stream(pair):
    until_both_up(pair)
    requests = bodies(8)
    for number, body in enumerate(requests[::2]):
        body |= {"temperature": 1.0, "seed": number}
    undisturbed = [summary(events) for events in stream_all(pair, requests)]
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


def command(server: DemoServer, *words: str) -> str:
    """What a command of an administrator says, which must succeed."""
    done = CliRunner().invoke(main, [*words, "--url", server.url])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_drained_instance_has_no_request_left_while_its_streams_go_on(pair):
    until_both_up(pair)
    requests = bodies(8)
    undisturbed = [summary(events) for events in stream_all(pair, requests)]
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


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_instance_killed_while_requests_are_moved_costs_no_token(pair, victim):
    """Whatever each of the moves had come to: it is killed as moves from 0 to 1 begin."""
    until_both_up(pair)
    requests = bodies(16)
    for number, body in enumerate(requests[::2]):
        body |= {"temperature": 1.0, "seed": number}
    undisturbed = [summary(events) for events in stream_all(pair, requests)]
    pid = pair.engine_pids()[victim]
    answers: list[httpx.Response] = []

    def kill() -> None:
        moving = threading.Thread(target=lambda: answers.append(migrate(pair, 0)))
        moving.start()
        time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)

    disturbed = [summary(events) for events in stream_all(pair, requests, kill, after=3)]
    check_same(disturbed, undisturbed)
    until(lambda: answers)
    assert answers[0].status_code == 200
    until_both_up(pair)
    until(lambda: instance_values(pair, "outstanding_tokens") == [0.0, 0.0])


def complete(server: DemoServer, model: str, text: str = "abc") -> httpx.Response:
    body = {"model": model, "prompt": prompt_for(text), "max_tokens": 40, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False)


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
