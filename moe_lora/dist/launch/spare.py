# SPDX-License-Identifier: Apache-2.0
"""A spare process, with imports done, for the next instance that dies."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.processes import Child

logger = logging.getLogger(__name__)

SPARE_AFTER_S = 10.0
"""Pause between a ready instance and the next spare."""
_IMPORTED = (
    "moe_lora.dist.cluster.instance_links",
    "moe_lora.engine.build",
    "moe_lora.engine.loop",
)


class Spare:
    """Keeps at most one spare process.  words: an instance's command, without interpreter and name."""

    def __init__(self, words: Sequence[str], fds: Sequence[int], clock: Clock | None = None) -> None:
        self._words, self._fds = words, fds
        self._clock = clock or WallClock()
        self._waiting: Child | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._earliest_s = 0.0

    def put_off(self) -> None:
        """Start no spare for SPARE_AFTER_S."""
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
                child = Child(*self._words, "--spare", "--status-fd", fds=self._fds)
            except Exception as error:
                logger.warning("no spare process can be started: %r", error)
            else:
                await self._watch(child)
            self.put_off()

    async def _watch(self, child: Child) -> None:
        self._waiting = child
        self._changed.clear()
        died, changed = asyncio.wrap_future(child.ended), asyncio.create_task(self._changed.wait())
        if not self._stopping:
            await asyncio.wait((died, changed), return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if self._waiting is None:
            return
        self._waiting = None
        child.socket.close()
        if died.done():
            logger.warning("the spare process ended: exit code %d", died.result())
        child.process.kill()
        await died

    def acquire(self, name: str, num_starts: int) -> Child | None:
        """Turn the spare, if any, into this instance."""
        waiting = self._waiting
        if waiting is None or waiting.ended.done() or waiting.is_stopped:
            return None
        try:
            waiting.socket.sendall(f"{num_starts} {name}\n".encode())
        except OSError:
            return None
        self._waiting = None
        self._changed.set()
        return waiting

    async def stop(self) -> None:
        """End the spare, and wait."""
        self._stopping = True
        self._changed.set()
        if self._keeping is not None:
            await self._keeping


def wait_for_name(fd: int, *, compiles: bool) -> tuple[int, str]:
    """Import the engine, then wait; returns the number of earlier starts and the instance's name.

    Set the threads' environment before.  fd: the keeper's socket.
    """
    for module in (*_IMPORTED, *(["torch._inductor.compile_fx"] if compiles else [])):
        importlib.import_module(module)
    logger.info("a spare process waits to replace an instance (process %d)", os.getpid())
    with open(os.dup(fd)) as told:
        line = told.readline()
    if not line:
        sys.exit(0)
    num_starts, _, name = line.rstrip("\n").partition(" ")
    return int(num_starts), name
