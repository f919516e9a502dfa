"""An engine in this process, its loop in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moe_lora.core.errors import EngineDeadError

from .core import EngineCore
from .loop import EngineLoop
from moe_lora.engine.client.loop_client import LoopClient
from moe_lora.engine.client.messages import Stop


class InProcessClient(LoopClient):
    """`EngineClient` of a core that it owns."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._loop = EngineLoop(core, self.deliver)
        super().__init__(self._loop.inbox.put)
        self._loop.start()

    def shut_down(self) -> None:
        """End the loop; requests under way are dropped."""
        self._loop.inbox.put(Stop())
        self._loop.join()
        self.fail(EngineDeadError("the engine was shut down"))

    async def close(self) -> None:
        stop: Callable[[], None] = self.shut_down
        await asyncio.to_thread(stop)
