from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection

import pytest

from moe_lora.core.errors import LoraServerError
from moe_lora.dist.lora_server.control import ControlConnection, ControlServer, Message, dial

from .cluster import KEY, hear_until_the_end, until

AGREED = {"protocol": 3, "dtype": "torch.float32", "num_layers": 4}
HELLO = {"role": "echo", "name": "me", "agreed": AGREED}


class Echo:
    """A server whose handler sends back what it hears; `ended` gets what ended each connection."""

    def __init__(self, address: str, silence_s: float | None) -> None:
        self.ended: queue.SimpleQueue[type[Exception]] = queue.SimpleQueue()
        self._silence_s = silence_s
        self.server = ControlServer(address, KEY.encode(), AGREED, {"echo": self._echo})

    def _echo(self, connection: ControlConnection, hello: Message) -> None:
        connection.send("welcome")
        try:
            while True:
                message = connection.receive(0.1, self._silence_s)
                if message is not None:
                    blocks = [connection.receive_block() for _ in range(message.pop("num_blocks", 0))]
                    message["sizes"] = [len(block) for block in blocks]
                    connection.send("echo", message=message)
        except (EOFError, OSError) as error:
            self.ended.put(type(error))  # the error itself would keep the connection
            raise


@contextlib.contextmanager
def echo(address: str | None = None, silence_s: float | None = None) -> Iterator[Echo]:
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        served = Echo(address or f"{folder}/s", silence_s)
        try:
            yield served
        finally:
            served.server.close()


def connect(served: Echo, **changes) -> ControlConnection:
    return dial(served.server.address, KEY.encode(), {**HELLO, **changes}, 5.0)[0]


@pytest.mark.parametrize("address", [None, "127.0.0.1:0"], ids=["path", "port"])
def test_messages_and_blocks_arrive_in_order(address):
    with echo(address) as served:
        connection = connect(served)
        for number in range(50):
            connection.send("say", number=number)
        connection.send_with_blocks([b"x" * 10, b"y" * 3_000_000], "say", number=50, num_blocks=2)
        heard = [connection.receive(5.0)["message"] for _ in range(51)]
        assert [message["number"] for message in heard] == list(range(51))
        assert heard[-1]["sizes"] == [10, 3_000_000]
        connection.close()
        assert issubclass(served.ended.get(timeout=5.0), EOFError | OSError)


def test_wrong_key_is_refused():
    with echo() as served, pytest.raises(LoraServerError, match="does not accept the cluster key"):
        dial(served.server.address, b"other", HELLO, 5.0)


@pytest.mark.parametrize(
    ("name", "value"), [("protocol", 2), ("dtype", "torch.bfloat16"), ("num_layers", 5), ("more", 1)]
)
def test_disagreement_is_refused_by_the_name_of_the_field(name, value):
    with echo() as served, pytest.raises(LoraServerError) as caught:
        connect(served, agreed={**AGREED, name: value})
    assert f"{name} is {AGREED.get(name)!r} at the LoRA Server and {value!r} at me" in str(caught.value)


def test_unknown_role_is_refused():
    with echo() as served, pytest.raises(LoraServerError, match="role 'other' is not served here"):
        connect(served, role="other")


def test_peer_that_is_gone_ends_both_directions():
    with echo() as served:
        connection = connect(served)
        served.server.close()
        with pytest.raises((EOFError, OSError)):
            hear_until_the_end(connection)
        until(lambda: _sending_fails(connection))


def _sending_fails(connection: ControlConnection) -> bool:
    try:
        connection.send("say")
    except OSError:
        return True
    return False


def test_silent_peer_is_given_up_and_a_quiet_one_is_not():
    with echo(silence_s=1.0) as served:
        quiet = connect(served)  # beats
        silent = Client(served.server.address, authkey=KEY.encode())
        silent.send_bytes(json.dumps({"kind": "hello", **HELLO}).encode())
        assert served.ended.get(timeout=5.0) is TimeoutError
        assert quiet.receive(1.5) is None
        quiet.send("say", number=1)
        assert quiet.receive(5.0) == {"kind": "echo", "message": {"kind": "say", "number": 1, "sizes": []}}
        silent.close()
        quiet.close()


def test_send_does_not_wait_for_a_peer_that_does_not_read():
    ours, theirs = socket.socketpair()
    with theirs:
        connection = ControlConnection(Connection(ours.detach()), "a stalled peer")
        for _ in range(100):
            connection.send("say", text="x" * 100_000)  # far more than the socket holds
        assert connection.receive(0.05) is None
        connection.close()


def test_message_that_stops_half_way_ends_the_connection():
    with echo() as served:
        raw = Client(served.server.address, authkey=KEY.encode())
        raw.send_bytes(json.dumps({"kind": "hello", **HELLO}).encode())
        os.write(raw.fileno(), b"\0\0\1\0 the rest never comes")
        assert served.ended.get(timeout=10.0) is BlockingIOError
        raw.close()


def test_successor_listens_where_a_killed_process_did():
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        path = f"{folder}/s"
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(path)
            killed.listen()
        with echo(path) as served:
            connection = connect(served)
            with pytest.raises(LoraServerError, match=f"can't listen at lora_server.address={path}"):
                Echo(path, None)
            connection.close()
        assert not os.path.exists(path)


@pytest.mark.parametrize("address", ["nowhere", "host:", ":1", "host:99999", "rel/path"])
def test_address_that_is_none_is_refused(address):
    with pytest.raises(LoraServerError, match=r"lora_server.address=.* is neither host:port nor an absolute"):
        dial(address, b"k", HELLO, 0.1)


def test_unreachable_server_is_named():
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        address = f"{folder}/nobody"
        with pytest.raises(LoraServerError, match=f"no LoRA Server answers at lora_server.address={address}"):
            dial(address, b"k", HELLO, 0.1)


def test_server_that_accepts_but_does_not_answer_is_given_up():
    with tempfile.TemporaryDirectory(prefix="ls") as folder, socket.socket(socket.AF_UNIX) as stalled:
        stalled.bind(f"{folder}/s")
        stalled.listen()
        with pytest.raises(LoraServerError, match="no LoRA Server answers"):
            dial(f"{folder}/s", b"k", HELLO, 0.2)


def test_nothing_is_left_of_connections_that_ended():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with echo() as served:
        idle = threading.active_count()
        connect(served).close()
        until(lambda: threading.active_count() <= idle)
        files, threads = open_files(), threading.active_count()
        for _ in range(20):
            connection = connect(served)
            connection.send("say")
            assert connection.receive(5.0) is not None
            connection.close()
            del connection
        until(lambda: open_files() <= files and threading.active_count() <= threads)
