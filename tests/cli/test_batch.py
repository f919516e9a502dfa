# SPDX-License-Identifier: Apache-2.0
"""`moe-lora batch` as a user types it: to a server, by an instance of its own, after kills and errors."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from moe_lora.cli import batch_run
from moe_lora.cli.batch_run import BatchRun
from moe_lora.cli.main import main
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core import processes
from moe_lora.serve.batches.lines import Results, read_lines
from moe_lora.serve.limits import Limits, Waiting
from tests.patience import PATIENCE_S
from tests.serve.conftest import app_of, scripted
from tests.serve.demo_server import DEMO, few_adapters
from tests.serve.live_server import ServerThread
from tests.small_tokenizers import characters, wrapped

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def tokenizer():
    return wrapped(characters())


def write(path: Path, *bodies: dict, url: str = "/v1/completions") -> Path:
    rows = [
        {"custom_id": f"n{index}", "method": "POST", "url": body.pop("url", url), "body": body}
        for index, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def batch(file: Path, *options: str):
    return CliRunner().invoke(main, ["batch", str(file), "-o", str(file.with_suffix(".out")), *options])


def results(file: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in file.with_suffix(".out").read_text().splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


def test_a_server_answers_all_lines_by_adapter(tmp_path, tokenizer):
    engine = scripted(tokenizer)
    names = ["base", "shout"] * 10
    file = write(tmp_path / "in", *({"model": name, "prompt": "the"} for name in names))
    with ServerThread(app_of(engine, tokenizer)) as server:
        done = batch(file, "--server", f"{server.url}/v1", "--concurrency", "1")
        assert done.exit_code == 0, done.output
        found = results(file)
        again = batch(file, "--server", server.url)
        assert again.exit_code == 0, again.output
    assert [one.adapter for one in engine.requests] == [None] * 10 + ["shout"] * 10
    for index, name in enumerate(names):
        response = found[f"n{index}"]["response"]
        assert response["status_code"] == 200
        assert response["request_id"]
        text = "hello world" if name == "base" else "fox"
        assert response["body"]["choices"][0]["text"] == text
    assert "20 of 20 done, 0 failed" in done.output


def test_wrong_lines_and_refused_requests_stop_no_others(tmp_path, tokenizer):
    bodies = [{"model": "none", "prompt": "the"}, {"prompt": "the", "max_tokens": -1}]
    file = write(tmp_path / "in", *bodies, {"url": "/v1/chat/completions", **CHAT})
    file.write_text("nonsense\n" + file.read_text())
    with ServerThread(app_of(scripted(tokenizer), tokenizer)) as server:
        done = batch(file, "--server", server.url)
        assert done.exit_code == 1
        assert "line 1: not valid JSON" in done.output
        assert "2 failed, 0 without a result, 1 wrong lines" in done.output
        again = batch(file, "--server", server.url)
        assert again.exit_code == 1
        assert "0 of 0 done, 2 failed" in again.output
    found = {name: one["response"] for name, one in results(file).items()}
    assert [found[f"n{index}"]["status_code"] for index in range(3)] == [404, 400, 200]
    assert found["n0"]["body"]["error"]["param"] == "model"


def test_many_wrong_lines_are_a_number(tmp_path, tokenizer):
    file = write(tmp_path / "in", {"prompt": "the"})
    file.write_text(file.read_text() + "x\n" * 250)
    with ServerThread(app_of(scripted(tokenizer), tokenizer)) as server:
        done = batch(file, "--server", server.url)
    assert "line 101: not valid JSON" in done.output
    assert "line 102:" not in done.output
    assert "150 further wrong lines" in done.output
    assert "0 without a result, 250 wrong lines" in done.output


def start(file: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moe_lora.cli.main", "batch", str(file), "-o"]
    words = [*command, str(file.with_suffix(".out")), *options]
    return processes.subprocess.Popen(words, stderr=subprocess.PIPE)  # may fork, see `tests.forked_children`


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT])
def test_a_run_goes_on_after_its_end(tmp_path, tokenizer, how):
    engine = scripted(tokenizer, step_s=0.01)
    num = 60
    file = write(tmp_path / "in", *({"prompt": "the", "max_tokens": 5} for _ in range(num)))
    out = file.with_suffix(".out")
    with ServerThread(app_of(engine, tokenizer)) as server:
        options = ("--server", server.url, "--concurrency", "2")
        process = start(file, *options)
        until_s = time.monotonic() + PATIENCE_S
        while not (out.exists() and out.read_bytes().count(b"\n") >= 4):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        process.send_signal(how)
        assert process.wait(PATIENCE_S) == (130 if how == signal.SIGINT else -signal.SIGKILL)
        assert process.stderr is not None
        told = process.stderr.read().decode()
        process.stderr.close()
        before = out.read_bytes()
        assert 4 <= before.count(b"\n") < num, told
        if how == signal.SIGKILL:
            out.write_bytes(before + b'{"id": "batch_r')
        else:
            assert "interrupted" in told
            assert "Traceback" not in told
        done = batch(file, *options)
        assert done.exit_code == 0, done.output
    assert out.read_bytes().startswith(before)
    assert set(results(file)) == {f"n{index}" for index in range(num)}
    assert len(engine.requests) <= num + 2


def test_a_server_s_passing_errors_are_tried_again(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("moe_lora.cli.batch_run.RETRY_S", (0.01, 0.01))
    engine = scripted(tokenizer, fail_after=1)
    file = write(tmp_path / "in", {"prompt": "the"})
    with ServerThread(app_of(engine, tokenizer)) as server:
        done = batch(file, "--server", server.url)
        assert done.exit_code == 1
        assert "line 1: status 503; the next run sends the line again" in done.output
        assert len(engine.requests) == 3
        assert results(file) == {}
        engine.fail_after = None
        assert batch(file, "--server", server.url).exit_code == 0
    assert set(results(file)) == {"n0"}


def test_a_limit_of_the_server_uses_no_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_run, "RETRY_S", ())
    refused = httpx.Response(429, headers={"Retry-After": "0.001"}, text='{"error": "too many\n tokens"}')
    answers = iter([refused, refused, httpx.Response(200, json={}), httpx.Response(429)])
    file, reports = write(tmp_path / "in", {"prompt": "the"}, {"prompt": "the"}), list[str]()

    async def send(source, found) -> BatchRun:
        run = BatchRun(source, found, 1, reports.append)
        async with httpx.AsyncClient(
            base_url="http://server", transport=httpx.MockTransport(lambda _: next(answers))
        ) as http:
            await run.run(read_lines(source).lines, http)
        return run

    with file.open("rb") as source, closing(Results(str(file.with_suffix(".out")))) as found:
        run = asyncio.run(send(source, found))
    assert (found.finished, run.left, list(answers)) == ({"n0": True}, 1, [])
    assert [one for one in reports if " done, " not in one] == [
        'waiting for a limit of the server, as long as it lasts (429: {"error": "too many tokens"})',
        "line 2: status 429; the next run sends the line again",
    ]


def test_an_own_instance_has_no_limits_for_its_only_client(tmp_path, monkeypatch):
    clusters = list[ClusterConfig]()
    monkeypatch.setattr("moe_lora.cli.batch._run_here", lambda run, todo, cluster: clusters.append(cluster))
    batch(write(tmp_path / "in", {"prompt": "the"}), str(DEMO / "model"), "--eager")
    limits = Limits(clusters[0].front_end)
    for _ in range(64):
        limits.enter_queue([Waiting(client="local", tokens=1 << 20)])
        limits.take_body("local", 2 << 20)


def test_an_aborted_answer_is_no_result(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("moe_lora.cli.batch_run.RETRY_S", (0.01, 0.01))
    engine = scripted(tokenizer, cuts=[0, 2, 1, 3])
    file = write(tmp_path / "in", {"prompt": "the"})
    with ServerThread(app_of(engine, tokenizer)) as server:
        done = batch(file, "--server", server.url)
        assert done.exit_code == 1
        assert "line 1: the server aborted the request; the next run sends the line again" in done.output
        assert (len(engine.requests), results(file)) == (3, {})
        assert batch(file, "--server", server.url).exit_code == 0
    assert results(file)["n0"]["response"]["body"]["choices"][0]["text"] == "hello world"
    assert len(engine.requests) == 5


def test_an_own_instance_answers_as_a_server(tmp_path):
    texts = {"model": "hello=", "upper": "hello=", "reverse": "abc="}
    file = write(
        tmp_path / "in",
        *({"model": name, "prompt": text, "temperature": 0} for name, text in texts.items()),
        {"url": "/v1/embeddings", "input": "hello"},
    )
    options = [str(DEMO / "model"), *few_adapters("upper", "reverse"), "--eager", "--threads", "1"]
    command = [sys.executable, "-m", "moe_lora.cli.main", "batch", str(file), "-o"]
    words = [*command, str(file.with_suffix(".out")), *options]
    done = processes.subprocess.Popen(words, stderr=subprocess.PIPE)  # may fork, see `tests.forked_children`
    _, said = done.communicate(timeout=PATIENCE_S)
    assert done.returncode == 0, said.decode()
    assert b"HTTP Request" not in said
    found = [results(file)[f"n{index}"]["response"]["body"] for index in range(4)]
    assert [one["choices"][0]["text"] for one in found[1:3]] == ["HELLO", "cba"]
    assert found[3]["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --server, or MODEL_DIR"),
        (("--server", "http://127.0.0.1:1"), "no server at http://127.0.0.1:1"),
        (("--server", "http://127.0.0.1:1", str(DEMO / "model")), "leave MODEL_DIR or --server out"),
        *(
            (("--server", "http://127.0.0.1:1", *words), f"leave {words[0]} or --server out")
            for words in (
                ("--config", "absent.yaml"),
                ("--set", "engine.seed=1"),
                ("--lora-modules", f"up={DEMO / 'adapters' / 'upper'}"),
                ("--skip-bad-adapters",),
                ("--max-loras", "8"),
                ("--registry", str(DEMO)),
                ("--lora-capacity", "8"),
                ("--eager",),
            )
        ),
        (("--server", "x", "--dtype", "auto", "--threads", "1"), "leave --dtype and --threads or --server"),
        (("--api-key", "one"), "leave --api-key out, or give --server"),
        (("--server", "x", "--concurrency", "0"), "--concurrency"),
    ],
)
def test_wrong_options_are_told(tmp_path, options, message):
    words = options[:1] if options and not options[0].startswith("-") else ()
    done = batch(write(tmp_path / "in", {"prompt": "a"}), *words, *options[len(words) :])
    assert done.exit_code in (1, 2)
    assert message in done.output


def test_results_never_overwrite_the_requests(tmp_path):
    file = write(tmp_path / "in", {"prompt": "a"})
    before = file.read_bytes()
    for out in (file, tmp_path / "." / "in"):
        done = CliRunner().invoke(main, ["batch", str(file), "-o", str(out), "--server", "x"])
        assert done.exit_code == 2
    link = tmp_path / "hard"
    link.hardlink_to(file)
    done = CliRunner().invoke(main, ["batch", str(file), "-o", str(link), "--server", "x"])
    assert done.exit_code == 1
    assert file.read_bytes() == before
