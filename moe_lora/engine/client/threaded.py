"""An engine client for callers of any thread and event loop; the client itself stays in its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from moe_lora.core.request import GenerateRequest, TokenOutput
from moe_lora.dist.net.thread import LoopThread

from .client import CallableEngine, EngineClient

_KEYWORDS = {"load_adapter": ("replace", "version", "content_hash"), "pin_adapter": ("pinned",)}


class ThreadedClient(CallableEngine):
    """`EngineClient` whose calls are carried to the event loop of `thread`, where `client` belongs."""

    def __init__(self, client: EngineClient, thread: LoopThread) -> None:
        self.client = client
        self._thread = thread

    async def ask(self, method: str, *args: Any) -> Any:
        names = _KEYWORDS.get(method, ())
        num_plain = len(args) - len(names)
        keywords = dict(zip(names, args[num_plain:], strict=True))
        return await self._there(getattr(self.client, method)(*args[:num_plain], **keywords))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[TokenOutput | BaseException | None] = asyncio.Queue()

        def put(item: TokenOutput | BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(items.put_nowait, item)

        async def collect() -> None:
            try:
                async for output in self.client.generate(request):
                    put(output)
                put(None)
            except BaseException as error:
                put(error)

        collecting = asyncio.run_coroutine_threadsafe(collect(), self._thread.loop)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            collecting.cancel()

    async def abort(self, request_id: str) -> None:
        await self._there(self.client.abort(request_id))

    async def is_alive(self) -> bool:
        return bool(await self._there(self.client.is_alive()))

    async def close(self) -> None:
        await self._there(self.client.close())

    async def _there(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._thread.loop))
