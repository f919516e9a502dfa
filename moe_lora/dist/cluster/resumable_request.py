# SPDX-License-Identifier: Apache-2.0
"""A request that continues at another instance."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import GenerateRequest, RequestTiming, TokenOutput, token_work
from moe_lora.engine.client.client import CallableEngine

from .instances import Instance

if TYPE_CHECKING:
    import asyncio

    from anyio import CancelScope

    from .migration import MoveTask

MAX_RESENDS = 3
"""After more deaths a request may be the cause, and is not retried."""


class Attempt:
    """A request's computation at one instance, counted in the instance's load until `close`.

    request: under a separate id, so that outputs of attempts never mix.  first: number of the answer's first
    token here.  Of a move's target: kind; begun_s: when sent; held_s: when the source was held, until a token
    comes; timing_before: the source's.  Of a source: kept_s: when it kept the request; first_token: set
    then, if the move began before; limit: of the move's present wait.
    """

    def __init__(self, instance: Instance, request: GenerateRequest, max_model_len: int) -> None:
        self.instance, self.client = instance, instance.client
        self.request = request
        self.first = len(request.generated)
        self.kind = "kv" if request.awaits_kv else "tokens"
        self.held_s: float | None = None
        self.kept_s: float | None = None
        self.first_token: asyncio.Event | None = None
        self.limit: CancelScope | None = None
        self.begun_s = 0.0
        self.timing_before: RequestTiming | None = None
        self._stream: AsyncIterator[TokenOutput] | None = None
        self._prompt_tokens = self._num_prompt = request.known_tokens
        self._left = token_work(request, max_model_len)
        self._started = self._ended = self._closed = self.given_up = False
        instance.outstanding_tokens += self._left
        instance.load.add(request.adapter, self._prompt_tokens)

    def outputs(self) -> AsyncIterator[TokenOutput]:
        """The instance's outputs; the first call sends the request.  Raises EngineDeadError."""
        if self._stream is None:
            self._stream = self.client.generate(self.request)
        return self._stream

    async def call(self, verb: str, *args: Any) -> Any:
        """Call the instance's method for this request."""
        return await self.client.call(verb, self.request.request_id, *args)

    def take(self, output: TokenOutput) -> None:
        """Count an output's tokens, with the first token the prompt's."""
        self._ended = output.finish_reason is not None
        if not output.token_ids:
            return
        done = min(self._left, self._num_prompt + len(output.token_ids))
        self._num_prompt = 0
        self._left -= done
        self.instance.outstanding_tokens -= done
        if not self._started:
            self._started = True
            self.instance.load.start(self.request.adapter, self._prompt_tokens)

    def leave(self) -> None:
        """End the stream after the received tokens, and the request here."""
        cast("CallableEngine", self.client).leave(self.request.request_id)

    def lose(self, error: EngineDeadError) -> None:
        """As `leave`, with this error."""
        self.given_up = True
        cast("CallableEngine", self.client).fail_request(self.request.request_id, error)

    async def abort(self) -> None:
        await self.client.abort(self.request.request_id)

    async def close(self) -> None:
        """Drop the rest here.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.instance.outstanding_tokens -= self._left
        self.instance.load.end(self.request.adapter, self._prompt_tokens, started=self._started)
        if self._stream is not None and not self._ended:
            await cast("Any", self._stream).aclose()


@dataclass(eq=False)
class ResumableRequest:
    """The delivered part of a request's answer.

    adapter_version: of the answer; before, the version served at arrival.  next: continues after the
    attempt's tokens.  left: the last instance died.
    """

    request: GenerateRequest
    adapter_version: int | None
    arrival_s: float
    delivered: list[int] = field(default_factory=list)
    num_resends: int = 0
    aborted: bool = False
    attempt: Attempt | None = None
    next: Attempt | None = None
    move: MoveTask | None = None
    left: Instance | None = None
    epoch: int = 0
    _num_cached: int = 0
    _waited_s: float = 0.0
    _timing: RequestTiming | None = None

    def continued(self, adapter_content: str | None = None) -> GenerateRequest:
        """The request for another instance, with the answer so far."""
        if not self.epoch:
            return self.request
        request_id = f"{self.request.request_id}~{self.epoch}"
        if not self.is_begun:
            return replace(self.request, request_id=request_id)
        rest = replace(self.request, request_id=request_id, generated=tuple(self.delivered))
        if self.switches:
            return rest
        return replace(rest, adapter_version=self.adapter_version, adapter_content=adapter_content)

    @property
    def is_begun(self) -> bool:
        """True with a token, or if the prompt moves while it is computed."""
        return bool(self.delivered) or (self.attempt is not None and self.attempt.first_token is not None)

    @property
    def switches(self) -> bool:
        """True if the rest may be of another version."""
        return self.request.sampling.on_publish == "switch"

    def lose(self, now_s: float) -> None:
        """The instance ended; before any token its time counts as queueing."""
        self.num_resends += 1
        self.epoch += 1
        self.attempt = self.move = None  # no move from there
        self._leave(now_s)

    def switch(self, target: Attempt) -> None:
        """Continue with the target, after all earlier tokens."""
        self._leave(target.begun_s)
        if self.delivered:
            self._timing = self._timing or target.timing_before

    def take(self, output: TokenOutput) -> TokenOutput:
        """An instance's output for the client, as of a single instance.

        Cached tokens and a moved answer's timing are of the first instance that delivered tokens; after a
        failure the last instance's timing counts.
        """
        if not self.epoch:
            self._num_cached = output.num_cached_tokens
        else:
            if not self.delivered:
                self._num_cached = output.num_cached_tokens
            timing = output.timing
            if timing is not None:
                timing = self._timing or replace(timing, queue_s=timing.queue_s + self._waited_s)
            output = structs.replace(
                output,
                request_id=self.request.request_id,
                num_cached_tokens=self._num_cached,
                timing=timing,
            )
        self.delivered += output.token_ids
        if output.adapter_version is not None:
            self.adapter_version = output.adapter_version
        return output

    def _leave(self, now_s: float) -> None:
        if not self.delivered:
            self._waited_s = now_s - self.arrival_s
