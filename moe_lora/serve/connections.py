# SPDX-License-Identifier: Apache-2.0
"""HTTP connections: their number and time limits."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from .frontend import CUT
from .http_errors import ApiError, to_json
from .limits import RETRY_S, Limits, client_at

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8
"""Connections accepted in one turn of the event loop."""
_LINGERING = 32
_RESERVE = 5 * ACCEPTED_AT_ONCE + _LINGERING + 16
"""File descriptors for refused connections and requests' files."""
_LINGER_S = 1.0
MAX_HEADERS = 128
"""Each header takes more memory than its bytes."""
MAX_PIPELINED = 64
"""Queued requests behind an unfinished answer."""
HEADERS_S = "moe_lora.headers_s"
"""ASGI scope key: arrival of the headers, monotonic."""
_UPGRADE = re.compile(rb"(?i)\r\nupgrade(?=:)")
_REQUEST, _HEAD, _BODY = "the next request", "the head of a request", "the body of a request"
"""Next data due from a client."""


def most_connections(max_files: int, num_open: int) -> int:
    """Further connections within the file limit, at least one."""
    return max(1, max_files - num_open - _RESERVE)


def as_bytes(error: ApiError) -> bytes:
    """An error's answer; the connection then closes."""
    body = to_json(error.body)
    fields = {**error.headers, "Content-Type": "application/json", "Connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in {**fields, "Content-Length": len(body)}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def send_unchunked(cycle: RequestResponseCycle, message: Any) -> Awaitable[None]:
    """Send to a client of HTTP/1.0: the connection's end is the body's."""
    cycle.chunked_encoding = False
    cycle.expected_content_length = len(message.get("body", b""))
    return RequestResponseCycle.send(cycle, message)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol within `Limits`.  for_files: connections within the file limit."""

    limits: Limits
    for_files: int
    said = False
    num_lingering = 0

    _client = ""
    _is_counted = False
    _lingers: asyncio.TimerHandle | None = None  # until a refused connection closes
    _num_head_bytes = 0  # since the last complete head or body chunk
    _awaited: str | None = None  # data due from the client by late_s
    late_s = math.inf
    _unread_bytes = 0
    unread_s = math.inf  # end of the time limit without reads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        error = None if self._is_counted else self.enter(transport)
        if error is not None:
            self._turn_away(transport, error)
            return
        super().connection_made(transport)
        config, peer = self.limits.config, get_remote_addr(transport)
        connects_ahead = peer is not None and self.limits.is_proxy(peer[0])
        self._await(_REQUEST, config.idle_timeout_s if connects_ahead else config.header_timeout_s)

    def enter(self, transport: asyncio.Transport) -> ApiError | None:
        """Count the connection; returns an error beyond a limit."""
        limits, peer = self.limits, get_remote_addr(transport)
        host = peer[0] if peer else None
        self._client = client_at(host)
        whose = limits.connections.exceeded(self._client, 1)
        if whose == "client" and host is not None and limits.is_proxy(host):
            whose = None
        by_files = limits.connections.in_all >= self.for_files
        if not by_files and whose is None:
            self._is_counted = True
            limits.connections.take(self._client, 1)
            return None
        if whose == "client" and not by_files:
            most = limits.connections.most_per_client
            what = f"more than {most} connections of one client; close some, or use them again"
            return limits.refusal("client_connections", ApiError(429, what, retry_s=RETRY_S))
        kind = type(self)
        if not kind.said:
            kind.said = True
            logger.error(
                "%d connections are open, all that %s: more are refused with a 503; raise it with %s",
                limits.connections.in_all,
                "the limit on open files leaves room for" if by_files else "there may be",
                "ulimit -n" if by_files else "front_end.max_connections",
            )
        what = "too many connections; try again later"
        return limits.refusal("connections", ApiError(503, what, retry_s=RETRY_S))

    def leave(self) -> None:
        """Stop counting the connection."""
        if self._is_counted:
            self._is_counted = False
            self.limits.connections.give_back(self._client, 1)

    def _turn_away(self, transport: asyncio.Transport, error: ApiError) -> None:
        kind = type(self)
        transport.write(as_bytes(error))
        if kind.num_lingering >= _LINGERING:
            transport.close()
            return
        # A close before the request has arrived would reset the connection and lose the answer.
        kind.num_lingering += 1
        self._lingers = asyncio.get_running_loop().call_later(_LINGER_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        if self._lingers is not None:
            self._lingers.cancel()
            type(self).num_lingering -= 1
        if self in self.connections:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self not in self.connections:
            return
        if self.cycle is None or self.cycle.response_complete:
            # HTTP/2 clients (Java's) send a body too; httptools would drop the body.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nignored", head) + end + rest
        self._num_head_bytes += len(data)
        super().data_received(data)
        most = self.limits.config.max_header_bytes
        if self._num_head_bytes > most and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has at most {most} bytes.")

    def send_400_response(self, msg: str) -> None:
        self.limits.count("http")
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        self._await(_HEAD, self.limits.config.header_timeout_s)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise httptools.HttpParserError(f"more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_head_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError(f"more than {MAX_PIPELINED} requests before the first answer")
        self._await(_BODY, self.limits.config.body_timeout_s)
        cast("dict[str, Any]", self.scope)[HEADERS_S] = time.monotonic()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = partial(send_unchunked, self.cycle)  # type: ignore[method-assign, assignment]

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._awaited, self.late_s = None, math.inf
        super().on_message_complete()
        if self.cycle.response_complete:  # answered before its body arrived
            self._await(_REQUEST, self.limits.config.idle_timeout_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._awaited is None and self.cycle.response_complete:
            self._await(_REQUEST, self.limits.config.idle_timeout_s)
        elif self._awaited == _BODY:
            self._await(_BODY, self.limits.config.body_timeout_s)

    def _await(self, what: str, time_s: float) -> None:
        self._awaited, self.late_s = what, time.monotonic() + time_s

    def pause_writing(self) -> None:
        self.unread_s = time.monotonic() + self.limits.config.write_timeout_s
        self._unread_bytes = self.transport.get_write_buffer_size()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unread_s = math.inf
        super().resume_writing()

    @property
    def is_unread(self) -> bool:
        """True if the client leaves data unread."""
        return self.unread_s < math.inf

    def end_if_late(self, now_s: float) -> None:
        """End the connection beyond its time limit; called periodically."""
        if now_s >= self.unread_s:
            num_bytes = self.transport.get_write_buffer_size()
            if num_bytes < self._unread_bytes:  # slow, but reading
                self.unread_s, self._unread_bytes = now_s + self.limits.config.write_timeout_s, num_bytes
                return
            self.limits.count("write_time")
            self.transport.abort()
        elif now_s >= self.late_s and not self.transport.is_closing() and not self.pipeline:
            if self._awaited == _REQUEST:
                self.transport.close()
            elif not self._answering():
                self.limits.count("header_time" if self._awaited == _HEAD else "body_time")
                self._refuse(408, f"{self._awaited} did not come in time; send it faster")

    def _answering(self) -> bool:
        cycle = self.cycle
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        if self._awaited == _HEAD or not self.cycle.response_complete:
            self.transport.write(as_bytes(ApiError(status, message)))
        self.transport.close()

    def shutdown(self) -> None:
        """Shut down without waiting for further data."""
        if self._awaited in (_HEAD, _BODY) and not self._answering():
            self._refuse(503, CUT)
        else:
            super().shutdown()


class TlsConnection(SSLProtocol):
    """TLS before a `Connection`; counted before its handshake, within the time limit of a head.

    Beyond the limit, a connection closes without the costly handshake.
    """

    def __init__(self, connection: Connection, context: ssl.SSLContext) -> None:
        loop, waiter = asyncio.get_running_loop(), None
        time_s: Any = connection.limits.config.header_timeout_s
        super().__init__(
            loop,
            connection,
            context,
            waiter,  # type: ignore[arg-type]
            server_side=True,
            ssl_handshake_timeout=time_s,
        )
        self._connection = connection

    def connection_made(self, transport: Any) -> None:
        if self._connection.enter(transport) is None:
            super().connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connection.leave()
        super().connection_lost(exc)


def limited(
    limits: Limits, for_files: int, context: ssl.SSLContext | None
) -> Callable[..., Connection | TlsConnection]:
    """Protocol factory.  context: of TLS."""
    kind = type("LimitedConnection", (Connection,), {"limits": limits, "for_files": for_files})
    return kind if context is None else lambda **words: TlsConnection(kind(**words), context)
