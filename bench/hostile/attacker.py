# SPDX-License-Identifier: Apache-2.0
"""A hostile client's use of sockets: raw bytes, slow bytes, parts, no reads."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"


def post(body: bytes, path: bytes = COMPLETIONS, *, more: bytes = b"") -> bytes:
    """A whole request.  more: header lines."""
    return HEAD % path + more + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


class Attacker:
    """Connections to one server, from one address, closed at the context's end.

    statuses: counts of answers by status; "closed" and "reset" for connections without an answer, "none" for
    silent ones.
    """

    def __init__(self, port: int, address: str) -> None:
        self.statuses: Counter[str] = Counter()
        self.longest_error = 0
        self.port = port
        self._address = address
        self._open: list[socket.socket] = []

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open:
            one.close()

    def connect(self, *, receive_bytes: int | None = None, address: str | None = None) -> socket.socket:
        """receive_bytes: of the kernel's buffer, so that unread bytes stay with the server.  address:
        default: the attacker's.
        """
        one = socket.socket()
        self._open.append(one)
        if receive_bytes is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        one.bind((address or self._address, 0))
        one.settimeout(10)
        one.connect(("127.0.0.1", self.port))
        return one

    def ask(self, *parts: bytes, wait_s: float = 60.0, pause_s: float = 0.0) -> bytes:
        """Send the parts over a new connection; returns and counts the answer."""
        try:
            one = self.connect()
            with contextlib.suppress(ConnectionError, TimeoutError):
                for part in parts:
                    one.sendall(part)
                    time.sleep(pause_s)
            return self.answer(one, wait_s)
        except OSError as error:
            self.statuses[type(error).__name__] += 1
            return b""

    def answer(self, one: socket.socket, wait_s: float = 60.0) -> bytes:
        """The server's bytes until it closes or is silent for `wait_s`."""
        found, kind, deadline_s = bytearray(), "closed", time.monotonic() + wait_s
        try:
            while len(found) < 1 << 20:
                one.settimeout(max(0.01, deadline_s - time.monotonic()))
                more = one.recv(1 << 16)
                if not more:
                    break
                found += more
        except TimeoutError:
            kind = "none"
        except ConnectionError:
            kind = "reset"
        one.close()
        answers = bytes(found).split(b"HTTP/1.1 ")[1:]
        for each in answers:
            self.statuses[each[:3].decode("ascii", "replace")] += 1
            if each[:1] in b"45":
                self.longest_error = max(self.longest_error, len(each))
        if not answers:
            self.statuses[kind] += 1
        return bytes(found)

    def json(self, body: Any, path: bytes = COMPLETIONS, wait_s: float = 60.0) -> bytes:
        return self.ask(post(json.dumps(body).encode(), path), wait_s=wait_s)

    def hold(
        self, num: int, start: bytes, *, receive_bytes: int | None = None, address: str | None = None
    ) -> list[socket.socket]:
        """Open connections that send these bytes and stay."""
        found = []
        for _ in range(num):
            try:
                one = self.connect(receive_bytes=receive_bytes, address=address)
                one.sendall(start)
            except OSError as error:
                self.statuses[type(error).__name__] += 1
            else:
                found.append(one)
        return found

    def drip(
        self, held: Sequence[socket.socket], drops: Iterator[bytes], every_s: float, for_s: float
    ) -> int:
        """Send a drop over each connection again and again; how many the server left open."""
        alive, deadline_s = list(held), time.monotonic() + for_s
        while alive and time.monotonic() < deadline_s:
            drop = next(drops)
            time.sleep(every_s)
            alive = [one for one in alive if self._lives(one) and _sent(one, drop)]
        for one in alive:
            self.statuses["left open"] += 1
            one.close()
        return len(alive)

    def _lives(self, one: socket.socket) -> bool:
        """True if the server still waits; counts its answer otherwise."""
        poll = select.poll()  # select takes no more than 1 024 files
        poll.register(one, select.POLLIN)
        if not poll.poll(0):
            return True
        self.answer(one, 1.0)
        return False


def _sent(one: socket.socket, drop: bytes) -> bool:
    try:
        one.sendall(drop)
    except OSError:
        return False
    return True
