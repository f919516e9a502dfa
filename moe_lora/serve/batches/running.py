# SPDX-License-Identifier: Apache-2.0
"""Runs batches in the background, one per owner at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.types import Message

from moe_lora.core.errors import StorageError
from moe_lora.serve.access import Allowance, Caller, allowance_of
from moe_lora.serve.frontend import ABORTED
from moe_lora.serve.http_errors import BUSY_S, ApiError, to_api_error

from .lines import (
    BatchLine,
    BatchLines,
    FileTooLongError,
    Results,
    body_at,
    problem_line,
    read_lines,
    result_line,
    run_lines,
    was_aborted,
)
from .store import FullError, Record, Store

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moe_lora.serve.api_keys import AdminKeys, ApiKey, KeyRing
    from moe_lora.serve.frontend import Frontend

logger = logging.getLogger(__name__)

RETRY_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits before retries after a passing error."""
TRANSIENT = frozenset({500, 502, 503, 504})
LOOK_S = 1.0
"""Time between looks for an engine or room within a rate."""
MAX_REQUESTS = 50_000
"""OpenAI's limit of requests per batch."""
LINE_BYTES = 1 << 16
"""Bytes of a line beside the request's body."""


class KeyGoneError(Exception):
    """The key of a batch was removed."""


class BackgroundCaller(Caller):
    """A caller whose requests run in steps without others, with a separate tenant outside of engines."""

    background = True

    def __init__(self, key: ApiKey | None, tokens: Allowance | None) -> None:
        super().__init__(key, tokens, is_admin=key is None)
        self.tenant = f"{self.tenant}(batch)"


class BatchAnswer(NamedTuple):
    status: int
    body: Any
    retry_s: float = 0.0


async def call(app: FastAPI, url: str, body: bytes, caller: Caller, request_id: str) -> BatchAnswer:
    """The application's answer; an abort is a passing error."""
    start, parts, bodies = dict[str, Any](), list[bytes](), [body]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        start.update(message) if message["type"] == "http.response.start" else parts.append(message["body"])

    state = {"caller": caller, "request_id": request_id, "request_id_given": True, "send_body": send}
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"},
        **{"scheme": "http", "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": ""},
        **{"client": None, "server": None, "app": app, "state": state},
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
    }
    try:
        await AsyncExitStackMiddleware(app.router)(scope, receive, send)
    except Exception as error:
        failure = to_api_error(error)
        return BatchAnswer(failure.status, failure.body, failure.retry_s or 0.0)
    try:
        answered = json.loads(b"".join(parts))
    except ValueError as error:
        failure = ApiError(500, f"the answer is not JSON: {error}")
        return BatchAnswer(failure.status, failure.body)
    if was_aborted(answered):
        failure = ApiError(503, ABORTED)
        return BatchAnswer(failure.status, failure.body)
    return BatchAnswer(start["status"], answered)


class Batches:
    """The batches of one front end; continues unfinished batches."""

    def __init__(self, frontend: Frontend, app: FastAPI, store: Store) -> None:
        self.frontend, self.app, self.store = frontend, app, store
        self.slots = asyncio.Semaphore(frontend.config.batch_concurrency)
        self._keys: KeyRing | AdminKeys | None = app.state.keys
        self._requests: dict[str, Allowance] = {}
        self._tokens: dict[str, Allowance] = {}
        self._runs: dict[str, Run] = {}
        self._owners: dict[str, asyncio.Task[None]] = {}
        for owner in {one.owner for one in store.all_of("batch") if not one.has_ended}:
            self.start(owner)

    def start(self, owner: str) -> None:
        """Run the owner's batches, oldest first."""
        if owner not in self._owners:
            self._owners[owner] = asyncio.create_task(self._work(owner))

    def cancel(self, record: Record) -> None:
        """End a batch; results so far stay."""
        if record.has_ended or record.shown["status"] == "cancelling":
            return
        now_s, run = int(time.time()), self._runs.get(record.id)
        record.shown |= {"status": "cancelling", "cancelling_at": now_s}
        if run is not None:
            run.cancel()
        elif not self.store.path(f"{record.id}.results").exists():
            record.shown |= {"status": "cancelled", "cancelled_at": now_s}
        self.store.save(record)

    def uses(self, record: Record) -> bool:
        """True for the input of an unfinished batch."""
        batches = self.store.all_of("batch", record.owner)
        return any(one.shown["input_file_id"] == record.id for one in batches if not one.has_ended)

    async def caller(self, record: Record, *, is_new: bool) -> Caller:
        """The request's caller; a new request is within the key's rate.  Raises KeyGoneError."""
        if record.key is None or self._keys is None:
            return BackgroundCaller(None, None)
        while True:
            key = self._keys.by_id(record.key)
            if key is None:
                raise KeyGoneError
            tokens = allowance_of(self._tokens, key.id, "tokens", key.tokens_per_minute)
            requests = allowance_of(self._requests, key.id, "requests", key.requests_per_minute)
            wait_s = 0.0 if requests is None or not is_new else requests.wait_s()
            if not wait_s:
                break
            await asyncio.sleep(min(wait_s, LOOK_S))
        if requests is not None and is_new:
            requests.take(1)
        return BackgroundCaller(key, tokens)

    async def _work(self, owner: str) -> None:
        while batch := next((one for one in self.store.all_of("batch", owner) if not one.has_ended), None):
            run = self._runs[batch.id] = Run(self, batch)
            try:
                await run.run()
            except Exception:
                logger.exception("the end of the batch %s is not on disk; the next start goes on", batch.id)
                if not batch.has_ended:
                    run.fail("storage_failed", "the server can't use its folder; its next start goes on")
            finally:
                del self._runs[batch.id]
        del self._owners[owner]


