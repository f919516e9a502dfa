"""Running the controller until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from moe_lora.core.address import Address
from moe_lora.dist.net.keys import Keys

from .front_end_listener import desk
from .cluster_controller import Director

logger = logging.getLogger(__name__)


async def run_controller(director: Director, address: Address, keys: Keys | None) -> None:
    """Direct the front ends that dial in until SIGINT or SIGTERM.  Raises ConfigError if the address can't be
    had.
    """
    loop = asyncio.get_running_loop()
    async with desk("controller.address", address, keys, director) as place:
        task = asyncio.create_task(director.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        logger.info("the controller listens at %s", place)
        with contextlib.suppress(asyncio.CancelledError):
            await task
