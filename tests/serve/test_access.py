# SPDX-License-Identifier: Apache-2.0
"""Keys: who may do what, and that nobody sees or disturbs what is another tenant's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora import assemble
from moe_lora.cli.main import main
from moe_lora.config import ControllerConfig, FrontEndPlace
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.controller.controller_link import directed_fleet
from moe_lora.serve import access, api_keys
from moe_lora.serve.api_keys import ApiKey, KeyRing, add_key, read_keys, remove_key
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.server import create_app
from tests.patience import PATIENCE_S

from .conftest import as_served, frontend_of, scripted
from .live_server import ServerThread
from .scripted_engine import adapter_info


def rights(tenant: str, *adapters: str, **more) -> ApiKey:
    return ApiKey(id="x", digest="", tenant=tenant, adapters=adapters, **more)


@dataclass
class Tenants:
    """A server with keys.  engine: scripted; it has an adapter of acme's, of globex' and of both."""

    http: httpx.Client
    engine: object
    file: Path
    keys: dict[str, str]

    def ask(self, who: str | None, method: str, path: str, body: object = None, **headers: str):
        if who is not None:
            headers["Authorization"] = f"Bearer {self.keys.get(who, who)}"
        return self.http.request(method, path, json=body, headers=headers)

    def complete(self, who: str | None, model: str = "base", **fields):
        return self.ask(who, "POST", "/v1/completions", {"model": model, "prompt": "hello", **fields})


@pytest.fixture
def front_end() -> dict[str, object]:
    """Further settings; tests override it."""
    return {}


@pytest.fixture
def tenants(engine, tokenizer, tmp_path, front_end) -> Iterator[Tenants]:
    with served_tenants(engine, tokenizer, tmp_path / "keys.json", front_end) as found:
        yield found


@pytest.fixture(scope="module")
def refused(tokenizer, tmp_path_factory) -> Iterator[Tenants]:
    """The same for tests whose requests are all refused."""
    file = tmp_path_factory.mktemp("refused") / "keys.json"
    with served_tenants(scripted(tokenizer), tokenizer, file, {}) as found:
        yield found


@contextlib.contextmanager
def served_tenants(engine, tokenizer, file: Path, front_end: dict[str, object]) -> Iterator[Tenants]:
    given = {
        "acme": rights("acme", "acme-*", "common"),
        "globex": rights("globex", "globex-*", "common", share=2.0),
        "admin": rights("ops", admin=True),
        "slow": rights("slow", requests_per_minute=2),
        "small": rights("small", "small-*", tokens_per_minute=20),
    }
    keys = {who: add_key(file, one) for who, one in given.items()}
    for name in ("acme-x", "globex-secret", "common"):
        engine.adapters[name] = replace(adapter_info(name), path=f"/srv/adapters/{name}")
    frontend = frontend_of(engine, tokenizer, api_keys=str(file), **front_end)
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        yield Tenants(served.http, engine, file, keys)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@contextlib.contextmanager
def under_way(tenants: Tenants, who: str, **fields: object) -> Iterator[None]:
    """A request that the engine has, and answers none meanwhile; it is left with the context."""
    tenants.engine.step_s = 1e3
    body = json.dumps({"model": "base", "ignore_eos": True, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {tenants.keys[who]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    place = tenants.http.base_url
    with socket.create_connection((place.host, place.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: tenants.engine.running)
        yield
    until(lambda: not tenants.engine.running)
    tenants.engine.step_s = 0.0


def same_but_names(response: httpx.Response, name: str) -> tuple[int, str, list[str]]:
    """What a client can tell of an answer, the name that it asked for left out."""
    headers = sorted(key for key in response.headers if key not in ("date", "x-request-id", "content-length"))
    return response.status_code, response.text.replace(name, "NAME"), headers


@pytest.mark.parametrize(
    "key", [None, "nobody", "moelora-", "moelora-00000000-x", "moelora--", "Bearer", "\u00fc-1-2"]
)
def test_without_a_valid_key_nothing_is_served_but_health(refused, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode("latin-1")}
    for method, path in (
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/"),
    ):
        found = refused.http.request(method, path, headers=headers)
        assert (found.status_code, found.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert found.json()["error"]["type"] == "AuthenticationError"
    assert refused.http.get("/health").status_code == 200
    assert not refused.engine.requests


@pytest.mark.parametrize("change", ["last", "digest", "case", "cut", "longer", "id of another", "basic"])
def test_a_key_that_is_nearly_right_is_wrong(refused, change):
    key = refused.keys["acme"]
    other = refused.keys["globex"].split("-", 2)
    text = {
        "last": key[:-1] + ("a" if key[-1] != "a" else "b"),
        "digest": read_keys(refused.file)[0].digest,
        "case": key.swapcase(),
        "cut": key[:-1],
        "longer": key + "a",
        "id of another": "-".join([*other[:2], key.split("-", 2)[2]]),
        "basic": key,
    }[change]
    kind = "Basic" if change == "basic" else "Bearer"
    found = refused.http.get("/v1/models", headers={"Authorization": f"{kind} {text}"})
    assert found.status_code == 401
    assert refused.http.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200


ADMINS = [
    ("GET", "/metrics"),
    ("GET", "/v1/adapters"),
    ("POST", "/v1/adapters/globex-secret/pin"),
    ("POST", "/v1/adapters/globex-secret/unpin"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/registry/adapters"),
    ("POST", "/v1/registry/adapters"),
    ("POST", "/v1/registry/check"),
    ("GET", "/v1/registry/adapters/globex-secret"),
    ("DELETE", "/v1/registry/adapters/globex-secret"),
    ("POST", "/v1/migrate"),
    ("GET", "/v1/instances"),
    ("POST", "/v1/instances/instance-0/drain"),
    ("POST", "/v1/instances/instance-0/undrain"),
    ("POST", "/v1/instances/instance-0/restart"),
    ("POST", "/v1/instances/scale?number=2"),
    ("GET", "/v1/provision"),
    ("GET", "/v1/lora_server"),
    ("POST", "/v1/lora_server/capacity"),
    ("POST", "/v1/lora_server/layout?layout=EP4-PP1"),
    ("POST", "/v1/lora_server/restart"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/unload_lora_adapter"),
    ("PUT", "/metrics"),
    ("GET", "/v1/completions/../adapters"),
    ("GET", "/v1/%61dapters"),
]
UNKNOWN = [
    ("GET", "/metrics/"),
    ("GET", "//metrics"),
    ("POST", "/v1/responses/x/y"),
    ("GET", "/v2/rerank"),
    ("GET", "/what/comes/later"),
]


@pytest.mark.parametrize(("method", "path"), ADMINS)
def test_tenants_may_not_do_what_administrators_do(refused, method, path):
    body = {"lora_name": "globex-secret", "lora_path": "/srv"}
    found = refused.http.send(
        refused.http.build_request(
            method,
            httpx.URL(str(refused.http.base_url).rstrip("/") + path),
            json=body,
            headers={"Authorization": f"Bearer {refused.keys['acme']}"},
        )
    )
    assert found.status_code == 403, found.text
    assert "globex" not in found.text.replace(path, "")
    assert set(refused.engine.adapters) >= {"globex-secret", "acme-x", "common"}
    assert not any(one.pinned for one in refused.engine.adapters.values())


@pytest.mark.parametrize(("method", "path"), UNKNOWN)
@pytest.mark.parametrize("who", ["acme", "admin"])
def test_what_is_nowhere_is_missing_and_not_forbidden(refused, method, path, who):
    url = httpx.URL(str(refused.http.base_url).rstrip("/") + path)
    headers = {"Authorization": f"Bearer {refused.keys[who]}"}
    found = refused.http.send(refused.http.build_request(method, url, headers=headers))
    assert found.status_code in ((404,) if who == "acme" else (404, 307)), found.text
    without = refused.http.send(refused.http.build_request(method, url))
    assert without.status_code == (401 if path == "/metrics/" else 404), without.text


def test_version_and_health_need_no_key(tenants):
    for path in ("/health", "/ready", "/live", "/version"):
        assert tenants.http.get(path).status_code == 200
        assert tenants.http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/live", "/ping", "/liveness"])
def test_load_balancers_may_ask_without_a_body(tenants, path):
    found, whole = tenants.http.head(path), tenants.http.get(path)
    assert (found.status_code, found.content) == (200, b"")
    varies = ("date", "x-request-id")
    assert [one for one in found.headers.items() if one[0] not in varies] == [
        one for one in whole.headers.items() if one[0] not in varies
    ]


def test_every_route_that_is_not_known_to_be_a_tenants_is_an_administrators(tenants):
    """A new route is closed until somebody opens it."""
    schema = tenants.ask("admin", "GET", "/openapi.json").json()
    open_to_tenants = set()
    for path, methods in schema["paths"].items():
        for method in methods:
            if tenants.ask("acme", method.upper(), path.replace("{model}", "base")).status_code != 403:
                open_to_tenants.add(path)
    assert open_to_tenants == {
        *(access.OPEN & set(schema["paths"])),
        *("/v1/models", "/v1/models/{model}"),
        *(
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/invocations",
        ),
        *(
            "/tokenize",
            "/detokenize",
            "/v1/tokenize",
            "/v1/detokenize",
            "/tokenizer_info",
            "/inference/v1/abort_requests",
        ),
        *("/inference/v1/generate", "/v1/chat/completions/batch", "/v1/chat/completions/tokens"),
        *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
        *("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
        *("/v1/completions/render", "/v1/chat/completions/render"),
        *("/v1/responses/render", "/v1/messages/render"),
        *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/pause", "/resume", "/is_paused", "/pause_generation", "/continue_generation"),
        *(
            "/generate",
            "/v1/score",
            "/abort_request",
            "/abort_requests",
            "/server_info",
            "/get_world_size",
            "/get_weight_version",
        ),
        *("/model_info", "/get_model_info", "/get_server_info"),
    }
    for path in ("/metrics", "/v1/adapters"):
        assert tenants.ask("admin", "GET", path).status_code == 200


MISSING = ["nobody-has-this", "globex-none", "acme-none"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"])
@pytest.mark.parametrize("stream", [False, True])
def test_another_tenants_adapter_is_as_one_that_does_not_exist(tenants, path, stream):
    def answer(name: str) -> httpx.Response:
        if path == "/v1/models":
            return tenants.ask("acme", "GET", f"{path}/{name}")
        what = {
            "/v1/completions": {"prompt": "hello"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
            "/v1/responses": {"input": "a"},
        }[path]
        return tenants.ask("acme", "POST", path, {"model": name, "stream": stream, **what})

    found = answer("globex-secret")
    assert found.status_code == 404
    for missing in MISSING:
        assert same_but_names(found, "globex-secret") == same_but_names(answer(missing), missing)
    assert not tenants.engine.requests
    assert answer("acme-x").status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "GLOBEX-secret",
        "globex-secret ",
        "acme-*",
        "*",
        "acme-x/../globex-secret",
        "acme-[x]",
        "globex-secre?",
    ],
)
def test_no_spelling_of_a_name_leads_to_another_tenants_adapter(refused, name):
    assert refused.complete("acme", name).status_code == 404
    assert refused.ask("acme", "GET", f"/v1/models/{name}").status_code == 404
    assert not refused.engine.requests


def test_a_wrong_request_for_another_tenants_adapter_is_refused_as_for_one_that_is_not(tenants):
    for fields in ({"max_tokens": 10**6}, {"prompt": []}, {"temperature": -1}, {"prompt": [10**6]}, {"n": 0}):
        answers = [
            same_but_names(tenants.complete("acme", name, **fields), name)
            for name in ("globex-secret", "none")
        ]
        assert answers[0] == answers[1]
        assert answers[0][0] == 400


def test_models_are_those_that_a_key_may_use_and_no_place_on_the_host_is_told(tenants):
    def seen(who: str) -> list[str]:
        return [card["id"] for card in tenants.ask(who, "GET", "/v1/models").json()["data"]]

    assert seen("acme") == ["base", "acme-x", "common"]
    assert seen("globex") == ["base", "globex-secret", "common"]
    assert seen("slow") == ["base"]
    assert seen("admin") == ["base", "shout", "acme-x", "globex-secret", "common"]
    for path in ("/v1/models", "/v1/models/common", "/v1/models/base"):
        text = tenants.ask("acme", "GET", path).text
        assert "/srv" not in text
        assert "models/base" not in text
    assert "/srv/adapters/common" in tenants.ask("admin", "GET", "/v1/models").text


def test_requests_say_whose_they_are_and_prompts_are_shared_within_a_tenant_only(tenants):
    assert tenants.complete("acme", "common").status_code == 200
    assert tenants.complete("globex", "common").status_code == 200
    assert tenants.complete("globex").status_code == 200
    found = [(one.tenant, one.share, one.cache_salt) for one in tenants.engine.requests]
    assert found == [("acme", 1.0, "acme"), ("globex", 2.0, "globex"), ("globex", 2.0, "globex")]


@pytest.mark.parametrize("front_end", [{"share_prefix_cache": True}])
def test_prompts_are_shared_if_asked_for(tenants):
    tenants.complete("acme", "common")
    tenants.complete("acme", "common", cache_salt="x")
    tenants.complete("globex", "common", cache_salt="x")
    first, *salted = [one.cache_salt for one in tenants.engine.requests]
    assert first == ""
    assert salted[0] == salted[1] != first


def test_a_salt_is_added_to_the_tenants_own(tenants):
    for who in ("acme", "globex"):
        for salt in ("x", "globex", "acme", "\0x", "x\0", None):
            assert tenants.complete(who, "common", cache_salt=salt).status_code == 200
    salts = [one.cache_salt for one in tenants.engine.requests]
    assert len(set(salts)) == len(salts)
    assert salts[5::6] == ["acme", "globex"]


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5, ["x"]])
def test_a_salt_is_a_text_of_some_length(tenants, salt):
    assert tenants.complete("acme", cache_salt=salt).status_code == 400


@pytest.mark.parametrize("field", ["tenant", "share", "key", "priority_class", "cache_salt"])
def test_a_body_can_not_say_whose_it_is(tenants, field):
    assert tenants.complete("acme", **{field: "globex"}).status_code == 200
    [request] = tenants.engine.requests
    assert (request.tenant, request.share) == ("acme", 1.0)
    assert request.cache_salt.startswith("acme")


def test_a_tenant_gets_no_report_of_the_load_of_all(tenants):
    header = {"endpoint-load-metrics-format": "TEXT"}
    answer = tenants.ask("acme", "POST", "/v1/completions", {"prompt": "hello"}, **header)
    assert answer.status_code == 200
    assert "endpoint-load-metrics" not in answer.headers


def test_headers_can_not_say_whose_it_is(tenants):
    names = ("X-Tenant", "X-Forwarded-User", "X-Api-Key", "Cookie", "X-Forwarded-For", "OpenAI-Organization")
    answer = tenants.ask(
        "acme", "POST", "/v1/completions", {"prompt": "hello"}, **dict.fromkeys(names, tenants.keys["globex"])
    )
    assert answer.status_code == 200
    assert tenants.engine.requests[-1].tenant == "acme"


def test_of_two_keys_in_one_request_the_first_counts(tenants):
    pairs = [("Authorization", f"Bearer {tenants.keys[who]}") for who in ("acme", "globex")]
    tenants.http.post("/v1/completions", json={"prompt": "hello"}, headers=pairs)
    assert tenants.engine.requests[-1].tenant == "acme"


def test_an_id_of_another_tenants_request_is_no_handle_on_it(tenants):
    for who in ("acme", "globex"):
        answer = tenants.ask(who, "POST", "/v1/completions", {"prompt": "a"}, **{"X-Request-Id": "same"})
        assert answer.status_code == 200
    first, second = (one.request_id for one in tenants.engine.requests)
    assert first != second


# Administrators' own address, without keys


def test_without_keys_places_on_the_host_are_told_at_the_administrators_address_only(engine, tokenizer):
    engine.adapters["common"] = replace(adapter_info("common"), path="/srv/adapters/common")
    frontend = frontend_of(engine, tokenizer, admin_address="127.0.0.1:1")
    with ServerThread(create_app(frontend)) as thread, as_served(thread.url, engine) as served:
        text = served.http.get("/v1/models").text
        assert "common" in text
        assert "/srv" not in text
        assert "models/base" not in text
        assert served.http.get("/metrics").status_code == 404
        assert served.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.fixture
def of_several(engine, tokenizer, tmp_path) -> ClusterConfig:
    """A cluster of front ends one and two, of which two has a place for administrators."""
    places = {name: FrontEndPlace(engines_address=str(tmp_path / name)) for name in ("one", "two")}
    places["two"] = replace(places["two"], admin_address="127.0.0.1:1")
    controller = ControllerConfig(address=str(tmp_path / "c"), engines_address=str(tmp_path / "e"))
    served = frontend_of(engine, tokenizer).cluster
    return replace(served, front_ends=places, controller=controller)


@pytest.mark.parametrize(("name", "status"), [("one", 200), ("two", 404)])
def test_one_of_several_front_ends_has_the_place_for_administrators_that_is_its_own(
    of_several, engine, tokenizer, monkeypatch, name, status
):
    made: list[Frontend] = []

    async def note(frontend: Frontend, *_: object) -> None:
        made.append(frontend)

    monkeypatch.setattr("moe_lora.serve.server.serve_forever", note)
    fleet = directed_fleet(of_several, name)
    asyncio.run(assemble.serve_http(of_several, fleet, tokenizer, ()))
    with ServerThread(create_app(made[0])) as thread, as_served(thread.url, engine) as served:
        assert served.http.get("/metrics").status_code == status


@pytest.mark.parametrize("start", [assemble.serve, partial(assemble.serve_host, num_front_ends=2)])
def test_one_front_ends_place_for_administrators_is_refused_where_all_are_on_one_host(of_several, start):
    with pytest.raises(ConfigError, match=r"front_ends.two.admin_address: .* addresses in front_end"):
        start(of_several)


# Rates


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(access, "time", found)  # the module itself is of running servers too
    return found


def test_a_key_has_so_many_requests_a_minute(monkeypatch, tenants):
    for _ in range(2):
        assert tenants.complete("slow").status_code == 200
    refused = tenants.complete("slow")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "RateLimitError")
    assert 0 < int(refused.headers["Retry-After"]) <= 30
    assert tenants.complete("acme").status_code == 200, "another key's"
    assert tenants.ask("slow", "GET", "/v1/models").status_code == 200, "generates nothing"


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 3, "max_tokens": 2}])
def test_requests_at_once_have_no_more_tokens_than_their_rate(tenants, fields):
    """The first one may take all 20 of a minute (5 and 15, or three times 5 and 2), and takes 11 at most."""
    tenants.engine.step_s = 0.02
    asked = {"prompt": [5] * 5, "max_tokens": 15, "ignore_eos": True} | fields
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tenants.complete, "small", **asked, stop=["lo"])
        until(lambda: tenants.engine.requests)
        refused = tenants.complete("small", prompt=[5], max_tokens=4)
        assert (refused.status_code, "20 tokens a minute" in refused.text) == (429, True)
        assert 0 < int(refused.headers["Retry-After"]) <= 60
        assert first.result().status_code == 200
    if "n" not in fields:  # what it did not take is there again
        assert tenants.complete("small", prompt=[5], max_tokens=4).status_code == 200
    assert 'reason="key_tokens"} 1.0' in tenants.ask("admin", "GET", "/metrics").text


def test_what_a_request_held_is_given_back_if_it_ends_without_an_answer(tenants):
    with under_way(tenants, "small", prompt=[5] * 2, max_tokens=18):
        assert tenants.complete("small", prompt=[5], max_tokens=8).status_code == 429
    until(lambda: tenants.complete("small", prompt=[5], max_tokens=16, ignore_eos=True).status_code == 200)


def test_a_prompt_counts_only_if_the_engine_took_it(tenants):
    for _ in range(3):
        assert tenants.complete("small", "none", prompt=[5] * 12, max_tokens=8).status_code == 404
        assert tenants.complete("small", "small-none", prompt=[5] * 12, max_tokens=8).status_code == 404
    tenants.engine.fail_after = 0
    for _ in range(3):
        assert tenants.complete("small", prompt=[5] * 12, max_tokens=8).status_code == 503
    tenants.engine.fail_after = 1
    assert tenants.complete("small", prompt=[5] * 12, max_tokens=8).status_code == 503
    assert tenants.complete("small", prompt=[5] * 2, max_tokens=8).status_code == 429, "that one had begun"


def test_a_rate_that_changes_leaves_held_what_is_held(tenants, monkeypatch):
    monkeypatch.setattr(api_keys, "_LOOK_AGAIN_S", 0.0)

    def change(tokens_per_minute: int) -> None:
        given = json.loads(tenants.file.read_text())
        [own] = [key for key in given["keys"] if key["tenant"] == "small"]
        own["tokens_per_minute"] = tokens_per_minute
        tenants.file.write_text(json.dumps(given))

    with under_way(tenants, "small", prompt=[5] * 2, max_tokens=8):
        change(30)
        refused = tenants.complete("small", prompt=[5] * 3, max_tokens=20)
        assert (refused.status_code, "30 tokens a minute" in refused.text) == (429, True)
        tenants.engine.refuse = "it is asked"
        assert tenants.complete("small", prompt=[5] * 3, max_tokens=6).status_code == 400
        change(8)
        assert tenants.complete("small", prompt=[5] * 3, max_tokens=5).status_code == 400
        change(20)
        assert tenants.complete("small", prompt=[5] * 3, max_tokens=17).status_code == 429


def test_what_is_held_is_waited_for_a_minute_at_most_and_what_is_owed_until_it_is_there(clock):
    allowance = access.Allowance("tokens", 60)
    held = access.Reservation(allowance, 6000)
    refused = allowance.refusal()
    assert refused is not None
    assert refused.headers["Retry-After"] == "60"
    held.spend(70)
    held.settle()
    refused = allowance.refusal()
    assert refused is not None
    assert refused.headers["Retry-After"] == "11", "10 owed, and one to begin with"
    allowance.take(600)
    refused = allowance.refusal()
    assert refused is not None
    assert refused.headers["Retry-After"] == "611"
    clock.now_s += 611
    assert allowance.refusal() is None


def test_refusals_by_keys_and_rates_are_counted(tenants):
    def counted() -> dict[str, float]:
        lines = tenants.ask("admin", "GET", "/metrics").text.splitlines()
        lines = [one for one in lines if one.startswith("moe_lora:http_refused_total")]
        return {one.split('reason="')[1].split('"')[0]: float(one.split()[-1]) for one in lines}

    assert not any(counted().values())
    tenants.complete("nobody")
    tenants.ask("acme", "GET", "/metrics")
    for _ in range(3):
        tenants.complete("slow")
    tenants.complete("small", prompt=[5] * 15, max_tokens=9, ignore_eos=True)
    tenants.complete("small")
    found = {reason: number for reason, number in counted().items() if number}
    assert found == {"key": 1, "admin": 1, "key_requests": 1, "key_tokens": 1}


def test_a_key_has_so_many_tokens_a_minute_and_owes_what_an_answer_took_beyond(tenants):
    assert tenants.complete("small", prompt=[5] * 15, max_tokens=9, ignore_eos=True).status_code == 200
    refused = tenants.complete("small")
    assert (refused.status_code, "20 tokens a minute" in refused.text) == (429, True)
    assert 12 <= int(refused.headers["Retry-After"]) <= 15  # 4 owed, and one to begin with


@given(
    per_minute=st.floats(0.5, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 1e3)), max_size=40),
)
@settings(max_examples=100, deadline=None)
def test_over_any_time_a_key_has_its_rate_and_a_minutes_worth(per_minute, steps):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "time", clock)
        allowance = access.Allowance("tokens", per_minute)
        taken = largest = 0.0
        for wait_s, amount in steps:
            clock.now_s += wait_s
            wait_s = allowance.wait_s(amount)
            if not wait_s:
                allowance.take(amount)
                taken, largest = taken + amount, max(largest, amount)
            else:
                clock.now_s += wait_s + 1e-6
                assert allowance.wait_s(amount) < 1e-3
            beyond = max(0.0, largest - per_minute)  # one that is more than a minute's worth
            limit = per_minute * (1 + (clock.now_s - 1000.0) / 60) + beyond
            assert taken <= limit * (1 + 1e-9) + 1e-6


# The file


def test_keys_file_holds_no_key_and_only_its_owner_reads_it(tmp_path):
    file = tmp_path / "keys.json"
    key = add_key(file, rights("acme", "a", requests_per_minute=5))
    text = file.read_text()
    assert key not in text
    assert key.split("-", 2)[2] not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    [kept] = read_keys(file)
    assert (kept.tenant, kept.adapters, kept.requests_per_minute) == ("acme", ("a",), 5)
    assert KeyRing(str(file)).find(key) == kept
    assert remove_key(file, kept.id) == kept
    assert read_keys(file) == []
    with pytest.raises(ConfigError, match="no key"):
        remove_key(file, kept.id)


def test_a_key_works_and_ends_without_a_restart(tenants, monkeypatch):
    monkeypatch.setattr(api_keys, "_LOOK_AGAIN_S", 0.0)
    tenants.keys["new"] = add_key(tenants.file, rights("new"))
    assert tenants.complete("new").status_code == 200
    remove_key(tenants.file, tenants.keys["acme"].split("-")[1])
    assert tenants.complete("acme").status_code == 401


def test_a_file_that_can_not_be_read_any_more_leaves_the_keys_as_they_were(tenants, monkeypatch, caplog):
    monkeypatch.setattr(api_keys, "_LOOK_AGAIN_S", 0.0)
    tenants.file.write_text('{"keys": [')
    assert tenants.complete("acme").status_code == 200
    assert tenants.complete("acme").status_code == 200
    assert caplog.text.count("the keys that were read before hold") == 1
    os.unlink(tenants.file)
    assert tenants.complete("acme").status_code == 200


def test_a_file_that_could_not_be_read_once_is_read_again(tenants, monkeypatch):
    monkeypatch.setattr(api_keys, "_LOOK_AGAIN_S", 0.0)
    remove_key(tenants.file, tenants.keys["acme"].split("-")[1])

    def too_many(path):
        raise ConfigError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(api_keys, "read_keys", too_many)
        assert tenants.complete("acme").status_code == 200
    assert tenants.complete("acme").status_code == 401


def test_who_could_read_the_keys_still_can_when_they_have_changed(tenants):
    tenants.file.chmod(0o640)
    add_key(tenants.file, rights("new"))
    assert tenants.file.stat().st_mode & 0o777 == 0o640


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="a file of another user or group needs root")


@AS_ROOT
@pytest.mark.parametrize("owner", [(0, 12345), (12345, 0), (12345, 12345)])
def test_a_changed_file_of_keys_keeps_its_user_and_group(tmp_path, owner):
    file = tmp_path / "keys.json"
    identity = add_key(file, rights("acme")).split("-")[1]
    os.chown(file, *owner)
    remove_key(file, identity)
    found = file.stat()
    assert (found.st_uid, found.st_gid) == owner


@AS_ROOT
def test_a_user_who_can_not_keep_the_group_of_the_keys_is_told_the_way_out(tmp_path, monkeypatch):
    def refuse(handle: int, user: int, group: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    file = tmp_path / "keys.json"
    identity = add_key(file, rights("acme")).split("-")[1]
    os.chown(file, 0, 12345)
    before = file.read_bytes()
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(ConfigError, match=r"not permitted; run this as root"):
        remove_key(file, identity)
    assert file.read_bytes() == before


def test_a_user_who_can_not_write_the_folder_of_the_keys_is_told_so(tmp_path, monkeypatch):
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(ConfigError, match=r"Permission denied; the folder must be writable$"):
        add_key(tmp_path / "keys.json", rights("acme"))


def test_an_empty_file_gets_its_first_key_and_a_damaged_file_stays(tmp_path):
    file = tmp_path / "keys.json"
    file.touch()
    key = add_key(file, rights("acme"))
    assert KeyRing(str(file)).find(key).tenant == "acme"
    file.write_text('{"keys": [')
    with pytest.raises(
        ConfigError, match=r"can't be read: .*; restore the file, or remove it and add keys anew"
    ):
        add_key(file, rights("acme"))
    assert file.read_text() == '{"keys": ['


GOOD = {"id": "a", "digest": "0" * 64, "tenant": "t"}


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "null", '{"keys": {}}', '{"other": []}'),
        *(
            json.dumps({"keys": keys})
            for keys in (
                [GOOD | {"admin": "yes"}],
                [GOOD | {"rights": "all"}],
                [GOOD | {"share": 0}],
                [GOOD | {"share": 1e9}],
                [GOOD | {"tokens_per_minute": -1}],
                [GOOD | {"digest": "00"}],
                [GOOD | {"tenant": ""}],
                [GOOD | {"tenant": "a\nb"}],
                [GOOD, GOOD],
                [GOOD, GOOD | {"id": "b", "share": 2}],
            )
        ),
        '{"keys": [], "keys": []}',
    ],
)
def test_a_file_that_says_something_else_is_refused_at_the_start(content, tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"keys\.json can't be read"):
        KeyRing(str(file))


def test_a_file_that_is_gone_is_logged_once_and_its_keys_hold(tmp_path, caplog):
    file = tmp_path / "keys.json"
    key = add_key(file, ApiKey(id="new", digest="", tenant="acme"))
    ring = KeyRing(str(file))
    file.unlink()
    for _ in range(2):
        ring._looked_s = float("-inf")
        assert ring.find(key) is not None
    assert [one.levelname for one in caplog.records] == ["ERROR"]
    assert "hold until it can" in caplog.text


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_command_makes_lists_and_removes_keys(tmp_path):
    file = str(tmp_path / "keys.json")
    given = ("--tenant", "acme", "--adapters", "acme-*", "--adapters", "common", "--share", "2")
    made = run("keys", "add", file, *given)
    assert (made.exit_code, made.output.count("\n")) == (0, 1)
    key = made.output.strip()
    assert KeyRing(file).find(key).share == 2
    refused = run("keys", "add", file, "--tenant", "acme")
    assert (refused.exit_code, "one share" in refused.output) == (1, True)
    assert run("keys", "add", file, "--tenant", "ops", "--admin").exit_code == 0
    refused = run("keys", "add", file, "--tenant", "ops", "--admin", "--adapters", "common")
    assert (refused.exit_code, "leave --adapters out" in refused.output) == (2, True)
    listed = run("keys", "list", file).output
    assert "acme-* common" in listed
    assert "everything (admin)" in listed
    assert key not in listed
    removed = run("keys", "remove", file, key.split("-")[1])
    assert (removed.exit_code, "of acme" in removed.output) == (0, True)
    assert KeyRing(file).find(key) is None
    assert run("keys", "add", file, "--tenant", "a b").exit_code == 1
    assert run("keys", "list", str(tmp_path / "none")).exit_code == 1
