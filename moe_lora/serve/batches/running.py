# SPDX-License-Identifier: Apache-2.0
"""Runs batches in the background: a batch of each owner at a time, requests through the application."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from starlette.types import Message

from moe_lora.serve.access import Allowance, Caller, checked_keys
from moe_lora.serve.http_errors import to_api_error

from .lines import (
    BatchLine,
    BatchLines,
    FileTooLongError,
    Results,
    body_at,
    problem_line,
    read_lines,
    result_line,
)
from .store import Record, Store

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moe_lora.serve.api_keys import ApiKey
    from moe_lora.serve.frontend import Frontend

logger = logging.getLogger(__name__)

RETRY_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits before further attempts after a passing error."""
TRANSIENT = frozenset({500, 502, 503, 504})
LOOK_S = 1.0
"""Between looks for an engine, and for the room of a rate."""
MAX_REQUESTS = 50_000
"""Requests of a batch, as OpenAI has it."""


class KeyGoneError(Exception):
    """The key of a batch was removed."""


class BackgroundCaller(Caller):
    """A caller whose requests run in steps without others; its tenant is apart from the key's tenant."""

    background = True

    def __init__(self, key: ApiKey | None, tokens: Allowance | None) -> None:
        super().__init__(key, tokens, is_admin=key is None)
        self.tenant = f"{self.tenant}(batch)"


class Answer(NamedTuple):
    status: int
    body: Any
    retry_s: float = 0.0


async def call(app: FastAPI, url: str, body: bytes, caller: Caller, request_id: str) -> Answer:
    """The application's answer to a request of this caller."""
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
        await app.router(scope, receive, send)
    except Exception as error:
        failure = to_api_error(error)
        return Answer(failure.status, failure.body, failure.retry_s or 0.0)
    return Answer(start["status"], json.loads(b"".join(parts)))


