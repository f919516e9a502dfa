"""TCP connections between the front end and engines on other hosts.

After the handshake both sides send pickles, so whoever knows the key can run code on the other side.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from moe_lora.core.request import ModelInfo

PROTOCOL_VERSION = 3
HANDSHAKE_S = 10.0
_KEEPALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000))
"""A host that is gone or cut off is noticed after about 5 s (on Linux; elsewhere by the system's rules)."""


@dataclass(frozen=True)
class Hello:
    """An engine's first message.  incarnation: the same as long as its process lives."""

    name: str
    incarnation: str
    info: ModelInfo
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Welcome:
    """The front end's answer.  refusal: why the engine can't take part; None: it does, and sends a beat
    every heartbeat_s.
    """

    refusal: str | None = None
    heartbeat_s: float = 1.0


def new_incarnation() -> str:
    return secrets.token_hex(8)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.  Raises OSError."""
    return socket.create_server((host, port), backlog=64)


def dial(host: str, port: int, key: bytes, hello: object) -> tuple[Connection, Welcome]:
    """Connect and say hello.

    Raises OSError or EOFError if nobody is there, AuthenticationError if its key is another.
    """
    sock = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    connection = _prepared(sock)
    try:
        with time_limit(connection, HANDSHAKE_S):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send(hello)
            welcome: Welcome = connection.recv()
    except AssertionError as error:  # before Python 3.12, of what should have been a challenge
        connection.close()
        raise AuthenticationError("what answers there speaks another protocol") from error
    except BaseException:
        connection.close()
        raise
    return connection, welcome


def greet(sock: socket.socket, key: bytes) -> tuple[Connection, Any]:
    """The other side of `dial`; a `Welcome` has to follow.  Raises as it does."""
    connection = _prepared(sock)
    try:
        with time_limit(connection, HANDSHAKE_S):
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            hello = connection.recv()
    except BaseException:
        connection.close()
        raise
    return connection, hello


@contextmanager
def time_limit(connection: Connection, limit_s: float) -> Iterator[None]:
    """Reads fail with OSError when nothing comes for that long."""
    _set_receive_timeout(connection, limit_s)
    yield
    _set_receive_timeout(connection, 0.0)


def _set_receive_timeout(connection: Connection, timeout_s: float) -> None:
    with socket.socket(fileno=socket.dup(connection.fileno())) as sock:
        value = struct.pack("ll", int(timeout_s), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)


def _prepared(sock: socket.socket) -> Connection:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(sock.detach())
