# SPDX-License-Identifier: Apache-2.0
"""Open-loop replay of a plan."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from moe_lora.config.plan import ReplayOptions
from moe_lora.workload.replay_plan import PlannedRequest, random_token_ids

from .latency import ClientTiming, RequestRecord
from .load_client import CompletionClient, ServedModels, ServerError, StreamedCompletion


def request_body(planned: PlannedRequest, options: ReplayOptions) -> dict[str, Any]:
    prompt: str | list[int] | None = planned.prompt
    if prompt is None:
        prompt = random_token_ids(
            planned.index, planned.prompt_tokens, options.vocab_size, options.seed, planned.hash_ids
        )
    body: dict[str, Any] = {
        "model": planned.adapter or options.model,
        "prompt": prompt,
        "max_tokens": planned.output_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if planned.answer is None and options.force_length == "ignore-eos":
        body["ignore_eos"] = True
    elif planned.answer is None and options.force_length == "min-tokens":
        body["min_tokens"] = planned.output_tokens
    return body


def finished_record(planned: PlannedRequest, completion: StreamedCompletion, start_s: float) -> RequestRecord:
    """The record, by the server's token counts and usage.timing."""
    usage, text = completion.usage, "".join(completion.texts)
    timing = ClientTiming(
        sent_s=completion.sent_s - start_s,
        token_times_s=tuple(moment - start_s for moment in completion.token_times_s),
        end_s=completion.end_s - start_s,
        num_output_tokens=_count(usage, "completion_tokens") or len(completion.token_times_s),
        decode_ttft_ms=_server_ms(usage, "decode_ttft_ms"),
    )
    return RequestRecord(
        adapter=planned.adapter,
        arrival_s=planned.arrival_s,
        sent_s=timing.sent_s,
        input_tokens=_count(usage, "prompt_tokens") or planned.prompt_tokens,
        timing=timing,
        text=text,
        exact=None if planned.answer is None else text.strip() == planned.answer.strip(),
        queue_ms=_server_ms(usage, "queue_ms"),
        adapter_load_ms=_server_ms(usage, "adapter_load_ms"),
        kv_load_ms=_server_ms(usage, "kv_load_ms"),
    )


def _count(usage: dict[str, Any], key: str) -> int:
    value = usage.get(key) or 0
    if not isinstance(value, int) or value < 0:
        raise ServerError(f"usage.{key} is {value!r}, not a whole number >= 0")
    return value


def _server_ms(usage: dict[str, Any], key: str) -> float | None:
    timing = usage.get("timing")
    value = timing.get(key) if isinstance(timing, dict) else None
    if value is not None and not isinstance(value, (int, float)):
        raise ServerError(f"usage.timing.{key} is {value!r}, not a number of ms")
    return value


_PROGRESS_PERIOD_S = 0.5


@dataclass(slots=True)
class ReplayState:
    """Progress of a run."""

    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Records of sent requests, in plan order; interrupted: stopped early."""

    records: list[RequestRecord]
    duration_s: float
    interrupted: bool


class Completions(Protocol):
    """Answers requests, over HTTP or by engines."""

    async def complete(self, body: dict[str, Any]) -> StreamedCompletion:
        """Answer a request's body.  Raises ServerError."""
        ...


def served_models(url: str, api_key: str | None = None) -> ServedModels:
    """Raises ServerError."""

    async def ask() -> ServedModels:
        async with CompletionClient(url, timeout_s=10.0, max_connections=1, api_key=api_key) as client:
            return await client.models()

    return asyncio.run(ask())


def replay(
    plan: Sequence[PlannedRequest],
    options: ReplayOptions,
    on_progress: Callable[[ReplayState], None] | None = None,
    connect: Callable[[], AbstractAsyncContextManager[Completions]] | None = None,
) -> ReplayOutcome:
    """Send the plan and wait for all answers; SIGINT or SIGTERM stops early and keeps the records.

    connect: makes the target, in the run's event loop; None: the server at `options.url`.
    """
    _raise_open_file_limit(min(options.max_connections, len(plan)))
    if connect is None:
        connect = functools.partial(
            CompletionClient,
            options.url,
            timeout_s=options.timeout_s,
            max_connections=options.max_connections,
            api_key=options.api_key,
        )
    return asyncio.run(_Run(plan, options, on_progress or (lambda state: None), connect).run())


class _Run:
    def __init__(
        self,
        plan: Sequence[PlannedRequest],
        options: ReplayOptions,
        on_progress: Callable[[ReplayState], None],
        connect: Callable[[], AbstractAsyncContextManager[Completions]],
    ) -> None:
        self._connect = connect
        self._plan = plan
        self._options = options
        self._on_progress = on_progress
        self._state = ReplayState(total=len(plan))
        self._stop = asyncio.Event()
        self._start_s = 0.0

    async def run(self) -> ReplayOutcome:
        async with self._connect() as client:
            self._start_s = time.perf_counter()
            ticker = asyncio.create_task(self._tick())
            try:
                with _signals_set(self._stop):
                    records = await self._send_all(client)
                duration_s = self._now_s()
            finally:
                ticker.cancel()
        self._report()
        return ReplayOutcome(records, duration_s, self._stop.is_set())

    async def _send_all(self, client: Completions) -> list[RequestRecord]:
        tasks: list[asyncio.Task[RequestRecord]] = []
        for planned in self._plan:
            if await self._stopped_before(planned.arrival_s):
                break
            tasks.append(asyncio.create_task(self._send(client, planned)))
            self._state.sent += 1
        stopped: asyncio.Future[Any] = asyncio.create_task(self._stop.wait())
        finished: asyncio.Future[Any] = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait([stopped, finished], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in tasks:
            task.cancel()
        records = []
        for found in await finished:
            if isinstance(found, RequestRecord):
                records.append(found)
            elif not isinstance(found, asyncio.CancelledError):
                raise found
        return records

    async def _stopped_before(self, arrival_s: float) -> bool:
        """Sleep until the arrival; True once stopped."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stop.wait(), max(0.0, arrival_s - self._now_s()))
        return self._stop.is_set()

    async def _send(self, client: Completions, planned: PlannedRequest) -> RequestRecord:
        sent_s, error = self._now_s(), None
        try:
            body = request_body(planned, self._options)
            completion = await asyncio.wait_for(client.complete(body), self._options.timeout_s)
            record = finished_record(planned, completion, self._start_s)
            self._state.done += 1
            self._state.output_tokens += record.timing.num_output_tokens if record.timing else 0
            return record
        except asyncio.TimeoutError:
            error = f"timeout: no end within {self._options.timeout_s:g} s"
        except (ServerError, ValueError) as problem:  # text that UTF-8 lacks
            error = str(problem)
        except asyncio.CancelledError:
            error = None
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        self._state.failed += error is not None
        return RequestRecord(
            adapter=planned.adapter,
            arrival_s=planned.arrival_s,
            sent_s=sent_s,
            input_tokens=planned.prompt_tokens,
            error=error,
        )

    async def _tick(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(_PROGRESS_PERIOD_S)

    def _report(self) -> None:
        self._state.elapsed_s = self._now_s()
        self._on_progress(self._state)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


@contextlib.contextmanager
def _signals_set(stop: asyncio.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop_once() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, stop_once)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _raise_open_file_limit(num_connections: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + 128
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
