# SPDX-License-Identifier: Apache-2.0
"""Connections: a Unix socket on one host, mutual TLS between hosts."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import connect, unix_connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection, serve, unix_serve
from websockets.exceptions import WebSocketException

from moe_lora.core.address import Address, located, needs_keys, unix_socket
from moe_lora.core.errors import ConfigError

from .codec import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from .keys import Keys

OPEN_S = 10.0
_CLOSE_S = 1.0
_KEEPALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000))
"""A lost host is noticed after about 5 s (on Linux)."""


@dataclass(frozen=True, kw_only=True)
class Pings:
    """Seconds between pings, and until a silent peer counts as gone."""

    interval_s: float
    timeout_s: float

    @staticmethod
    def within(silence_s: float) -> Pings:
        """Pings that end a connection after silence_s."""
        return Pings(interval_s=silence_s / 5, timeout_s=silence_s * 4 / 5)


def _options(pings: Pings | None) -> dict[str, Any]:
    return {
        "compression": None,
        "max_size": MAX_FRAME_BYTES,
        "open_timeout": OPEN_S,
        "close_timeout": _CLOSE_S,
        "ping_interval": None if pings is None else pings.interval_s,
        "ping_timeout": None if pings is None else pings.timeout_s,
        "logger": _wire_logger,
    }


@asynccontextmanager
async def listen(
    setting: str,
    address: Address,
    keys: Keys | None,
    visit: Callable[[Connection, str], Awaitable[None]],
    pings: Pings | None = None,
) -> AsyncIterator[Address]:
    """Call `visit` with each connection and its origin; yields the bound address.

    A Unix socket is private to its user.  setting: named in errors.  Raises ConfigError for an unavailable
    address, or a network address without keys.
    """

    async def handle(connection: ServerConnection) -> None:
        _keep_alive(connection)
        peer = connection.remote_address
        await visit(connection, peer[0] if isinstance(peer, tuple) and peer else "this host")

    context = None if address.path else _context(setting, address, keys, server=True)
    place = located(address)
    with ExitStack() as stack:
        try:
            if address.path:
                own = stack.enter_context(unix_socket(address.path))
                server = await unix_serve(handle, sock=own, **_options(pings))
            else:
                server = await serve(handle, place.host, place.port, ssl=context, **_options(pings))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"can't listen at {setting}={place}: {reason}; choose another") from error
        async with server:
            sock = next(iter(server.sockets))
            yield address if address.path or address.port else Address(address.host, sock.getsockname()[1])


async def dial(setting: str, address: Address, keys: Keys | None, pings: Pings | None = None) -> Connection:
    """Connect.  Raises ConnectionError; ConfigError for a network address without keys."""
    context = None if address.path else _context(setting, address, keys, server=False)
    place = located(address)
    try:
        if address.path:
            connection = await unix_connect(address.path, proxy=None, **_options(pings))
        else:
            connection = await connect(
                f"wss://{place}",
                ssl=context,
                server_hostname=place.host,
                proxy=None,
                **_options(pings),
            )
    except ssl.SSLError as error:
        raise ConnectionRefusedError(f"{address} was not trusted ({error.reason}); {_SAME_KEYS}") from error
    except (WebSocketException, EOFError, ConnectionResetError, BrokenPipeError) as error:
        raise ConnectionRefusedError(
            f"{address} turned this process away ({type(error).__name__}: {error}); {_SAME_KEYS}"
        ) from error
    except (OSError, asyncio.TimeoutError) as error:
        raise ConnectionError(f"nobody answers at {address}: {error!r}") from error
    _keep_alive(connection)
    return connection


_SAME_KEYS = "are its certificates of the same authority?"


def _context(setting: str, address: Address, keys: Keys | None, *, server: bool) -> ssl.SSLContext:
    if keys is None:
        raise needs_keys(setting, address)
    return keys.context(server=server)


def _keep_alive(connection: Connection) -> None:
    sock = connection.transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _OneLine(logging.Filter):
    """Logs strangers' errors in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]!r}", ()
            record.exc_info = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


_wire_logger = logging.getLogger(f"{__name__}.websocket")
_wire_logger.setLevel(logging.WARNING)
_wire_logger.addFilter(_OneLine())
