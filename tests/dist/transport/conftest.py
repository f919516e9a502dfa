# SPDX-License-Identifier: Apache-2.0
"""Every test here runs over each transport that this machine can run."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from moe_lora.dist.transport import KINDS, RemoteWindow, Transport, make_transport

from .peers import Peer

_numbers = itertools.count()


@dataclass
class Pair:
    """This process's transport and a peer that has joined with one of the same kind."""

    kind: str
    here: Transport
    peer: Peer
    peer_name: str
    options: dict[str, Any]

    def attach(self, label: str, num_bytes: int, num_signals: int) -> RemoteWindow:
        """A new window of the peer."""
        return self.here.attach(self.peer.call("alloc", label, num_bytes, num_signals))

    def rejoin(self, peer: Peer) -> None:
        """Another process takes the peer's place and name."""
        self.peer = peer
        peer.meanwhile = lambda: self.here.wait_any(
            [], 0.0
        )  # some media get on only while their process waits
        peer.call("join", self.kind, self.peer_name, self.options)


@pytest.fixture(scope="session")
def shared_peer() -> Iterator[Peer]:
    """One process for all tests that leave it alive."""
    peer = Peer()
    yield peer
    peer.kill()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed; pip install 'moe-lora[nixl]'")
    return request.param


@pytest.fixture(scope="module")
def options(kind: str) -> dict[str, Any]:
    return {}


def joined(kind: str, options: dict[str, Any], peer: Peer) -> Iterator[Pair]:
    number = next(_numbers)
    here = make_transport(kind, name=f"instance-{number}/0", **options)
    pair = Pair(kind, here, peer, f"server-{number}/0", options)
    pair.rejoin(peer)
    try:
        yield pair
    finally:
        here.close()


@pytest.fixture(scope="module")
def pair(kind: str, options: dict[str, Any], shared_peer: Peer) -> Iterator[Pair]:
    """Two processes joined once for the tests of a module; windows need labels of their own."""
    yield from joined(kind, options, shared_peer)
    shared_peer.call("leave")


@pytest.fixture
def mortal_pair(kind: str, options: dict[str, Any]) -> Iterator[Pair]:
    """Two processes of which a test may kill one."""
    peers = joined(kind, options, Peer())
    pair = next(peers)
    yield pair
    pair.peer.kill()
    next(peers, None)