class Run:
    """The run of a batch."""

    def __init__(self, batches: Batches, record: Record) -> None:
        self._batches, self._record, self._store = batches, record, batches.store
        self._path = self._store.path(f"{record.id}.results")
        self._results: Results
        self._errors: list[dict[str, Any]] = []
        self._wrong: list[tuple[str | None, str]] = []
        """`custom_id` and problem of lines without a request."""
        self._num_bytes = 0
        self._task: asyncio.Task[None] | None = None

    def _count_bytes(self, num_bytes: int) -> None:
        """Count results as the owner's use.  Raises FullError."""
        self._num_bytes += num_bytes
        self._store.receive(self._record.owner, num_bytes)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Answer the requests, and end the batch."""
        await self._retried(self._open)
        try:
            with suppress(FullError):
                self._count_bytes(self._results.num_bytes)
            with self._store.path(self._record.shown["input_file_id"]).open("rb") as source:
                status = await self._run(source, self._results)
        except KeyGoneError:
            status = self._failed("batch_failed", "the key of the batch was removed")
        except FullError as error:
            status = self._failed("storage_full", f"{error}, and send requests without a result again")
        except FileTooLongError as error:
            status = self._failed("too_many_tasks", str(error))
        except OSError as error:
            logger.error("the batch %s failed: %s", self._record.id, error)
            what = f"the server's folder for files can't be used ({error.strerror})"
            status = self._failed("storage_failed", f"{what}; send requests without a result again later")
        except Exception as error:
            logger.exception("the batch %s failed", self._record.id)
            status = self._failed("batch_failed", f"the server failed: {type(error).__name__}; see its log")
        finally:
            with suppress(OSError):
                await asyncio.to_thread(self._results.close)
        await self._retried(partial(self._end, status))

    async def _open(self) -> None:
        self._results = await asyncio.to_thread(Results, str(self._path))

    def _failed(self, code: str, message: str) -> str:
        self._errors = [_error(code, message), *self._errors]
        return "failed"

    def fail(self, code: str, message: str) -> None:
        """End the batch in memory alone."""
        self._show(self._failed(code, message))

    def _show(self, status: str) -> None:
        errors = {"object": "list", "data": self._errors} if self._errors else None
        self._record.shown |= {"status": status, f"{status}_at": int(time.time()), "errors": errors}

    async def _retried(self, write: Callable[[], Awaitable[None]]) -> None:
        """Wait for a writable folder.  Raises OSError and StorageError after the last attempt."""
        for wait_s in RETRY_S:
            try:
                return await write()
            except (OSError, StorageError) as error:
                logger.warning("the batch %s waits for its folder: %s", self._record.id, error)
                await asyncio.sleep(wait_s)
        return await write()

    async def _run(self, source: BinaryIO, results: Results) -> str:
        """The batch's last status."""
        shown, most = self._record.shown, self._batches.frontend.limits.config.max_body_bytes
        found = await asyncio.to_thread(
            read_lines, source, (shown["endpoint"],), most=MAX_REQUESTS, most_line_bytes=most + LINE_BYTES
        )
        self._errors = [_error("invalid_line", one.message, one.number) for one in found.problems]
        self._wrong = [(one.custom_id, f"line {one.number}: {one.message}") for one in found.problems]
        if found.further:
            self._errors.append(_error("invalid_line", found.further))
            self._wrong.append((None, found.further))
        shown["request_counts"]["total"] = len(found.lines) + found.num_wrong
        self._count(results, found.num_wrong)
        if not found.lines:
            self._errors = self._errors or [_error("empty_file", "the file has no request")]
            return "failed"
        if shown["status"] == "validating":
            shown |= {"status": "in_progress", "in_progress_at": int(time.time())}
        with suppress(StorageError):  # the next start finds the batch as new
            self._store.save(self._record)
        if shown["status"] == "in_progress":
            await self._answer_all(found, source, results)
        return "cancelled" if shown["status"] == "cancelling" else "completed"

    async def _answer_all(self, found: BatchLines, source: BinaryIO, results: Results) -> None:
        todo = [one for one in found.lines if one.custom_id not in results.finished]
        num = self._batches.frontend.config.batch_concurrency
        self._task = asyncio.create_task(run_lines(todo, num, partial(self._work, source, results)))
        try:
            await self._task
        except asyncio.CancelledError:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            if self._record.shown["status"] != "cancelling":
                raise
        finally:
            self._count(results, found.num_wrong)

    def _count(self, results: Results, num_wrong: int) -> None:
        completed = sum(results.finished.values())
        failed = len(results.finished) - completed + num_wrong
        self._record.shown["request_counts"] |= {"completed": completed, "failed": failed}

    async def _work(self, source: BinaryIO, results: Results, line: BatchLine) -> None:
        counts, request_id = self._record.shown["request_counts"], uuid.uuid4().hex
        answer = await self._answer(line, source, request_id)
        text = result_line(line.custom_id, answer.status, request_id, answer.body)
        self._count_bytes(len(text))
        await self._retried(partial(self._add, results, text, line.custom_id, answer.status))
        counts["completed" if answer.status == 200 else "failed"] += 1

    async def _add(self, results: Results, text: bytes, custom_id: str, status: int) -> None:
        results.add(text, custom_id, is_whole=status == 200)

    async def _answer(self, line: BatchLine, source: BinaryIO, request_id: str) -> BatchAnswer:
        """The answer, after waits for passing errors, the key's rate, and a busy server: it may sleep."""
        batches, ending, waits_s = self._batches, self._batches.frontend.ending, iter(RETRY_S)
        is_new = True
        while True:
            while not await batches.frontend.client.is_alive():
                await asyncio.sleep(LOOK_S)
            caller, is_new = await batches.caller(self._record, is_new=is_new), False
            async with batches.slots:
                if ending.begun:
                    await asyncio.Event().wait()  # the next start runs the line
                answer = await call(batches.app, line.url, body_at(source, line), caller, request_id)
            if answer.status in TRANSIENT and ending.begun:
                continue
            is_busy = answer.status == 503 and answer.retry_s >= BUSY_S
            if answer.status == 429 or is_busy:
                waits_s = iter(RETRY_S) if is_busy else waits_s  # a sleep aborts requests
                await asyncio.sleep(max(LOOK_S, answer.retry_s))
                continue
            wait_s = next(waits_s, None) if answer.status in TRANSIENT else None
            if wait_s is None:
                return answer
            await asyncio.sleep(wait_s)

    async def _end(self, status: str) -> None:
        """Make files of the results, and end the batch."""
        record, shown = self._record, self._record.shown
        lines = [problem_line(custom_id, "invalid_line", problem) for custom_id, problem in self._wrong]
        output, error = (f"file-{record.id.removeprefix('batch_')}-{kind}" for kind in ("output", "error"))
        paths = self._store.path(output), self._store.path(error)
        await asyncio.to_thread(self._results.split, *paths, lines)
        shown |= {"output_file_id": self._kept(output), "finalizing_at": int(time.time())}
        shown["error_file_id"] = self._kept(error)
        self._show(status)
        self._store.save(record)
        self._path.unlink(missing_ok=True)
        self._count_bytes(-self._num_bytes)

    def _kept(self, name: str) -> str | None:
        """The id of a file with results, stable over runs, or None."""
        record, path = self._record, self._store.path(name)
        num_bytes = path.stat().st_size
        if not num_bytes:
            path.unlink()
            return None
        shown = {"id": name, "object": "file", "bytes": num_bytes, "purpose": "batch_output"}
        about = {
            "filename": f"{record.id}_{name.rpartition('-')[2]}.jsonl",
            "status": "processed",
            "expires_at": None,
        }
        self._store.add(record.owner, record.key, {**shown, **about})
        return name


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}
