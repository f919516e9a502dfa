from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError, LoraServerError
from moe_lora.dist.lora_server.protocol import control
from moe_lora.dist.lora_server.protocol.control import ControlConnection, ControlServer, dial
from moe_lora.dist.lora_server.protocol.control_messages import (
    PROTOCOL,
    Acquire,
    Block,
    Content,
    FindHello,
    LeasesHello,
    Need,
    ServerWelcome,
)
from moe_lora.dist.net.connection import dial as connect_to
from moe_lora.dist.net.keys import Keys, make_keys
from moe_lora.dist.net.peer import Peer
from moe_lora.dist.net.thread import LoopThread
from tests.dist.lora_server.cluster import hear_until_the_end, until

AGREED = {"protocol": 3, "dtype": "torch.float32", "num_layers": 4}
HELLO = LeasesHello(name="me", instance="me", agreed=AGREED)


class Echo:
    """A server whose handler sends back what it hears; `ended` gets what ended each connection."""

    def __init__(self, address: Address, silence_s: float | None, keys: Keys | None = None) -> None:
        self.ended: queue.SimpleQueue[type[Exception]] = queue.SimpleQueue()
        self._silence_s = silence_s
        self.server = ControlServer(address, keys, AGREED, {LeasesHello: self._echo})

    def _echo(self, connection: ControlConnection, hello: LeasesHello) -> None:
        connection.send(ServerWelcome())
        try:
            while True:
                message = connection.receive(0.1, self._silence_s)
                if message is not None:
                    connection.send(message)
        except (EOFError, OSError) as error:
            self.ended.put(type(error))  # the error itself would keep the connection
            raise


@contextlib.contextmanager
def echo(
    address: Address | None = None, silence_s: float | None = None, keys: Keys | None = None
) -> Iterator[Echo]:
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        served = Echo(address or Address(path=f"{folder}/s"), silence_s, keys)
        try:
            yield served
        finally:
            served.server.close()


def connect(served: Echo, hello=HELLO, keys: Keys | None = None) -> ControlConnection:
    return dial(served.server.address, keys, hello, 5.0)[0]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("ours"))


@pytest.mark.parametrize("network", [False, True], ids=["path", "port"])
def test_messages_and_blocks_arrive_in_order(network, keys):
    address, trusted = (Address("127.0.0.1"), keys) if network else (None, None)
    with echo(address, keys=trusted) as served:
        connection = connect(served, keys=trusted)
        for number in range(50):
            connection.send(Acquire("a", number))
        blocks = [Block(bytes([n]) * 1_000_000) for n in range(9)]
        connection.send_all(iter([Content("a", 9), *blocks]))
        connection.send(Need("last"))
        heard = [connection.receive(5.0) for _ in range(61)]
        assert heard == [Acquire("a", n) for n in range(50)] + [Content("a", 9), *blocks, Need("last")]
        connection.close()
        assert issubclass(served.ended.get(timeout=5.0), EOFError | OSError)


def test_certificates_of_another_cluster_are_refused(keys, tmp_path):
    others = make_keys(tmp_path / "others")
    with (
        echo(Address("127.0.0.1"), keys=keys) as served,
        pytest.raises(LoraServerError, match="are its certificates of the same authority"),
    ):
        dial(served.server.address, others, HELLO, 5.0)


@pytest.mark.parametrize(
    ("name", "value"), [("protocol", 2), ("dtype", "torch.bfloat16"), ("num_layers", 5), ("more", 1)]
)
def test_disagreement_is_refused_by_the_name_of_the_field(name, value):
    with echo() as served, pytest.raises(LoraServerError) as caught:
        connect(served, replace(HELLO, agreed={**AGREED, name: value}))
    assert f"{name} is {AGREED.get(name)!r} at the LoRA Server and {value!r} at me" in str(caught.value)


def test_purpose_that_is_not_served_is_refused():
    with echo() as served, pytest.raises(LoraServerError, match="FindHello is not served here"):
        connect(served, FindHello(name="me", agreed=AGREED, server_rank=0))


def test_peer_that_is_gone_ends_both_directions():
    with echo() as served:
        connection = connect(served)
        served.server.close()
        with pytest.raises((EOFError, OSError)):
            hear_until_the_end(connection)
        until(lambda: _sending_fails(connection))


def _sending_fails(connection: ControlConnection) -> bool:
    try:
        connection.send(Need("a"))
    except OSError:
        return True
    return False


