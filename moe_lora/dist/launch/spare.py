"""A spare process of a host: it has imported what an instance needs, and waits for the name of one that died.

Imports are most of what the return of an instance takes.
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
from typing import BinaryIO

logger = logging.getLogger(__name__)

_IMPORTED = (
    "torch._inductor.compile_fx",
    "moe_lora.dist.cluster.instance_links",
    "moe_lora.engine.build",
    "moe_lora.engine.loop",
)
SPARE_AFTER_S = 10.0
"""From the start of the last instance to that of a spare, whose imports take cores from what starts."""


class Spare:
    """At most one spare process, kept by who keeps the instances running.

    words: of an instance's command, after the interpreter, without its name.  fds: that it inherits.
    """

    def __init__(self, words: Sequence[str], fds: Sequence[int]) -> None:
        self._words, self._fds = words, fds
        self._waiting: tuple[asyncio.subprocess.Process, BinaryIO, socket.socket] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[None] | None = None

    def start_later(self) -> None:
        """Start a spare process SPARE_AFTER_S after the last call, unless one waits."""
        self._put_off()
        self._timer = asyncio.get_running_loop().call_later(SPARE_AFTER_S, self._start_now)

    def _put_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start_now(self) -> None:
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._refill())

    async def _refill(self) -> None:
        if self._waiting is None or self._waiting[0].returncode is not None:
            self._drop()
            with suppress(OSError):  # no memory or handles: the next death starts a process as before
                self._waiting = await self._start()

    async def _start(self) -> tuple[asyncio.subprocess.Process, BinaryIO, socket.socket]:
        status, theirs = os.pipe()
        ours, name = socket.socketpair()
        with name:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *self._words),
                    *("--status-fd", str(theirs), "--spare", str(name.fileno())),
                    pass_fds=(*self._fds, theirs, name.fileno()),
                    start_new_session=True,
                )
            except BaseException:
                os.close(status)
                ours.close()
                raise
            finally:
                os.close(theirs)
        return process, os.fdopen(status, "rb"), ours

    def take(self, name: str, num_starts: int) -> tuple[asyncio.subprocess.Process, BinaryIO] | None:
        """Have the spare process be this instance; the process and its status pipe.  None: no spare waits."""
        self._put_off()
        if self._waiting is None or self._waiting[0].returncode is not None:
            return None
        process, status, ours = self._waiting
        try:
            ours.sendall(f"{num_starts} {name}\n".encode())
        except OSError:  # the process ends
            return None
        self._waiting = None
        ours.close()
        return process, status

    def _drop(self) -> None:
        if self._waiting is not None:
            _, status, ours = self._waiting
            self._waiting = None
            status.close()
            ours.close()

    async def stop(self) -> None:
        """End the spare process, which holds nothing; return when it has ended."""
        self._put_off()
        if self._starting is not None:
            await self._starting
        if self._waiting is None:
            return
        process = self._waiting[0]
        self._drop()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def wait_for_name(fd: int) -> tuple[int, str]:
    """Import what an instance needs, then wait; how often the instance was started before, and its name.

    fd: the spare's end of a socket.  The process ends with who keeps it.  The environment of the engine's
    threads is set before.
    """
    _import_engine()
    logger.info("a spare process waits to replace an instance")
    with socket.socket(fileno=fd) as ours, ours.makefile("r") as told:
        line = told.readline()
    if not line:
        sys.exit(0)
    num_starts, _, name = line.rstrip("\n").partition(" ")
    return int(num_starts), name


def _import_engine() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
