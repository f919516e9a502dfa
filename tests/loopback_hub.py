# SPDX-License-Identifier: Apache-2.0
"""A hub of models on loopback: repositories are folders with one commit, behind the Hub's HTTP paths."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_INFO = re.compile(r"/api/models/([\w.-]+/[\w.-]+?)(?:/revision/([\w.-]+))?(?:\?.*)?")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([\w.-]+)/([^?]+)(?:\?.*)?")
TOKEN = "hf_secret_of_the_test"


@dataclass
class Hub:
    """folders: of repositories by name.  private: repositories that need `TOKEN`.  calls: of files.

    asked: repositories by the calls for their facts, which are answered while `answers` is set.
    """

    url: str = ""
    folders: dict[str, Path] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    states_sizes: bool = True

    def files(self, repo: str) -> dict[str, Path]:
        folder = self.folders[repo]
        return {str(one.relative_to(folder)): one for one in sorted(folder.rglob("*")) if one.is_file()}

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1()
        for name, path in self.files(repo).items():
            digest.update(name.encode() + path.read_bytes())
        return digest.hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            """Stay silent."""

        def do_GET(self) -> None:
            if found := _INFO.fullmatch(self.path):
                self._info(*found.groups())
            elif found := _FILE.fullmatch(self.path):
                self._file(*found.groups())
            else:
                self._send(404, b"{}")

        do_HEAD = do_GET

        def _known(self, repo: str, revision: str | None) -> bool:
            if repo not in hub.folders or (
                repo in hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"
            ):
                self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
                return False
            if revision not in (None, "main", hub.commit(repo)):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return False
            return True

        def _info(self, repo: str, revision: str | None) -> None:
            hub.asked.append(repo)
            hub.answers.wait()
            if self._known(repo, revision):
                files = [
                    {"rfilename": name, "size": path.stat().st_size if hub.states_sizes else None}
                    for name, path in hub.files(repo).items()
                ]
                self._send(200, json.dumps({"id": repo, "sha": hub.commit(repo), "siblings": files}).encode())

        def _file(self, repo: str, revision: str, name: str) -> None:
            if not self._known(repo, revision):
                return
            content = hub.files(repo)[name].read_bytes()
            if self.command == "GET":
                hub.calls.append(name)
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self._send(200, content, {"X-Repo-Commit": hub.commit(repo), "ETag": etag})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


@contextmanager
def loopback_hub() -> Iterator[Hub]:
    hub = Hub()
    hub.answers.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def reached_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process takes for the Hugging Face Hub, without a token."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    with loopback_hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield found
