# SPDX-License-Identifier: Apache-2.0
"""One connection between two processes over gloo send/recv: requests one way, answers the other.

A gloo process group has fixed members, so each connection is a group of its own with two: the owner of the
windows (0) and whoever attached (1).  They meet over a socket (`MeetingStore`).
"""

from __future__ import annotations

import hmac
import itertools
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store

from .descriptor import as_bytes, check_range, check_signal

OWNER, ATTACHED = 0, 1
_REQUEST = struct.Struct("<qqqqqQ")
_ANSWER = struct.Struct("<qqq")
_REQUEST_TAG, _PAYLOAD_TAG, _ANSWER_TAG, _DATA_TAG, _ABORT_TAG = range(5)
_Group: Any = distributed.ProcessGroupGloo  # its Python signatures are not declared
_FOREVER = timedelta(days=365)
_GOODBYE = timedelta(milliseconds=200)


class Op(IntEnum):
    """What a request asks for."""

    SIZE = 0
    PUT = 1
    GET = 2
    QUIET = 3
    BYE = 4


Answer = tuple[int, int, int]
"""(1 if the window exists else 0, num_bytes, num_signals)"""


class Link:
    """One end of a connection. Methods raise RuntimeError when the other end is gone."""

    def __init__(
        self, store: Store, side: int, device: Any, timeout_s: float, put_timeout_s: float | None = None
    ) -> None:
        """Meets the other end; raises RuntimeError if it does not come within timeout_s.

        put_timeout_s: of the parts of a put; None: timeout_s.
        """
        self._timeout = timedelta(seconds=timeout_s)
        self._put_timeout = timedelta(seconds=timeout_s if put_timeout_s is None else put_timeout_s)
        options = _Group._Options()
        options._timeout = self._timeout
        options._threads = 1
        options._devices = [device]
        self._group = _Group(store, side, 2, options)
        self._store = store  # a store written in Python does not live by the group's hold on it
        self._other = 1 - side
        self._lock = threading.Lock()
        self.alive = True

    def _send(self, tensor: torch.Tensor, tag: int, timeout: timedelta | None = None) -> None:
        self._group.send([tensor], self._other, tag).wait(timeout or self._timeout)

    def _recv(self, tensor: torch.Tensor, tag: int, timeout: timedelta) -> None:
        self._group.recv([tensor], self._other, tag).wait(timeout)

    def put(self, window: int, offset: int, data: torch.Tensor | None, signal: int, value: int) -> None:
        """Send bytes and a signal; returns when gloo has taken them."""
        num_bytes = 0 if data is None else data.nbytes
        with self._turn_to_put():
            self._request(Op.PUT, window, offset, num_bytes, signal, value, timeout=self._put_timeout)
            if data is not None and num_bytes:
                self._send(as_bytes(data), _PAYLOAD_TAG, self._put_timeout)

    @contextmanager
    def _turn_to_put(self) -> Iterator[None]:
        # Whoever has the lock may wait for a peer that stalls: longer than a put may take.
        if not self._lock.acquire(timeout=self._put_timeout.total_seconds()):
            raise RuntimeError("another thread waits for an answer over the same connection")
        try:
            yield
        finally:
            self._lock.release()

    def ask(self, op: Op, window: int, offset: int = 0, out: torch.Tensor | None = None) -> Answer:
        """SIZE, QUIET or GET: the answer comes after all that was put before."""
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
        """End the connection, so that the other end's receiver stops; it may have ended on its own."""
        if not self.alive:
            return
        self.alive = False
        with self._lock, suppress(RuntimeError):
            self._request(Op.BYE, 0, 0, 0, 0, 0, timeout=_GOODBYE)

    def _request(self, *fields: int, timeout: timedelta | None = None) -> None:
        request = torch.frombuffer(bytearray(_REQUEST.pack(*fields)), dtype=torch.uint8)
        self._send(request, _REQUEST_TAG, timeout)

    def serve(self, place: Callable[[int], Any]) -> None:
        """Obey requests until the other end says goodbye. place(id): a window or None.

        Raises ValueError for a request beyond its window, before anything of it is placed.
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
        """Break the connection under a receiver that waits."""
        # gloo closes a pair whose receive timed out, which ends its other receives too; its own abort() does
        # not.
        self.alive = False
        try:
            self._recv(torch.empty(1, dtype=torch.uint8), _ABORT_TAG, timedelta(milliseconds=1))
        except RuntimeError:
            return


# How the two ends of a gloo link tell each other their addresses: over a socket of their own.
#
# torch's TCPStore would look up the name of each end that connects, and wait seconds for a resolver that does
# not answer.


_LENGTHS = struct.Struct("<II")


class MeetingStore(Store):
    """A store of two processes: what one end sets is sent to the other, which reads it when it asks.

    Raises OSError, also when the other end has hung up or says nothing for the socket's timeout.
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
        """timeout: not looked at, the socket has one."""
        for key in keys:
            self.get(key)


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Exactly that many bytes.  Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the other end hung up")
        data += part
    return data


# Where peers of the gloo transport meet a window's owner, and the threads that receive from them.


logger = logging.getLogger(__name__)

_TAG_CHARS = 32


class Reception:
    """The owner's side: a port where peers announce themselves, and a thread per link."""

    def __init__(self, host: str, device: Any, timeout_s: float, place: Any) -> None:
        self._listener = socket.create_server(("0.0.0.0" if host != "127.0.0.1" else host, 0), backlog=64)
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
            visitor, _ = self._listener.accept()
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
            # Only now is the link gone: ending it takes time inside gloo, and `close` must wait for that.
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
        except (OSError, RuntimeError) as error:  # the visitor died on the doorstep, or may not come in
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
        except RuntimeError:  # the peer has ended, or this side closes
            link.alive = False
        self._links.pop(number, None)

    def close(self) -> None:
        """End all links and threads."""
        self._closing = True
        socket.create_connection(("127.0.0.1", self.port)).close()  # so that the acceptor looks
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
    """A link to the owner at that address, who knows by the tag that this process has its descriptor.

    Raises OSError or RuntimeError.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as owner:
        owner.sendall(tag.encode())
        if not hmac.compare_digest(receive(owner, _TAG_CHARS), tag.encode()):
            raise ConnectionError("another process has its port")
        return Link(MeetingStore(owner), ATTACHED, device, timeout_s, put_timeout_s)
