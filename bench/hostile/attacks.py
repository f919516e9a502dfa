# SPDX-License-Identifier: Apache-2.0
"""The attacks: functions of an `Attacker`, about ten seconds each on a responsive server."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.harness.records import ROOT

from .attacker import CHAT, COMPLETIONS, HEAD, Attacker, post
from .hostile_adapters import hostile_configs, lying_headers

Attack = Callable[[Attacker], None]
ATTACKS: dict[str, Attack] = {}
SHORT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 1}
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
LONG_STREAM = {**LONG, "max_tokens": 250, "stream": True, "n": 4, "logprobs": 5}
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n"
LOAD, UNLOAD = b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"
GOOD_ADAPTER = ROOT / "demo" / "adapters" / "rot13-r2"
NUM_ADAPTERS = 200
NUM_CALLS = 500


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


def one_body(name: str, make: Callable[[], bytes], path: bytes = COMPLETIONS, *, more: bytes = b"") -> None:
    """An attack by one request with this body."""

    def run(attacker: Attacker) -> None:
        attacker.ask(post(make(), path, more=more))

    ATTACKS[name] = run


def raw(name: str, *parts: bytes, wait_s: float = 3.0) -> None:
    """An attack by bytes over one connection, part by part."""

    def run(attacker: Attacker) -> None:
        attacker.ask(*parts, wait_s=wait_s, pause_s=0.02)

    ATTACKS[name] = run


one_body("wrong-typed prompts, 10^6", lambda: b'{"prompt":[' + b"{}," * 10**6 + b"{}]}")
one_body("wrong-typed prompts, 6 10^5", lambda: b'{"prompt":[' + b"{}," * 600_000 + b"{}]}")
one_body("unknown fields, 10^5", lambda: _fields(b"u%d", 100_000))
one_body("token ids, 10^7", lambda: b'{"prompt":[' + b"1," * 10**7 + b"1]}")
one_body("token ids, 9 10^5", lambda: b'{"prompt":[' + b"1," * 900_000 + b"1]}")
one_body("lists of ids, 4 10^5", lambda: b'{"prompt":[' + b"[1]," * 400_000 + b"[1]]}")
one_body("unknown fields, 10^6", lambda: _fields(b"unknown_%d", 10**6))
one_body("unknown fields, 3 10^4", lambda: _fields(b"u%d", 30_000))
one_body("unknown fields of an adapter, 10^5", lambda: _fields(b"u%d", 100_000), LOAD)
one_body("one field 10^6 times", lambda: b"{" + b'"prompt":"a",' * 10**6 + b'"n":1}')
one_body(
    "neutral fields of the wrong kind",
    lambda: b'{"prompt":"a","logit_bias":' + b"[" * 500 + b"]" * 500 + b"}",
)
one_body("lists in lists, 10^5 deep", lambda: b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
one_body("lists never closed, 10^6", lambda: b"[" * 10**6)
one_body("objects in objects, 10^5 deep", lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
one_body(
    "variables of a template, 900 deep",
    lambda: (
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"chat_template_kwargs":{"x":'
        + b"[" * 900
        + b"]" * 900
        + b"}}"
    ),
    CHAT,
)
one_body("a number of 2 10^6 digits", lambda: b'{"prompt":"a","seed":' + b"9" * 2_000_000 + b"}")
one_body("a number of 4000 digits as a token", lambda: b'{"prompt":[' + b"9" * 4000 + b"]}")
one_body("an exponent of 10^6 digits", lambda: b'{"prompt":"a","top_p":1e' + b"9" * 10**6 + b"}")
one_body("a text of 2 MB", lambda: json.dumps({"prompt": "hello " * 345_000, "max_tokens": 1}).encode())
one_body(
    "a text of one word, 1 MB", lambda: json.dumps({"prompt": "a" * 1_000_000, "max_tokens": 1}).encode()
)
one_body("a text of escapes, 2 MB", lambda: b'{"prompt":"' + b"\\u0000" * 340_000 + b'"}')
one_body("half surrogates, 10^5", lambda: b'{"prompt":"' + b"\\ud800" * 100_000 + b'"}')
one_body("texts, 3 10^5", lambda: json.dumps({"prompt": ["a"] * 300_000}).encode())
one_body("messages, 10^5", lambda: _messages(100_000), CHAT)
one_body("parts of a message, 10^5", lambda: _parts(100_000), CHAT)
one_body("messages of no role, 10^5", lambda: b'{"messages":[' + b"{}," * 100_000 + b"{}]}", CHAT)
one_body("stop strings, 10^5", lambda: json.dumps({**SHORT, "stop": ["x"] * 100_000}).encode())
one_body("stop tokens, 6 10^5", lambda: json.dumps({**SHORT, "stop_token_ids": [1] * 600_000}).encode())
one_body("a model's name of 2 MB", lambda: json.dumps({**SHORT, "model": "a" * 2_000_000}).encode())
one_body(
    "an adapter's path of 3 MB",
    lambda: json.dumps({"lora_name": "a", "lora_path": "b" * 3_000_000}).encode(),
    LOAD,
)
one_body(
    "choices, 1000 prompts of 128", lambda: json.dumps({**SHORT, "prompt": [[5]] * 1000, "n": 128}).encode()
)
one_body(
    "a body said to be gzip", lambda: b"\x1f\x8b\x08\x00" + b"\x00" * 1000, more=b"Content-Encoding: gzip\r\n"
)
one_body("a body said to be text", lambda: b"x" * 1_000_000, more=b"Content-Type: text/plain\r\n")
one_body("bytes that are no UTF-8", lambda: b'{"prompt":"' + b"\xff\xfe" * 1000 + b'"}')
one_body("UTF-16", lambda: '{"prompt": "hello"}'.encode("utf-16"))
one_body("an id that is a header", lambda: json.dumps({**SHORT, "request_id": "a\r\nSet-Cookie: b"}).encode())


def _fields(name: bytes, num: int) -> bytes:
    return b'{"prompt":"a",' + b",".join(b'"' + name % i + b'":1' for i in range(num)) + b"}"


def _messages(num: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}] * num, "max_tokens": 1}).encode()


def _parts(num: int) -> bytes:
    parts = [{"type": "text", "text": "a"}] * num
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()


@attack
def numbers_at_the_edges(attacker: Attacker) -> None:
    edges: list[Any] = [
        0,
        -1,
        2**31,
        2**63,
        -(2**63) - 1,
        10**400,
        1e308,
        -0.0,
        5e-324,
        0.1,
        True,
        None,
        "1",
        [],
        {},
    ]
    fields = ["max_tokens", "min_tokens", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed"]
    for field, value in itertools.product([*fields, "logprobs", "stream", "stop_token_ids"], edges):
        attacker.json({**SHORT, field: value})
    for literal in (b"NaN", b"-Infinity", b"1e400", b"00", b"0x1", b"1_0"):
        attacker.ask(post(b'{"prompt":"a","max_tokens":1,"top_p":%s}' % literal))


@attack
def unicode_of_all_kinds(attacker: Attacker) -> None:
    texts = ["\0", "\u202e", "\ufeff", "a\u0300" * 2000, "\U0001f469\u200d" * 500, "\uffff", "ﷺ" * 500]
    for text in texts:
        attacker.json({**SHORT, "prompt": text})
        attacker.json({**SHORT, "model": text})
        attacker.json({**SHORT, "stop": [text[:500]]})
        attacker.json({"messages": [{"role": "user", "content": text, "name": text}], "max_tokens": 1}, CHAT)


@attack
def a_body_said_to_have_a_terabyte(attacker: Attacker) -> None:
    attacker.ask(HEAD % COMPLETIONS + b"Content-Length: 1000000000000\r\n\r\n{", wait_s=12)


@attack
def a_body_without_end(attacker: Attacker) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    attacker.ask(HEAD % COMPLETIONS + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 3000)


@attack
def bodies_of_2_mb_at_once(attacker: Attacker) -> None:
    body = post(b'{"prompt":"' + b"a" * 2_000_000 + b'","max_tokens":1}')
    _at_once(64, lambda: attacker.ask(body))


@attack
def bodies_of_2_mb_that_stop_before_their_end(attacker: Attacker) -> None:
    start = HEAD % COMPLETIONS + b"Content-Length: 2000000\r\n\r\n" + b"a" * 1_900_000
    found: list[socket.socket] = []
    _at_once(64, lambda: found.extend(attacker.hold(1, start)))
    attacker.drip(found, itertools.repeat(b"a"), 0.5, 12)


@attack
def a_body_for_a_get(attacker: Attacker) -> None:
    attacker.ask(GET % b"/version" + b"Content-Length: 100000000\r\n\r\n", *[b"a" * 65536] * 200, wait_s=8)


raw("an endless address", b"GET /" + b"a" * 100_000, *[b"a" * 65536] * 20)
raw("an endless header", GET % b"/version" + b"A: ", *[b"a" * 65536] * 20)
raw("headers, 10^5", GET % b"/version", *[b"a: b\r\n" * 10_000] * 10)
raw(
    "a request's id of 60 KB",
    GET % b"/version" + b"X-Request-Id: " + b"a" * 60_000 + b"\r\nConnection: close\r\n\r\n",
)
raw("an address of 60 KB", GET % (b"/v1/models/" + b"a" * 60_000) + b"Connection: close\r\n\r\n")


# Slowly, in part, and without reading.


@attack
def half_open_connections(attacker: Attacker) -> None:
    held = attacker.hold(500, b"POST /v1/completions HTTP/1.1\r\n")
    attacker.drip(held, itertools.repeat(b""), 0.5, 15)


@attack
def silent_connections(attacker: Attacker) -> None:
    attacker.drip(attacker.hold(2000, b""), itertools.repeat(b""), 0.5, 3)


@attack
def idle_connections_of_ten_clients(attacker: Attacker) -> None:
    held: list[socket.socket] = []
    for number in range(10):
        held += attacker.hold(1000, b"", address=f"127.0.1.{number}")
    attacker.drip(held, itertools.repeat(b""), 0.5, 5)


@attack
def streams_of_ten_clients(attacker: Attacker) -> None:
    asked = {"prompt": "a", "max_tokens": 10, "ignore_eos": True, "stream": True}
    held: list[socket.socket] = []
    for number in range(10):
        held += attacker.hold(100, post(json.dumps(asked).encode()), address=f"127.0.1.{number}")
    for one in held:
        attacker.answer(one)


@attack
def headers_byte_by_byte(attacker: Attacker) -> None:
    held = attacker.hold(100, b"POST /v1/completions HTTP/1.1\r\nX-A: ")
    attacker.drip(held, itertools.repeat(b"a"), 0.5, 15)


@attack
def bodies_byte_by_byte(attacker: Attacker) -> None:
    held = attacker.hold(100, HEAD % COMPLETIONS + b"Content-Length: 100000\r\n\r\n{")
    attacker.drip(held, itertools.repeat(b" "), 0.5, 15)


@attack
def continue_that_never_comes(attacker: Attacker) -> None:
    start = HEAD % COMPLETIONS + b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n"
    attacker.drip(attacker.hold(100, start), itertools.repeat(b""), 0.5, 15)


@attack
def streams_that_nobody_reads(attacker: Attacker) -> None:
    held = attacker.hold(100, post(json.dumps(LONG_STREAM).encode()), receive_bytes=1)
    time.sleep(15)
    for one in held:
        one.close()


def streams_that_are_read(attacker: Attacker) -> None:
    for one in attacker.hold(100, post(json.dumps(LONG_STREAM).encode())):
        attacker.answer(one)


@attack
def streams_left_at_once(attacker: Attacker) -> None:
    asked = post(json.dumps({"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True}).encode())
    linger = struct.pack("ii", 1, 0)  # a reset instead of an end
    deadline_s = time.monotonic() + 6
    while time.monotonic() < deadline_s:
        for one in attacker.hold(20, asked):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            one.close()
        time.sleep(0.05)


@attack
def connections_one_after_another(attacker: Attacker) -> None:
    for _ in range(3000):
        try:
            attacker.connect().close()
        except OSError as error:
            attacker.statuses[type(error).__name__] += 1


# Valid, but more than anyone's share.


@attack
def choices_1024_of_50_tokens(attacker: Attacker) -> None:
    asked = {"prompt": [[5]] * 8, "n": 128, "max_tokens": 50, "ignore_eos": True}
    attacker.json(asked, wait_s=90)


def requests_100_at_once_three_times(attacker: Attacker) -> None:
    for _ in range(3):
        for one in attacker.hold(100, post(json.dumps(LONG).encode())):
            attacker.answer(one)


@attack
def requests_1000_at_once(attacker: Attacker) -> None:
    held = attacker.hold(1000, post(json.dumps(LONG).encode()))
    deadline_s = time.monotonic() + 90
    for one in held:
        attacker.answer(one, max(0.1, deadline_s - time.monotonic()))


@attack
def errors_as_fast_as_they_come(attacker: Attacker) -> None:
    body = json.dumps({"prompt": "a", "no_such_field": 1}).encode()
    _for_seconds(6, lambda: attacker.ask(post(body)))


def answers_as_fast_as_they_come(attacker: Attacker) -> None:
    asked = GET % b"/v1/models" + b"Connection: close\r\n\r\n"
    _for_seconds(6, lambda: attacker.ask(asked))


@attack
def bodies_of_30_kb_as_fast_as_they_come(attacker: Attacker) -> None:
    body = post(b'{"prompt":[' + b"{}," * 10_000 + b"{}]}")
    _for_seconds(6, lambda: attacker.ask(body))


@attack
def texts_of_100_kb_as_fast_as_they_come(attacker: Attacker) -> None:
    body = post(json.dumps({"prompt": "hello " * 17_000, "max_tokens": 1}).encode())
    _for_seconds(6, lambda: attacker.ask(body))


@attack
def metrics_as_fast_as_they_come(attacker: Attacker) -> None:
    _for_seconds(6, lambda: attacker.ask(GET % b"/metrics" + b"Connection: close\r\n\r\n"))


@attack
def unknown_models(attacker: Attacker) -> None:
    for number in range(500):
        attacker.json({**SHORT, "model": f"nobody-{number}"})


@attack
def adapters_with_lying_headers(attacker: Attacker) -> None:
    with tempfile.TemporaryDirectory() as folder:
        load_each(attacker, lying_headers(GOOD_ADAPTER, Path(folder), NUM_ADAPTERS))


@attack
def adapters_with_hostile_configs(attacker: Attacker) -> None:
    with tempfile.TemporaryDirectory() as folder:
        load_each(attacker, hostile_configs(GOOD_ADAPTER, Path(folder), NUM_ADAPTERS))


def load_each(attacker: Attacker, folders: Iterable[Path]) -> None:
    """Load in sequence; unloads accepted adapters."""
    for number, folder in enumerate(folders):
        name = f"hostile-{number}"
        if b" 200 " in attacker.json({"lora_name": name, "lora_path": str(folder)}, LOAD)[:15]:
            attacker.json({"lora_name": name}, UNLOAD)


@attack
def openapi_fuzzing(attacker: Attacker) -> None:
    deadline_s = time.monotonic() + 20
    for request in drawn_calls(attacker.port):
        if time.monotonic() < deadline_s:
            attacker.ask(request)


@lru_cache
def drawn_calls(port: int) -> tuple[bytes, ...]:
    """Calls of the server's operations; the first draw takes half a minute."""
    words = ["-m", "bench.hostile.openapi_calls", str(port), str(NUM_CALLS)]
    drawn = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(line).encode("latin-1") for line in drawn.stdout.splitlines())


