# SPDX-License-Identifier: Apache-2.0
"""What a front end refuses before it works for it: connections, bytes, time; each refusal is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from moe_lora.config import LimitsConfig
from moe_lora.core.errors import ConfigError
from moe_lora.serve import connections, http_errors
from moe_lora.serve import limits as limits_module
from moe_lora.serve import server as server_module
from moe_lora.serve.http_errors import ApiError
from moe_lora.serve.limits import UNCOUNTED_BYTES, Limits, Quota, Waiting, client_at, client_of
from moe_lora.serve.openai import preparing
from moe_lora.serve.openai.generation import merge
from moe_lora.serve.server import PEAK_BYTES, RETURN_S, ProcessMemory, create_app
from tests.patience import PATIENCE_S

from .conftest import as_served, frontend_of, scripted
from .live_server import ServerThread, wait_until

BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1}).encode()
HEAD = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
START = HEAD % b"/v1/completions"
POST = START + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LIMIT_S = 1000.0
"""Limit of time of a server whose clock the test moves."""


@contextlib.contextmanager
def limited_server(tokenizer, engine=None, **limits):
    """A server of its own with these settings; (as tests see it, its front end)."""
    engine = engine or scripted(tokenizer)
    frontend = frontend_of(engine, tokenizer, **limits)
    with (
        ServerThread(create_app(frontend), frontend.limits) as thread,
        as_served(thread.url, engine) as served,
    ):
        yield served, frontend


def connect(served, address="127.0.0.1"):
    place = urlsplit(served.url)
    return socket.create_connection(
        (place.hostname, place.port), timeout=PATIENCE_S, source_address=(address, 0)
    )


def answer(connection):
    """All that comes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            found += more
    return found


def refused(served, reason):
    lines = served.get("/metrics").text.splitlines()
    [line] = [one for one in lines if one.startswith("moe_lora:http_refused_total") and f'"{reason}"' in one]
    return float(line.split()[-1])


def error_in(text):
    """Status and message of an answer's bytes."""
    head, _, body = text.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert head.startswith(b"HTTP/1.1 %d " % error["code"])
    return error["code"], error["message"], head.decode()


@pytest.fixture(autouse=True)
def short_lingering(monkeypatch):
    monkeypatch.setattr(http_errors, "LINGER_S", 0.1)


@pytest.fixture
def often(monkeypatch):
    """A server that looks at its connections all the time."""
    monkeypatch.setattr(server_module, "SWEEP_S", 0.02)


@pytest.fixture
def pass_s(monkeypatch, often):
    """Moves the clock of connections on by so many seconds."""
    moved: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(moved))
    for module in (connections, server_module):
        monkeypatch.setattr(module, "time", clock)
    return moved.append


def received(connection):
    found = connection.recv(1 << 16)
    assert found, "it was closed"
    return found


def late_answer(connection, pass_s, *, drops=b""):
    """All that comes until the server closes, while limits of time are passed again and again.

    drops: sent meanwhile.
    """
    found = b""
    connection.settimeout(0.02)
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(drops)
            try:
                more = connection.recv(1 << 16)
            except TimeoutError:
                pass_s(2 * LIMIT_S)
                continue
            if not more:
                break
            found += more
    return found


