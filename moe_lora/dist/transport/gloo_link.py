# SPDX-License-Identifier: Apache-2.0
"""One connection between two processes over gloo send/recv: requests one way, answers the other.

A gloo group has fixed members, so each connection is a group: the windows' owner (0) and the attacher (1).
"""

from __future__ import annotations

import hmac
import itertools
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store

from .contract import as_bytes, check_range, check_signal

OWNER, ATTACHED = 0, 1
_REQUEST = struct.Struct("<qqqqqQ")
_ANSWER = struct.Struct("<qqq")
_REQUEST_TAG, _PAYLOAD_TAG, _ANSWER_TAG, _DATA_TAG, _ABORT_TAG = range(5)
_Group: Any = distributed.ProcessGroupGloo  # undeclared Python signatures
_FOREVER = timedelta(days=365)
_GOODBYE = timedelta(milliseconds=200)


class Op(IntEnum):
    """Kind of a request."""

    SIZE = 0
    PUT = 1
    GET = 2
    QUIET = 3
    BYE = 4


Answer = tuple[int, int, int]
"""(1 if the window exists else 0, num_bytes, num_signals)"""


class Link:
    """One end of a connection.  Raises RuntimeError if the other is gone."""

    def __init__(
        self, store: Store, side: int, device: Any, timeout_s: float, put_timeout_s: float | None = None
    ) -> None:
        """Meet the other end.  Raises RuntimeError after timeout_s.  put_timeout_s: of a put's parts."""
        self._timeout = timedelta(seconds=timeout_s)
        self._put_timeout = timedelta(seconds=timeout_s if put_timeout_s is None else put_timeout_s)
        options = _Group._Options()
        options._timeout = self._timeout
        options._threads = 1
        options._devices = [device]
        self._group = _Group(store, side, 2, options)
        self._store = store  # the group does not keep the store alive
        self._other = 1 - side
        self._lock = threading.Lock()
        self.alive = True

    def _send(self, tensor: torch.Tensor, tag: int, timeout: timedelta | None = None) -> None:
        self._group.send([tensor], self._other, tag).wait(timeout or self._timeout)

    def _recv(self, tensor: torch.Tensor, tag: int, timeout: timedelta) -> None:
        self._group.recv([tensor], self._other, tag).wait(timeout)

    def put(self, window: int, offset: int, data: torch.Tensor | None, signal: int, value: int) -> None:
        """Send bytes and a signal; returns once gloo has both."""
        num_bytes = 0 if data is None else data.nbytes
        with self._turn_to_put():
            self._request(Op.PUT, window, offset, num_bytes, signal, value, timeout=self._put_timeout)
            if data is not None and num_bytes:
                self._send(as_bytes(data), _PAYLOAD_TAG, self._put_timeout)

    @contextmanager
    def _turn_to_put(self) -> Iterator[None]:
        # The lock's holder may wait longer than a put's limit.
        if not self._lock.acquire(timeout=self._put_timeout.total_seconds()):
            raise RuntimeError("another thread waits for an answer over the same connection")
        try:
            yield
        finally:
            self._lock.release()

    def ask(self, op: Op, window: int, offset: int = 0, out: torch.Tensor | None = None) -> Answer:
        """SIZE, QUIET or GET, answered after all earlier puts."""
        num_bytes = 0 if out is None else out.nbytes
        with self._lock:
            answer = torch.empty(_ANSWER.size, dtype=torch.uint8)
            coming = self._group.recv([answer], self._other, _ANSWER_TAG)
            self._request(op, window, offset, num_bytes, 0, 0)
            coming.wait(self._timeout)
            exists, its_bytes, its_signals = _ANSWER.unpack(bytes(answer.numpy()))
            if exists and out is not None and num_bytes:
                self._recv(as_bytes(out), _DATA_TAG, self._timeout)
        return exists, its_bytes, its_signals

    def say_goodbye(self) -> None:
        """End the connection and the other end's receiver; tolerates an ended link."""
        if not self.alive:
            return
        self.alive = False
        with self._lock, suppress(RuntimeError):
            self._request(Op.BYE, 0, 0, 0, 0, 0, timeout=_GOODBYE)

    def _request(self, *fields: int, timeout: timedelta | None = None) -> None:
        request = torch.frombuffer(bytearray(_REQUEST.pack(*fields)), dtype=torch.uint8)
        self._send(request, _REQUEST_TAG, timeout)

    def serve(self, place: Callable[[int], Any]) -> None:
        """Serve until the other end's goodbye.  place(id): a window or None.

        Raises ValueError for a request beyond its window, before any write.
        """
        request = torch.empty(_REQUEST.size, dtype=torch.uint8)
        while True:
            self._recv(request, _REQUEST_TAG, _FOREVER)
            code, number, offset, num_bytes, signal, value = _REQUEST.unpack(bytes(request.numpy()))
            op, window = Op(code), place(number)
            if window and op in (Op.PUT, Op.GET):
                check_range(window, offset if num_bytes else 0, num_bytes)
            if window and op == Op.PUT:
                check_signal(window, signal, value)
            if op == Op.BYE:
                return
            if op == Op.PUT:
                if num_bytes:
                    discarded = torch.empty(0 if window else num_bytes, dtype=torch.uint8)
                    target = window.bytes[offset : offset + num_bytes] if window else discarded
                    self._recv(target, _PAYLOAD_TAG, self._timeout)
                if window:
                    window.words.raise_to(signal, value)
                continue
            answer = (1, window.num_bytes, window.num_signals) if window else (0, 0, 0)
            self._send(torch.frombuffer(bytearray(_ANSWER.pack(*answer)), dtype=torch.uint8), _ANSWER_TAG)
            if op == Op.GET and window and num_bytes:
                self._send(window.bytes[offset : offset + num_bytes], _DATA_TAG)

    def abort(self) -> None:
        """Break the connection under a waiting receiver."""
        # A timed-out receive closes gloo's pair and its receives; gloo's abort() does not.
        self.alive = False
        try:
            self._recv(torch.empty(1, dtype=torch.uint8), _ABORT_TAG, timedelta(milliseconds=1))
        except RuntimeError:
            return


