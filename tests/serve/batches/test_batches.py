# SPDX-License-Identifier: Apache-2.0
"""/v1/files and /v1/batches with the client of OpenAI: results, cancels, tenants, kills, wrong uploads."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import httpx
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_lora.assemble import serve, serve_front_end, serve_host
from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.front_end import ControllerConfig, FrontEndPlace
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import BusyError, ConfigError
from moe_lora.core.request import BACKGROUND
from moe_lora.provision.online import DemandWindow
from moe_lora.serve import http_errors
from moe_lora.serve.access import Caller
from moe_lora.serve.admin.controls import scope_of
from moe_lora.serve.api_keys import add_key, read_keys, remove_key
from moe_lora.serve.batches import endpoints, running, store
from moe_lora.serve.batches.store import FullError, Store
from moe_lora.serve.frontend import ABORTED
from moe_lora.serve.server import create_app
from tests.patience import PATIENCE_S
from tests.serve.conftest import app_of, frontend_of, scripted
from tests.serve.demo_server import demo_server, few_adapters
from tests.serve.live_server import ServerThread, wait_until
from tests.serve.test_access import rights

ENDPOINT = "/v1/completions"


def lines_of(*bodies: dict, url: str = ENDPOINT) -> bytes:
    rows = [
        {"custom_id": f"n{index}", "method": "POST", "url": url, "body": body}
        for index, body in enumerate(bodies)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@contextmanager
def served(engine, tokenizer, **settings):
    """The URL of a server."""
    with ServerThread(app_of(engine, tokenizer, **settings)) as thread:
        yield thread.url


def client_of(url: str, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def create(client: openai.OpenAI, content: bytes, endpoint: str = ENDPOINT):
    file_id = upload(client, content)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")


def ended(client: openai.OpenAI, batch_id: str):
    until_s = time.monotonic() + PATIENCE_S
    while True:
        found = client.batches.retrieve(batch_id)
        if found.status in ("completed", "failed", "cancelled"):
            return found
        assert time.monotonic() < until_s, found
        time.sleep(0.05)


def watch_calls(monkeypatch) -> list[int]:
    """Statuses of the answers to all attempts from now on."""
    statuses, call = [], running.call

    async def watched(*args):
        answer = await call(*args)
        statuses.append(answer.status)
        return answer

    monkeypatch.setattr(running, "call", watched)
    return statuses


def content(client: openai.OpenAI, file_id: str | None) -> dict:
    assert file_id is not None
    rows = [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


@pytest.mark.parametrize("folder", [False, True])
def test_a_batch_from_upload_to_results(tokenizer, tmp_path, folder):
    engine = scripted(tokenizer)
    settings = {"batch_dir": str(tmp_path / "batches")} if folder else {}
    bodies = [{"model": name, "prompt": "the"} for name in ("base", "shout", "base", "none")]
    other = lines_of({"input": "the"}, url="/v1/embeddings").replace(b'"n0"', b'"other"')
    text = lines_of(*bodies, {"prompt": "the", "priority": 5}) + b"nonsense\n" + other
    with served(engine, tokenizer, **settings) as url, client_of(url) as client:
        file_id = upload(client, text)
        assert client.files.retrieve(file_id).bytes == len(text)
        assert client.files.content(file_id).content == text
        batch = client.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h", metadata={"a": "b"}
        )
        assert batch.status == "validating"
        found = ended(client, batch.id)
        assert found.status == "completed"
        assert found.metadata == {"a": "b"}
        counts = found.request_counts
        assert (counts.total, counts.completed, counts.failed) == (7, 4, 3)
        assert [(one.code, one.line) for one in found.errors.data] == [
            ("invalid_line", 6),
            ("invalid_line", 7),
        ]
        results = content(client, found.output_file_id)
        texts = {name: row["response"]["body"]["choices"][0]["text"] for name, row in results.items()}
        assert texts == {**dict.fromkeys(("n0", "n2", "n4"), "hello world"), "n1": "fox"}
        errors = content(client, found.error_file_id)
        assert errors["n3"]["response"]["status_code"] == 404
        assert "line 6" in errors[None]["error"]["message"]
        assert "line 7" in errors["other"]["error"]["message"]
        assert [one.id for one in client.batches.list()] == [batch.id]
        names = {one.id for one in client.files.list()}
        assert names == {file_id, found.output_file_id, found.error_file_id}
        assert [one.id for one in client.files.list(purpose="batch")] == [file_id]
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(file_id)
    assert {one.priority for one in engine.requests} == {BACKGROUND}


def test_pages_of_lists(tokenizer):
    with served(scripted(tokenizer), tokenizer) as url, client_of(url) as client:
        made = [upload(client, b"x") for _ in range(5)]
        assert [one.id for one in client.files.list(limit=2)] == made[::-1]
        assert [one.id for one in client.files.list(limit=2, order="asc")] == made
        assert client.files.list(limit=2, after=made[2]).has_more is False


def test_chats_embeddings_and_responses_are_endpoints_too(tokenizer):
    chat = {"messages": [{"role": "user", "content": "the"}]}
    engine = scripted(tokenizer, hidden=struct.pack("<2f", 3, 4))
    with served(engine, tokenizer) as url, client_of(url) as client:
        for path in ("/v1/embeddings", "/v1/responses"):
            one = ended(client, create(client, lines_of({"input": "the"}, url=path), path).id)
            body = content(client, one.output_file_id)["n0"]["response"]["body"]
            if path == "/v1/embeddings":
                assert body["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
            else:
                assert body["output"][0]["content"][0]["text"] == "hello world"
        batch = create(client, lines_of(chat, url="/v1/chat/completions"), "/v1/chat/completions")
        results = content(client, ended(client, batch.id).output_file_id)
        message = results["n0"]["response"]["body"]["choices"][0]["message"]
        assert message["content"] == "hello world"
        failed = ended(client, create(client, lines_of(chat)).id)
        assert failed.status == "completed"
        wrong = ended(client, create(client, lines_of(chat, url="/v1/responses")).id)
        assert wrong.status == "failed"
        assert "url='/v1/responses'" in wrong.errors.data[0].message
        empty = ended(client, create(client, b"\n").id)
        assert empty.errors.data[0].code == "empty_file"


def test_responses_of_a_batch_are_stored_only_on_request(tokenizer):
    with served(scripted(tokenizer), tokenizer) as url, client_of(url) as client:
        bodies = {"input": "the"}, {"input": "the", "store": True}
        batch = create(client, lines_of(*bodies, url="/v1/responses"), "/v1/responses")
        results = content(client, ended(client, batch.id).output_file_id)
        left_out, kept = (results[name]["response"]["body"] for name in ("n0", "n1"))
        assert (left_out["store"], kept["store"]) == (False, True)
        assert client.responses.retrieve(kept["id"]).output_text == "hello world"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(left_out["id"])


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"]
)
def test_aborted_requests_are_sent_again(tokenizer, monkeypatch, path):
    monkeypatch.setattr(running, "RETRY_S", (0.0,) * 3)
    engine = scripted(tokenizer, hidden=b"\0" * 16, cuts=[0, 0, 3])
    chat = {"messages": [{"role": "user", "content": "the"}]}
    bodies = {"/v1/completions": {"prompt": "the"}, "/v1/chat/completions": chat}
    body = bodies.get(path, {"input": "the"})
    with served(engine, tokenizer, batch_concurrency=1) as url, client_of(url) as client:
        found = ended(client, create(client, lines_of(body, body, url=path), path).id)
        assert (found.request_counts.completed, found.request_counts.failed) == (2, 0)
        assert "aborted" not in str(content(client, found.output_file_id))
        assert len(engine.requests) == (4 if path == "/v1/embeddings" else 5)


def test_a_request_that_is_aborted_each_time_is_a_failed_row(tokenizer, monkeypatch):
    monkeypatch.setattr(running, "RETRY_S", (0.0, 0.0))
    engine = scripted(tokenizer, cuts=[2, 1, 0])
    with served(engine, tokenizer, batch_concurrency=1) as url, client_of(url) as client:
        found = ended(client, create(client, lines_of({"prompt": "a"}, {"prompt": "b"})).id)
        assert (found.request_counts.completed, found.request_counts.failed) == (1, 1)
        assert set(content(client, found.output_file_id)) == {"n1"}
        response = content(client, found.error_file_id)["n0"]["response"]
    assert response["status_code"] == 503
    assert response["body"]["error"]["message"] == ABORTED
    assert len(engine.requests) == 4


def test_a_batch_waits_while_the_model_sleeps(tokenizer, monkeypatch):
    for module, name in ((running, "BUSY_S"), (http_errors, "BUSY_S"), (running, "LOOK_S")):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(running, "RETRY_S", ())
    statuses = watch_calls(monkeypatch)
    engine = scripted(tokenizer, refuse=BusyError("the model is asleep"))
    with served(engine, tokenizer) as url, client_of(url) as client:
        batch = create(client, lines_of({"prompt": "a"}, {"prompt": "b"}))
        wait_until(lambda: len(statuses) > 8, "attempts")
        engine.refuse = None
        assert ended(client, batch.id).request_counts.completed == 2
    assert set(statuses[:8]) == {503}


def test_attempts_during_a_sleep_are_no_errors_and_count_once_in_the_key_s_rate(
    tokenizer, tmp_path, monkeypatch
):
    for module, name in ((running, "BUSY_S"), (http_errors, "BUSY_S"), (running, "LOOK_S")):
        monkeypatch.setattr(module, name, 0.01)
    file = tmp_path / "keys.json"
    key = add_key(file, msgspec.structs.replace(rights("acme"), requests_per_minute=2.0))
    statuses = watch_calls(monkeypatch)
    engine = scripted(tokenizer, refuse=BusyError("the model is asleep"))
    frontend = frontend_of(engine, tokenizer, api_keys=str(file))
    with ServerThread(create_app(frontend)) as thread, client_of(thread.url, key) as client:
        batch = create(client, lines_of({"prompt": "a"}, {"prompt": "b"}))
        wait_until(lambda: len(statuses) > 8, "attempts")
        engine.refuse = None
        assert ended(client, batch.id).request_counts.completed == 2
    families = text_string_to_metric_families(frontend.metrics.render().decode())
    found = [one for family in families for one in family.samples if one.name == "vllm:request_success_total"]
    assert {one.labels["finished_reason"] for one in found if one.value} == {"stop"}


def test_a_key_removed_during_a_sleep_ends_its_batch(tokenizer, tmp_path, monkeypatch):
    for module, name in ((running, "BUSY_S"), (http_errors, "BUSY_S"), (running, "LOOK_S")):
        monkeypatch.setattr(module, name, 0.01)
    file = tmp_path / "keys.json"
    key, other = add_key(file, rights("acme")), add_key(file, rights("acme"))
    statuses = watch_calls(monkeypatch)
    engine = scripted(tokenizer, refuse=BusyError("the model is asleep"))
    with served(engine, tokenizer, api_keys=str(file)) as url:
        batch = create(client_of(url, key), lines_of({"prompt": "a"}))
        wait_until(lambda: statuses, "an attempt")
        remove_key(file, key.split("-")[1])
        assert ended(client_of(url, other), batch.id).status == "failed"


def test_many_sleeps_that_abort_a_request_do_not_use_up_its_attempts(tokenizer, monkeypatch):
    monkeypatch.setattr(running, "RETRY_S", (0.0,))
    monkeypatch.setattr(running, "LOOK_S", 0.0)
    monkeypatch.setattr(running, "BUSY_S", 0.01)
    aborted, asleep = running.BatchAnswer(503, {}), running.BatchAnswer(503, {}, 0.01)
    answers = iter([*[aborted, asleep] * 5, running.BatchAnswer(200, {})])

    async def call(*_):
        return next(answers)

    monkeypatch.setattr(running, "call", call)
    with served(scripted(tokenizer), tokenizer) as url, client_of(url) as client:
        found = ended(client, create(client, lines_of({"prompt": "a"})).id)
    assert (found.request_counts.completed, found.request_counts.failed) == (1, 0)


def test_files_with_too_many_requests_and_with_many_wrong_lines(tokenizer, monkeypatch):
    monkeypatch.setattr(running, "MAX_REQUESTS", 300)
    with served(scripted(tokenizer), tokenizer) as url, client_of(url) as client:
        many = ended(client, create(client, b"x\n" * 300 + lines_of({"prompt": "the"})).id)
        assert (many.status, many.output_file_id) == ("failed", None)
        [error] = many.errors.data
        assert (error.code, "more than 300 requests" in error.message) == ("too_many_tasks", True)
        wrong = ended(client, create(client, lines_of({"prompt": "the"}) + b"x\n" * 299).id)
        assert (wrong.status, wrong.request_counts.failed) == ("completed", 299)
        assert [one.line for one in wrong.errors.data] == [*range(2, 102), None]
        assert wrong.errors.data[-1].message == "199 further wrong lines"
        assert len(client.files.content(wrong.error_file_id).text.splitlines()) == 101


def test_results_count_as_files_of_their_owner(tokenizer, tmp_path):
    file, settings = tmp_path / "keys.json", {"batch_bytes": 9000, "batch_dir": str(tmp_path / "batches")}
    acme, globex = (add_key(file, rights(name)) for name in ("acme", "globex"))
    engine = scripted(tokenizer)
    with served(engine, tokenizer, api_keys=str(file), **settings) as url:
        first, second = client_of(url, acme), client_of(url, globex)
        text = lines_of(*({"prompt": "the"} for _ in range(40)))
        found = ended(first, create(first, text).id)
        assert (found.status, found.errors.data[0].code) == ("failed", "storage_full")
        assert "front_end.batch_bytes=9000" in found.errors.data[0].message
        kept = content(first, found.output_file_id)
        assert 0 < len(kept) == found.request_counts.completed < 40
        assert sum(one.bytes for one in first.files.list()) <= 9000
        assert ended(second, create(second, lines_of({"prompt": "the"})).id).status == "completed"
        assert len(engine.requests) < 40
        for one in (found.output_file_id, found.input_file_id):
            first.files.delete(one)
        assert ended(first, create(first, lines_of({"prompt": "the"})).id).status == "completed"


def test_use_of_owners_is_known_after_a_restart(tmp_path):
    store = Store(str(tmp_path), 100)
    shown = {"object": "file", "bytes": 60, "purpose": "batch"}
    record = store.add("a", None, shown)
    store.add("a", None, {**shown, "id": record.id, "bytes": 50})
    store.add("b", None, shown)
    os.close(store._lock)
    again = Store(str(tmp_path), 100)
    again.receive("a", 50)
    again.receive("a", -50)
    with pytest.raises(FullError, match=r"front_end\.batch_bytes=100"):
        again.receive("a", 51)
    again.receive("a", -51)
    again.remove(again.get("a", "file", record.id))
    again.receive("a", 100)


def test_a_temporary_folder_ends_with_its_store_and_after_a_kill(tmp_path, monkeypatch):
    program = "from moe_lora.serve.batches.store import Store; s = Store(None, 1); print(flush=True); input()"
    killed = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert killed.stdout.readline() == b"\n"
    [left] = tmp_path.iterdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    beside = Store(None, 1)
    assert left.exists(), "its server runs"
    killed.kill()
    killed.communicate()
    after = Store(None, 1)
    assert not left.exists()
    assert beside.path("").exists()
    del beside, after
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@contextmanager
def full_disk():
    """Files of this process have 3000 bytes at most."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_batch_waits_for_room_on_the_disk(tokenizer, tmp_path, caplog):
    with served(scripted(tokenizer), tokenizer, batch_dir=str(tmp_path)) as url, client_of(url) as client:
        file_id = upload(client, lines_of(*({"prompt": "the"} for _ in range(20))))
        with full_disk():
            batch = client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
            wait_until(lambda: "waits for its folder" in caplog.text, "a failed write")
        assert ended(client, batch.id).status == "completed"
        assert len(content(client, client.batches.retrieve(batch.id).output_file_id)) == 20