TAIL = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
raw(
    "length and chunks",
    HEAD % COMPLETIONS + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + TAIL,
)
raw(
    "chunks and length",
    HEAD % COMPLETIONS + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n" + TAIL,
)
raw("two lengths", HEAD % COMPLETIONS + b"Content-Length: 4\r\nContent-Length: 40\r\n\r\n" + TAIL)
raw("a length with a sign", HEAD % COMPLETIONS + b"Content-Length: +4\r\n\r\n" + TAIL)
raw("a negative length", HEAD % COMPLETIONS + b"Content-Length: -1\r\n\r\n" + TAIL)
raw("a length beyond 64 bits", HEAD % COMPLETIONS + b"Content-Length: 99999999999999999999\r\n\r\n")
raw("chunked twice", HEAD % COMPLETIONS + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + TAIL)
raw("chunked, then identity", HEAD % COMPLETIONS + b"Transfer-Encoding: chunked, identity\r\n\r\n" + TAIL)
raw("chunked with a tab", HEAD % COMPLETIONS + b"Transfer-Encoding:\tchunked\x0b\r\n\r\n" + TAIL)
raw("a space before the colon", HEAD % COMPLETIONS + b"Content-Length : 4\r\n\r\n" + TAIL)
raw("a folded header", HEAD % COMPLETIONS + b"Content-Length:\r\n 4\r\n\r\n" + TAIL)
raw("line feeds alone", b"POST /v1/completions HTTP/1.1\nHost: a\nContent-Length: 4\n\n" + TAIL)
raw("a negative chunk", HEAD % COMPLETIONS + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n" + TAIL)
raw(
    "a chunk beyond 64 bits",
    HEAD % COMPLETIONS + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\n{}\r\n",
)
raw(
    "an extension of a chunk, 1 MB",
    HEAD % COMPLETIONS + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"a" * 1_000_000 + b"\r\n{}\r\n0\r\n\r\n",
)
raw(
    "trailers without end",
    HEAD % COMPLETIONS + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
    *[b"a: b\r\n" * 9000] * 9,
)
raw("a zero in a header", GET % b"/version" + b"A: b\0c\r\n\r\n")
raw("a zero in the address", GET % b"/v1/models/\0" + b"\r\n")
raw("a line break in the address", GET % b"/v1/models/%0d%0aSet-Cookie:a" + b"Connection: close\r\n\r\n")
raw("a path upwards", GET % b"/v1/models/../../../etc/passwd" + b"Connection: close\r\n\r\n")
raw("escapes that are none", GET % b"/v1/models/%zz%c0%af%" + b"Connection: close\r\n\r\n")
raw("an address with a host", GET % b"http://elsewhere/version" + b"Connection: close\r\n\r\n")
raw("no host", b"GET /version HTTP/1.1\r\n\r\n")
raw("HTTP/0.9", b"GET /version\r\n\r\n")
raw("HTTP/2 at once", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100)
raw(
    "a WebSocket",
    GET % b"/v1/completions" + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: a\r\n\r\n",
)
raw("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500)
raw("CONNECT", b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: elsewhere\r\n\r\n")
raw("a method that is none", b"HACK /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
raw("noise", bytes(range(256)) * 100)


@attack
def requests_in_one_connection_before_any_answer(attacker: Attacker) -> None:
    attacker.ask((GET % b"/version" + b"\r\n") * 2000, GET % b"/version" + b"Connection: close\r\n\r\n")


VALID = {
    "errors_as_fast_as_they_come": answers_as_fast_as_they_come,
    "streams_that_nobody_reads": streams_that_are_read,
    "requests_1000_at_once": requests_100_at_once_three_times,
}
"""Valid work of the attacks, as a harmless client asks for it; for errors, a front end's fastest answers."""


def _at_once(num: int, work: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=work) for _ in range(num)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def _for_seconds(time_s: float, work: Callable[[], Any], num_threads: int = 4) -> None:
    deadline_s = time.monotonic() + time_s

    def go_on() -> None:
        while time.monotonic() < deadline_s:
            work()

    _at_once(num_threads, go_on)
