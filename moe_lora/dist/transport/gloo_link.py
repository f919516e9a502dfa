"""One connection between two processes over gloo send/recv: requests one way, answers the other.

A gloo process group has fixed members, so each connection is a group of its own with two: the owner of the
windows (0) and whoever attached (1).  They meet over a socket (`gloo_meeting`).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store

from .descriptor import as_bytes

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

    def __init__(self, store: Store, side: int, device: Any, timeout_s: float) -> None:
        """Meets the other end; raises RuntimeError if it does not come within timeout_s."""
        self._timeout = timedelta(seconds=timeout_s)
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
        with self._lock:
            self._request(Op.PUT, window, offset, num_bytes, signal, value)
            if data is not None and num_bytes:
                self._send(as_bytes(data), _PAYLOAD_TAG)

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

    def bye(self) -> None:
        """End the connection, so that the other end's receiver stops; it may have ended on its own."""
        with self._lock:
            self._request(Op.BYE, 0, 0, 0, 0, 0, timeout=_GOODBYE)
        self.alive = False

    def _request(self, *fields: int, timeout: timedelta | None = None) -> None:
        request = torch.frombuffer(bytearray(_REQUEST.pack(*fields)), dtype=torch.uint8)
        self._send(request, _REQUEST_TAG, timeout)

    def serve(self, place: Callable[[int], Any]) -> None:
        """Obey requests until the other end says goodbye. place(id): a window or None."""
        request = torch.empty(_REQUEST.size, dtype=torch.uint8)
        while True:
            self._recv(request, _REQUEST_TAG, _FOREVER)
            op, number, offset, num_bytes, signal, value = _REQUEST.unpack(bytes(request.numpy()))
            window = place(number)
            if op == Op.BYE:
                return
            if op == Op.PUT:
                if num_bytes:
                    place_for = window.bytes if window else torch.empty(offset + num_bytes, dtype=torch.uint8)
                    self._recv(place_for[offset : offset + num_bytes], _PAYLOAD_TAG, self._timeout)
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
