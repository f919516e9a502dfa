# SPDX-License-Identifier: Apache-2.0
"""Administrators' keys without a file, as vLLM's --api-key."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.serve.access import STATUS, checked_keys
from moe_lora.serve.api_keys import ApiKey, add_key, digest_of
from moe_lora.serve.server import create_app
from tests.serve.test_metrics import samples, value

from .conftest import as_served, frontend_of
from .live_server import ServerThread

KEYS = ("first-key", "second-key")
DIGESTS = tuple(map(digest_of, KEYS))
OPEN = (*sorted(STATUS), "/health", "/live", "/ready")
GUARDED = (
    ("GET", "/v1/models"),
    ("GET", "/v1/adapters"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/load_lora_adapter"),
)


@pytest.fixture
def settings() -> dict[str, object]:
    """Further settings; tests override it."""
    return {}


@pytest.fixture
def http(engine, tokenizer, settings) -> Iterator[httpx.Client]:
    frontend = frontend_of(engine, tokenizer, admin_key_digests=DIGESTS, **settings)
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        yield served.http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_a_key_only_the_state_of_the_server_is_shown(http, engine):
    for path in OPEN:
        assert http.get(path).status_code == 200, path
        assert http.get(f"{path}/", follow_redirects=True).status_code == 200, path
    for method, path in GUARDED:
        assert http.request(method, path).status_code == 401, path
        for wrong in ("", "first-key2", DIGESTS[0]):
            assert http.request(method, path, headers=bearer(wrong or "x")).status_code == 401
    assert http.get("/v1/nothing").status_code == 404
    assert not engine.requests


@pytest.mark.parametrize("key", KEYS)
def test_each_key_may_do_everything(http, key):
    body = {"prompt": "hello", "max_tokens": 2, "model": "shout"}
    assert http.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
    assert http.get("/v1/adapters", headers=bearer(key)).status_code == 200
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "shout"}, headers=bearer(key))
    assert answer.status_code == 200


def test_their_requests_count_as_one_tenants(http):
    for key in KEYS:
        http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}, headers=bearer(key))
    found = samples(http)
    named = {"tenant": "(api-key)", "finished_reason": "length"}
    assert value(found, "moe_lora:tenant_requests_total", **named) == 2


@pytest.fixture
def tenants_file(tmp_path) -> tuple[str, str]:
    file = tmp_path / "keys.json"
    return str(file), add_key(file, ApiKey(id="x", digest="", tenant="acme"))


def test_beside_a_file_the_rules_of_the_file_hold(engine, tokenizer, tenants_file):
    file, key = tenants_file
    frontend = frontend_of(engine, tokenizer, admin_key_digests=DIGESTS, api_keys=file)
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        assert served.http.get("/metrics").status_code == 401
        assert served.http.get("/metrics", headers=bearer(KEYS[1])).status_code == 200
        assert served.http.get("/v1/models", headers=bearer(key)).status_code == 200
        assert served.http.get("/v1/adapters", headers=bearer(key)).status_code == 403


@pytest.mark.parametrize("settings", [{"docs_page": False}])
def test_the_page_may_be_left_out(http):
    for path in ("/", "/docs", "/openapi.json"):
        assert http.get(path).status_code == 404
    assert http.get("/metrics").status_code == 200


@pytest.mark.parametrize("settings", [{"admin_address": "127.0.0.1:1"}])
def test_an_address_of_administrators_hides_the_metrics_elsewhere(http):
    assert http.get("/metrics").status_code == 404
    assert http.get("/metrics", headers=bearer(KEYS[0])).status_code == 404


def test_a_key_in_place_of_its_digest_is_refused(engine, tokenizer):
    with pytest.raises(ConfigError, match=re.escape("--api-key KEY")):
        frontend_of(engine, tokenizer, admin_key_digests=("secret",))
    assert checked_keys(frontend_of(engine, tokenizer).config) is None
