# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator

import pytest

from moe_lora.core.address import Address
from moe_lora.core.errors import CapacityError, ConfigError, LoraServerError
from moe_lora.dist.lora_server.control import (
    ControlServer,
    Visitor,
    called,
    disagreement,
    join,
    network,
)
from moe_lora.dist.lora_server.messages import HANDSHAKE, Block, Content, Need
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.connection import Pings
from moe_lora.dist.net.keys import Keys, make_keys
from moe_lora.dist.net.peer import Peer, PeerEndedError
from tests.dist.lora_server.cluster import until
from tests.patience import PATIENCE_S

AGREED = {"protocol": 3, "dtype": "torch.float32", "num_layers": 4}
HELLO = HANDSHAKE.hello("me", AGREED)


class Served:
    """A server that answers some calls; `visitors` are those there now, `num_left` counts those who left."""

    def __init__(self, address: Address, silence_s: float = 3.0, keys: Keys | None = None) -> None:
        self.visitors: list[Visitor] = []
        self.num_left = 0
        answers = {"join_instance": self._come, "need": self._need, "resize": self._resize}
        self.server = ControlServer(address, keys, AGREED, answers, Pings.within(silence_s))

    async def _come(self, visitor: Visitor, instance: str) -> None:
        self.visitors.append(visitor)
        visitor.left.callback(self._leave, visitor)

    def _leave(self, visitor: Visitor) -> None:
        self.visitors.remove(visitor)
        self.num_left += 1

    async def _need(self, visitor: Visitor, adapter_id: str) -> None:
        visitor.peer.send(Need(adapter_id))

    async def _resize(self, visitor: Visitor, capacity: int) -> None:
        raise CapacityError(f"capacity={capacity} is too much")


@contextlib.contextmanager
def serving(
    address: Address | None = None, silence_s: float = 3.0, keys: Keys | None = None
) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        served = Served(address or Address(path=f"{folder}/s"), silence_s, keys)
        try:
            yield served
        finally:
            served.server.close()


class Client:
    """A peer at the server that keeps what it hears."""

    def __init__(self, served: Served, hello=HELLO, keys: Keys | None = None) -> None:
        self.heard: list[Message] = []
        address = served.server.address
        begin = "join_instance", "me"
        self.peer = network().run(join(address, keys, hello, 5.0, *begin, hear=self._hear), 60.0)

    async def _hear(self, peer: Peer, message: Message) -> None:
        self.heard.append(message)

    def call(self, method: str, *args: object) -> object:
        return network().run(called(self.peer, method, *args), 60.0)

    def close(self) -> None:
        network().loop.call_soon_threadsafe(self.peer.end)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("ours"))


@pytest.mark.parametrize("network_address", [False, True], ids=["path", "port"])
def test_messages_and_blocks_arrive_in_order(network_address, keys):
    address, trusted = (Address("127.0.0.1"), keys) if network_address else (None, None)
    with serving(address, keys=trusted) as served:
        client = Client(served, keys=trusted)
        blocks = [Block(bytes([n]) * 1_000_000) for n in range(9)]

        async def speak() -> None:
            [visitor] = served.visitors
            visitor.peer.send(Need("first"))
            visitor.peer.send_all(iter([Content("a", 9), *blocks]))
            visitor.peer.send(Need("last"))

        network().run(speak())
        expected = [Need("first"), Content("a", 9), *blocks, Need("last")]
        until(lambda: len(client.heard) == len(expected))
        assert client.heard == expected
        for number in range(50):
            client.call("need", str(number))
        assert client.heard[-50:] == [Need(str(number)) for number in range(50)]
        client.close()
        until(lambda: served.num_left == 1)


def test_certificates_of_another_cluster_are_refused(keys, tmp_path):
    others = make_keys(tmp_path / "others")
    with (
        serving(Address("127.0.0.1"), keys=keys) as served,
        pytest.raises(LoraServerError, match="are its certificates of the same authority"),
    ):
        Client(served, keys=others)


@pytest.mark.parametrize(
    ("name", "value"), [("protocol", 2), ("dtype", "torch.bfloat16"), ("num_layers", 5), ("more", 1)]
)
def test_disagreement_is_refused_by_the_name_of_the_field(name, value):
    with serving() as served, pytest.raises(LoraServerError) as caught:
        Client(served, HANDSHAKE.hello("me", {**AGREED, name: value}))
    assert f"{name} is {AGREED.get(name)!r} at the LoRA Server and {value!r} at me" in str(caught.value)
    assert not served.visitors


def test_peer_may_state_less_than_the_server_knows():
    assert disagreement(AGREED, {"protocol": 3}, "an admin") is None


def test_call_that_is_not_served_is_refused_and_the_connection_stays():
    with serving() as served:
        client = Client(served)
        with pytest.raises(LoraServerError, match="find is not answered by this rank"):
            client.call("find", 0)
        with pytest.raises(CapacityError, match="capacity=3 is too much"):
            client.call("resize", 3)
        client.call("need", "a")
        assert client.heard == [Need("a")]


