# SPDX-License-Identifier: Apache-2.0
"""The interface between a front end and an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, Protocol, cast

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import AdapterInfo, EngineStats, GenerateRequest, ModelInfo, TokenOutput


class EngineClient(Protocol):
    """An engine for its front ends: in this process, in another, or several behind a router.

    All methods may be called from one asyncio event loop, concurrently.  Errors: `AdapterNotFoundError` for
    an unknown adapter, `AdapterExistsError` for a name in use, `AdapterError` for unusable files,
    `ValueError` for a request that can't run (prompt too long, token id outside the vocabulary),
    `EngineDeadError` once the engine is gone.
    """

    async def model_info(self) -> ModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        """Yield outputs until one has a finish_reason.  Closing the iterator early aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort".  Unknown ids are ignored."""
        ...

    async def call(self, verb: str, *args: Any, **words: Any) -> Any:
        """Run a verb by name (see `engine.verbs`), and return its result.

        Raises the errors of the verb, ValueError for an unknown verb, TypeError for wrong arguments.
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
        """As `EngineClient.call`; EngineDeadError when the engine is gone."""
        raise NotImplementedError

    def leave(self, request_id: str) -> None:
        """End a request, and its stream with finish_reason "abort" after the received outputs."""
        raise NotImplementedError

    def fail_request(self, request_id: str, error: EngineDeadError) -> None:
        """End a request, and its stream with an error after the received outputs; later outputs are
        dropped.
        """
        raise NotImplementedError

    async def model_info(self) -> ModelInfo:
        return cast("ModelInfo", await self.call("model_info"))

    async def list_adapters(self) -> list[AdapterInfo]:
        return cast("list[AdapterInfo]", await self.call("list_adapters"))

    async def stats(self) -> EngineStats:
        return cast("EngineStats", await self.call("stats"))

    async def is_alive(self) -> bool:
        return not self.ended.is_set()