def test_a_full_disk_ends_its_batch_and_no_later_batch(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "RETRY_S", (0.01,))
    lines = lines_of(*({"prompt": "the"} for _ in range(20)))
    with served(scripted(tokenizer), tokenizer, batch_dir=str(tmp_path)) as url, client_of(url) as client:
        file_id = upload(client, lines)
        with full_disk():
            batch = client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
            found = ended(client, batch.id)
        assert (found.status, str(tmp_path) in found.errors.data[0].message) == ("failed", False)
        assert ended(client, create(client, lines).id).request_counts.completed == 20


def test_results_of_a_batch_outlive_a_start_that_can_not_open_them(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "RETRY_S", ())
    settings = {"batch_dir": str(tmp_path)}
    engine = scripted(tokenizer, hang_after=50)
    frontend = frontend_of(engine, tokenizer, batch_concurrency=1, **settings)
    with ServerThread(create_app(frontend)) as thread, client_of(thread.url) as client:
        batch = create(client, lines_of(*({"prompt": "the"} for _ in range(9))))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 2, "results")
    os.close(frontend.batches.store._lock)
    rows = tmp_path / f"{batch.id}.results"
    before = rows.read_bytes()
    rows.rename(tmp_path / "moved")
    rows.mkdir()  # can't be opened
    frontend = frontend_of(scripted(tokenizer), tokenizer, **settings)
    with ServerThread(create_app(frontend)) as thread, client_of(thread.url) as client:
        assert ended(client, batch.id).errors.data[0].code == "storage_failed"
        assert ended(client, create(client, lines_of({"prompt": "the"})).id).status == "completed"
    os.close(frontend.batches.store._lock)
    rows.rmdir()
    (tmp_path / "moved").rename(rows)
    with served(engine := scripted(tokenizer), tokenizer, **settings) as url, client_of(url) as client:
        assert ended(client, batch.id).request_counts.completed == 9
    assert len(engine.requests) == 9 - before.count(b"\n")


