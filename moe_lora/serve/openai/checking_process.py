# SPDX-License-Identifier: Apache-2.0
"""The process for checks of large bodies and grammars."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from anyio import fail_after, to_process

from moe_lora.core.teardown import ignore_ctrl_c

if TYPE_CHECKING:
    from moe_lora.engine.text.text import Tokenizer

START_S = 120.0
"""Limit for the process to start or answer, slow by its low priority."""
FIRST_START_S = 300.0
"""Limit for the first start, beside loading instances."""
EXIT_S = 60.0
"""Limit of an exit's wait for a start."""
CHECK_NICE = 5
"""Low priority: a third of a core beside a normal process."""


class CheckingProcess:
    """One process of an event loop, for calls of `anyio.to_process`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._starting: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Starts the process in the background; `ready` repeats a failed start.

        The exit waits up to EXIT_S until Python runs in the process: a closing event loop cancels all tasks,
        and asyncio may never end a cancelled `create_subprocess_exec` (Python 3.11).
        """
        spawning = asyncio.create_task(_spawn(FIRST_START_S))
        self._begin(_read_there(spawning, self._tokenizer))
        try:
            yield
        finally:
            await _ended(spawning)

    async def ready(self) -> None:
        """Returns when the process answers; starts an absent process, and ends a stopped process.

        A start outlives its callers: a process with a cancelled start would be neither used nor ended.
        Raises TimeoutError, BrokenWorkerProcess and OSError.
        """
        if self._starting is None or self._starting.done():
            self._begin(_spawn(START_S))
        assert self._starting is not None
        await asyncio.shield(self._starting)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._starting = asyncio.create_task(work)
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _ended(spawning: asyncio.Task[None]) -> None:
    """Wait for the task up to EXIT_S, even if cancelled."""
    cancelled: asyncio.CancelledError | None = None
    until_s = time.monotonic() + EXIT_S
    while not spawning.done() and (left_s := until_s - time.monotonic()) > 0:
        try:
            await asyncio.wait({spawning}, timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _spawn(limit_s: float) -> None:
    """Return once the process answers; starts a process if needed.

    The process ignores Ctrl-C, and has low priority.
    """
    priority = max(CHECK_NICE, os.getpriority(os.PRIO_PROCESS, 0))
    with fail_after(limit_s):
        await to_process.run_sync(ignore_ctrl_c, priority, cancellable=True)


async def _read_there(spawning: asyncio.Task[None], tokenizer: Tokenizer | None) -> None:
    await asyncio.shield(spawning)
    with fail_after(FIRST_START_S):
        await to_process.run_sync(_read, tokenizer, cancellable=True)


def _read(tokenizer: Tokenizer | None) -> None:
    """Runs in the process."""
    import_module("moe_lora.serve.openai.preparing")
