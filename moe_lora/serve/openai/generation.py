# SPDX-License-Identifier: Apache-2.0
"""From a checked request to text, an engine request per choice."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import msgspec

from moe_lora.core.errors import AdapterNotFoundError, BusyError, UnreadError
from moe_lora.core.request import (
    BACKGROUND,
    UNFOLLOWABLE,
    GenerateRequest,
    PromptReport,
    RequestTiming,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from moe_lora.engine.text.text import TextStream
from moe_lora.serve.access import Allowance, Caller, Reservation, reserved
from moe_lora.serve.frontend import CUT, Frontend
from moe_lora.serve.http_errors import ApiError, to_api_error
from moe_lora.serve.limits import Limits, Waiting
from moe_lora.serve.metrics import BackgroundWatch, RequestWatch

T = TypeVar("T")
Outputs: TypeAlias = "AsyncGenerator[TokenOutput, None]"


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams in order of arrival.  The first error, or `aclose`, ends all.

    A stream computes its next item after the last is read.
    """
    items: asyncio.Queue[T | BaseException | None] = asyncio.Queue(maxsize=len(streams))
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
    """Move a stream's items to the queue, then None or the error."""
    try:
        async with aclosing(stream):
            async for item in stream:
                await items.put(item)
    except Exception as error:
        await items.put(error)
    else:
        await items.put(None)


class Delta(msgspec.Struct):
    """New text and tokens of a choice.  finish_reason: None before the end.  prompt: with the first.

    matched_stop: the final stop string or token.  stop_reason: the same, but None for the model's end token.
    adapter_version: with the last.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None
    prompt: PromptReport | None = None
    matched_stop: str | int | None = None
    stop_reason: str | int | None = None
    adapter_version: int | None = None


def late(timeout_s: float) -> ApiError:
    what = f"not done within timeout={timeout_s:g} s, and ended; allow it more"
    return ApiError(408, what, limit="timeout")


class Deadline:
    """Aborts a request after left_s."""

    def __init__(
        self, timeout_s: float, left_s: float, abort: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._timeout_s = timeout_s
        self._abort = abort
        self._ending: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(left_s, self._end)

    def _end(self) -> None:
        self._ending = asyncio.create_task(self._abort())

    def check(self, output: TokenOutput) -> None:
        """Raises ApiError for an aborted request's end."""
        if self._ending is not None and output.finish_reason == "abort":
            raise late(self._timeout_s)

    def close(self) -> None:
        self._timer.cancel()


@dataclass
class Watchers:
    """Observers of a choice's outputs.

    waits: None after the first output.  reservation: None without a token rate.
    """

    limits: Limits
    metrics: RequestWatch
    waits: Waiting | None
    reservation: Reservation | None
    deadline: Deadline | None = None
    reason: str = "abort"
    timing: RequestTiming | None = None
    has_begun: bool = False

    def record_output(self, output: TokenOutput) -> None:
        """Raises ApiError after the deadline."""
        num_tokens = len(output.token_ids)
        if self.waits is not None:
            self.limits.leave_queue(self.waits, begun=num_tokens > 0)
            self.waits = None
        if self.reservation is not None:
            self.reservation.spend(num_tokens)
        self.has_begun = self.has_begun or num_tokens > 0
        self.timing = output.timing
        if self.deadline is not None:
            self.deadline.check(output)