def test_a_folder_without_a_permission_is_no_server_s_fault(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "RETRY_S", (0.01,))
    folder = tmp_path / "batches"
    with served(scripted(tokenizer), tokenizer, batch_dir=str(folder)) as url, client_of(url) as client:
        file_id = upload(client, lines_of({"prompt": "the"}))
        folder.rename(tmp_path / "moved")
        with pytest.raises(openai.InternalServerError, match="can't be written") as caught:
            client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
        assert caught.value.status_code == 503
        (tmp_path / "moved").rename(folder)
        batch = client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
        assert ended(client, batch.id).status == "completed"


def test_a_line_is_no_longer_than_a_body_on_the_server(tokenizer):
    with served(scripted(tokenizer), tokenizer, max_body_bytes=4096) as url, client_of(url) as client:
        long = [{"prompt": "the", "user": "x" * num} for num in (2000, 8000, 80_000)]
        found = ended(client, create(client, lines_of(*long)).id)
        assert [(one.line, "more than 69632 bytes" in one.message) for one in found.errors.data] == [
            (3, True)
        ]
        errors = content(client, found.error_file_id)
        assert errors["n1"]["response"]["status_code"] == 413
        assert set(content(client, found.output_file_id)) == {"n0"}


def test_a_cancelled_batch_keeps_its_results(tokenizer):
    engine = scripted(tokenizer, step_s=0.005)
    with served(engine, tokenizer, batch_concurrency=1) as url, client_of(url) as client:
        batch = create(client, lines_of(*({"prompt": "the"} for _ in range(500))))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 2, "results")
        with pytest.raises(openai.BadRequestError, match="a batch reads this file"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        found = ended(client, batch.id)
        assert found.status == "cancelled"
        num = found.request_counts.completed
        assert 2 < num < 500
        assert len(content(client, found.output_file_id)) == num
        wait_until(lambda: not engine.running, "running requests end")
        with pytest.raises(openai.BadRequestError, match="has ended"):
            client.batches.cancel(batch.id)


def test_online_requests_do_not_wait_for_a_batch_in_the_front_end_s_queue(tokenizer):
    engine = scripted(tokenizer, hang_after=0)
    settings = {"max_queued_tokens": 2048, "max_queued_tokens_per_client": 2048}
    with served(engine, tokenizer, **settings) as url, client_of(url) as client:
        batch = create(client, lines_of(*({"prompt": "the"} for _ in range(20))))
        wait_until(lambda: len(engine.running) == 16, "the batch runs")
        engine.hang_after = None
        client.completions.create(model="base", prompt="the", timeout=PATIENCE_S)
        assert ended(client, batch.id).request_counts.completed == 20
    priorities = [one.priority for one in engine.requests]
    assert priorities.count(0) == 1
    assert priorities.count(BACKGROUND) == 20


def test_requests_of_batches_show_no_latency_and_no_demand(tokenizer):
    frontend = frontend_of(scripted(tokenizer), tokenizer)
    window = frontend.controller.window = DemandWindow(WallClock(), 600.0)
    with ServerThread(create_app(frontend)) as thread, client_of(thread.url) as client:
        batch = create(client, lines_of(*({"model": "shout", "prompt": "the"} for _ in range(5))))
        assert ended(client, batch.id).request_counts.completed == 5
        found = {
            (one.name, one.labels.get("adapter")): one.value
            for family in text_string_to_metric_families(frontend.metrics.render().decode())
            for one in family.samples
        }
        assert not any(value for (name, _), value in found.items() if name.endswith("_seconds_count"))
        assert found["moe_lora:adapter_requests_total", "shout"] == 5
        assert found["moe_lora:adapter_prompt_tokens_total", "shout"] == 5 * 4
        assert found["moe_lora:adapter_generation_tokens_total", "shout"] == 5 * 4
        assert sum(window.demand().counts) == 0
        client.completions.create(model="shout", prompt="the")
        assert sum(window.demand().counts) == 1


def test_a_line_is_read_once_the_server_has_room_for_its_request(monkeypatch):
    """Ten owners' workers share one slot."""
    held, answered = [], []

    async def call(app, url, body, caller, request_id):
        held.append(len(bodies))
        await asyncio.sleep(0)
        bodies.pop()
        return running.BatchAnswer(200, {})

    async def of_key(record, *, is_new):
        return None

    async def is_alive():
        return True

    async def run():
        client, ending = SimpleNamespace(is_alive=is_alive), SimpleNamespace(begun=False)
        frontend = SimpleNamespace(client=client, ending=ending)
        one = object.__new__(running.Run)
        one._record = None
        one._batches = SimpleNamespace(frontend=frontend, app=None, caller=of_key, slots=asyncio.Semaphore(1))
        lines = [SimpleNamespace(url="") for _ in range(10)]
        answered.extend(await asyncio.gather(*(one._answer(line, None, "") for line in lines)))

    bodies = []
    monkeypatch.setattr(running, "call", call)
    monkeypatch.setattr(running, "body_at", lambda source, line: bodies.append(line))
    asyncio.run(run())
    assert held == [1] * 10
    assert len(answered) == 10


def test_a_tenant_sees_its_own_files_and_batches(tokenizer, tmp_path):
    file = tmp_path / "keys.json"
    acme, other = add_key(file, rights("acme")), add_key(file, rights("acme", "shout"))
    globex = add_key(file, rights("globex", "shout"))
    engine = scripted(tokenizer)
    bodies = [{"model": name, "prompt": "the"} for name in ("base", "shout")]
    with served(engine, tokenizer, api_keys=str(file)) as url:
        first, second, third = (client_of(url, key) for key in (acme, other, globex))
        batch = create(first, lines_of(*bodies))
        found = ended(first, batch.id)
        assert found.request_counts.failed == 1, "the key may not use the adapter"
        assert second.batches.retrieve(batch.id).id == batch.id
        assert list(third.batches.list()) == list(third.files.list()) == []
        for read in (
            lambda: third.batches.retrieve(batch.id),
            lambda: third.batches.cancel(batch.id),
            lambda: third.files.content(found.output_file_id),
            lambda: third.files.retrieve(batch.input_file_id),
            lambda: third.files.delete(batch.input_file_id),
            lambda: third.files.list(after=batch.input_file_id),
            lambda: third.batches.create(
                input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                read()
        assert ended(third, create(third, lines_of(*bodies)).id).request_counts.completed == 2
        assert httpx.get(f"{url}/v1/batches", trust_env=False).status_code == 401
        for one in (first, second, third):
            one.close()
    assert {one.cache_salt for one in engine.requests} == {"acme(batch)", "globex(batch)"}
    assert {one.tenant for one in engine.requests} == {"acme", "globex"}, "no further share of an engine"
    scope = scope_of(Caller(read_keys(file)[2], is_admin=False))
    assert [scope.covers(one) for one in engine.requests] == [
        (one.tenant, one.adapter) == ("globex", "shout") for one in engine.requests
    ]


def test_a_removed_key_ends_its_batch(tokenizer, tmp_path):
    file = tmp_path / "keys.json"
    key, other = add_key(file, rights("acme")), add_key(file, rights("acme"))
    engine = scripted(tokenizer, step_s=0.02)
    with served(engine, tokenizer, api_keys=str(file), batch_concurrency=1) as url:
        batch = create(client_of(url, key), lines_of(*({"prompt": "the"} for _ in range(2000))))
        remove_key(file, key.split("-")[1])
        found = ended(client_of(url, other), batch.id)
    assert found.status == "failed"
    assert "key" in found.errors.data[0].message


def test_a_changed_rate_of_a_key_is_its_batches_rate_too(tokenizer, tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, msgspec.structs.replace(rights("acme"), requests_per_minute=1.0))
    engine = scripted(tokenizer)
    with served(engine, tokenizer, api_keys=str(file)) as url, client_of(url, key) as client:
        batch = create(client, lines_of(*({"prompt": "the"} for _ in range(50))))
        wait_until(lambda: engine.requests, "the first request")
        [entry] = read_keys(file)
        text = msgspec.json.encode({"keys": [msgspec.structs.replace(entry, requests_per_minute=1e6)]})
        new = file.with_suffix(".new")
        new.write_bytes(text)
        new.replace(file)
        assert ended(client, batch.id).request_counts.completed == 50


def test_a_batch_that_waits_for_its_tokens_is_no_refused_request(tokenizer, tmp_path, monkeypatch):
    file = tmp_path / "keys.json"
    key = add_key(file, msgspec.structs.replace(rights("acme"), tokens_per_minute=8.0))
    statuses = watch_calls(monkeypatch)
    frontend = frontend_of(scripted(tokenizer), tokenizer, api_keys=str(file), batch_concurrency=1)
    with ServerThread(create_app(frontend)) as thread, client_of(thread.url, key) as client:
        create(client, lines_of({"prompt": "the"}, {"prompt": "the"}))
        wait_until(lambda: 429 in statuses, "the batch waits for tokens")
    families = text_string_to_metric_families(frontend.metrics.render().decode())
    refused = [one for family in families for one in family.samples if one.name.endswith("refused_total")]
    assert [one.value for one in refused if one.labels["reason"] == "key_tokens"] == [0]


def test_a_shutdown_keeps_answers_and_begins_no_requests(tokenizer, tmp_path):
    engine = scripted(tokenizer, hang_after=0)
    settings = {"batch_dir": str(tmp_path), "batch_concurrency": 3}
    frontend = frontend_of(engine, tokenizer, **settings)
    with ServerThread(create_app(frontend)) as thread, client_of(thread.url) as client:
        batch = create(client, lines_of(*({"prompt": "the"} for _ in range(20))))
        wait_until(lambda: len(engine.running) == 3, "the batch runs")
        frontend.ending.begun = True
        engine.hang_after = None
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 3, "results")
    assert len(engine.requests) == 3
    os.close(frontend.batches.store._lock)
    with served(engine, tokenizer, **settings) as url, client_of(url) as client:
        assert ended(client, batch.id).request_counts.completed == 20
    assert len(engine.requests) == 20


def test_a_queued_batch_is_cancelled_at_once(tokenizer):
    engine = scripted(tokenizer, hang_after=0)
    with served(engine, tokenizer) as url, client_of(url) as client:
        first, second, third = (create(client, lines_of({"prompt": "the"})) for _ in range(3))
        wait_until(lambda: engine.running, "the first batch runs")
        found = client.batches.cancel(second.id)
        assert found.status == "cancelled"
        assert found.cancelled_at >= found.cancelling_at > 0
        assert client.files.delete(second.input_file_id).deleted
        engine.hang_after = None
        assert [ended(client, one.id).status for one in (first, third)] == ["completed"] * 2
    assert len(engine.requests) == 2


def test_a_batch_goes_on_after_the_server_was_killed(tmp_path):
    options = (*few_adapters("upper", "reverse"), "--eager", "--max-num-seqs", "2")
    options += (
        "--set",
        f"front_end.batch_dir={tmp_path / 'batches'}",
        "--set",
        "front_end.batch_concurrency=2",
    )
    bodies = [{"model": "upper", "prompt": "hello=", "temperature": 0} for _ in range(24)]
    with demo_server(tmp_path / "log1", *options) as server:
        client = client_of(server.url)
        batch = create(client, lines_of(*bodies))
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3, "results")
        server.process.kill()
        server.process.wait()
    with demo_server(tmp_path / "log2", *options) as server:
        client = client_of(server.url)
        online = client.completions.create(model="reverse", prompt="abc=", temperature=0)
        assert online.choices[0].text == "cba"
        found = ended(client, batch.id)
        assert found.request_counts.completed == 24
        results = content(client, found.output_file_id)
    assert set(results) == {f"n{index}" for index in range(24)}
    assert {one["response"]["body"]["choices"][0]["text"] for one in results.values()} == {"HELLO"}


def test_a_lost_file_fails_its_batch_alone(tokenizer, tmp_path):
    with served(scripted(tokenizer), tokenizer, batch_dir=str(tmp_path)) as url, client_of(url) as client:
        file_id = upload(client, lines_of({"prompt": "the"}))
        (tmp_path / file_id).unlink()
        batch = client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
        found = ended(client, batch.id)
        assert found.status == "failed"
        assert str(tmp_path) not in found.errors.data[0].message
        assert ended(client, create(client, lines_of({"prompt": "the"})).id).status == "completed"


def test_a_file_is_shown_with_its_whole_content(tokenizer, tmp_path, monkeypatch):
    copies, goes_on = [], threading.Event()

    def copy(source, form, target):
        copies.append(target)
        assert goes_on.wait(PATIENCE_S)
        return store.copy_part(source, form, target)

    monkeypatch.setattr(endpoints, "copy_part", copy)
    with (
        served(scripted(tokenizer), tokenizer, batch_dir=str(tmp_path)) as url,
        client_of(url) as client,
        ThreadPoolExecutor() as pool,
    ):
        made = pool.submit(upload, client, b"content")
        wait_until(lambda: copies, "the copy begins")
        assert list(client.files.list()) == []
        assert not list(tmp_path.glob("file-*"))
        goes_on.set()
        assert client.files.content(made.result(PATIENCE_S)).content == b"content"
        assert not list(tmp_path.glob("*.new"))


def test_an_upload_without_its_end_keeps_nothing(tokenizer, tmp_path, caplog):
    with served(scripted(tokenizer), tokenizer, batch_dir=str(tmp_path), batch_bytes=4096) as url:
        head = "POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as sock:
            sock.sendall(f"{head}Content-Length: 4000\r\n\r\n".encode() + b"x" * 3000)
            wait_until(lambda: list(tmp_path.glob("*.new")), "the start")
        wait_until(lambda: not list(tmp_path.glob("*.new")), "the end")
        with client_of(url) as client:
            assert upload(client, b"x" * 3000)
    assert "Exception in ASGI" not in caplog.text


@pytest.mark.parametrize(
    ("form", "status", "message"),
    [
        ({"data": {"purpose": "batch"}, "files": {"other": ("a", b"x")}}, 400, "no file"),
        ({"data": {"purpose": "vision"}, "files": {"file": ("a", b"x")}}, 400, "purpose must be batch"),
        ({"files": {"file": ("a", b"x")}}, 400, "purpose must be batch"),
        (
            {"data": {"purpose": "batch", "expires_after[seconds]": "9"}, "files": {"file": ("a", b"x")}},
            400,
            "expires_after[seconds] is not supported",
        ),
        ({"data": {"purpose": "batch"}, "files": {"file": ("a", b"x" * 9000)}}, 413, "delete some"),
        ({"content": b"{}", "headers": {"Content-Type": "application/json"}}, 400, "must be a form"),
        ({"content": b"", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "is empty"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "boundary"),
        (
            {
                "content": b"--b\r\nA: b\r\n\r\nx",
                "headers": {"Content-Type": "multipart/form-data; boundary=b"},
            },
            400,
            "cut short",
        ),
        (
            {
                "data": {"purpose": "batch"},
                "files": {"file": ("a", b"x")},
                "headers": {"Origin": "http://a.b"},
            },
            403,
            "http://a.b",
        ),
    ],
)
def test_wrong_uploads_are_refused(tokenizer, form, status, message):
    with (
        served(scripted(tokenizer), tokenizer, batch_bytes=4096) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http,
    ):
        answer = http.post("/v1/files", **form)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), (
            answer.text
        )
        assert http.get("/v1/files").json()["data"] == []
        kept = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ('é".jsonl', b"\r\n--\r\n")})
        assert kept.status_code == 200, "there is room again"
        assert http.get(f"/v1/files/{kept.json()['id']}/content").content == b"\r\n--\r\n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"seconds": 1}}, "output_expires_after"),
        ({"other": 1}, "other"),
    ],
)
def test_wrong_batches_are_refused(tokenizer, fields, param):
    with (
        served(scripted(tokenizer), tokenizer) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http,
    ):
        body = {"input_file_id": "file-x", "endpoint": ENDPOINT, "completion_window": "24h"}
        answer = http.post("/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input_file_id")
        answer = http.post("/v1/batches", json={**body, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        long = "000000001" + "9" * 4400
        for path in ("limit=0", "limit=x", f"limit={long}", "limit=0000000019999", "limit=-1", "order=up"):
            assert http.get(f"/v1/batches?{path}").status_code == 400
        assert http.get("/v1/batches?limit=010000").status_code == 200
        assert http.get("/v1/batches?after=none").status_code == 404
        assert http.post("/v1/batches", content=b"[").status_code == 400


def test_several_front_ends_have_no_batches(tokenizer, tmp_path):
    frontend = frontend_of(scripted(tokenizer), tokenizer)
    places = {name: FrontEndPlace(engines_address=f"/nowhere/{name}") for name in ("a", "b")}
    controller = ControllerConfig(address="/nowhere/c", engines_address="/nowhere/d")
    frontend.cluster = replace(frontend.cluster, front_ends=places, controller=controller)
    with ServerThread(create_app(frontend)) as thread:
        answer = httpx.get(f"{thread.url}/v1/files", trust_env=False)
    assert answer.status_code == 400
    assert "one front end" in answer.json()["error"]["message"]
    settings = replace(frontend.cluster.front_end, batch_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="batch_dir"):
        replace(frontend.cluster, front_end=settings)


@pytest.mark.parametrize("start", [serve, lambda cluster: serve_host(cluster, 1), serve_front_end])
@pytest.mark.parametrize("is_used", [True, False])
def test_a_folder_that_can_t_be_used_is_refused_before_roles_start(start, is_used, tmp_path, monkeypatch):
    def started(work) -> None:
        work.close()
        pytest.fail("started")

    monkeypatch.setattr("moe_lora.assemble._run", started)
    folder, words = tmp_path / "file" / "batches", "can't be used: Not a directory"
    (tmp_path / "file").touch()
    if is_used:
        folder, words = tmp_path / "used", "is in use by another server"
        other = Store(str(folder), 1024)
    front_end = FrontEndConfig(port=0, engines_address="127.0.0.1:7600", batch_dir=str(folder))
    engine = EngineConfig(model_dir="demo/model", device="cpu")
    cluster = ClusterConfig(engine=engine, served_model_name="demo", front_end=front_end)
    with pytest.raises(ConfigError, match=f"batch_dir={folder} {words}"):
        start(cluster)
    if is_used:
        os.close(other._lock)


def test_a_folder_serves_one_server_at_a_time(tokenizer, tmp_path):
    settings = {"batch_dir": str(tmp_path)}
    with (
        served(scripted(tokenizer), tokenizer, **settings) as first,
        served(scripted(tokenizer), tokenizer, **settings) as second,
    ):
        assert httpx.get(f"{first}/v1/files", trust_env=False).status_code == 200
        answer = httpx.get(f"{second}/v1/files", trust_env=False)
    assert answer.status_code == 503
    assert "in use" in answer.json()["error"]["message"]
