"""A connection between the controller and a front end: who is silent is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from moe_lora.serve.control import channel
from moe_lora.serve.control.channel import Channel
from moe_lora.serve.control.messages import Beat, Taken


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, two = (Channel(Connection(sock.detach())) for sock in socket.socketpair())
    yield one, two
    one.close(at_once=True)
    two.close(at_once=True)


def test_beats_are_not_handed_on(ends):
    one, two = ends
    for message in (Beat(), Taken(1), Beat(), Taken(2)):
        one.send(message)
    assert [two.receive(), two.receive()] == [Taken(1), Taken(2)]


def test_what_was_sent_comes_before_the_end(ends):
    one, two = ends
    one.send(Taken(1))
    one.close()
    assert two.receive() == Taken(1)
    with pytest.raises((EOFError, OSError)):
        two.receive()


def test_a_silent_peer_is_gone(ends, monkeypatch):
    monkeypatch.setattr(channel, "SILENCE_S", 1.0)
    one, _ = ends
    with pytest.raises(TimeoutError, match="nothing was heard for 1 s"):
        one.receive()


def test_a_peer_that_does_not_read_holds_up_nobody(ends):
    one, _ = ends
    for _ in range(1000):
        one.send(bytes(10_000))
    one.close(at_once=True)
