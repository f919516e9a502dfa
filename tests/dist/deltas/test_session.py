# SPDX-License-Identifier: Apache-2.0
"""Both halves of a session over shared memory, without a data loop between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from moe_lora.dist.deltas.session import (
    DONE,
    STALE,
    ClientSession,
    FrameLayout,
    PeerFrames,
    Sent,
    SessionLostError,
    lay_out_request,
)
from moe_lora.dist.lora_server.data_loop import ServerSession
from moe_lora.dist.transport import make_transport
from tests.dist.lora_server.shapes import model_shape

LAYOUT = FrameLayout(model_shape(0), torch.float32, 4)
DEPTH = 3
WIDTH = LAYOUT.shape.sites[0].total_out_features


class Pair:
    """A client and a server, wired."""

    def __init__(self, answer_timeout_s: float = 20.0) -> None:
        self.here, self.there = make_transport("shm", name="client"), make_transport("shm", name="server")
        self.requests = self.there.alloc("requests", DEPTH * LAYOUT.request_bytes, 1)
        answers = self.here.alloc("answers", DEPTH * LAYOUT.answer_bytes, 1)
        self.client = ClientSession(
            self.here,
            self.here.attach(self.requests.descriptor()),
            answers,
            LAYOUT,
            DEPTH,
            answer_timeout_s,
        )
        frames = PeerFrames(self.there, self.there.attach(answers.descriptor()), LAYOUT.answer_bytes, DEPTH)
        self.server = ServerSession("client", "i", self.requests, frames, LAYOUT, DEPTH)

    def send(self, value: float) -> Sent:
        request = lay_out_request(self.client.frame(), LAYOUT, 0, 0, 2, 0, 2)
        request.x.fill_(value)
        return self.client.send(request)

    def serve(self, state: int = DONE) -> None:
        """Answer one request with twice its first value."""
        request = self.server.pending()
        assert request is not None
        if state == DONE:
            self.server.deltas(request).fill_(2 * float(request.x[0, 0]))
        self.server.answer(request, state, 0)

    def take(self, sent: Sent) -> float:
        delta = self.client.take(sent)
        assert delta.shape == (2, WIDTH)
        assert bool((delta == delta[0, 0]).all())
        return float(delta[0, 0])

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_ring_goes_round(pair):
    for number in range(4 * DEPTH):
        sent = pair.send(number)
        pair.serve()
        assert pair.take(sent) == 2 * number
    assert pair.server.pending() is None


def test_answers_may_be_taken_in_any_order(pair):
    sent = [pair.send(number) for number in range(DEPTH)]
    for _ in sent:
        pair.serve()
    assert [pair.take(sent[number]) for number in (2, 0, 1)] == [4, 0, 2]


def test_full_ring_keeps_answers_that_were_not_taken(pair):
    sent = [pair.send(number) for number in range(DEPTH)]
    for _ in sent:
        pair.serve()
    for number in range(DEPTH, 3 * DEPTH):
        sent.append(pair.send(number))
        pair.serve()
    assert [pair.take(one) for one in sent] == [2 * number for number in range(3 * DEPTH)]


def test_full_ring_waits_for_the_oldest_answer(pair):
    sent = [pair.send(number) for number in range(DEPTH)]
    thread = threading.Timer(0.05, pair.serve)
    thread.start()
    sent.append(pair.send(DEPTH))
    thread.join()
    assert [pair.take(sent[0])] == [0]


def test_refused_request_keeps_what_was_asked_when_its_frame_is_needed(pair):
    """The session goes on; the request, not its place in the ring, is what is computed elsewhere."""
    refused = pair.send(7.0)
    pair.serve(STALE)
    others = []
    for number in range(2 * DEPTH):
        others.append(pair.send(number))
        pair.serve()
    with pytest.raises(SessionLostError):
        pair.client.take(refused)
    with pytest.raises(SessionLostError):
        pair.client.take(refused)
    assert float(refused.request.x[0, 0]) == 7.0
    assert not pair.client.broken
    assert [pair.take(one) for one in others] == [2 * number for number in range(2 * DEPTH)]


@pytest.mark.parametrize("num_served", range(DEPTH + 1))
def test_after_an_abandoned_step_answers_match_the_requests_of_the_next_step(pair, num_served):
    """The server answers some requests before the step is abandoned, the rest while the next step waits."""
    dropped = [pair.send(number) for number in range(DEPTH)]
    for number in range(num_served):
        pair.serve(STALE if number % 2 else DONE)
    pair.client.abandon()
    threads = [threading.Timer(0.02 * number, pair.serve) for number in range(DEPTH - num_served)]
    for thread in threads:
        thread.start()
    kept = []
    for number in range(10, 10 + 2 * DEPTH):
        kept.append(pair.send(number))
        for thread in threads:
            thread.join()
        pair.serve()
    assert [pair.take(one) for one in kept] == [2 * number for number in range(10, 10 + 2 * DEPTH)]
    assert all(one.delta is None for one in dropped), "nobody keeps an answer that nobody takes"
    assert pair.server.pending() is None
    assert not pair.client.broken


def test_abandoned_request_without_an_answer_ends_the_session_only_after_the_time_limit():
    pair = Pair(answer_timeout_s=0.05)
    for number in range(DEPTH):
        pair.send(number)
    pair.client.abandon()
    assert not pair.client.broken
    with pytest.raises(SessionLostError):
        pair.client.frame()
    assert pair.client.broken
    pair.close()


def test_server_that_freed_its_window_ends_the_session(pair):
    sent = pair.send(1.0)
    pair.requests.free()
    with pytest.raises(SessionLostError):
        pair.client.take(sent)
    assert pair.client.broken
    assert float(sent.request.x[0, 0]) == 1.0
    with pytest.raises(SessionLostError):
        pair.client.frame()


def test_lost_between_frame_and_send(pair):
    request = lay_out_request(pair.client.frame(), LAYOUT, 0, 0, 2, 0, 2)
    pair.requests.free()
    with pytest.raises(SessionLostError):
        pair.client.send(request)


def test_break_off_ends_a_wait(pair):
    sent = pair.send(1.0)
    thread = threading.Timer(0.05, pair.client.break_off)
    thread.start()
    with pytest.raises(SessionLostError):
        pair.client.take(sent)
    thread.join()


def test_answer_after_the_time_limit_changes_nothing():
    pair = Pair(answer_timeout_s=0.05)
    sent = pair.send(1.0)
    with pytest.raises(SessionLostError):
        pair.client.take(sent)
    pair.serve()
    with pytest.raises(SessionLostError):
        pair.client.take(sent)
    assert float(sent.request.x[0, 0]) == 1.0
    pair.close()
