# SPDX-License-Identifier: Apache-2.0
"""A second process whose transport a test drives call by call."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from moe_lora.dist.transport import make_transport
from tests.patience import PATIENCE_S

TIMEOUT_S = PATIENCE_S
POLL_S = 0.002


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    """Bytes that depend on place and seed, so that stale or shifted data shows."""
    return ((torch.arange(num_bytes, dtype=torch.int64) * 31 + seed * 7919) % 251).to(torch.uint8)


class Driven:
    """What the other process can be told to do."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.windows: dict[str, Any] = {}
        self.remotes: dict[str, Any] = {}

    def join(self, kind: str, name: str, options: dict[str, Any]) -> None:
        self.transport = make_transport(kind, name=name, **options)

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> bytes:
        self.windows[label] = self.transport.alloc(label, num_bytes, num_signals)
        return self.windows[label].descriptor()

    def attach(self, descriptor: bytes) -> None:
        remote = self.transport.attach(descriptor)
        self.remotes[remote.label] = remote

    def put(self, label: str, offset: int, num_bytes: int, seed: int, index: int, value: int) -> None:
        remote = self.remotes[label]
        self.transport.put_signal(remote, offset, pattern(num_bytes, seed), index, value)
        self.transport.quiet(remote)

    def wait(self, label: str, index: int, at_least: int, timeout_s: float = TIMEOUT_S) -> int:
        return self.transport.signal_wait_until(self.windows[label], index, at_least, timeout_s)

    def read(self, label: str, offset: int, num_bytes: int) -> bytes:
        return bytes(self.windows[label].bytes[offset : offset + num_bytes].numpy())

    def read_at(self, label: str, index: int, at_least: int, parts: list[tuple[int, int]]) -> list[bytes]:
        """The bytes of each (offset, length) as they are once the signal is there."""
        self.wait(label, index, at_least)
        return [self.read(label, offset, num_bytes) for offset, num_bytes in parts]

    def free(self, label: str) -> None:
        self.windows.pop(label).free()

    def echo(self, label: str, remote_label: str, rounds: list[tuple[int, int, int]]) -> int:
        """Round i: await (offset, length, value), check the bytes, put them back. Returns the faults."""
        window, remote, faults = self.windows[label], self.remotes[remote_label], 0
        for offset, num_bytes, value in rounds:
            self.transport.signal_wait_until(window, 0, value, TIMEOUT_S)
            seen = window.bytes[offset : offset + num_bytes]
            faults += not torch.equal(seen, pattern(num_bytes, value))
            self.transport.put_signal(remote, offset, seen, 0, value)
        self.transport.quiet(remote)
        return faults

    def leave(self) -> None:
        self.transport.close()
        self.__init__()  # type: ignore[misc]

    def footprint(self) -> tuple[int, int]:
        """Open files and threads of the process."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    driven = Driven()
    while True:
        while driven.transport and not pipe.poll(POLL_S):
            driven.transport.wait_any([], 0.0)  # some media get on only while their process waits
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(driven, method)(*arguments)))
        except Exception as error:
            pipe.send((False, error))


class Peer:
    """A process that obeys: `peer.call("alloc", "w", 64, 1)`; or `start` now and `finish` later."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.meanwhile: Callable[[], object] = lambda: None
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def finish(self) -> Any:
        deadline = time.monotonic() + TIMEOUT_S * 2
        while not self._pipe.poll(POLL_S):
            assert time.monotonic() < deadline, "the peer does not answer"
            self.meanwhile()
        good, result = self._pipe.recv()
        if not good:
            raise result
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.finish()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """As a crash would: nothing runs on the way out."""
        if self._process.is_alive():
            self.send_signal(signal.SIGKILL)
        self._process.join()
        self._pipe.close()
