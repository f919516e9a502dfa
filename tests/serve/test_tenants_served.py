# SPDX-License-Identifier: Apache-2.0
"""The real server with keys: what is one tenant's no other sees or disturbs, in whichever way it tries."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from moe_lora.config import FrontEndConfig
from moe_lora.core.errors import ConfigError
from moe_lora.serve.access import checked_keys
from tests.patience import PATIENCE_S

from .demo_server import DEMO
from .served_tenants import (
    MAX_LORAS,
    MOST_CONNECTIONS,
    MOST_OF_ONE,
    MOST_QUEUED,
    SECRET,
    ServedTenants,
    make_certificate,
    serving_tenants,
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tenants(tmp_path_factory, certificate) -> Iterator[ServedTenants]:
    with serving_tenants(tmp_path_factory.mktemp("served"), *certificate) as found:
        yield found


def test_who_asks_for_ten_times_as_much_is_not_served_before_another(tenants):
    started = tenants.order_of_starts({"acme": MOST_OF_ONE, "globex": MOST_QUEUED - MOST_OF_ONE})
    assert "globex" not in started[-20:], "it waited for all that had come before"


def test_what_comes_without_tls_is_not_served(tenants):
    place = httpx.URL(tenants.url)
    with socket.create_connection((place.host, place.port), timeout=PATIENCE_S) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in plain.recv(1000)


def test_connections_count_before_their_handshake(tenants):
    place, other = httpx.URL(tenants.url), ("127.0.0.2", 0)

    def connect() -> socket.socket:
        return socket.create_connection((place.host, place.port), timeout=PATIENCE_S, source_address=other)

    def refused() -> float:
        text = tenants.ask("ops", "GET", "/metrics", admin=True).text
        [found] = re.findall(r'http_refused_total{.*reason="client_connections"} (\S+)', text)
        return float(found)

    before = refused()
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(connect())
        with connect() as one_more, contextlib.suppress(ConnectionError):
            assert one_more.recv(1) == b"", "it is closed at once, whatever it sends"
        assert refused() == before + 1
        assert tenants.ask("acme", "GET", "/version").status_code == 200, "another client"
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:  # they count no more
        with contextlib.suppress(ConnectionError, ssl.SSLError), connect() as plain:
            tenants.context.wrap_socket(plain, server_hostname=place.host).close()
            return
        time.sleep(0.01)
    raise AssertionError("none is let in again")


def test_administrators_have_a_socket_of_their_own_and_read_below_the_root_only(tenants, tmp_path):
    assert stat.S_IMODE(tenants.admins.stat().st_mode) == 0o600
    assert tenants.ask("ops", "GET", "/metrics").status_code == 404, "not at this address"
    assert tenants.ask(None, "GET", "/metrics", admin=True).status_code == 401
    assert "moe_lora" in tenants.ask("ops", "GET", "/metrics", admin=True).text
    outside = {"lora_name": "x", "lora_path": str(tmp_path)}
    found = tenants.ask("ops", "POST", "/v1/load_lora_adapter", outside, admin=True)
    assert (found.status_code, "adapter_root" in found.text) == (404, True)


def test_what_can_not_be_used_is_known_at_the_start(tmp_path, certificate):
    cert, key = map(str, certificate)
    (tmp_path / "keys").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="tls_cert and tls_key go together"):
        FrontEndConfig(tls_cert=cert)
    for settings, words in (
        ({"api_keys": str(tmp_path / "keys")}, "can't be read"),
        ({"tls_cert": key, "tls_key": key}, "can't be used"),
        ({"tls_cert": cert, "tls_key": cert}, "can't be used"),
        ({"tls_cert": cert, "tls_key": str(tmp_path / "none")}, "can't be used"),
    ):
        with pytest.raises(ConfigError, match=words):
            checked_keys(FrontEndConfig(**settings))
    assert checked_keys(FrontEndConfig(tls_cert=cert, tls_key=key)) is None


# Ways to what is another's


Way = Callable[[ServedTenants], None]
WAYS: dict[str, Way] = {}


def way(words: str) -> Callable[[Way], Way]:
    """One way in which acme tries to get at what is globex', who alone may use the adapter SECRET."""

    def add(function: Way) -> Way:
        WAYS[words] = function
        return function

    return add


