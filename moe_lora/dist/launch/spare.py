# SPDX-License-Identifier: Apache-2.0
"""A spare process of a host: it starts ahead of need and replaces the next instance that dies.

Imports are most of the time from the death of an instance to its return.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.processes import is_stopped

from .host_roles import start_process

logger = logging.getLogger(__name__)

SPARE_AFTER_S = 10.0
"""Seconds between a ready instance and the start of the next spare."""
_IMPORTED = (
    "moe_lora.dist.cluster.instance_links",
    "moe_lora.engine.build",
    "moe_lora.engine.loop",
)


class _Waiting(NamedTuple):
    process: asyncio.subprocess.Process
    status: BinaryIO
    ours: socket.socket

    def close(self) -> None:
        self.status.close()
        self.ours.close()


class Spare:
    """Keeps at most one spare process; belongs to one event loop.

    words: of an instance's command, after the interpreter, without its name.  fds: that it inherits.
    """

    def __init__(self, words: Sequence[str], fds: Sequence[int], clock: Clock | None = None) -> None:
        self._words, self._fds = words, fds
        self._clock = clock or WallClock()
        self._waiting: _Waiting | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._earliest_s = 0.0

    def put_off(self) -> None:
        """Start no spare process for the next SPARE_AFTER_S."""
        self._earliest_s = self._clock.now_s() + SPARE_AFTER_S
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while not self._stopping:
            if (pause_s := self._earliest_s - self._clock.now_s()) > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), pause_s)
                continue
            try:
                waiting = await self._start()
            except Exception as error:
                logger.warning("no spare process can be started: %r", error)
            else:
                await self._watch(waiting)
            self.put_off()

    async def _start(self) -> _Waiting:
        ours, name = socket.socketpair()
        with name:
            fd = name.fileno()
            try:
                process, status = await start_process(self._words, ("--spare", str(fd)), (*self._fds, fd))
            except BaseException:
                ours.close()
                raise
        return _Waiting(process, status, ours)

    async def _watch(self, waiting: _Waiting) -> None:
        self._waiting = waiting
        self._changed.clear()
        died, changed = asyncio.create_task(waiting.process.wait()), asyncio.create_task(self._changed.wait())
        if not self._stopping:
            await asyncio.wait((died, changed), return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if self._waiting is None:
            died.cancel()
            return
        self._waiting = None
        waiting.close()
        if died.done():
            logger.warning("the spare process ended: exit code %d", died.result())
        with suppress(ProcessLookupError):
            waiting.process.kill()
        await died

    def acquire(self, name: str, num_starts: int) -> tuple[asyncio.subprocess.Process, BinaryIO] | None:
        """Turn the spare process into this instance; returns process and status
        pipe.  None: no spare waits.
        """
        waiting = self._waiting
        if waiting is None or waiting.process.returncode is not None or is_stopped(waiting.process.pid):
            return None
        try:
            waiting.ours.sendall(f"{num_starts} {name}\n".encode())
        except OSError:
            return None
        self._waiting = None
        waiting.ours.close()
        self._changed.set()
        return waiting.process, waiting.status

    async def stop(self) -> None:
        """End the spare process; returns after its end."""
        self._stopping = True
        self._changed.set()
        if self._keeping is not None:
            await self._keeping


def wait_for_name(fd: int, *, compiles: bool) -> tuple[int, str]:
    """Import the engine, then wait; returns the number of earlier starts and the instance's name.

    fd: the spare's end of a socket.  compiles: the engine will compile.  Set the threads' environment before.
    """
    for module in (*_IMPORTED, *(["torch._inductor.compile_fx"] if compiles else [])):
        importlib.import_module(module)
    logger.info("a spare process waits to replace an instance (process %d)", os.getpid())
    with socket.socket(fileno=fd) as ours, ours.makefile("r") as told:
        line = told.readline()
    if not line:
        sys.exit(0)
    num_starts, _, name = line.rstrip("\n").partition(" ")
    return int(num_starts), name