def test_a_client_is_an_address_and_all_of_an_ipv6_network():
    assert client_at("10.0.0.1") == client_of({"client": ("10.0.0.1", 5)}) == "10.0.0.1"
    assert client_at("2001:db8::1") == client_at("2001:db8::ffff:1") != client_at("2001:db8:0:1::1")
    assert client_at("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_at(None) == client_of({"client": None}) == client_of({})


def test_a_quota_says_whose_part_is_over_and_forgets_who_has_nothing():
    quota = Quota(most=10, most_per_client=6)
    quota.take("a", 6)
    assert quota.exceeded("a", 1) == "client"
    assert quota.exceeded("b", 4) is None
    assert quota.exceeded("b", 5) == "all"
    quota.give_back("a", 6)
    assert (quota.in_all, quota.of_client("a"), quota.exceeded("b", 6)) == (0, 0, None)


@pytest.mark.parametrize("proxy", ["nowhere", "10.0.0.1/8", "*"])
def test_proxies_are_addresses_or_networks(proxy):
    with pytest.raises(ConfigError, match=r"front_end\.trusted_proxies"):
        LimitsConfig(trusted_proxies=(proxy,))


def test_a_body_of_too_many_bytes_is_413_before_it_is_sent_and_when_it_goes_on_without_end(tokenizer):
    with limited_server(tokenizer, max_body_bytes=2000) as (served, frontend):
        with connect(served) as one:
            one.sendall(START + b"Content-Length: 1000000000000\r\n\r\n")
            status, message, head = error_in(answer(one))
        assert (status, "2000 bytes" in message, "connection: close" in head.lower()) == (413, True, True)
        with connect(served) as one:
            one.sendall(START + b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n")
            one.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
            assert error_in(answer(one))[0] == 413
        body = json.dumps({"lora_name": "x", "lora_path": "y" * 70_000})
        assert served.post_raw("/v1/load_lora_adapter", body.encode()).status_code == 413
        assert refused(served, "body_size") == 3
        assert served.post_raw("/v1/completions", BODY).status_code == 200
        assert frontend.limits.bodies.in_all == 0


def test_bodies_under_way_are_bounded_for_each_client_and_in_all(tokenizer):
    limits = {"max_bodies_bytes": 6000, "max_bodies_bytes_per_client": 4000}
    limits["max_body_bytes"] = UNCOUNTED_BYTES + 4000
    start = START + b"Content-Length: %d\r\n\r\n{" % (UNCOUNTED_BYTES + 3000)
    with limited_server(tokenizer, **limits) as (served, frontend):
        with connect(served, "127.0.0.2") as first, connect(served, "127.0.0.3") as second:
            first.sendall(start)
            wait_until(lambda: frontend.limits.bodies.in_all == 3000, "the body is awaited")
            with connect(served, "127.0.0.2") as one:
                one.sendall(start)
                status, message, head = error_in(answer(one))
                assert (status, "4000 bytes" in message, "retry-after: 1" in head.lower()) == (
                    429,
                    True,
                    True,
                )
            second.sendall(start)
            wait_until(lambda: frontend.limits.bodies.in_all == 6000, "both are awaited")
            with connect(served, "127.0.0.4") as one:
                one.sendall(start)
                assert error_in(answer(one))[0] == 503
            assert served.post_raw("/v1/completions", BODY).status_code == 200  # small ones count nothing
        wait_until(lambda: frontend.limits.bodies.in_all == 0, "what left is forgotten")
        assert (refused(served, "client_bodies"), refused(served, "bodies")) == (1, 1)


def test_connections_are_bounded_for_each_client_and_in_all(tokenizer):
    limits = {"max_connections": 6, "max_connections_per_client": 3}
    with limited_server(tokenizer, **limits) as (served, frontend), contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(served, "127.0.0.2"))
        wait_until(lambda: frontend.limits.connections.in_all == 3, "they are open")
        with connect(served, "127.0.0.2") as one:
            status, message, head = error_in(answer(one))
        assert (status, "more than 3" in message, "retry-after: 1" in head.lower()) == (429, True, True)
        for _ in range(3):
            stack.enter_context(connect(served, "127.0.0.3"))
        wait_until(lambda: frontend.limits.connections.in_all == 6, "all are open")
        with connect(served, "127.0.0.4") as one:
            assert error_in(answer(one))[0] == 503
        stack.close()
        wait_until(lambda: frontend.limits.connections.in_all == 0, "closed ones don't count")
        assert (refused(served, "client_connections"), refused(served, "connections")) == (1, 1)


def test_a_connection_turned_away_can_send_its_request_late_and_holds_its_place_no_longer_than_it_is_open(
    tokenizer, monkeypatch
):
    monkeypatch.setattr(connections, "_LINGERING", 1)
    monkeypatch.setattr(connections, "_LINGER_S", 60.0)

    def num_lingering():
        return sum(kind.num_lingering for kind in connections.Connection.__subclasses__())

    with limited_server(tokenizer, max_connections=1) as (served, frontend), connect(served):
        wait_until(lambda: frontend.limits.connections.in_all == 1, "it is open")
        for _ in range(2):
            with connect(served, "127.0.0.4") as one:
                wait_until(lambda: num_lingering() == 1, "it is told so")
                one.sendall(POST)
                assert error_in(one.recv(1 << 16))[0] == 503
            wait_until(lambda: num_lingering() == 0, "it is closed")


def test_a_proxy_names_clients_and_has_no_limit_of_its_own(tokenizer):
    limits = {"max_connections_per_client": 1, "trusted_proxies": ("127.0.0.2",)}
    with limited_server(tokenizer, **limits) as (served, frontend), contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(served, "127.0.0.2")) for _ in range(3)]
        wait_until(lambda: frontend.limits.connections.in_all == 3, "they are open")
        held[0].sendall(POST)
        assert held[0].recv(100).startswith(b"HTTP/1.1 200")
    limits = Limits(LimitsConfig(trusted_proxies=("10.0.0.0/8",)))
    assert [limits.is_proxy(one) for one in ("10.1.1.1", "11.0.0.0", "x")] == [True, False, False]


