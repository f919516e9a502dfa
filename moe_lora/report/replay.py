"""Replay a plan against a server: every request is sent at its time, whether earlier ones are done or not."""

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
from moe_lora.workload.replay_plan import PlannedRequest

from .load_client import CompletionClient, ServedModels, ServerError, StreamedCompletion
from .exchange import finished_record, request_body
from .records import RequestRecord

_PROGRESS_PERIOD_S = 0.5


@dataclass(slots=True)
class ReplayState:
    """How far a run is; `elapsed_s` counts from its start."""

    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Records of the requests that were sent, in plan order; interrupted: stopped before the plan's end."""

    records: list[RequestRecord]
    duration_s: float
    interrupted: bool


class Completions(Protocol):
    """What answers the requests: an HTTP server, or engines reached without one."""

    async def complete(self, body: dict[str, Any]) -> StreamedCompletion:
        """The answer to the body of a /v1/completions call.  Raises ServerError."""
        ...


def served_models(url: str, api_key: str | None = None) -> ServedModels:
    """What the server offers. Raises ServerError (a ValueError) if it can't be reached."""

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
    """Send the plan and wait for all answers; SIGINT or SIGTERM stops early and keeps what there is.

    A second signal has its usual effect.  on_progress is called about twice a second.  connect: what to send
    to, called in the run's event loop; None: the server at `options.url`.
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
    """One replay under way."""

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
            self._start_s = time.perf_counter()  # after the client is set up, which takes tens of ms
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
            task.cancel()  # those still under way, when the run was stopped
        records = []
        for found in await finished:
            if isinstance(found, RequestRecord):
                records.append(found)
            elif not isinstance(found, asyncio.CancelledError):  # cancelled before it began: never sent
                raise found
        return records

    async def _stopped_before(self, arrival_s: float) -> bool:
        """Sleep until the arrival; True at once if the run is stopped."""
        # The wait also lets other tasks run where arrivals are already late.
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
        except ServerError as problem:
            error = str(problem)
        except asyncio.CancelledError:
            # Only `_send_all` cancels, when the user stops the run: the record then stays without an end.
            error = None
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
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
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
    wanted = num_connections + 128  # besides connections: libraries, result files, the event loop
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
