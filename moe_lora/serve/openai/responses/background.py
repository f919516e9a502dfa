# SPDX-License-Identifier: Apache-2.0
"""Responses without a client's connection, stored at the end."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from moe_lora.serve.http_errors import ApiError, JsonResponse, to_api_error, to_json
from moe_lora.serve.limits import RETRY_S, Quota
from moe_lora.serve.openai.generation import Delta, Generation

from .answer import ResponseFormat
from .store import Stored

if TYPE_CHECKING:
    from moe_lora.serve.openai.parsers.answers import AnswerPart

    from .store import ResponseStore

MAX_RUNNING, MAX_RUNNING_PER_CLIENT = 256, 64


class BackgroundFormat(ResponseFormat):
    """A response: queued until the first token."""

    _status = "queued"

    def __init__(self, runs: Runs, *parts: Any) -> None:
        super().__init__(*parts)
        self._runs = runs

    async def respond(
        self, request: Request, generation: Generation, head: dict[str, Any], headers: dict[str, str]
    ) -> Response:
        """Starts the response.  Raises ApiError if too many run."""
        self.generation, self.head = generation, head
        self._runs.start(self)
        return JsonResponse(self.snapshot(), headers={**headers, **self.headers()})

    def snapshot(self) -> dict[str, Any]:
        """The running response."""
        return self._response(self._status)

    async def run(self) -> None:
        """Computes and stores the response, even after errors."""
        try:
            await self._collect()
            found = self.whole_answer()
        except Exception as error:
            [event] = self.failed(to_api_error(error))
            found = event["response"]
        if found["status"] in ("failed", "cancelled"):
            self._add(found)

    def add_cancelled(self) -> None:
        """Stores the response as cancelled."""
        self._add(self._response("cancelled"))

    def _read(self, delta: Delta) -> list[AnswerPart]:
        self._status = "in_progress"
        return super()._read(delta)

    def _add(self, found: dict[str, Any]) -> None:
        """Stores a response without a conversation."""
        self._runs.store.add(Stored(self.owner, self.response_id, to_json({**found, "store": True}), b""))


class Runs:
    """Running responses of one front end."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._quota = Quota(MAX_RUNNING, MAX_RUNNING_PER_CLIENT)
        self._running: dict[tuple[str, str], tuple[BackgroundFormat, asyncio.Task[None]]] = {}

    def start(self, form: BackgroundFormat) -> None:
        """Raises ApiError if too many responses run."""
        client, key = form.generation.client, (form.owner, form.response_id)
        whose = self._quota.exceeded(client, 1)
        if whose is not None:
            status = 429 if whose == "client" else 503
            most = MAX_RUNNING_PER_CLIENT if whose == "client" else MAX_RUNNING
            what = (
                f"{most} responses run in the background, and no more may run; send the request again later"
            )
            raise ApiError(status, what, "background", retry_s=RETRY_S)
        self._quota.take(client, 1)
        task = asyncio.create_task(form.run())
        self._running[key] = form, task
        task.add_done_callback(partial(self._end, form))

    def get(self, owner: str, response_id: str) -> dict[str, Any] | None:
        """A running response, or None."""
        found = self._running.get((owner, response_id))
        return None if found is None else found[0].snapshot()

    async def cancel(self, owner: str, response_id: str) -> None:
        """Cancels a running response; returns after its end."""
        found = self._running.get((owner, response_id))
        if found is not None:
            found[1].cancel()
            await asyncio.wait({found[1]})

    def _end(self, form: BackgroundFormat, task: asyncio.Task[None]) -> None:
        self._quota.give_back(form.generation.client, 1)
        del self._running[form.owner, form.response_id]
        if task.cancelled():
            form.add_cancelled()