@dataclass(kw_only=True)
class Generation:
    """`num_choices` answers to each prompt, in order.

    `deltas` or `whole` runs a generation once.  answer_tokens: longest answer per prompt.  tokenizer: None:
    ids only.  continues_prompt: keeps a leading space.  timeout_s: from from_s on, monotonic.
    reasoning_tokens: by choice, kept by `watch`; None without a reasoning parser.  source: of outputs; None:
    the front end's client.  stop_token_ids: of the client, without the tokenizer's end tokens.
    """

    frontend: Frontend
    client: str
    caller: Caller
    adapter: str | None
    prompts: Sequence[tuple[int, ...]]
    answer_tokens: Sequence[int]
    num_choices: int
    sampling: SamplingParams
    tokenizer: Any
    continues_prompt: bool
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    from_s: float = field(default_factory=time.monotonic)
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    reasoning_tokens: Counter[int] | None = None
    watch: Callable[[Delta], object] | None = None
    source: Any = None
    grammar_field: str | None = None
    stop_token_ids: Collection[int] = ()
    renamed: Callable[[ApiError], ApiError] | None = None
    cached_tokens: Counter[int] = field(default_factory=Counter)
    beside_usage: ClassVar[Callable[[Any], dict[str, Any]] | None] = None
    """Makes fields beside the usage."""
    _num_joint = 1
    """Choices that wait as one."""
    _timings: list[RequestTiming] = field(default_factory=list)
    _completion_tokens: Counter[int] = field(default_factory=Counter)

    @asynccontextmanager
    async def deltas(self) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """Deltas of all choices.  The exit aborts running choices.

        Raises ApiError if the choices may exceed the queue or the rate.
        """
        limits, allowance = self.frontend.limits, self.caller.tokens
        waits = {
            index: Waiting(
                client=self.client,
                tokens=len(self.prompts[index // self.num_choices])
                + self.answer_tokens[index // self.num_choices],
                tenant=self.caller.tenant,
                share=self.caller.share,
                priority=self.priority,
            )
            for index in range(0, len(self.prompts) * self.num_choices, self._num_joint)
        }
        with nullcontext() if allowance is None else self._reserved(allowance) as reservation:
            if not self.caller.background:
                limits.enter_queue([*waits.values()], None if self.timeout_s is None else self._left_s())
            try:
                choices = [self._choice(index, one, reservation) for index, one in waits.items()]
                async with aclosing(choices[0] if len(choices) == 1 else merge(choices)) as deltas:
                    yield deltas
            finally:
                for one in waits.values():
                    limits.leave_queue(one, begun=False)

    async def abort(self) -> None:
        """End all choices with "abort"."""
        for index in range(len(self.prompts) * self.num_choices):
            await self.frontend.client.abort(f"{self.engine_id}-{index}")

    def _reserved(self, allowance: Allowance) -> AbstractContextManager[Reservation]:
        num_tokens = self.num_choices * (sum(map(len, self.prompts)) + sum(self.answer_tokens))
        refusal = allowance.refusal(num_tokens)
        if refusal is not None:
            raise refusal if self.caller.background else self.frontend.limits.refusal("key_tokens", refusal)
        return reserved(allowance, num_tokens)

    async def whole(self) -> list[Delta]:
        """All choices with joined deltas."""
        parts: list[list[Delta]] = [[] for _ in range(len(self.prompts) * self.num_choices)]
        async with self.deltas() as deltas:
            async for delta in deltas:
                parts[delta.index].append(delta)
                if self.watch is not None:
                    self.watch(delta)
        return [
            Delta(
                index,
                "".join(delta.text for delta in part),
                tuple(token_id for delta in part for token_id in delta.token_ids),
                None
                if self.sampling.logprobs is None
                else tuple(entry for delta in part for entry in delta.logprobs or ()),
                part[-1].finish_reason,
                part[0].prompt or part[min(1, len(part) - 1)].prompt,  # the first output may be empty
                part[-1].matched_stop,
                part[-1].stop_reason,
                part[-1].adapter_version,
            )
            for index, part in enumerate(parts)
        ]

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """Token ids of a choice's prompt."""
        return self.prompts[index // self.num_choices]

    def usage_of(self, index: int, *, begun: bool = True) -> dict[str, Any]:
        """Tokens of a choice so far, and of its prompt."""
        return _tokens(len(self.prompt_of(index)), self._completion_tokens[index] if begun else 0)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage, and `timing`: the choices' longest seconds in the engine.

        Complete after the last delta.
        """
        usage: dict[str, Any] = _tokens(sum(map(len, self.prompts)), self._completion_tokens.total())
        cached = sum(num for index, num in self.cached_tokens.items() if not index % self.num_choices)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.reasoning_tokens is not None:
            num_reasoning = self.reasoning_tokens.total()
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
            usage["reasoning_tokens"] = num_reasoning
        if self._timings:
            usage["timing"] = {
                f"{name}_ms": round(1e3 * max(getattr(timing, f"{name}_s") for timing in self._timings), 3)
                for name in ("queue", "adapter_load", "kv_load", "prefill", "decode_ttft")
            }
        return usage

    def _left_s(self) -> float:
        return max(0.0, self.from_s + cast("float", self.timeout_s) - time.monotonic())

    async def _choice(
        self, index: int, waits: Waiting, reservation: Reservation | None
    ) -> AsyncGenerator[Delta, None]:
        """A choice's deltas; a stop string ends it with "stop".  Raises ApiError."""
        client, request = self.frontend.client, self._request(index)
        text, is_cut = None, False
        if self.tokenizer is not None:
            text = TextStream(
                self.tokenizer,
                stop=self.sampling.stop,
                min_tokens=self.sampling.min_tokens,
                prompt_token_ids=request.prompt_token_ids if self.continues_prompt else (),
            )
        with self._attached(request, waits, reservation) as watchers:
            source = self.source or client
            async with aclosing(cast("Outputs", source.generate(request))) as outputs:
                async for output in outputs:
                    watchers.record_output(output)
                    if is_cut:
                        continue
                    watchers.metrics.tokens(len(output.token_ids))
                    delta = self._delta(index, output, text)
                    if delta.finish_reason is not None:
                        watchers.reason = delta.finish_reason
                        is_cut = output.finish_reason is None
                        if is_cut:
                            if watchers.deadline is not None:
                                watchers.deadline.close()
                                watchers.deadline = None
                            await client.abort(request.request_id)
                    yield delta

    @contextmanager
    def _attached(
        self, request: GenerateRequest, waits: Waiting, reservation: Reservation | None
    ) -> Iterator[Watchers]:
        """Queue, deadline, rate, metrics and shutdown of a choice.  Raises ApiError for all errors."""
        frontend, task = self.frontend, asyncio.current_task()
        watchers = Watchers(frontend.limits, self._metrics(request), waits, reservation)
        if self.timeout_s is not None:
            abort = partial(frontend.client.abort, request.request_id)
            watchers.deadline = Deadline(self.timeout_s, self._left_s(), abort)
        if reservation is not None:
            reservation.spend(request.prompt_tokens)
        frontend.ending.running.add(task)
        try:
            if self.caller.key is not None and not self.caller.may_use(self.adapter):
                raise AdapterNotFoundError(f"no adapter is named {self.adapter!r}")
            if frontend.ending.over:
                raise ApiError(503, CUT)
            yield watchers
        except asyncio.CancelledError as error:
            if not frontend.ending.over:
                raise
            if task is not None and hasattr(task, "uncancel"):
                task.uncancel()
            raise self._failed(ApiError(503, CUT), watchers, request) from error
        except Exception as error:
            raise self._failed(error, watchers, request) from error
        finally:
            frontend.ending.running.discard(task)
            if watchers.deadline is not None:
                watchers.deadline.close()
            watchers.metrics.end(watchers.reason, watchers.timing)
            if watchers.timing is not None:
                self._timings.append(watchers.timing)

    def _metrics(self, request: GenerateRequest) -> RequestWatch:
        window, visit = self.frontend.controller.window, None
        watch = BackgroundWatch if self.caller.background else RequestWatch
        if window is not None and self.adapter is not None and not self.caller.background:
            visit = window.begin(self.adapter)
        return watch(
            self.frontend.metrics,
            visit,
            adapter=self.adapter,
            tenant=self.caller.tenant,
            prompt_tokens=request.prompt_tokens,
            max_tokens=self.sampling.max_tokens,
            num_choices=self.num_choices,
        )

    def _failed(self, error: Exception, watchers: Watchers, request: GenerateRequest) -> ApiError:
        failure, limits = to_api_error(error), self.frontend.limits
        if isinstance(error, AdapterNotFoundError):
            what = f"the model {self.adapter!r} does not exist; GET /v1/models lists what does"
            failure = ApiError(404, what, "model")
        if isinstance(error, UnreadError):
            limits.count("unread")
        if failure.limit is not None:
            limits.count(failure.limit)
        if watchers.reservation is not None and not watchers.has_begun and failure.status != 408:
            watchers.reservation.spend(-request.prompt_tokens)  # a prompt without a token is free
        is_sent_again = self.caller.background and isinstance(error, BusyError)
        watchers.reason = "refused" if failure.status < 500 or is_sent_again else "error"
        return failure if self.renamed is None else self.renamed(failure)

    def _request(self, index: int) -> GenerateRequest:
        """The request of a choice, with a separate seed: equal seeds give equal choices."""
        choice = index % self.num_choices
        sampling = self.sampling
        if sampling.seed is not None and choice:
            sampling = replace(sampling, seed=(sampling.seed + choice) % 2**63)
        salt = "" if self.frontend.config.share_prefix_cache else self.caller.tenant
        if self.cache_salt is not None:  # a tenant's name has no NUL: salts differ
            salt = f"{salt}\0{self.cache_salt}"
        return GenerateRequest(
            request_id=f"{self.engine_id}-{index}",
            prompt_token_ids=self.prompts[index // self.num_choices],
            sampling=sampling,
            adapter=self.adapter,
            tenant=self.caller.owner,
            share=self.caller.share,
            priority=BACKGROUND if self.caller.background else self.priority,
            cache_salt=salt,
        )

    def _delta(self, index: int, output: TokenOutput, text: TextStream | None) -> Delta:
        if output.finish_reason == "error":
            what = f"the engine can't run this request: {output.error}"
            if not (output.error or "").startswith(UNFOLLOWABLE):
                raise ApiError(503, what)
            name = self.grammar_field
            raise ApiError(400, what if name is None else f"{name}: {what}", name)
        token_ids, logprobs, reason = output.token_ids, output.logprobs, output.finish_reason
        piece, stop = "", None
        if text is not None:
            # The token that ended the answer is no text.
            pushed = text.push(token_ids[:-1] if reason == "stop" else token_ids)
            piece, stop = pushed.text, pushed.stop
            if stop is not None:
                token_ids = token_ids[: pushed.num_tokens]
                logprobs = None if logprobs is None else logprobs[: pushed.num_tokens]
            elif reason is not None:
                rest = text.flush()
                piece, stop = piece + rest.text, rest.stop
            if stop is not None:
                reason = "stop"
        self._completion_tokens[index] += len(token_ids)
        if output.num_cached_tokens > self.cached_tokens[index]:
            self.cached_tokens[index] = output.num_cached_tokens
        version = None if reason is None else output.adapter_version
        delta = Delta(index, piece, token_ids, logprobs, reason, output.prompt, stop, stop, version)
        if reason == "stop" and stop is None:
            delta.matched_stop = token_ids[-1]
            if token_ids[-1] in self.stop_token_ids:
                delta.stop_reason = token_ids[-1]
        return delta


def _tokens(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