def test_peer_that_is_gone_ends_both_directions():
    with serving() as served:
        client = Client(served)
        served.server.close()
        until(client.peer.ended.is_set)
        with pytest.raises(LoraServerError, match="was lost"):
            client.call("need", "a")


def test_silent_peer_is_given_up_and_a_quiet_one_is_not():
    with serving(silence_s=5.0) as served:
        quiet, silent = Client(served), Client(served)
        network().loop.call_soon_threadsafe(silent.peer._socket.transport.pause_reading)  # no pong leaves
        until(lambda: served.num_left == 1)
        quiet.call("need", "one")
        assert quiet.heard == [Need("one")]
        assert not quiet.peer.ended.is_set()
        network().loop.call_soon_threadsafe(silent.peer.abort, "the test is over")


def test_send_does_not_wait_for_a_peer_that_does_not_read():
    with serving() as served:
        deaf = Client(served)

        async def fill() -> None:
            deaf.peer._socket.transport.pause_reading()
            for _ in range(100):
                served.visitors[0].peer.send(Need("x" * 100_000))  # far more than the socket holds

        network().run(fill(), 5.0)
        network().loop.call_soon_threadsafe(deaf.peer.abort, "the test is over")


def test_message_that_stops_half_way_ends_the_connection_once_nothing_more_comes():
    with serving(silence_s=5.0) as served:
        client = Client(served)

        async def half() -> None:
            client.peer._socket.transport.write(b"\x82\xe4" + b"\x00" * 20)
            client.peer._socket.transport.pause_reading()

        network().run(half())
        until(lambda: served.num_left == 1)
        network().loop.call_soon_threadsafe(client.peer.abort, "the test is over")


def test_message_of_another_kind_ends_the_connection():
    with serving() as served:
        client = Client(served)

        async def evil() -> None:
            client.peer._waiting.append(b"\x91\xa4Evil")
            client.peer._something.set()

        network().run(evil())
        until(client.peer.ended.is_set)
        assert "not understood" in client.peer.problem


def test_peer_that_says_no_hello_is_turned_away():
    with serving() as served, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(served.server.address)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(PATIENCE_S)
        while stranger.recv(1000):
            pass
        assert not served.visitors


def test_successor_listens_where_a_killed_process_did():
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        path = Address(path=f"{folder}/s")
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(path.path)
            killed.listen()
        with serving(path) as served:
            client = Client(served)
            with pytest.raises(LoraServerError, match=f"can't listen at lora_server.address={path}"):
                Served(path)
            client.close()
        assert not os.path.exists(path.path)


@pytest.mark.parametrize("address", ["nowhere", "host:", ":1", "host:99999", "rel/path"])
def test_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"lora_server.address=.* is not host:port.*nor the absolute path"):
        network().run(join(address, None, HELLO, 0.1))


def test_unreachable_server_is_named():
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        address = f"{folder}/nobody"
        with pytest.raises(LoraServerError, match=f"no LoRA Server answers at lora_server.address={address}"):
            network().run(join(address, None, HELLO, 0.1))


def test_server_that_accepts_but_does_not_answer_is_given_up():
    with tempfile.TemporaryDirectory(prefix="ls") as folder, socket.socket(socket.AF_UNIX) as stalled:
        stalled.bind(f"{folder}/s")
        stalled.listen()
        with pytest.raises(LoraServerError, match="no LoRA Server answers"):
            network().run(join(f"{folder}/s", None, HELLO, 0.2))


def test_call_of_a_server_that_goes_fails():
    with serving() as served:
        client = Client(served)

        async def ask_and_end() -> None:
            asked = client.peer.call("need", "a")
            client.peer.abort("the test ends it")
            with pytest.raises(PeerEndedError):
                await asked

        network().run(ask_and_end(), 20.0)


def test_nothing_is_left_of_connections_that_ended():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with serving() as served:
        Client(served).close()
        until(lambda: not network().run(_num_peers()))
        files, threads = open_files(), threading.active_count()
        for _ in range(20):
            client = Client(served)
            client.call("need", "a")
            client.close()
            del client
        until(lambda: not network().run(_num_peers()))
        until(lambda: open_files() <= files and threading.active_count() <= threads)


async def _num_peers() -> int:
    """Connections in the event loop that are not closed yet: each has a writer."""
    return sum("Peer._write" in repr(task) for task in asyncio.all_tasks())


def test_network_without_certificates_is_refused():
    with pytest.raises(LoraServerError, match="moe-lora cluster init"):
        Served(Address("127.0.0.1"))
    with pytest.raises(ConfigError, match="moe-lora cluster init"):
        network().run(join("127.0.0.1:1", None, HELLO, 0.1))
