# SPDX-License-Identifier: Apache-2.0
"""What an etcd's gateway may answer; `tests/dist/test_elected_controllers.py` asks a real one."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from moe_lora.dist.cluster.leadership import LostLeaseError, StoreError
from moe_lora.dist.cluster.leadership.etcd_store import EtcdStore

TTL_S = 300.0
"""A call may take a fifth."""


@contextmanager
def gateway(answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Iterator[str]:
    """host:port of a member that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, said = answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode() + b"\n")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def held(holder: str, revision: int) -> dict[str, Any]:
    value = b64encode(holder.encode()).decode()
    return {"kvs": [{"value": value, "create_revision": str(revision)}]}


class Answers:
    """A lease that `holder` has; each field may change."""

    def __init__(self) -> None:
        self.key: dict[str, Any] = {}
        self.renewed: Any = {"result": {"ID": "9", "TTL": "5"}}
        self.asked: list[str] = []

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(path)
        if path == "/v3/kv/txn":
            [one] = body["success"]
            self.key = {"kvs": [{"value": one["request_put"]["value"], "create_revision": "41"}]}
        found = {
            "/v3/kv/range": self.key,
            "/v3/lease/grant": {"ID": "9"},
            "/v3/lease/keepalive": self.renewed,
        }
        return 200, found.get(path, {})


def test_the_revision_of_the_key_is_the_epoch():
    answers = Answers()
    with gateway(answers) as member:
        store = EtcdStore([member], "k", TTL_S)
        assert store.acquire("a") == ("a", 41)
        store.renew()
        store.release()
        assert answers.asked[-1] == "/v3/lease/revoke"
        answers.key = held("b", 50)
        assert store.acquire("a") == ("b", 50)
        assert answers.asked[-1] == "/v3/kv/range", "a held key costs no lease"


@pytest.mark.parametrize("lost", ["expired", "taken", "deleted"])
def test_a_lost_lease_is_found_by_the_next_renewal(lost):
    answers = Answers()
    with gateway(answers) as member:
        store = EtcdStore([member], "k", TTL_S)
        store.acquire("a")
        if lost == "expired":
            answers.renewed = {"result": {"ID": "9"}}
        else:
            answers.key = held("b", 50) if lost == "taken" else {}
        with pytest.raises(LostLeaseError):
            store.renew()


def test_the_next_member_answers_for_one_that_does_not():
    answers, broken = Answers(), []

    def no_leader(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        broken.append(path)
        return 503, {"error": "etcdserver: no leader"}

    with gateway(no_leader) as bad, gateway(answers) as good:
        store = EtcdStore([bad, "127.0.0.1:1", good], "k", TTL_S)
        assert store.acquire("a") == ("a", 41)
        store.renew()
        assert len(broken) == 1, "calls begin at the member that answered"


@pytest.mark.parametrize("said", [(500, {}), (200, b"no json"), (200, {"error": {"message": "no leader"}})])
def test_without_a_good_answer_the_error_says_what_to_do(said):
    with gateway(lambda path, body: said) as member:
        store = EtcdStore([member], "k", TTL_S)
        for call in (store.renew, lambda: store.acquire("a")):
            with pytest.raises(StoreError, match="start a majority of its members"):
                call()
        store.release()  # no call: no lease was granted


def test_a_release_without_a_good_answer_is_told():
    answers = Answers()
    with gateway(answers) as member:
        store = EtcdStore([member], "k", TTL_S)
        store.acquire("a")
    with pytest.raises(StoreError, match="start a majority of its members"):
        store.release()
