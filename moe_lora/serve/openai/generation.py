"""From a checked request to text: one engine request per choice, their outputs as text deltas."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_lora.core.errors import AdapterNotFoundError
from moe_lora.core.request import GenerateRequest, RequestTiming, SamplingParams, TokenLogprobs, TokenOutput
from moe_lora.engine.text.detokenize import TextStream
from moe_lora.serve.frontend import Frontend
from moe_lora.serve.http_errors import ApiError, to_api_error

# Running work for a client that may leave, merging streams, and server-sent events.


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


REFUSED = "refused"
"""Why a request ended that the engine never took; such requests are not counted."""


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """What to generate: `num_choices` answers to each prompt, prompt by prompt.

    request_id: what the client calls the request, perhaps several at once.  continues_prompt: the answer's
    text goes on where the prompt's stops (keeps a leading space).
    """

    request_id: str
    adapter: str | None
    prompts: tuple[tuple[int, ...], ...]
    num_choices: int
    sampling: SamplingParams
    continues_prompt: bool

    def requests(self) -> list[GenerateRequest]:
        """One per choice, under ids of their own.  Choices of a seeded request get seeds of their own, or
        they would be equal."""
        requests: list[GenerateRequest] = []
        engine_id = uuid.uuid4().hex
        for prompt in self.prompts:
            for choice in range(self.num_choices):
                sampling = self.sampling
                if sampling.seed is not None and choice:
                    sampling = replace(sampling, seed=(sampling.seed + choice) % 2**63)
                requests.append(
                    GenerateRequest(
                        request_id=f"{engine_id}-{len(requests)}",
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        adapter=self.adapter,
                    )
                )
        return requests


@dataclass(slots=True)
class Delta:
    """What a choice gained: text that is certain, the tokens it came from, and why it ended, if it did."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None


class Generation:
    """Runs a plan once; `usage()` is complete when `deltas()` has ended."""

    def __init__(self, frontend: Frontend, plan: GenerationPlan) -> None:
        self.plan = plan
        self._frontend = frontend
        self._completion_tokens: Counter[int] = Counter()
        self._cached_tokens: dict[int, int] = {}
        self._timings: list[RequestTiming] = []

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices as they come.  Closing it aborts what still runs."""
        return merge([self._choice(index, request) for index, request in enumerate(self.plan.requests())])

    async def _choice(self, index: int, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        watch = self._frontend.watch(request.adapter)
        text = self._text(request)
        reason, timing = "abort", None
        try:
            async with aclosing(self._outputs(request)) as outputs:
                async for output in outputs:
                    watch.tokens(len(output.token_ids))
                    delta = self._delta(index, output, text)
                    reason = delta.finish_reason or reason
                    timing = output.timing
                    if delta.finish_reason is not None and output.finish_reason is None:
                        await self._frontend.client.abort(request.request_id)
                        yield delta
                        timing = await _timing_of_rest(outputs)
                    else:
                        yield delta
        except ApiError as error:
            reason = REFUSED if error.status < 500 else "error"
            raise
        finally:
            if reason == REFUSED:
                watch.refuse()
            else:
                watch.end(reason, timing)
            if timing is not None:
                self._timings.append(timing)

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        """The engine's outputs, its errors as ApiError; closing it aborts the request."""
        outputs = cast("AsyncGenerator[TokenOutput, None]", self._frontend.client.generate(request))
        try:
            with self._frontend.ending.ends():
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output
        except AdapterNotFoundError as error:
            raise ApiError(
                404, f"the model {request.adapter!r} does not exist; GET /v1/models lists what does", "model"
            ) from error
        except Exception as error:
            raise to_api_error(error) from error

    def _text(self, request: GenerateRequest) -> TextStream | None:
        if self._frontend.tokenizer is None:
            return None
        return TextStream(
            self._frontend.tokenizer,
            stop=request.sampling.stop,
            min_tokens=request.sampling.min_tokens,
            prompt_token_ids=request.prompt_token_ids if self.plan.continues_prompt else (),
        )

    def _delta(self, index: int, output: TokenOutput, text: TextStream | None) -> Delta:
        """Account for an output and turn it into text; a stop string ends the choice with "stop"."""
        if output.finish_reason == "error":
            raise ApiError(503, f"the engine can't run this request: {output.error}")
        token_ids, logprobs, reason = output.token_ids, output.logprobs, output.finish_reason
        piece = ""
        if text is not None:
            # The token that ended the answer is a mark, not text.
            shown = token_ids[:-1] if reason == "stop" else token_ids
            pushed = text.push(shown)
            piece = pushed.text
            stopped = pushed.stopped
            if stopped:
                token_ids = token_ids[: pushed.num_tokens]
                logprobs = None if logprobs is None else logprobs[: pushed.num_tokens]
            elif reason is not None:
                rest = text.flush()
                piece += rest.text
                stopped = rest.stopped
            reason = "stop" if stopped else reason
        self._completion_tokens[index] += len(token_ids)
        if index % self.plan.num_choices == 0:
            self._cached_tokens[index] = max(self._cached_tokens.get(index, 0), output.num_cached_tokens)
        return Delta(index, piece, token_ids, logprobs, reason)

    def usage_of(self, index: int) -> dict[str, Any]:
        """Tokens of one choice so far, and of its prompt, as vLLM counts them in a stream."""
        prompt = self.plan.prompts[index // self.plan.num_choices]
        return _tokens(len(prompt), self._completion_tokens[index])

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage, and `timing`: where the time went in the engine (the longest of all choices)."""
        usage: dict[str, Any] = _tokens(sum(map(len, self.plan.prompts)), self._completion_tokens.total())
        usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached_tokens.values())}
        if self._timings:
            usage["timing"] = {
                f"{name}_ms": round(1e3 * max(getattr(timing, f"{name}_s") for timing in self._timings), 3)
                for name in ("queue", "adapter_load", "kv_load", "prefill", "decode_ttft")
            }
        return usage


def _tokens(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


async def _timing_of_rest(outputs: AsyncGenerator[TokenOutput, None]) -> RequestTiming | None:
    """Timing from the last output of an aborted request; tokens that still came are dropped."""
    timing = None
    async for output in outputs:
        timing = output.timing
    return timing
