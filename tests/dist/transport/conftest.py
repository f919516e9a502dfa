"""Every test here runs over each transport that this machine can run."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed import TCPStore

from moe_lora.dist.transport import KINDS, Transport, make_transport

from .peers import Peer

_numbers = itertools.count()


@dataclass
class Pair:
    """This process's transport and a peer that has joined with one of the same kind."""

    kind: str
    store: TCPStore
    here: Transport
    peer: Peer
    peer_name: str
    options: dict[str, Any]

    def rejoin(self, peer: Peer) -> int:
        """Another process takes the peer's place and name; returns its generation."""
        self.peer = peer
        peer.meanwhile = lambda: self.here.wait_any(
            [], 0.0
        )  # some media get on only while their process waits
        return peer.call("join", self.kind, self.peer_name, self.store.port, self.options)


@pytest.fixture(scope="session")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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


def joined(kind: str, store: TCPStore, options: dict[str, Any], peer: Peer) -> Iterator[Pair]:
    number = next(_numbers)
    here = make_transport(kind, name=f"instance-{number}/0", store=store, **options)
    pair = Pair(kind, store, here, peer, f"server-{number}/0", options)
    pair.rejoin(peer)
    try:
        yield pair
    finally:
        here.close()


@pytest.fixture(scope="module")
def pair(kind: str, store: TCPStore, options: dict[str, Any], shared_peer: Peer) -> Iterator[Pair]:
    """Two processes joined once for the tests of a module; windows need labels of their own."""
    yield from joined(kind, store, options, shared_peer)
    shared_peer.call("leave")


@pytest.fixture
def mortal_pair(kind: str, store: TCPStore, options: dict[str, Any]) -> Iterator[Pair]:
    """Two processes of which a test may kill one."""
    peers = joined(kind, store, options, Peer())
    pair = next(peers)
    yield pair
    pair.peer.kill()
    next(peers, None)
