# SPDX-License-Identifier: Apache-2.0
"""A request that goes on at another instance: when the one that computes it ends, or when it is moved."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import GenerateRequest, RequestTiming, TokenOutput
from moe_lora.engine.client.client import CallableEngine

from .instances import Instance

if TYPE_CHECKING:
    from .migration import MoveTask

MAX_RESENDS = 3
"""A request under which this many instances and one more have ended may be what ends them."""


class Attempt:
    """The computing of a request at one instance, counted in the instance's load from now until `close`.

    request: as the instance gets it, under an id of its own, so that what an earlier or later attempt says is
    never taken for this one's.  first: number of the answer's token that it begins with.  Of an attempt that
    a request was moved to: kind: how; begun_s: when it was sent; held_s: when the one before was held, until
    this one has a token; timing_before: what the one before says of its time.
    given_up: the instance has been.
    """

    def __init__(self, instance: Instance, request: GenerateRequest, max_model_len: int) -> None:
        self.instance, self.client = instance, instance.client
        self.request = request
        self.first = len(request.generated)
        self.kind = "kv" if request.awaits_kv else "tokens"
        self.held_s: float | None = None
        self.begun_s = 0.0
        self.timing_before: RequestTiming | None = None
        self._stream: AsyncIterator[TokenOutput] | None = None
        self._prompt_tokens = self._num_prompt = request.known_tokens
        self._left = token_work(request, max_model_len)
        self._started = self._ended = self._closed = self.given_up = False
        instance.asked_tokens += self._left
        instance.load.add(request.adapter, self._prompt_tokens)

    def outputs(self) -> AsyncIterator[TokenOutput]:
        """What the instance says of the request; the first call sends it.  Raises EngineDeadError."""
        if self._stream is None:
            self._stream = self.client.generate(self.request)
        return self._stream

    async def call(self, verb: str, *args: Any) -> Any:
        """What a method of the instance says of this request."""
        return await self.client.call(verb, self.request.request_id, *args)

    def take(self, output: TokenOutput) -> None:
        """Count the tokens that were computed for an output: with the first one those of the prompt."""
        done = min(self._left, self._num_prompt + len(output.token_ids))
        self._num_prompt = 0
        self._left -= done
        self.instance.asked_tokens -= done
        self._ended = output.finish_reason is not None
        if output.token_ids and not self._started:
            self._started = True
            self.instance.load.start(self.request.adapter, self._prompt_tokens)

    def leave(self) -> None:
        """It goes on elsewhere: its stream ends after the tokens that came, and the instance frees it."""
        cast("CallableEngine", self.client).leave(self.request.request_id)

    def lose(self, error: EngineDeadError) -> None:
        """Its stream ends with this error after the tokens that came; the instance is told to drop it."""
        self.given_up = True
        cast("CallableEngine", self.client).fail_request(self.request.request_id, error)

    async def abort(self) -> None:
        await self.client.abort(self.request.request_id)

    async def close(self) -> None:
        """What is left is not to be done here.  May be called again."""
        if self._closed:
            return
        self._closed = True
        self.instance.asked_tokens -= self._left
        self.instance.load.end(self.request.adapter, self._prompt_tokens, started=self._started)
        if self._stream is not None and not self._ended:
            await cast("Any", self._stream).aclose()


@dataclass(eq=False)
class ResumableRequest:
    """What of a request's answer has been handed on.

    adapter_version: of the request's adapter: the one that began the answer, and until then the one that was
    served when it came.  attempt: what computes it now; next: what goes on once that one's tokens have been
    handed on.  move: the one under way.  left: the last instance died.  epoch: of the latest attempt.  Times
    are in seconds of the caller's clock.
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
        """The request as another instance goes on with it: the same, and what its answer has so far.

        adapter_content: hash of the version that began it; None: it is not known.
        """
        if not self.epoch:
            return self.request
        request_id = f"{self.request.request_id}~{self.epoch}"
        if not self.delivered:
            return replace(self.request, request_id=request_id)
        return replace(
            self.request,
            request_id=request_id,
            adapter_version=self.adapter_version,
            adapter_content=adapter_content,
            generated=tuple(self.delivered),
        )

    def lose(self, now_s: float) -> None:
        """The instance ended.  While nothing has been delivered, the time with it counts as queueing."""
        self.num_resends += 1
        self.epoch += 1
        self._leave(now_s)

    def switch(self, target: Attempt) -> None:
        """All tokens of the attempt before have been handed on; the target goes on."""
        self._leave(target.begun_s)
        if self.delivered:
            self._timing = self._timing or target.timing_before

    def take(self, output: TokenOutput) -> TokenOutput:
        """An instance's output as the client is to see it: as if one instance had made all of them.

        Cached tokens are those of the first instance that delivered any.  So is the timing of an answer that
        was moved; of one that was cut it is the last instance's, since what the first one would have reported
        is lost with it.
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


def token_work(request: GenerateRequest, max_model_len: int) -> int:
    """Tokens that the request may need, in rows to compute: its prompt and the longest answer allowed."""
    num_prompt = len(request.prompt_token_ids)
    room = max(0, max_model_len - num_prompt)
    limit = request.sampling.max_tokens
    return num_prompt + (room if limit is None else min(limit, room))