async def silently(address: str) -> Peer:
    """A peer that says hello, and nothing more."""
    peer = Peer(await connect_to("address", Address(path=address), None), PROTOCOL, "the server")
    peer.send(HELLO)
    return peer


def test_silent_peer_is_given_up_and_a_quiet_one_is_not():
    thread = LoopThread()
    with echo(silence_s=1.0) as served:
        quiet = connect(served)  # beats
        silent = thread.run(silently(served.server.address))
        assert served.ended.get(timeout=5.0) is TimeoutError
        assert quiet.receive(1.5) is None
        quiet.send(Need("one"))
        assert quiet.receive(5.0) == Need("one")
        thread.loop.call_soon_threadsafe(silent.end)
        quiet.close()
    thread.stop()


def test_send_does_not_wait_for_a_peer_that_does_not_read():
    thread = LoopThread()
    with echo() as served:

        async def deaf() -> ControlConnection:
            return ControlConnection(await silently(served.server.address), "")

        async def fill(connection: ControlConnection) -> None:
            served_peer = next(iter(served.server._connections))
            served_peer._peer._socket.transport.pause_reading()

        connection = thread.run(deaf())
        until(lambda: served.server._connections)
        thread.run(fill(connection))
        for _ in range(100):
            connection.send(Need("x" * 100_000))  # far more than the socket holds
        connection.close()
    thread.stop()


def test_message_that_stops_half_way_ends_the_connection_once_nothing_more_comes():
    thread = LoopThread()
    with echo(silence_s=1.0) as served:
        peer = thread.run(silently(served.server.address))

        async def half() -> None:
            peer._socket.transport.write(b"\x82\xe4" + b"\x00" * 20)

        thread.run(half())
        assert served.ended.get(timeout=10.0) is TimeoutError
    thread.stop()


def test_message_of_another_kind_ends_the_connection():
    with echo() as served:
        connection = connect(served)
        loop = connection._loop
        loop.call_soon_threadsafe(connection._peer._waiting.append, b"\x91\xa4Evil")
        connection.send(Need("a"))
        with pytest.raises((EOFError, OSError), match="not understood"):
            hear_until_the_end(connection)


def test_successor_listens_where_a_killed_process_did():
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        path = Address(path=f"{folder}/s")
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(path.path)
            killed.listen()
        with echo(path) as served:
            connection = connect(served)
            with pytest.raises(LoraServerError, match=f"can't listen at lora_server.address={path}"):
                Echo(path, None)
            connection.close()
        assert not os.path.exists(path.path)


@pytest.mark.parametrize("address", ["nowhere", "host:", ":1", "host:99999", "rel/path"])
def test_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"lora_server.address=.* is not host:port.*nor the absolute path"):
        dial(address, None, HELLO, 0.1)


def test_unreachable_server_is_named():
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        address = f"{folder}/nobody"
        with pytest.raises(LoraServerError, match=f"no LoRA Server answers at lora_server.address={address}"):
            dial(address, None, HELLO, 0.1)


def test_server_that_accepts_but_does_not_answer_is_given_up():
    with tempfile.TemporaryDirectory(prefix="ls") as folder, socket.socket(socket.AF_UNIX) as stalled:
        stalled.bind(f"{folder}/s")
        stalled.listen()
        with pytest.raises(LoraServerError, match="no LoRA Server answers"):
            dial(f"{folder}/s", None, HELLO, 0.2)


def test_nothing_is_left_of_connections_that_ended():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with echo() as served:
        control._network()
        idle = threading.active_count()
        connect(served).close()
        until(lambda: threading.active_count() <= idle)
        until(lambda: not asyncio.run_coroutine_threadsafe(_num_peers(), control._network().loop).result())
        files, threads = open_files(), threading.active_count()
        for _ in range(20):
            connection = connect(served)
            connection.send(Need("a"))
            assert connection.receive(5.0) is not None
            connection.close()
            del connection
        until(lambda: open_files() <= files and threading.active_count() <= threads)


async def _num_peers() -> int:
    """Connections in the event loop that are not closed yet: each has a writer."""
    return sum("Peer._write" in repr(task) for task in asyncio.all_tasks())


def test_network_without_certificates_is_refused():
    with pytest.raises(LoraServerError, match="moe-lora cluster init"):
        Echo(Address("127.0.0.1"), None)
    with pytest.raises(ConfigError, match="moe-lora cluster init"):
        dial("127.0.0.1:1", None, HELLO, 0.1)