@pytest.mark.parametrize(
    ("start", "reason", "setting"),
    [
        (b"POST /v1/compl", "header_time", "header_timeout_s"),
        (START, "header_time", "header_timeout_s"),
        (START + b"Content-Length: 100\r\n\r\n{", "body_time", "body_timeout_s"),
        (START + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", "body_time", "body_timeout_s"),
    ],
)
def test_what_does_not_come_in_time_is_408(tokenizer, pass_s, start, reason, setting):
    with limited_server(tokenizer, idle_timeout_s=1e9, **{setting: LIMIT_S}) as (served, _):
        with connect(served) as one:
            one.sendall(start)
            assert error_in(late_answer(one, pass_s))[0] == 408
        with connect(served) as one:
            one.sendall(POST)
            found = received(one)
            pass_s(2 * LIMIT_S)
            one.sendall(POST)  # the time counts from a request's first byte
            while found.count(b"HTTP/1.1 200") < 2:
                found += received(one)
        assert refused(served, reason) == 1


def test_an_idle_connection_is_closed_and_drops_between_requests_don_t_keep_it(tokenizer, pass_s):
    limits = {"idle_timeout_s": LIMIT_S, "header_timeout_s": LIMIT_S}
    with limited_server(tokenizer, **limits) as (served, _):
        with connect(served) as one:
            one.sendall(POST)
            assert one.recv(100).startswith(b"HTTP/1.1 200")
            late_answer(one, pass_s)
        with connect(served) as one:
            late_answer(one, pass_s, drops=b"\r\n")


def test_a_new_connection_has_no_longer_for_its_first_byte_than_for_a_head(tokenizer, pass_s):
    with limited_server(tokenizer, idle_timeout_s=1e9, header_timeout_s=LIMIT_S) as (served, frontend):
        with connect(served) as silent, connect(served) as other:
            other.sendall(POST)
            assert other.recv(100).startswith(b"HTTP/1.1 200")
            assert late_answer(silent, pass_s) == b""
            assert frontend.limits.connections.in_all == 1
        assert refused(served, "header_time") == 0


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(limits_module, "time", clock := Clock())
    return clock


class Queue:
    """Of one front end, whose requests count 2 000 tokens each."""

    def __init__(self, clock):
        self.counted, self._clock, self._waiting = [], clock, []
        self.limits = Limits(LimitsConfig(), self.counted.append)

    def add(self, num=1, timeout_s=None, **fields):
        for _ in range(num):
            who = Waiting(client="c", tokens=2000, **fields)
            self.limits.enter_queue([who], timeout_s)
            self._waiting.append(who)

    def begin(self, num, time_s, *, begun=True):
        self._clock.now_s += time_s
        for _ in range(num):
            self.limits.leave_queue(self._waiting.pop(0), begun=begun)

    def refusal(self, timeout_s, **fields):
        with pytest.raises(ApiError) as refused:
            self.add(1, timeout_s, **fields)
        return refused.value


@pytest.fixture
def queue(clock):
    return Queue(clock)


def test_a_request_that_would_not_begin_within_its_timeout_is_429_at_once(queue):
    queue.add(16)
    queue.begin(10, 10)  # 2 000 tokens a second: 6 s for those that wait
    queue.add(1, 6.1)
    error = queue.refusal(4)
    assert "about 7 s, its timeout leaves 4; send it again later" in error.message
    assert (error.status, error.retry_s, queue.counted) == (429, 3, ["queue_time"])
    queue.add(1)


def test_nobody_is_refused_by_what_came_where_it_is_not_all_that_can_be_done(queue):
    queue.add(10)
    queue.begin(2, 60)  # perhaps more would have begun had they come
    queue.add(1, 0.1)
    queue.begin(9, 60, begun=False)
    queue.add(8)
    queue.add(1, 0.1)
    assert not queue.counted


def test_of_a_tenant_s_own_those_wait_before_a_request_that_its_priority_does_not_pass(queue):
    queue.add(16, priority=10)
    queue.begin(10, 10)
    queue.add(1, 0.1)
    queue.add(1, 1.1)
    assert "about 2 s" in queue.refusal(1.1).message
    assert "about 8 s" in queue.refusal(1.1, priority=10).message


def test_a_tenant_s_turn_comes_whatever_others_have_waiting(queue):
    queue.add(60, tenant="a", share=2.0)
    queue.begin(20, 20)
    queue.add(1, 0.1, tenant="b")
    queue.add(1, 3.1, tenant="b")  # one of its own, two of the other's
    assert "about 6 s" in queue.refusal(3.1, tenant="b").message


@pytest.mark.parametrize("size", [131072, 300])
def test_one_request_of_any_size_leaves_room_for_other_clients(size):
    limits = Limits(LimitsConfig(max_queued_tokens=4 * 1024 * 128, max_queued_tokens_per_client=1024 * 128))
    one, other = [
        [Waiting(client=client, tokens=size + number) for number in range(200)] for client in ("a", "b")
    ]
    for choices in (one, other):
        limits.enter_queue(choices)
        with pytest.raises(ApiError) as refused:
            limits.enter_queue([Waiting(client=choices[0].client, tokens=20)])
        assert refused.value.status == 429
    limits.change(LimitsConfig())
    for number, choice in enumerate([*one, *other]):
        limits.leave_queue(choice, begun=bool(number % 2))
    assert limits.queue.in_all == limits.queue.of_client("a") == limits.queue.of_client("b") == 0


def test_a_connection_answered_before_its_body_came_is_closed_when_it_is_idle(tokenizer, often):
    with limited_server(tokenizer, idle_timeout_s=1.0) as (served, _), connect(served) as one:
        one.sendall(HEAD % b"/v1/nothing" + b"Content-Length: 4\r\n\r\n")
        found = b""
        while b"}}" not in found:
            found += one.recv(1 << 16)
        assert found.startswith(b"HTTP/1.1 404")
        one.sendall(b"body")
        assert answer(one) == b""


@pytest.mark.parametrize(
    ("setting", "reason", "asked"),
    [
        ({"max_json_depth": 4}, "json_depth", {"prompt": "a", "extra_body": [[[[[]]]]]}),
        ({"max_choices": 2}, "choices", {"prompt": "a", "n": 3}),
        ({"max_request_tokens": 5}, "request_tokens", {"prompt": "a", "n": 2, "max_tokens": 3}),
    ],
)
@pytest.mark.parametrize("inline_bytes", [0, 1 << 14])
def test_what_one_request_may_not_ask_for_is_400_and_counted(
    tokenizer, monkeypatch, setting, reason, asked, inline_bytes
):
    monkeypatch.setattr(preparing, "INLINE_BYTES", inline_bytes)
    with limited_server(tokenizer, **setting) as (served, _):
        assert served.post("/v1/completions", asked).status_code == 400
        assert refused(served, reason) == 1


def test_a_client_that_does_not_read_is_ended_and_its_requests_with_it(tokenizer, often):
    engine = scripted(tokenizer, max_model_len=1_000_000, tokens_per_step=200)
    asked = json.dumps({"prompt": "a", "max_tokens": 900_000, "ignore_eos": True, "stream": True}).encode()
    with limited_server(tokenizer, engine, write_timeout_s=0.5) as (served, _):
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect((urlsplit(served.url).hostname, urlsplit(served.url).port))
            one.sendall(START + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
            wait_until(lambda: engine.requests, "it runs")
            wait_until(lambda: not engine.running, "it is ended")
        assert engine.num_tokens < 900_000
        assert refused(served, "write_time") == 1


def test_headers_and_requests_before_an_answer_are_bounded_in_number(tokenizer):
    engine = scripted(tokenizer, step_s=0.5)
    with limited_server(tokenizer, engine) as (served, _):
        with connect(served) as one:
            one.sendall(START + b"a: b\r\n" * 200 + b"\r\n")
            assert answer(one).startswith(b"HTTP/1.1 400")
        with connect(served) as one:
            one.sendall(POST + b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
            assert answer(one).startswith(b"HTTP/1.1 400")
        assert refused(served, "http") == 2


def test_what_a_client_sent_is_never_given_back_whole(tokenizer):
    with limited_server(tokenizer) as (served, _):
        for body in (
            {"prompt": "a", "model": "m" * 1_000_000},
            {"prompt": "a", "x" * 1_000_000: 1, "temperatures": 1},
            {"prompt": "a", **{f"field_{number}": 1 for number in range(10_000)}},
            {"prompt": [{}] * 10_000},
        ):
            response = served.post("/v1/completions", body)
            assert 400 <= response.status_code < 500
            assert len(response.content) < 3000
        response = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "x" * 1_000_000: 1})
        assert response.status_code == 200
        assert sum(len(key) + len(value) for key, value in response.headers.items()) < 1000


def test_memory_is_given_back_after_a_peak_once_no_bodies_are_held():
    memory = ProcessMemory(least_bytes=100, returned_s=0.0)
    assert not memory.is_due(90, 1.0, bodies_bytes=0)
    assert not memory.is_due(90 + PEAK_BYTES, 2.0, bodies_bytes=0)
    assert not memory.is_due(91 + PEAK_BYTES, 3.0, bodies_bytes=1)
    assert memory.is_due(91 + PEAK_BYTES, 4.0, bodies_bytes=0)


def test_memory_is_given_back_after_a_while_also_where_bodies_are_held():
    memory = ProcessMemory(least_bytes=100, returned_s=1.0)
    assert not memory.is_due(100, 0.9 + RETURN_S, bodies_bytes=1)
    assert memory.is_due(100, 1.0 + RETURN_S, bodies_bytes=1)


def test_a_server_gives_memory_back_again_and_again(tokenizer, often, monkeypatch):
    given_back = []
    monkeypatch.setattr(server_module, "RETURN_S", 0.02)
    monkeypatch.setattr(server_module, "resident_bytes", lambda: 100)
    monkeypatch.setattr(server_module, "return_memory", lambda: given_back.append(1))
    with limited_server(tokenizer):
        wait_until(lambda: len(given_back) > 2, "memory is given back again and again")


def test_choices_of_an_answer_that_nobody_takes_are_not_asked_for_more():
    asked = []

    async def endless(name):
        while True:
            asked.append(name)
            yield name

    async def run():
        async with contextlib.aclosing(merge([endless("a"), endless("b")])) as merged:
            assert await anext(merged) in ("a", "b")
            for _ in range(100):
                await asyncio.sleep(0)
            return len(asked)

    assert asyncio.run(run()) < 10
