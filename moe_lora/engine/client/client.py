# SPDX-License-Identifier: Apache-2.0
"""The one interface between a front end and an engine, wherever that engine runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, Protocol, cast

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import AdapterInfo, EngineStats, GenerateRequest, ModelInfo, TokenOutput


class EngineClient(Protocol):
    """An engine as its front ends see it: in this process, in another one, or several behind a router.

    All methods may be called from one asyncio event loop, concurrently.  Errors: `AdapterNotFoundError`
    for an unknown adapter, `AdapterExistsError` for a name in use, `AdapterError` for files that can't be
    served, `ValueError` for a request that can't run (prompt too long, token id outside the vocabulary),
    `EngineDeadError` once the engine is gone.
    """

    async def model_info(self) -> ModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenOutput]:
        """Yield outputs until one has a finish_reason.  Closing the iterator early aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort".  Unknown ids are ignored."""
        ...

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        replace: bool = False,
        version: int | None = None,
        content_hash: str | None = None,
    ) -> AdapterInfo:
        """Read a PEFT directory and serve it as `name`; with `replace`, as a new version of that name.

        Requests under way finish on the version they started with.  version: the number of this one; None:
        one more than the last.  content_hash: what it must hold (`AdapterInfo.content_hash`), wherever that
        is read; None: what is in the directory now.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for `name`, wait until its running ones are done, free its memory."""
        ...

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        """Bring an adapter to the device and keep it there, or do so no longer; a new version of the name is
        pinned too.  Raises CapacityError if that left no room for one request.
        """
        ...

    async def list_adapters(self) -> list[AdapterInfo]: ...

    async def stats(self) -> EngineStats: ...

    async def is_alive(self) -> bool: ...

    async def close(self) -> None: ...


class CallableEngine:
    """The calls of `EngineClient` over `ask`, which runs a method of `messages.EngineMethods`.

    ended: set once the engine is gone.
    """

    ended: threading.Event | asyncio.Event

    async def ask(self, method: str, *args: Any) -> Any:
        """What the method returned; raises what it raised, EngineDeadError when the engine is gone."""
        raise NotImplementedError

    def leave(self, request_id: str) -> None:
        """End a request's stream now, with finish_reason "abort" after what came of it, and the request."""
        raise NotImplementedError

    def fail_request(self, request_id: str, error: EngineDeadError) -> None:
        """End a request's stream with an error after what came of it, and the request, whatever it still
        says."""
        raise NotImplementedError

    async def model_info(self) -> ModelInfo:
        return cast("ModelInfo", await self.ask("model_info"))

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        replace: bool = False,
        version: int | None = None,
        content_hash: str | None = None,
    ) -> AdapterInfo:
        words = (name, path, replace, version, content_hash)
        return cast("AdapterInfo", await self.ask("load_adapter", *words))

    async def unload_adapter(self, name: str) -> None:
        await self.ask("unload_adapter", name)

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        return cast("AdapterInfo", await self.ask("pin_adapter", name, pinned))

    async def list_adapters(self) -> list[AdapterInfo]:
        return cast("list[AdapterInfo]", await self.ask("list_adapters"))

    async def stats(self) -> EngineStats:
        return cast("EngineStats", await self.ask("stats"))

    async def is_alive(self) -> bool:
        return not self.ended.is_set()
