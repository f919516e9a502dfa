"""The server's life: start, readiness, signals; and what it must not import."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import httpx
import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.serve.server import bind

PROGRAM = """
    import logging
    from moe_lora.serve.frontend import Frontend
    from moe_lora.serve.server import bind, run_server
    from tests.serve.conftest import scripted
    from tests.small_tokenizers import characters, wrapped

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = wrapped(characters())
    engine = scripted(tokenizer, step_s=STEP_S)
    frontend = Frontend(client=engine, tokenizer=tokenizer, model_name="base")
    run_server(frontend, bind("127.0.0.1", 0), drain_s=1)
    print("aborted", len(engine.aborted), flush=True)
"""
LONG = {"prompt": "hello", "ignore_eos": True, "max_tokens": 100, "stream": True}


def start(step_s):
    program = textwrap.dedent(PROGRAM).replace("STEP_S", str(step_s))
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    line = process.stdout.readline()
    assert line.startswith("Serving base at http://127.0.0.1:"), line + process.stdout.read()
    return process, line.split()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_short_requests_finish_and_ends_cleanly(number):
    process, url = start(step_s=0.002)
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = list(lines)
        assert "data: [DONE]" in rest
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, output) == (0, "aborted 0\n")


def test_what_runs_after_the_drain_is_aborted():
    process, url = start(step_s=0.5)
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert output.endswith("aborted 1\n")


def test_a_port_in_use_is_refused_before_an_engine_starts():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port}: .*in use; choose another"):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"host=no\.such\.host\.invalid port=80"):
        bind("no.such.host.invalid", 80)


def test_the_front_end_imports_no_torch():
    program = (
        "import sys, moe_lora.serve.server, moe_lora.engine.text, tokenizers, jinja2;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
