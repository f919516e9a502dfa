# SPDX-License-Identifier: Apache-2.0
"""The interface between front end and engine, and a client of a local loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, cast

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import AdapterInfo, EngineStats, GenerateRequest, ModelInfo, TokenOutput
from moe_lora.engine.verbs import ENGINE_INTERFACE

from .messages import Abort, Call, Command, Dead, Event, Generate, Outputs, Rejected, Reply


class EngineClient(Protocol):
    """An engine for its front ends: in this process, in another, or several behind a router.

    For one asyncio event loop.  Errors: `AdapterNotFoundError`, `AdapterExistsError`, `AdapterError` for
    unusable files, `ValueError` for a request that can't run, `EngineDeadError`.
    """

    async def model_info(self) -> ModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        """Yield outputs until a finish_reason.  Closing the iterator aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort".  Unknown ids are ignored."""
        ...

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        """Run a verb by name, and return its result.

        Raises the verb's errors, ValueError for an unknown verb, TypeError for wrong arguments.
        """
        ...

    async def list_adapters(self) -> list[AdapterInfo]: ...

    async def stats(self) -> EngineStats: ...

    async def is_alive(self) -> bool: ...

    async def close(self) -> None: ...


class CallableEngine:
    """An engine with all verbs of `engine.verbs`.  ended: set once the engine is gone."""

    ended: threading.Event | asyncio.Event

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        """As `EngineClient.call`; raises EngineDeadError."""
        raise NotImplementedError

    def leave(self, request_id: str) -> None:
        """End a request, and its stream with "abort"."""
        raise NotImplementedError

    def fail_request(self, request_id: str, error: EngineDeadError) -> None:
        """End a request and its stream with an error."""
        raise NotImplementedError

    async def model_info(self) -> ModelInfo:
        return cast("ModelInfo", await self.call("model_info"))

    async def list_adapters(self) -> list[AdapterInfo]:
        return cast("list[AdapterInfo]", await self.call("list_adapters"))

    async def stats(self) -> EngineStats:
        return cast("EngineStats", await self.call("stats"))

    async def is_alive(self) -> bool:
        return not self.ended.is_set()


Sink = Callable[[TokenOutput | Exception], None]
"""Receives a request's outputs, in the delivering thread."""


class LoopClient(CallableEngine):
    """Sends commands and distributes events; thread-safe."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._sinks: dict[str, Sink] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._dead: Exception | None = None
        self.ended = threading.Event()

    def deliver(self, event: Event) -> None:
        """Distribute an event."""
        if isinstance(event, Outputs):
            for output in event.outputs:
                ended = output.finish_reason is not None
                sink = (
                    self._sinks.pop(output.request_id, None) if ended else self._sinks.get(output.request_id)
                )
                if sink is not None:
                    sink(output)
        elif isinstance(event, Rejected):
            sink = self._sinks.pop(event.request_id, None)
            if sink is not None:
                sink(event.error)
        elif isinstance(event, Reply):
            with self._lock:
                future = self._calls.pop(event.call_id, None)
            if future is None:
                return
            if event.error is not None:
                future.set_exception(event.error)
            else:
                future.set_result(event.value)
        elif isinstance(event, Dead):
            self.fail(event.error)

    def fail(self, error: Exception) -> None:
        """The loop is gone: end all waits."""
        with self._lock:
            self._dead = self._dead or error
            sinks, self._sinks = self._sinks, {}
            calls, self._calls = self._calls, {}
        self.ended.set()
        for sink in sinks.values():
            sink(error)
        for future in calls.values():
            future.set_exception(error)

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request; `sink` gets outputs, or a refusal's error."""
        with self._lock:
            if self._dead is not None:
                raise self._dead
            if request.request_id in self._sinks:
                raise ValueError(f"request_id {request.request_id!r} is already running")
            self._sinks[request.request_id] = sink
        self._send(Generate(request))

    def start_call(self, verb: str, *args: Any, **words: Any) -> Future[Any]:
        """Start a verb.  Raises TypeError for wrong arguments."""
        if verb in ENGINE_INTERFACE:
            args = ENGINE_INTERFACE.bind(verb, args, words)
        future = _asked()
        with self._lock:
            if self._dead is not None:
                raise self._dead
            call_id = next(self._call_ids)
            self._calls[call_id] = future
        self._send(Call(call_id, verb, args))
        return future

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        return await asyncio.wrap_future(self.start_call(verb, *args, **words))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[TokenOutput | Exception] = asyncio.Queue()

        def sink(item: TokenOutput | Exception) -> None:
            with suppress(RuntimeError):  # the loop may close meanwhile
                loop.call_soon_threadsafe(outputs.put_nowait, item)

        self.submit(request, sink)
        ended = False
        try:
            while not ended:
                item = await outputs.get()
                ended = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not ended:
                self.abort_now(request.request_id)

    def abort_now(self, request_id: str) -> None:
        """As `abort`, from any thread; drops further outputs."""
        self._sinks.pop(request_id, None)
        self._send_abort(request_id)

    def leave(self, request_id: str) -> None:
        sink = self._sinks.pop(request_id, None)
        if sink is not None:
            sink(TokenOutput(request_id=request_id, token_ids=(), finish_reason="abort"))
            self._send_abort(request_id)

    async def abort(self, request_id: str) -> None:
        self._send_abort(request_id)

    def _send_abort(self, request_id: str) -> None:
        if self._dead is None:
            self._send(Abort(request_id))


def _asked() -> Future[Any]:
    """A running future: a cancelled caller must not cancel the loop's answer."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
