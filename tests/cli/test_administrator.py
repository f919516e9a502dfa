# SPDX-License-Identifier: Apache-2.0
"""Calls of commands reach a server over the network, or over its socket for administrators."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moe_lora.cli import administrator
from moe_lora.cli.administrator import call, call_instance
from moe_lora.cli.main import main


class Answering(BaseHTTPRequestHandler):
    status = 200

    def found(self) -> Any:
        return {"path": self.path, "key": self.headers["Authorization"]}

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        body = json.dumps(self.found()).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


class AtSocket(socketserver.UnixStreamServer):
    def get_request(self) -> tuple[Any, Any]:
        return super().get_request()[0], ("local", 0)  # the handler wants an address


def test_a_url_may_end_in_v1_as_those_of_openai_clients():
    with socketserver.TCPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_address[1]}"
        try:
            for url in (f"http://{place}", f"http://{place}/v1", f"http://{place}/v1/", place):
                assert call(url, None, "POST", "/v1/x", 30)["path"] == "/v1/x"
        finally:
            server.shutdown()


@contextmanager
def at_socket(folder: Path, handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    path = str(folder / "admin")
    with AtSocket(path, handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield path
        finally:
            server.shutdown()


def test_a_path_is_a_socket_for_administrators(tmp_path):
    with at_socket(tmp_path, Answering) as path:
        found = call_instance(path, "key", "one/two", "drain", 10)
    assert found == {"path": "/v1/instances/one%2Ftwo/drain", "key": "Bearer key"}


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (404, {"error": {"message": "no instance"}}, "no instance"),
        (404, {"detail": "Not Found"}, "Not Found"),
        (502, {"error": "bad gateway"}, "bad gateway"),
        (503, ["busy"], "busy"),
        (200, ["other"], "no moe-lora server answers at .*other.* is no object"),
    ],
)
def test_another_server_s_answer_is_an_error_with_its_words(tmp_path, status, content, message):
    class Other(Answering):
        def found(self) -> Any:
            return content

    Other.status = status
    with at_socket(tmp_path, Other) as path, pytest.raises(ValueError, match=message):
        call(path, None, "POST", "/v1/instances/a/drain", 10)


def test_scale_waits_for_the_number_and_shows_it(monkeypatch):
    calls: list[tuple[Any, ...]] = []

    def called(*words: Any) -> dict[str, Any]:
        calls.append(words)
        return {"data": [{}] * 4}

    monkeypatch.setattr(administrator, "call", called)
    done = CliRunner().invoke(main, ["scale", "instance", "4", "--url", "u", "--limit-s", "9"])
    assert (done.exit_code, done.output) == (0, "4 instances take part\n")
    assert calls == [("u", None, "POST", "/v1/instances/scale?number=4&limit_s=9", 3609.0)]


def test_scale_waits_for_the_layout_and_shows_its_ranks(monkeypatch):
    calls: list[tuple[Any, ...]] = []

    def called(*words: Any) -> dict[str, Any]:
        calls.append(words)
        return {"ranks": [1] * 4}

    monkeypatch.setattr(administrator, "call", called)
    done = CliRunner().invoke(main, ["scale", "lora-server", "EP4-PP1", "--url", "u"])
    assert (done.exit_code, done.output) == (0, "the LoRA Server has 4 ranks, and all instances are there\n")
    assert calls == [("u", None, "POST", "/v1/lora_server/layout?layout=EP4-PP1&limit_s=300", 3900.0)]
    wrong = CliRunner().invoke(main, ["scale", "instance", "EP4-PP1"])
    assert wrong.exit_code == 2
    assert "'EP4-PP1' is not a valid" in wrong.output


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "/nowhere/admin"])
def test_a_server_that_is_not_there_is_named(url):
    with pytest.raises(ValueError, match=url):
        call(url, None, "GET", "/v1/instances", 10)