class Batches:
    """The batches of one front end.  Starts with the unfinished batches of the store."""

    def __init__(self, frontend: Frontend, app: FastAPI, store: Store) -> None:
        self.frontend, self.app, self.store = frontend, app, store
        config = frontend.config
        self.slots = asyncio.Semaphore(config.batch_concurrency)
        self._keys = checked_keys(config)
        self._allowances: dict[str, tuple[Allowance | None, Allowance | None]] = {}
        self._runs: dict[str, Run] = {}
        self._owners: dict[str, asyncio.Task[None]] = {}
        for owner in {one.owner for one in store.all_of("batch") if not one.has_ended}:
            self.start(owner)

    def start(self, owner: str) -> None:
        """Run the owner's batches, the oldest first."""
        if owner not in self._owners:
            task = self._owners[owner] = asyncio.create_task(self._work(owner))
            task.add_done_callback(lambda _: self._owners.pop(owner, None))

    def cancel(self, record: Record) -> None:
        """End a batch; its results so far stay."""
        if record.has_ended or record.shown["status"] == "cancelling":
            return
        record.shown |= {"status": "cancelling", "cancelling_at": int(time.time())}
        self.store.save(record)
        if record.id in self._runs:
            self._runs[record.id].cancel()

    def uses(self, record: Record) -> bool:
        """True for the input of an unfinished batch."""
        batches = self.store.all_of("batch", record.owner)
        return any(one.shown["input_file_id"] == record.id for one in batches if not one.has_ended)

    async def caller(self, record: Record) -> Caller:
        """The caller for the batch's next request, within the rates of its key.  Raises KeyGoneError."""
        if record.key is None or self._keys is None:
            return BackgroundCaller(None, None)
        key = self._keys.by_id(record.key)
        if key is None:
            raise KeyGoneError
        if key.id not in self._allowances:
            rates = ("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)
            made = (None if rate is None else Allowance(what, rate) for what, rate in rates)
            self._allowances[key.id] = next(made), next(made)
        requests, tokens = self._allowances[key.id]
        if requests is not None:
            while wait_s := requests.wait_s():
                await asyncio.sleep(min(wait_s, LOOK_S))
            requests.take(1)
        return BackgroundCaller(key, tokens)

    async def _work(self, owner: str) -> None:
        while batch := next((one for one in self.store.all_of("batch", owner) if not one.has_ended), None):
            run = self._runs[batch.id] = Run(self, batch)
            try:
                await run.run()
            except KeyGoneError:
                run.end("failed", [_error("batch_failed", "the key of the batch was removed")])
            except Exception as error:
                logger.exception("the batch %s failed", batch.id)
                why = f"the server failed: {type(error).__name__}; see its log"
                run.end("failed", [_error("batch_failed", why)])
            finally:
                del self._runs[batch.id]


class Run:
    """The run of a batch."""

    def __init__(self, batches: Batches, record: Record) -> None:
        self._batches, self._record, self._store = batches, record, batches.store
        self._task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        shown, path = self._record.shown, self._store.path(self._record.shown["input_file_id"])
        with path.open("rb") as source, closing(Results(str(self._results))) as results:
            try:
                found = await asyncio.to_thread(read_lines, source, (shown["endpoint"],), most=MAX_REQUESTS)
            except FileTooLongError as error:
                self.end("failed", [_error("too_many_tasks", str(error))])
                return
            errors = [_error("invalid_line", message, number) for number, message in found.problems]
            if found.further:
                errors.append(_error("invalid_line", found.further))
            shown["request_counts"]["total"] = len(found.lines) + found.num_wrong
            if not found.lines:
                self.end("failed", errors or [_error("empty_file", "the file has no request")])
                return
            if shown["status"] == "validating":
                shown |= {"status": "in_progress", "in_progress_at": int(time.time())}
            self._count(results, found.num_wrong)
            self._store.save(self._record)
            if shown["status"] == "in_progress":
                await self._answer_all(found, source, results)
        self.end("cancelled" if shown["status"] == "cancelling" else "completed", errors)

    @property
    def _results(self) -> Any:
        return self._store.path(f"{self._record.id}.results")

    async def _answer_all(self, found: BatchLines, source: BinaryIO, results: Results) -> None:
        todo = iter([one for one in found.lines if one.custom_id not in results.finished])

        async def run() -> None:
            num = self._batches.frontend.config.batch_concurrency
            workers = [asyncio.create_task(self._work(todo, source, results)) for _ in range(num)]
            try:
                done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
                for one in done:
                    one.result()
            finally:
                for one in workers:
                    one.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                self._count(results, found.num_wrong)

        self._task = asyncio.create_task(run())
        try:
            await self._task
        except asyncio.CancelledError:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            if self._record.shown["status"] != "cancelling":
                raise

    def _count(self, results: Results, num_wrong: int) -> None:
        completed = sum(results.finished.values())
        failed = len(results.finished) - completed + num_wrong
        self._record.shown["request_counts"] |= {"completed": completed, "failed": failed}

    async def _work(self, todo: Iterator[BatchLine], source: BinaryIO, results: Results) -> None:
        counts = self._record.shown["request_counts"]
        for line in todo:
            request_id = uuid.uuid4().hex
            answer = await self._answer(line, body_at(source, line), request_id)
            text = result_line(line.custom_id, answer.status, request_id, answer.body)
            results.add(text, line.custom_id, is_whole=answer.status == 200)
            counts["completed" if answer.status == 200 else "failed"] += 1

    async def _answer(self, line: BatchLine, body: bytes, request_id: str) -> Answer:
        """The answer after passing errors, and after the end of the key's rate."""
        batches, waits_s = self._batches, iter(RETRY_S)
        while True:
            while not await batches.frontend.client.is_alive():
                await asyncio.sleep(LOOK_S)
            caller = await batches.caller(self._record)
            async with batches.slots:
                answer = await call(batches.app, line.url, body, caller, request_id)
            if batches.frontend.ending.begun:
                await asyncio.Event().wait()  # the next start runs the line again
            if answer.status == 429:
                await asyncio.sleep(max(LOOK_S, answer.retry_s))
                continue
            wait_s = next(waits_s, None) if answer.status in TRANSIENT else None
            if wait_s is None:
                return answer
            await asyncio.sleep(wait_s)

    def end(self, status: str, errors: list[dict[str, Any]]) -> None:
        """Make files of the results so far, and end the batch."""
        record, shown = self._record, self._record.shown
        if self._results.exists():
            shown |= {"output_file_id": self._file("output", 200, []), "finalizing_at": int(time.time())}
            wrong = [one for one in errors if one["code"] == "invalid_line"]
            texts = [
                one["message"] if one["line"] is None else f"line {one['line']}: {one['message']}"
                for one in wrong
            ]
            lines = [problem_line(None, "invalid_line", text) for text in texts]
            shown["error_file_id"] = self._file("error", None, lines)
        data = {"object": "list", "data": errors}
        shown |= {"status": status, f"{status}_at": int(time.time()), "errors": data if errors else None}
        self._store.save(record)
        self._results.unlink(missing_ok=True)

    def _file(self, kind: str, status: int | None, further: list[bytes]) -> str | None:
        """The id of a file with the results of this status, or of all others: the same in a second run."""
        record, name = self._record, f"file-{self._record.id.removeprefix('batch_')}-{kind}"
        num_bytes = 0
        with self._results.open("rb") as results, self._store.path(name).open("wb") as out:
            for text in results:
                response = json.loads(text)["response"] or {}
                if (response.get("status_code") == 200) == (status == 200):
                    num_bytes += out.write(text)
            num_bytes += sum(map(out.write, further))
        if not num_bytes:
            self._store.path(name).unlink()
            return None
        shown = {"id": name, "object": "file", "bytes": num_bytes, "purpose": "batch_output"}
        about = {"filename": f"{record.id}_{kind}.jsonl", "status": "processed", "expires_at": None}
        self._store.add(record.owner, record.key, {**shown, **about})
        return name


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}