def as_missing(tenants: ServedTenants, path: str, body: dict | None = None) -> None:
    """What acme is answered for SECRET is what it is answered for a name that nobody has."""
    found = []
    for name in (SECRET, "nobodys"):
        asked = None if body is None else {**body, "model": name}
        answer = tenants.ask("acme", "GET" if body is None else "POST", path.replace("NAME", name), asked)
        headers = sorted(
            one for one in answer.headers if one not in ("date", "x-request-id", "content-length")
        )
        found.append((answer.status_code, answer.text.replace(name, "NAME"), headers))
    assert found[0] == found[1]
    assert 400 <= found[0][0] < 500


def cached(tenants: ServedTenants, who: str, **body: object) -> int:
    """Prompt tokens that were found computed."""
    answer = tenants.ask(who, "POST", "/v1/completions", {"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def raw(tenants: ServedTenants, *parts: bytes) -> bytes:
    """What is answered to these bytes on one connection."""
    place = httpx.URL(tenants.url)
    with (
        socket.create_connection((place.host, place.port), timeout=PATIENCE_S) as plain,
        tenants.context.wrap_socket(plain, server_hostname=place.host) as connection,
    ):
        for part in parts:
            connection.sendall(part)
        found = b""
        try:
            while more := connection.recv(1 << 16):
                found += more
        except (TimeoutError, ssl.SSLError, ConnectionError):
            pass
        return found


# Names


@way("its adapter by name, for text")
def _(tenants):
    as_missing(tenants, "/v1/completions", {"prompt": "hello"})


@way("its adapter by name, for a chat")
def _(tenants):
    as_missing(tenants, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})


@way("its adapter by name, as a stream")
def _(tenants):
    as_missing(tenants, "/v1/completions", {"prompt": "hello", "stream": True})


@way("its adapter's card")
def _(tenants):
    as_missing(tenants, "/v1/models/NAME")


@way("the list of models")
def _(tenants):
    cards = tenants.ask("acme", "GET", "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["demo", "upper"]
    assert [card["root"] for card in cards] == ["demo", "upper"], "no places on the host"


@way("other spellings of its adapter's name")
def _(tenants):
    for name in (
        SECRET.upper(),
        f"{SECRET} ",
        f"upper/../{SECRET}",
        f"./{SECRET}",
        "rev*",
        "%72everse",
        "reverse\0",
    ):
        answer = tenants.ask("acme", "POST", "/v1/completions", {"model": name, "prompt": "hello"})
        assert answer.status_code == 404, name


@way("a request for its adapter that is wrong otherwise")
def _(tenants):
    for fields in ({"max_tokens": 10**6}, {"prompt": []}, {"temperature": -1}, {"n": 0}, {"priority": 10**9}):
        as_missing(tenants, "/v1/completions", {"prompt": "hello", **fields})


@way("how long an error takes: the engine is not asked, it stands still")
def _(tenants):
    tenants.ask("acme", "GET", "/v1/models")
    with tenants.stopped_engine():
        as_missing(tenants, "/v1/completions", {"prompt": "hello"})


@way("its adapter among several prompts and choices")
def _(tenants):
    as_missing(tenants, "/v1/completions", {"prompt": ["hello", "you"], "n": 2})


# Computed prompts


@way("its prompt, with the adapter that both may use")
def _(tenants):
    assert cached(tenants, "globex", model="upper", prompt=tenants.prompt) == 0
    assert cached(tenants, "globex", model="upper", prompt=tenants.prompt) > 0
    assert cached(tenants, "acme", model="upper", prompt=tenants.prompt) == 0


@way("its prompt, with the base model")
def _(tenants):
    cached(tenants, "globex", prompt=tenants.prompt)
    assert cached(tenants, "globex", prompt=tenants.prompt) > 0
    assert cached(tenants, "acme", prompt=tenants.prompt) == 0


@way("its prompt among many in one request")
def _(tenants):
    cached(tenants, "globex", prompt=tenants.prompt)
    assert cached(tenants, "acme", prompt=[tenants.prompt, [9] * 60], n=2) == 0


@way("its prompt, in a user's name")
def _(tenants):
    cached(tenants, "globex", prompt=tenants.prompt)
    assert cached(tenants, "acme", prompt=tenants.prompt, user="globex") == 0


@way("fields that say whose a request is")
def _(tenants):
    for number, field in enumerate(("tenant", "share", "salt", "api_key", "cache_salt")):
        prompt = [number + 3, number + 4, *tenants.prompt]
        cached(tenants, "globex", prompt=prompt)
        assert cached(tenants, "globex", prompt=prompt) > 0
        assert cached(tenants, "acme", prompt=prompt, **{field: "globex"}) == 0, field
    for field in ("adapter", "lora_path", "request_ids"):
        answer = tenants.ask("acme", "POST", "/v1/completions", {"prompt": "hello", field: "globex"})
        assert answer.status_code == (404 if field == "lora_path" else 400), field


@way("another tenant's salt")
def _(tenants):
    prompt = tenants.prompt[::-1]
    assert cached(tenants, "globex", prompt=prompt, cache_salt="same") == 0
    assert cached(tenants, "globex", prompt=prompt, cache_salt="same") > 0
    assert cached(tenants, "acme", prompt=prompt, cache_salt="same") == 0
    assert cached(tenants, "globex", prompt=prompt) == 0, "nor without it"


@way("headers that say whose a request is")
def _(tenants):
    names = (
        "X-Tenant",
        "X-Api-Key",
        "Api-Key",
        "X-Forwarded-User",
        "Cookie",
        "OpenAI-Organization",
        "OpenAI-Project",
    )
    headers = dict.fromkeys(names, tenants.keys["globex"])
    answer = tenants.ask("acme", "GET", f"/v1/models/{SECRET}", headers=headers)
    assert answer.status_code == 404


# Keys


@way("its key's id with another secret")
def _(tenants):
    _, identity, _ = tenants.keys["globex"].split("-", 2)
    key = "-".join(["moelora", identity, tenants.keys["acme"].split("-", 2)[2]])
    assert (
        tenants.ask(None, "GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 401
    )


@way("its key's digest, as the file has it")
def _(tenants):
    digest = json.loads(tenants.file.read_text())["keys"][1]["digest"]
    answer = tenants.ask(None, "GET", "/v1/models", headers={"Authorization": f"Bearer {digest}"})
    assert answer.status_code == 401


@way("a key in the address")
def _(tenants):
    for query in ("api_key", "key", "access_token", "authorization"):
        assert tenants.ask(None, "GET", f"/v1/models?{query}={tenants.keys['globex']}").status_code == 401


@way("a connection over which it was served")
def _(tenants):
    get = b"GET /v1/models/%s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n"
    names = SECRET.encode(), tenants.keys["globex"].encode(), tenants.keys["acme"].encode()
    last = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    found = raw(tenants, get % names[:2] + get % (names[0], names[2]) + last)
    assert re.findall(rb"HTTP/1\.1 (\d+)", found) == [b"200", b"404", b"401"]


@way("a request hidden in another's body")
def _(tenants):
    hidden = b"GET /v1/models/%s HTTP/1.1\r\nHost: x\r\n\r\n" % SECRET.encode()
    for lengths in (
        b"Content-Length: 4\r\nTransfer-Encoding: chunked",
        b"Content-Length: 4\r\nContent-Length: 90",
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n\r\n0\r\n\r\n"
        found = raw(tenants, head % (tenants.keys["acme"].encode(), lengths) + hidden)
        assert found.startswith(b"HTTP/1.1 400"), found
        assert found.count(b"HTTP/1.1 ") == 1


# What administrators may

ADMINS = [
    ("GET", "/metrics", None),
    ("GET", "/v1/adapters", None),
    ("POST", "/v1/load_lora_adapter", {"lora_name": SECRET, "lora_path": "upper", "load_inplace": True}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": SECRET}),
    ("POST", f"/v1/adapters/{SECRET}/pin", None),
    ("POST", f"/v1/adapters/{SECRET}/unpin", None),
    ("DELETE", f"/v1/registry/adapters/{SECRET}", None),
    ("GET", f"/v1/registry/adapters/{SECRET}", None),
    ("POST", "/v1/migrate", {"source": "instance-0", "target": "instance-0"}),
    ("GET", "/v1/provision", None),
    ("POST", "/v1/lora_server/capacity", {"capacity": 1}),
]


def admins_way(method: str, path: str, body: dict | None) -> Way:
    def tried(tenants: ServedTenants) -> None:
        assert tenants.ask("acme", method, path, body).status_code == 404, "not at this address"
        assert tenants.ask("acme", method, path, body, admin=True).status_code == 403, "nor at that one"

    return tried


WAYS |= {f"{method} {path}": admins_way(method, path, body) for method, path, body in ADMINS}


@way("an administrator's path spelled otherwise")
def _(tenants):
    spelled = (
        "//metrics",
        "/metrics/",
        "/v1/models/../../metrics",
        "/v1/completions/../adapters",
        "/V1/adapters",
    )
    for target in (
        *spelled,
        "/v1/%61dapters",
        "/v1/models/..%2f..%2fmetrics",
        "https://x/metrics",
        "/metrics?/v1/models",
    ):
        head = "GET {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\r\n"
        found = raw(tenants, head.format(target, tenants.keys["acme"]).encode())
        assert found[9:12] in (b"404", b"403"), (target, found)


@way("another method")
def _(tenants):
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"):
        for path in ("/metrics", f"/v1/models/{SECRET}", "/v1/adapters"):
            assert tenants.ask("acme", method, path).status_code in (403, 404, 405), (method, path)


@way("what needs no key, or anybody's: health and the descriptions")
def _(tenants):
    for path in ("/", "/docs", "/openapi.json", "/version", "/health", "/ready", "/live"):
        answer = tenants.ask("acme", "GET", path)
        assert answer.status_code == 200
        assert SECRET not in answer.text
        assert "globex" not in answer.text


# What it has under way


def beside_its_stream(tenants: ServedTenants, tried: Callable[[], None]) -> None:
    """What is tried changes nothing of a stream of globex', whose id is known."""
    body = {"model": SECRET, "prompt": tenants.prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": "known", "Authorization": f"Bearer {tenants.keys['globex']}"}
    body |= {"return_token_ids": True, "temperature": 0}
    with tenants.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        rest = answer.iter_lines()
        lines = [next(rest)]
        tried()
        lines += rest
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    tokens = [one for event in events for choice in event["choices"] for one in choice["token_ids"]]
    assert (answer.status_code, len(tokens), lines[-2]) == (200, 60, "data: [DONE]")


@way("to end its request by its id")
def _(tenants):
    def tried() -> None:
        for method, path in (
            *(("DELETE", "/v1/completions/cmpl-known"), ("POST", "/v1/completions/cmpl-known/cancel")),
            *(("POST", "/v1/abort"), ("POST", "/abort_request"), ("DELETE", "/v1/completions")),
        ):
            answer = tenants.ask("acme", method, path, {"request_id": "known", "rid": "known"})
            assert answer.status_code in (400, 404, 405), path

    beside_its_stream(tenants, tried)


@way("a request of the same id, that ends and that is left")
def _(tenants):
    def tried() -> None:
        same = {"X-Request-Id": "known"}
        body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "request_id": "known"}
        assert tenants.ask("acme", "POST", "/v1/completions", body, headers=same).status_code == 200
        headers = {**same, "Authorization": f"Bearer {tenants.keys['acme']}"}
        left = {"prompt": "hello", "max_tokens": 50, "ignore_eos": True, "stream": True}
        with tenants.http.stream("POST", "/v1/completions", json=left, headers=headers) as answer:
            next(answer.iter_lines())

    beside_its_stream(tenants, tried)


@way("a request that is over at once")
def _(tenants):
    def tried() -> None:
        body = {"prompt": tenants.prompt, "max_tokens": 50, "ignore_eos": True, "timeout": 1e-3}
        assert tenants.ask("acme", "POST", "/v1/completions", body).status_code == 408

    beside_its_stream(tenants, tried)


@way("a better place in the queue, by priority")
def _(tenants):
    started = tenants.order_of_starts({"acme": MOST_OF_ONE, "globex": MOST_QUEUED - MOST_OF_ONE}, acme=-100)
    assert "globex" not in started[-20:]


@way("the places of its adapters: many cold ones of another's leave them where they are")
def _(tenants):
    def residency() -> dict[str, str]:
        cards = tenants.ask("ops", "GET", "/v1/adapters", admin=True).json()["data"]
        return {card["id"]: card["residency"] for card in cards}

    def ask(name: str) -> int:
        body = {"model": name, "prompt": [5] * 10, "max_tokens": 1}
        return tenants.ask("acme", "POST", "/v1/completions", body).status_code

    names = [f"cold-{number}" for number in range(4 * MAX_LORAS)]
    try:
        for name in names:
            body = {"lora_name": name, "lora_path": str(DEMO / "adapters" / "caesar")}
            assert tenants.ask("ops", "POST", "/v1/load_lora_adapter", body, admin=True).status_code == 200
        tenants.of_globex()
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(ask, names)) == {200}
        found = residency()
        assert found[SECRET] == "device"
        assert [found[name] for name in names].count("device") < MAX_LORAS
    finally:
        for name in names:
            tenants.ask("ops", "POST", "/v1/unload_lora_adapter", {"lora_name": name}, admin=True)


@way("its rate: what one spends the other has")
def _(tenants):
    body = {"prompt": [5] * 10, "max_tokens": 5, "ignore_eos": True}
    for _ in range(20):  # four times its rate
        found = tenants.ask("metered", "POST", "/v1/completions", body).status_code
        if found != 200:
            break
    assert found == 429
    assert tenants.ask("acme", "POST", "/v1/completions", body).status_code == 200
    assert tenants.ask("globex", "POST", "/v1/completions", body).status_code == 200


@way("its place in the queue: who fills its own part is refused, and nobody else")
def _(tenants):
    body = {"prompt": [5] * 10, "max_tokens": 5, "ignore_eos": True}
    with ThreadPoolExecutor(MOST_OF_ONE + 1) as pool:
        with tenants.stopped_engine():
            ask = (tenants.ask, "acme", "POST", "/v1/completions", body)
            asked = [pool.submit(*ask) for _ in range(MOST_OF_ONE)]
            tenants.wait_until_full("acme")
            assert tenants.has_room("globex")
        assert {one.result().status_code for one in asked} == {200}


@way("what the log says: it names no prompt, no key")
def _(tenants):
    marked = "a very private sentence"
    assert (
        tenants.ask("globex", "POST", "/v1/completions", {"model": SECRET, "prompt": marked}).status_code
        == 200
    )
    log = tenants.server.log.read_text()
    assert marked not in log
    assert not [key for key in tenants.keys.values() if key.split("-", 2)[2] in log]


@way("a page in a browser")
def _(tenants):
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    for method in ("OPTIONS", "GET"):
        answer = tenants.ask("acme", method, "/v1/models", headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("words", WAYS)
def test_no_way_leads_to_what_is_another_tenants(tenants, words):
    WAYS[words](tenants)
    assert tenants.of_globex() == tenants.at_first, "globex has and is answered what it had and was"
