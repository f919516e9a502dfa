# SPDX-License-Identifier: Apache-2.0
"""/sleep and /wake_up over real servers: instances give memory back, and have the same tokens after it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_lora.serve.server import create_app
from tests.grids import with_quick

from .conftest import as_served, frontend_of
from .demo_server import DemoServer, demo_server
from .live_server import ServerThread, wait_until
from .test_controls import NUM, OPTIONS, SEVERAL, Http, several

RANKS = ("--tensor-parallel-size", "2")


NAMELESS = re.compile(
    r"^\S+-\S+ \S+ \S+ \S+ 0 *\nSize: +(\d+) kB\n(?:\w+: .*\n)*?Rss: +(\d+) kB$", re.MULTILINE
)


def arena_kb(server: DemoServer) -> list[int]:
    """Resident memory of each instance's arena, its largest nameless mapping; no other part counts."""
    texts = [Path(f"/proc/{pid}/smaps").read_text() for pid in server.engine_pids()]
    return [max((int(size), int(resident)) for size, resident in NAMELESS.findall(one))[1] for one in texts]


KINDS = {"alone": (), "several": SEVERAL, "ranks": RANKS}


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Callable[[str], DemoServer]]:
    """A server of each kind, from its first test on."""
    with ExitStack() as stack:

        @cache
        def started(kind: str) -> DemoServer:
            log = tmp_path_factory.mktemp("sleep") / "log"
            server = stack.enter_context(demo_server(log, *OPTIONS, *KINDS[kind]))
            if kind == "several":
                server.wait_for_instances()
            return server

        yield started


@pytest.fixture
def server(request, servers) -> DemoServer:
    return servers(request.param)


def answers(http: Http) -> list[str]:
    return [http.complete(model, 6, ignore_eos=True)["text"] for model in ("upper", "demo") * 2]


of_several = pytest.mark.parametrize("server", with_quick(KINDS, {"several"}), indirect=True)
"""One kind by default: `tests/engine/test_sleep.py` has one process and ranks."""
LEVELS = ("", "?level=1&mode=wait", "?level=2&mode=abort")
TAGS = (["kv_cache"], ["kv_cache", "weights"], None)


@of_several
@pytest.mark.parametrize("level", LEVELS)
def test_all_instances_sleep_refuse_and_wake_up_with_the_same_tokens(server, level):
    http = Http(server.url)
    before, awake_kb = answers(http), arena_kb(server)
    http.ok("POST", f"/sleep{level}")
    assert http.ok("GET", "/is_sleeping") == {"is_sleeping": True}
    http.ok("GET", "/health_generate")
    assert all(kb < was / 8 for kb, was in zip(arena_kb(server), awake_kb, strict=True))
    for stream in (False, True, False, True):  # each connection may reach another front end and instance
        refused = http("POST", "/v1/completions", json={"prompt": "a=", "model": "upper", "stream": stream})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "/wake_up" in refused.json()["error"]["message"]
    assert http("GET", "/health").status_code == 200
    http.ok("POST", "/wake_up?tags=weights")
    assert http.ok("GET", "/is_sleeping") == {"is_sleeping": True}
    http.ok("POST", "/wake_up?tags=kv_cache&tags=scheduling")
    assert http.ok("GET", "/is_sleeping") == {"is_sleeping": False}
    assert answers(http) == before


@of_several
@pytest.mark.parametrize("tags", with_quick(TAGS, TAGS[:2]))
def test_memory_is_released_and_resumed_by_the_names_of_sglang(server, tags):
    http = Http(server.url)
    before = answers(http)
    http.ok("POST", "/release_memory_occupation", json={"tags": tags})
    assert http.ok("GET", "/is_sleeping") == {"is_sleeping": True}
    if tags is not None and len(tags) > 1:
        http.ok("POST", "/resume_memory_occupation", json={"tags": ["weights"]})
        tags = ["kv_cache"]
    http.ok("POST", "/resume_memory_occupation", json={"tags": tags})
    assert answers(http) == before


@pytest.mark.slow
def test_a_killed_instance_starts_asleep(tmp_path):
    with demo_server(tmp_path / "log", *OPTIONS, *SEVERAL) as server:
        server.wait_for_instances()
        http = Http(server.url)
        before = answers(http)
        http.ok("POST", "/sleep?level=2")
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        server.wait_for_instances(9)
        for _ in range(12):  # each connection may reach another front end and instance
            refused = http("POST", "/v1/completions", json={"prompt": "a=", "model": "upper"})
            assert refused.status_code == 503, refused.text
            assert "asleep" in refused.json()["error"]["message"]
        http.ok("POST", "/wake_up")
        assert answers(http) == before


@of_several
def test_a_sleep_ends_running_requests_or_says_that_they_run(server):
    http = Http(server.url)
    http.ok("POST", "/pause?mode=keep&clear_cache=false")
    with several(http, "upper") as running:
        wait_until(lambda: http.num_waiting() == NUM, "all requests wait")
        http.ok("POST", "/sleep")
        assert all(one.result()["finish_reason"] == "abort" for one in running)
    http.ok("POST", "/wake_up")
    http.ok("POST", "/resume")
    assert http.ok("GET", "/is_sleeping") == {"is_sleeping": False}


@of_several
@pytest.mark.parametrize("level", with_quick([1, 2], [2]))
def test_kept_requests_go_on_after_the_sleep(server, level):
    http = Http(server.url)
    expected = http.complete("upper")["text"]
    http.ok("POST", "/pause?mode=keep&clear_cache=false")
    with several(http, "upper") as running:
        wait_until(lambda: http.num_waiting() == NUM, "all requests wait")
        http.ok("POST", "/resume")
        http.ok("POST", f"/sleep?level={level}&mode=keep")
        http.ok("POST", "/wake_up")
        assert {one.result()["text"] for one in running} == {expected}


@pytest.mark.parametrize("server", ["several"], indirect=True)
@pytest.mark.parametrize(
    ("method", "path", "problem"),
    [
        ("POST", "/sleep?level=3", "level"),
        ("POST", "/sleep?mode=freeze", "'abort', 'wait' or 'keep'"),
        ("POST", "/sleep?tags=weights", "tags"),
        ("POST", "/wake_up?tags=kv", "tags"),
        ("POST", "/sleep?level=1&level=2", "level is given twice"),
        ("POST", "/wake_up?level=1", "level"),
        ("GET", "/is_sleeping?level=1", "level"),
    ],
)
def test_a_wrong_value_is_named(server, method, path, problem):
    answer = Http(server.url)(method, path)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_requests_that_outlive_the_wait_are_a_408(engine, tokenizer, monkeypatch):
    async def call(verb: str, *args: Any) -> None:
        assert (verb, *args[:3]) == ("sleep", ("weights", "kv_cache"), False, "wait")
        raise TimeoutError("requests ran on for 1 s")

    monkeypatch.setattr(engine, "call", call)
    app = create_app(frontend_of(engine, tokenizer))
    with ServerThread(app) as thread, as_served(thread.url, engine) as served:
        answer = served.post("/sleep?mode=wait", {})
        assert answer.status_code == 408
        assert "raise front_end.pause_timeout_s" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_server_with_merging_refuses(tmp_path):
    with demo_server(tmp_path / "log", *OPTIONS, "--batching", "merged") as server:
        http = Http(server.url)
        refused = http("POST", "/sleep")
        assert refused.status_code == 400
        assert "batching='unmerged'" in refused.json()["error"]["message"]
        assert http.complete("upper")["text"]
