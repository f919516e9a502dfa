# SPDX-License-Identifier: Apache-2.0
"""The server's life: start, readiness, signals; and what it must not import."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import ExitStack

import httpx
import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.serve.server import bind, bind_admin, create_app
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
    for _ in range(200_000):
        under_way.append(Request())
    print(sum(isinstance(one, Request) for one in gc.get_objects()))
"""
PROGRAM = """
    import logging
    from moe_lora.serve.server import bind, run_server
    from tests.serve.conftest import frontend_of, scripted
    from tests.small_tokenizers import characters, wrapped

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = wrapped(characters())
    engine = scripted(tokenizer, step_s=STEP_S, **ENGINE)
    frontend = frontend_of(engine, tokenizer)
    run_server(frontend, [bind("127.0.0.1", 0)], drain_s=DRAIN_S)
    print("aborted", len(engine.aborted), flush=True)
"""
LONG = {"prompt": "hello", "ignore_eos": True, "max_tokens": 100, "stream": True}


def start(step_s, drain_s=1, files=None, **engine):
    program = textwrap.dedent(PROGRAM).replace("DRAIN_S", str(drain_s)).replace("STEP_S", str(step_s))
    program = program.replace("ENGINE", repr(engine))
    limit = [] if files is None else ["prlimit", f"--nofile={files}:{files}"]
    process = subprocess.Popen(
        [*limit, sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    line = process.stdout.readline()
    assert line.startswith("Serving base at http://127.0.0.1:"), line + process.stdout.read()
    return process, line.split()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_short_requests_finish_and_ends_cleanly(number):
    process, url = start(step_s=0.002, drain_s=PATIENCE_S)
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = list(lines)
        assert "data: [DONE]" in rest
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert output.endswith("aborted 0\n")


def test_what_runs_after_the_drain_ends_with_an_error_event_and_what_has_no_token_yet_with_a_503():
    process, url = start(step_s=0, hang_after=1)
    waiting: list[httpx.Response] = []
    body = {**LONG, "stream": False}

    def wait() -> None:
        waiting.append(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S))

    def both_run() -> bool:
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
        return re.search(r"^vllm:num_requests_running(\{.*\})? 2(\.0)?$", metrics, re.MULTILINE) is not None

    try:
        thread = threading.Thread(target=wait)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            thread.start()
            wait_until(both_run, "two requests run")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        thread.join()
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert rest[-1] == "data: [DONE]"
    assert "the server is shutting down" in rest[-2]
    assert waiting[0].status_code == 503
    assert waiting[0].json()["error"]["type"] == "ServiceUnavailableError"
    assert process.returncode == 0
    assert output.endswith("aborted 2\n")


def test_a_second_signal_ends_it_at_once():
    process, url = start(step_s=0.5, drain_s=1000)
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline().startswith("Ending:")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert "the server is shutting down" in rest[-2]
    assert process.returncode == 0


def test_what_nobody_sends_or_reads_holds_up_no_end():
    process, url = start(step_s=0.01, drain_s=2, tokens_per_step=5000, max_model_len=10**8)
    body = json.dumps({**LONG, "max_tokens": 10**7}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as unread, socket.socket() as unsent:
        try:
            for one in (unread, unsent):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.settimeout(PATIENCE_S)
                one.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            unread.sendall(head + body)
            unsent.sendall(head + body[:20])
            assert unread.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            assert unsent.recv(4096).startswith(b"HTTP/1.1 503")
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in output
    assert output.endswith("aborted 1\n")


def test_live_says_that_the_server_answers_and_ready_that_requests_should_come(server, engine, tokenizer):
    def statuses():
        return [server.get(path).status_code for path in ("/live", "/ready", "/health")]

    assert statuses() == [200, 200, 200]
    engine.alive = False
    assert statuses() == [200, 503, 503]


def test_a_server_that_ends_is_not_ready(tokenizer, engine):
    frontend = frontend_of(engine, tokenizer)
    with ServerThread(create_app(frontend)) as thread:
        frontend.ending.begun = True
        response = httpx.get(f"{thread.url}/ready", timeout=PATIENCE_S)
        assert (response.status_code, "shutting down" in response.json()["error"]["message"]) == (503, True)
        assert httpx.get(f"{thread.url}/live", timeout=PATIENCE_S).status_code == 200


def test_connections_for_which_no_files_are_left_are_refused_and_that_is_said_once():
    process, url = start(step_s=0.002, files=256)
    port = int(url.rpartition(":")[2])
    socks = []
    try:
        for _ in range(400):
            socks.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        answers = [one.recv(4096) for one in socks[-20:]]
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers if answer)
        assert any(answers)
        for one in socks:
            one.close()
        response = None
        while response is None or response.status_code == 503:
            response = httpx.get(f"{url}/version", timeout=PATIENCE_S)
        assert response.status_code == 200
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert output.count("raise it with ulimit -n") == 1
    assert "Traceback" not in output


def test_a_port_in_use_is_refused_before_an_engine_starts():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port}: .*in use; choose another"):
            bind("127.0.0.1", port)


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


def test_the_front_end_imports_no_torch():
    program = (
        "import sys, moe_lora.serve.server, moe_lora.engine.text.text, tokenizers, jinja2;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_chat_template_needs_no_torch():
    program = (
        "import sys; from moe_lora.engine.text.chat_template import ChatTemplates;"
        "templates = ChatTemplates({'default': '{{ messages | tojson }}'}, {}); templates.compile();"
        "templates.render([{'role': 'user', 'content': 'hello'}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_requests_that_a_collection_finds_under_way_are_not_kept():
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REQUESTS)], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) < 4000
