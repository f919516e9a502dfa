"""Running work for a client that may leave, merging streams, and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_lora.serve.http_errors import to_api_error

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
CLIENT_GONE = 499
"""Status for nobody: logged by proxies when a client closed the connection before the answer."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client leaves first, in which case `work` is cancelled."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come.  The first error ends all; closing this closes them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for only in stream:
                yield only
        return
    items: asyncio.Queue[T | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, items)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await items.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T, None], items: asyncio.Queue[T | BaseException | None]) -> None:
    """Move a stream's items to the queue, then None, or the error that ended it."""
    try:
        async with aclosing(stream):
            async for item in stream:
                items.put_nowait(item)
    except Exception as error:
        items.put_nowait(error)
    else:
        items.put_nowait(None)


class EventStream(Response):
    """Server-sent events from a generator of ready-made event texts, closed when the client leaves.

    Errors before the first event become an HTTP error answer, later ones an error event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not started:
                        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        await send(start)
                        started = True
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        except Exception as error:
            if not started:
                raise to_api_error(error) from error
            failure = f"data: {json.dumps(to_api_error(error).body)}\n\n"
            await send({"type": "http.response.body", "body": failure.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": DONE.encode(), "more_body": False})