_LENGTHS = struct.Struct("<II")


class MeetingStore(Store):
    """A store of two processes over a socket; torch's TCPStore may take seconds to resolve host names.

    Raises OSError.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        name, data = key.encode(), value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._sock.sendall(_LENGTHS.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            name_bytes, num_bytes = _LENGTHS.unpack(receive(self._sock, _LENGTHS.size))
            name = receive(self._sock, name_bytes).decode()
            self._values[name] = receive(self._sock, num_bytes)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """timeout: ignored, the socket has a timeout."""
        for key in keys:
            self.get(key)


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Exactly num_bytes bytes.  Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the other end hung up")
        data += part
    return data


logger = logging.getLogger(__name__)

_TAG_CHARS = 32
_ACCEPT_PAUSE_S = 0.5


class Reception:
    """The owner's side: a port, and a thread per link."""

    def __init__(self, host: str, device: Any, timeout_s: float, place: Any) -> None:
        family, every = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))[":" in host]
        listens_at = (host if host == "127.0.0.1" else every, 0)
        self._listener = socket.create_server(listens_at, family=family, backlog=64)
        self.port = self._listener.getsockname()[1]
        self.tag = secrets.token_hex(_TAG_CHARS // 2)
        self._device, self._timeout_s, self._place = device, timeout_s, place
        self._links: dict[int, Link] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name="gloo-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                visitor, _ = self._listener.accept()
            except OSError as error:  # no free file descriptor, say
                if self._closing:
                    return
                logger.warning("the gloo transport can't accept a link now: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            if self._closing:
                visitor.close()
                return
            guest = (number, visitor)
            thread = threading.Thread(target=self._receive, args=guest, name="gloo-receive", daemon=True)
            self._threads[number] = thread
            thread.start()

    def _receive(self, number: int, visitor: socket.socket) -> None:
        try:
            self._serve(number, visitor)
        finally:
            # Last: an ending link takes time inside gloo, and `close` must wait.
            self._threads.pop(number, None)

    def _serve(self, number: int, visitor: socket.socket) -> None:
        try:
            with visitor:
                visitor.settimeout(self._timeout_s)
                tag = self.tag.encode()
                if not hmac.compare_digest(receive(visitor, _TAG_CHARS), tag):
                    raise ConnectionError("a stranger: it does not know this process's tag")
                visitor.sendall(tag)
                link = Link(MeetingStore(visitor), OWNER, self._device, self._timeout_s)
        except (OSError, RuntimeError) as error:
            logger.info("a visitor of the gloo transport was turned away: %s", error)
            return
        self._links[number] = link
        try:
            if not self._closing:
                link.serve(self._place)
        except ValueError as error:
            logger.warning(
                "a link of the gloo transport is dropped, its peer asked for what can't be: %s", error
            )
            link.abort()
        except RuntimeError:
            link.alive = False
        self._links.pop(number, None)

    def close(self) -> None:
        """End all links and threads."""
        self._closing = True
        socket.create_connection(self._listener.getsockname()[:2]).close()
        self._acceptor.join()
        self._listener.close()
        threads = list(self._threads.values())
        for link in list(self._links.values()):
            link.abort()
        for thread in threads:
            thread.join()


def connect(
    host: str, port: int, tag: str, device: Any, timeout_s: float, put_timeout_s: float | None = None
) -> Link:
    """A link to the owner; the tag proves possession of a descriptor.

    Raises OSError or RuntimeError.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as owner:
        owner.sendall(tag.encode())
        if not hmac.compare_digest(receive(owner, _TAG_CHARS), tag.encode()):
            raise ConnectionError("another process has its port")
        return Link(MeetingStore(owner), ATTACHED, device, timeout_s, put_timeout_s)
