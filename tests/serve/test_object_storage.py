# SPDX-License-Identifier: Apache-2.0
"""Adapters of `s3://` over moto's server on loopback, which checks signatures; secrets are never logged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from moe_lora.adapters.peft.files import WEIGHTS_FILE

from .demo_server import DEMO, demo_server
from .test_adapters import LOAD
from .test_controls import Http

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (find_spec("moto") and find_spec("s3fs")), reason="moto[server] and s3fs are missing"
    ),
]
BUCKET, FOLDER = "adapters", DEMO / "adapters" / "upper"
ALLOWED = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
OPTIONS = ("--eager", "--dtype", "float32", "--set", "sources.allow=s3://adapters/*")


@dataclass
class Storage:
    """The server's address, and a key with rights.  cut: objects that end in the middle of their transfer."""

    url: str
    key_id: str = ""
    secret: str = ""
    cut: set[str] = field(default_factory=set)


def cutting(app: Callable[..., Iterable[bytes]], storage: Storage) -> Callable[..., Iterable[bytes]]:
    """The application with short bodies for `storage.cut`."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = app(environ, start)
        if environ["REQUEST_METHOD"] != "GET" or environ["PATH_INFO"] not in storage.cut:
            return body
        whole = b"".join(body)
        return [whole[: len(whole) // 2]]

    return answer


def fill(storage: Storage) -> None:
    """Three copies of an adapter, of which one is cut in the bucket; from here on the server checks keys."""
    import boto3

    given: Any = {"endpoint_url": storage.url, "region_name": "us-east-1"}
    given |= {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
    users, bucket = boto3.client("iam", **given), boto3.client("s3", **given)
    users.create_user(UserName="server")
    users.put_user_policy(UserName="server", PolicyName="all", PolicyDocument=json.dumps(ALLOWED))
    key = users.create_access_key(UserName="server")["AccessKey"]
    storage.key_id, storage.secret = key["AccessKeyId"], key["SecretAccessKey"]
    bucket.create_bucket(Bucket=BUCKET)
    for name in ("good", "short", "broken_off"):
        for file in FOLDER.iterdir():
            content = file.read_bytes()
            if (name, file.name) == ("short", WEIGHTS_FILE):
                content = content[: len(content) // 2]
            bucket.put_object(Bucket=BUCKET, Key=f"{name}/{file.name}", Body=content)
    storage.cut.add(f"/{BUCKET}/broken_off/{WEIGHTS_FILE}")
    httpx.post(f"{storage.url}/moto-api/reset-auth", content=b"0", trust_env=False).raise_for_status()


@pytest.fixture(scope="module")
def storage() -> Iterator[Storage]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    found = Storage("")
    app = cutting(DomainDispatcherApplication(create_backend_app), found)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        fill(found)
        yield found
    finally:
        server.shutdown()
        thread.join()


def set_keys(monkeypatch: pytest.MonkeyPatch, storage: Storage, key_id: str, secret: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", storage.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def load(http: Http, name: str) -> httpx.Response:
    return http("POST", LOAD, json={"lora_name": name, "lora_path": f"s3://{BUCKET}/{name}"})


def message(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_adapters_load_from_a_bucket_and_broken_ones_are_named(storage, tmp_path, monkeypatch):
    set_keys(monkeypatch, storage, storage.key_id, storage.secret)
    log, cache = tmp_path / "log", f"sources.folder={tmp_path / 'cache'}"
    with demo_server(log, *OPTIONS, "--lora-modules", f"local={FOLDER}", "--set", cache, anew=True) as server:
        http = Http(server.url)
        assert load(http, "good").status_code == 200
        assert http.complete("good")["text"] == http.complete("local")["text"]
        answers = [
            message(load(http, "short"), 400),
            message(load(http, "broken_off"), 503),
            message(load(http, "nobody"), 400),
        ]
        assert WEIGHTS_FILE in answers[0]
        assert "can't be fetched now" in answers[1]
        assert "does not exist" in answers[2]
        storage.cut.clear()
        assert load(http, "broken_off").status_code == 200
        assert http.complete("broken_off")["text"] == http.complete("local")["text"]
    assert storage.secret not in log.read_text() + "".join(answers)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_wrong_key_is_an_error_without_the_key(storage, tmp_path, monkeypatch, is_known):
    """is_known: the key's id exists, with another secret."""
    key_id, secret = storage.key_id if is_known else "AKIAUNKNOWNUNKNOWN00", "wrong-secret-of-this-test"
    set_keys(monkeypatch, storage, key_id, secret)
    log = tmp_path / "log"
    with demo_server(log, *OPTIONS, "--set", f"sources.folder={tmp_path / 'cache'}", anew=True) as server:
        answer = message(load(Http(server.url), "good"), 400)
    assert "the server's account may not" in answer
    assert not any(one in log.read_text() + answer for one in (key_id, secret))
