"""Running the controller until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Collection

from moe_lora.engine.entry import Recovery

from .book import StateBook
from .desk import Desk
from .director import Decisions, Director

logger = logging.getLogger(__name__)


def run_controller(
    decisions: Decisions,
    book: StateBook,
    recovery: Recovery,
    *,
    host: str,
    port: int,
    key: str,
    front_ends: Collection[str],
) -> None:
    """Direct the front ends that dial host:port until SIGINT or SIGTERM.

    Raises ConfigError if the address can't be had.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()
        director = Director(decisions, book, recovery, front_ends)
        desk = Desk(host, port, key, director, loop)
        threading.Thread(target=desk.serve_forever, name="controller-desk", daemon=True).start()
        task = asyncio.create_task(director.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        logger.info("the controller listens at %s:%d", host, desk.port)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            desk.closing = True
            await asyncio.to_thread(desk.shutdown)
            desk.server_close()

    asyncio.run(run())
