# SPDX-License-Identifier: Apache-2.0
"""Runs a batch file's requests with retries and progress."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

import httpx

from moe_lora.serve.batches.lines import BatchLine, Results, body_at, result_line, run_lines, was_aborted

RETRY_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Waits before retries."""
MAX_WAIT_S = 60.0
"""Limit of a server's Retry-After."""
TRANSIENT = frozenset({409, 425, 429, 500, 502, 503, 504})
"""Statuses to retry."""
PROGRESS_S = 2.0


class BatchRun:
    """The requests of a file.  left: requests without a result, for a later run."""

    def __init__(
        self, source: BinaryIO, results: Results, concurrency: int, report: Callable[[str], None]
    ) -> None:
        self._source, self._results = source, results
        self._concurrency, self._report = concurrency, report
        self._num_before, self._start_s = len(results.finished), time.monotonic()
        self.left = 0
        self.interrupted = False
        self._waited = False

    @property
    def failed(self) -> int:
        return sum(not is_whole for is_whole in self._results.finished.values())

    async def run(self, lines: Sequence[BatchLine], http: httpx.AsyncClient) -> None:
        """Send the lines until the end, or Ctrl-C.  Raises ValueError without an answering server."""
        task, loop = asyncio.create_task(self._run(lines, http)), asyncio.get_running_loop()

        def interrupt() -> None:
            self.interrupted = True
            task.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            await task
        except asyncio.CancelledError:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if not self.interrupted:
                raise
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _run(self, lines: Sequence[BatchLine], http: httpx.AsyncClient) -> None:
        showing = asyncio.create_task(self._show(len(lines)))
        try:
            await run_lines(lines, self._concurrency, partial(self._work, http))
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    async def _show(self, num_lines: int) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._report(self.described(num_lines))

    def described(self, num_lines: int) -> str:
        """12 of 300 done, 1 failed, 3.5 requests/s"""
        done = len(self._results.finished) - self._num_before
        rate = done / max(time.monotonic() - self._start_s, 1e-9)
        return f"{done} of {num_lines} done, {self.failed} failed, {rate:.1f} requests/s"

    async def _work(self, http: httpx.AsyncClient, line: BatchLine) -> None:
        found = await self._answer(line, body_at(self._source, line), http)
        if found is None:
            self.left += 1
            return
        answer, body = found
        status, request_id = answer.status_code, answer.headers.get("X-Request-Id", "")
        text = result_line(line.custom_id, status, request_id, body)
        self._results.add(text, line.custom_id, is_whole=status == 200)

    async def _answer(
        self, line: BatchLine, body: bytes, http: httpx.AsyncClient
    ) -> tuple[httpx.Response, Any] | None:
        """The answer and its body; None after the last attempt.

        Raises ValueError without an answering server, or for a refused key.
        """
        for wait_s in (*RETRY_S, None):
            try:
                answer = await self._admitted(line.url, body, http)
            except httpx.TransportError as error:
                problem, least_s = f"no answer ({error or type(error).__name__})", 0.0
                if wait_s is None:
                    raise ValueError(f"line {line.number}: {problem}; run the command again") from error
            else:
                if answer.status_code in (401, 403):
                    what = f"the server refuses the key ({answer.status_code}); give another --api-key"
                    raise ValueError(what)
                problem, least_s = f"status {answer.status_code}", _retry_after_s(answer)
                if answer.status_code not in TRANSIENT:
                    answered = _body(answer)
                    if not was_aborted(answered):
                        return answer, answered
                    problem = "the server aborted the request"
            if wait_s is not None:
                await asyncio.sleep(max(wait_s, least_s))
        self._report(f"line {line.number}: {problem}; the next run sends the line again")
        return None

    async def _admitted(self, url: str, body: bytes, http: httpx.AsyncClient) -> httpx.Response:
        """The answer, after all waits of a limit of the server; the first is reported."""
        while True:
            answer = await http.post(url, content=body, headers={"Content-Type": "application/json"})
            wait_s = _retry_after_s(answer)
            if answer.status_code != 429 or not wait_s > 0:
                return answer
            if not self._waited:
                words = " ".join(answer.text.split())[:300]
                self._report(f"waiting for a limit of the server, as long as it lasts (429: {words})")
            self._waited = True
            await asyncio.sleep(wait_s)


def _body(answer: httpx.Response) -> Any:
    """The body from JSON, else as text."""
    try:
        return json.loads(answer.content)
    except ValueError:
        return answer.text


def _retry_after_s(answer: httpx.Response) -> float:
    try:
        return min(float(answer.headers.get("Retry-After", 0)), MAX_WAIT_S)
    except ValueError:
        return 0.0
