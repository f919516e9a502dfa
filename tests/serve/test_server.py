# SPDX-License-Identifier: Apache-2.0
"""The server's life: start, readiness, signals; and what it must not import."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import uvicorn

from moe_lora.config import LimitsConfig
from moe_lora.core import processes
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import CLUSTER_MARK, cluster_headers
from moe_lora.serve.limits import Limits
from moe_lora.serve.server import HttpServer, bind, bind_admin, create_app
from tests.patience import PATIENCE_S

from .conftest import frontend_of
from .live_server import ServerThread, wait_until

REQUESTS = """
    import gc
    from collections import deque
    from moe_lora.serve.server import RARE_COLLECTIONS

    class Request:
        def __init__(self):
            self.own = self

    young, middle, old = RARE_COLLECTIONS
    gc.freeze()
    gc.collect()
    gc.set_threshold(young // 100, middle, old)
    under_way = deque(maxlen=100)
    for _ in range(100_000):
        under_way.append(Request())
    print(sum(isinstance(one, Request) for one in gc.get_objects()))
"""
LONG = {"prompt": "hello", "ignore_eos": True, "max_tokens": 100, "stream": True}


class Running:
    """A process with a server.  `output`: the text of its log."""

    def __init__(self, log: Path, *, drain_s: float = 1, **settings: float) -> None:
        self._log = log
        command = [
            sys.executable,
            "-m",
            "tests.serve.scripted_server",
            json.dumps({"drain_s": drain_s, **settings}),
        ]
        with log.open("w") as file:
            self._process = processes.subprocess.Popen(command, stderr=file)
        self.send_signal, self.kill = self._process.send_signal, self._process.kill
        wait_until(
            lambda: re.search("Serving base.*\n", self.output()) or self._process.poll() is not None,
            "it serves",
        )
        found = re.search(r"Serving base at (http://127.0.0.1:\d+)\n", self.output())
        assert found, self.output()
        self.url = found.group(1)

    def output(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        """The exit status."""
        return self._process.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Running]]:
    with ExitStack() as stack:

        def started(**settings: float) -> Running:
            running = Running(tmp_path / "log", **settings)
            stack.callback(running.kill)
            return running

        yield started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_short_requests_finish_and_ends_cleanly(start, number):
    server = start(step_s=0.002, drain_s=PATIENCE_S)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        server.send_signal(number)
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert server.wait() == 0
    assert server.output().endswith("aborted 0\n")


def test_what_runs_after_the_drain_ends_with_an_error_event_and_what_has_no_token_yet_with_a_503(start):
    server = start(step_s=0, hang_after=1)
    url = server.url
    waiting: list[httpx.Response] = []
    body = {**LONG, "stream": False}

    def wait() -> None:
        waiting.append(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S))

    def both_run() -> bool:
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
        return re.search(r"^vllm:num_requests_running(\{.*\})? 2(\.0)?$", metrics, re.MULTILINE) is not None

    thread = threading.Thread(target=wait)
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        thread.start()
        wait_until(both_run, "two requests run")
        server.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    thread.join()
    assert server.wait() == 0
    assert rest[-1] == "data: [DONE]"
    assert "the server is shutting down" in rest[-2]
    assert waiting[0].status_code == 503
    assert waiting[0].json()["error"]["type"] == "ServiceUnavailableError"
    assert server.output().endswith("aborted 2\n")


def test_a_second_signal_ends_it_at_once(start):
    server = start(step_s=0.5, drain_s=1000)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: "\nEnding:" in server.output(), "it ends")
        server.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert server.wait() == 0
    assert "the server is shutting down" in rest[-2]


def test_what_nobody_sends_or_reads_holds_up_no_end(start):
    server = start(step_s=0.01, drain_s=2, tokens_per_step=5000, max_model_len=10**8)
    body = json.dumps({**LONG, "max_tokens": 10**7}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as unread, socket.socket() as unsent:
        for one in (unread, unsent):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(PATIENCE_S)
            one.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        unread.sendall(head + body)
        unsent.sendall(head + body[:20])
        assert unread.recv(100).startswith(b"HTTP/1.1 200")
        server.send_signal(signal.SIGTERM)
        assert unsent.recv(4096).startswith(b"HTTP/1.1 503")
        assert server.wait() == 0
    assert "Traceback" not in server.output()
    assert server.output().endswith("aborted 1\n")


def test_live_says_that_the_server_answers_and_ready_that_requests_should_come(server, engine, tokenizer):
    def statuses():
        return [server.get(path).status_code for path in ("/live", "/ready", "/health")]

    assert statuses() == [200, 200, 200]
    assert "x-moe-lora-cluster" not in server.get("/ready").headers
    engine.alive = False
    assert statuses() == [200, 503, 503]


def test_ready_has_the_sign_of_a_cluster_on_this_host(tokenizer, engine, monkeypatch):
    monkeypatch.setenv(CLUSTER_MARK, 4 * "01234567")
    with ServerThread(create_app(frontend_of(engine, tokenizer))) as thread:
        found = httpx.get(f"{thread.url}/ready", timeout=PATIENCE_S).headers
    assert cluster_headers("01234567 and more").items() <= found.items()


def test_a_server_that_ends_is_not_ready(tokenizer, engine):
    frontend = frontend_of(engine, tokenizer)
    with ServerThread(create_app(frontend)) as thread:
        frontend.ending.begun = True
        response = httpx.get(f"{thread.url}/ready", timeout=PATIENCE_S)
        assert (response.status_code, "shutting down" in response.json()["error"]["message"]) == (503, True)
        assert httpx.get(f"{thread.url}/live", timeout=PATIENCE_S).status_code == 200


def test_connections_for_which_no_files_are_left_are_refused_and_that_is_said_once(start):
    server = start(step_s=0.002, files=256)
    port = int(server.url.rpartition(":")[2])
    socks = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) for _ in range(400)]
    answers = [one.recv(4096) for one in socks[-20:]]
    assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers if answer)
    assert any(answers)
    for one in socks:
        one.close()
    answers = []
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as http:
        wait_until(lambda: answers.append(http.get("/version")) or not answers[-1].is_server_error, "a file")
    assert answers[-1].status_code == 200
    server.send_signal(signal.SIGTERM)
    server.wait()
    assert server.output().count("raise it with ulimit -n") == 1
    assert "Traceback" not in server.output()


def test_a_port_in_use_is_refused_before_an_engine_starts():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port}: .*in use; choose another"):
            bind("127.0.0.1", port)


def test_a_port_is_taken_before_its_server_listens():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port}: .*in use; choose another"):
            bind("127.0.0.1", port)


def test_a_free_port_is_bound_without_a_second_binds_option(monkeypatch):
    monkeypatch.setattr("moe_lora.serve.server.socket.SO_REUSEADDR", object())  # no number: an error if set
    bind("127.0.0.1", 0).close()


def test_a_restart_takes_the_port_beside_closed_connections(start):
    server = start()
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        while client.recv(4096):  # the server closes first, and its end stays for a while
            pass
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    bind("127.0.0.1", port).close()


def test_a_port_that_another_took_meanwhile_is_an_error_of_settings(engine, tokenizer):
    config = uvicorn.Config(create_app(frontend_of(engine, tokenizer)), lifespan="off")
    http = HttpServer(config, Limits(LimitsConfig()))
    with bind("127.0.0.1", 0) as own, socket.socket() as other:
        for one in (own, other):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(own.getsockname())
        other.listen()
        with pytest.raises(ConfigError, match=r"can't listen at the front end's address: .*in use"):
            asyncio.run(http.serve([own]))


def test_a_host_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"host=no\.such\.host\.invalid port=80"):
        bind("no.such.host.invalid", 80)


def listens(path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


def test_administrators_socket_of_a_server_that_lives_is_not_taken_from_it(tmp_path):
    place = tmp_path / "admin"
    with ExitStack() as first:
        first.enter_context(bind_admin(str(place)))
        with (
            pytest.raises(ConfigError, match=r"admin_address=.*in use; choose another"),
            bind_admin(str(place)),
        ):
            pass
        assert listens(place)
        place.unlink()  # by hand
        with bind_admin(str(place)):
            first.close()
            assert listens(place)
    assert not place.exists()


def test_a_killed_servers_socket_is_taken_and_a_file_is_not(tmp_path):
    place = tmp_path / "admin"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place))
    with bind_admin(str(place)):
        assert place.stat().st_mode & 0o777 == 0o600
        assert listens(place)
    place.write_text("notes")
    with pytest.raises(ConfigError, match="in use"), bind_admin(str(place)):
        pass
    assert place.read_text() == "notes"


def test_the_front_end_and_a_chat_template_need_no_torch():
    program = (
        "import sys, moe_lora.serve.server, moe_lora.engine.text.text, tokenizers, jinja2;"
        "assert 'transformers' not in sys.modules;"
        "from moe_lora.engine.text.chat_template import ChatTemplates;"
        "templates = ChatTemplates({'default': '{{ messages | tojson }}'}, {}); templates.compile();"
        "templates.render([{'role': 'user', 'content': 'hello'}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_requests_that_a_collection_finds_under_way_are_not_kept():
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REQUESTS)], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) < 4000
