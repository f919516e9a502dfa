# SPDX-License-Identifier: Apache-2.0
"""Lines of OpenAI's batch files: requests and results."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Paths of requests."""
MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARS = 512
MAX_PROBLEMS = 100
"""Wrong lines that get a message."""
_ID = "batch_req_"
_START = f'{{"id": "{_ID}'.encode()
_JSON = json.JSONDecoder()
_OPENED, _COLON, _NEXT = (
    re.compile(rf"{one}[ \t\r\n]*")
    for one in (r"\ufeff?[ \t\r\n]*\{", r"[ \t\r\n]*:", r"[ \t\r\n]*(?:,|\}(?=[ \t\r\n]*\Z))")
)
_FIELDS = ("custom_id", "method", "url", "body")


class BatchLine(NamedTuple):
    """A request.  number: from 1.  offset, size: of the body.  model: "" for the base model."""

    number: int
    offset: int
    size: int
    custom_id: str
    url: str
    model: str


class WrongLine(NamedTuple):
    """A line without a request.  custom_id: of no other request; None if unreadable."""

    number: int
    message: str
    custom_id: str | None


@dataclass
class BatchLines:
    """Requests by adapter, in order of first lines, and the first wrong lines."""

    lines: list[BatchLine] = field(default_factory=list)
    problems: list[WrongLine] = field(default_factory=list)
    num_wrong: int = 0

    @property
    def further(self) -> str | None:
        """Number of further wrong lines, as text."""
        num = self.num_wrong - len(self.problems)
        return f"{num} further wrong lines" if num else None


class FileTooLongError(ValueError):
    """A file has too many lines."""


def read_lines(
    file: BinaryIO,
    urls: Container[str] = URLS,
    *,
    most: int = sys.maxsize,
    most_line_bytes: int = MAX_LINE_BYTES,
) -> BatchLines:
    """The requests of a file, without empty lines; holds one line at a time.

    most: requests and wrong lines, and as many empty lines.  Raises FileTooLongError.
    """
    found, numbers, first = BatchLines(), dict[str, int](), dict[str, int]()
    wrong = Counter[str | None]()
    for number, (offset, text) in enumerate(_texts(file, most_line_bytes), 1):
        is_empty = not text.strip()
        if number > 2 * most or (not is_empty and len(found.lines) + found.num_wrong >= most):
            raise FileTooLongError(f"the file has more than {most} requests; make several files of it")
        if is_empty:
            continue
        custom_id = None
        try:
            line, start, size = _parsed(text, most_line_bytes)
            custom_id = _id_of(line)
            url, model = _checked(line, urls)
            if custom_id in numbers:
                raise ValueError(f"line {numbers[custom_id]} has the custom_id {custom_id[:64]!r} too")
        except (ValueError, RecursionError) as error:
            what = "too many nested lists" if isinstance(error, RecursionError) else str(error)
            found.num_wrong += 1
            wrong[custom_id] += 1
            if len(found.problems) < MAX_PROBLEMS:
                found.problems.append(WrongLine(number, what, custom_id))
            continue
        numbers[custom_id] = number
        first.setdefault(model, number)
        found.lines.append(BatchLine(number, offset + start, size, custom_id, url, model))
    found.problems = [
        one._replace(custom_id=None) if one.custom_id in numbers or wrong[one.custom_id] > 1 else one
        for one in found.problems
    ]
    found.lines.sort(key=lambda line: first[line.model])
    return found


def _texts(file: BinaryIO, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Offset and text of each line, up to most_bytes + 1 bytes."""
    file.seek(0)
    offset = 0
    while text := file.readline(most_bytes + 1):
        yield offset, text
        while not text.endswith(b"\n") and (more := file.readline(1 << 20)):
            offset += len(text)
            text = more
        offset += len(text)


def _parsed(text: bytes, most_bytes: int) -> tuple[dict[str, Any], int, int]:
    """As `_fields`.  Raises ValueError."""
    if len(text) > most_bytes:
        raise ValueError(f"the line has more than {most_bytes} bytes; send a shorter prompt")
    allowed = f"give an object with {', '.join(_FIELDS)}"
    try:
        return _fields(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error}); {allowed}") from None
    except TypeError:
        raise ValueError(f"not an object; {allowed}") from None


def _id_of(line: dict[str, Any]) -> str:
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise ValueError(f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters")
    return custom_id


def _checked(line: dict[str, Any], urls: Container[str]) -> tuple[str, str]:
    """The url, and the model's start.  Raises ValueError."""
    url, body = line.get("url"), line.get("body")
    if line.get("method", "POST") != "POST":
        raise ValueError(f"method={str(line['method'])[:64]!r} is not allowed; method must be POST")
    if not isinstance(url, str) or url not in urls:
        allowed = ", ".join(one for one in URLS if one in urls)
        raise ValueError(f"url={str(url)[:64]!r} is not allowed; allowed are {allowed}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object: the request for the url")
    for name in ("stream", "background"):
        if body.get(name):
            raise ValueError(f"{name} is not supported in a batch; leave {name} out")
    if body.get("encoding_format") in ("bytes", "bytes_only"):
        raise ValueError("encoding_format: results are JSON; send base64 or float in a batch")
    model = body.get("model")
    model = model[:MAX_ID_CHARS] if isinstance(model, str) else ""
    return sys.intern(url), model


def _fields(text: bytes) -> tuple[dict[str, Any], int, int]:
    """Fields, offset and size of the body.  Raises ValueError and TypeError."""
    chars = text.decode("utf-8", "surrogatepass")
    try:
        line, start, end = _object(chars)
    except ValueError:
        line, start, end = json.loads(text), 0, 0
    if not isinstance(line, dict):
        raise TypeError
    size, before = (len(part.encode("utf-8", "surrogatepass")) for part in (chars[start:end], chars[:start]))
    return line, before, size


def _object(chars: str) -> tuple[dict[str, Any], int, int]:
    """Fields, start and end of the body.  Raises ValueError."""
    fields, start, end, mark = dict[str, Any](), 0, 0, _end_of(_OPENED, chars, 0)
    while True:
        key, place = _JSON.raw_decode(chars, mark)
        if not isinstance(key, str):
            raise ValueError
        value = _end_of(_COLON, chars, place)
        fields[key], place = _JSON.raw_decode(chars, value)
        if key == "body":
            start, end = value, place
        mark = _end_of(_NEXT, chars, place)
        if mark == len(chars) and not chars[place:].lstrip().startswith(","):
            return fields, start, end


def _end_of(pattern: re.Pattern[str], chars: str, place: int) -> int:
    found = pattern.match(chars, place)
    if found is None:
        raise ValueError
    return found.end()


def body_at(file: BinaryIO, line: BatchLine) -> bytes:
    """The request's body as JSON."""
    file.seek(line.offset)
    return file.read(line.size)


def result_line(custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    """A result in OpenAI's form."""
    return _line(custom_id, {"status_code": status, "request_id": request_id, "body": body}, None)


def was_aborted(body: Any) -> bool:
    """True for an answer cut by an abort."""
    if not isinstance(body, dict):
        return False
    choices = body.get("choices") or ()
    return body.get("status") == "cancelled" or any(one.get("finish_reason") == "abort" for one in choices)


def problem_line(custom_id: str | None, code: str, message: str) -> bytes:
    """The result of a request without an answer."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str | None, response: Any, error: Any) -> bytes:
    fields = {"id": f"{_ID}{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(fields).encode() + b"\n"


class Results:
    """The file of results, for one process at a time.  finished: custom_id -> True for status 200.

    Drops a torn last line.  Raises ValueError for a file in use or with other content, and for a pipe.
    """

    def __init__(self, path: str) -> None:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"{path}: no regular file, and a later run reads the results again; choose one")
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (until `close`)
        self._path, self.num_bytes = path, 0
        self.finished: dict[str, bool] = {}
        self._rows = bytearray()
        try:
            self._lock(path)
            self._read(path)
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another process writes results here; wait for its end") from None

    def _read(self, path: str) -> None:
        with open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    if text[: len(_START)] != _START[: len(text)]:
                        raise ValueError(_foreign(path, number))
                    break
                try:
                    line = json.loads(text)
                    response = line["response"] or {}
                    self._keep(str(line["custom_id"]), len(text), is_whole=response.get("status_code") == 200)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise ValueError(_foreign(path, number)) from None
        self._file.truncate(self.num_bytes)

    def _keep(self, custom_id: str, num_bytes: int, *, is_whole: bool) -> None:
        self.finished[custom_id] = is_whole
        self._rows.append(is_whole)
        self.num_bytes += num_bytes

    def add(self, text: bytes, custom_id: str, *, is_whole: bool) -> None:
        """Write a result line, or nothing.  Raises OSError."""
        view = memoryview(text)
        try:
            self._file.truncate(self.num_bytes)  # an earlier cut may have failed
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self.num_bytes)
            raise
        self._keep(custom_id, len(text), is_whole=is_whole)

    def split(self, whole: Path, others: Path, further: Iterable[bytes]) -> None:
        """Write results with status 200 to `whole`, the rest to `others`."""
        with open(self._path, "rb") as rows, whole.open("wb") as good, others.open("wb") as bad:
            for text, is_whole in zip(rows, self._rows, strict=False):
                (good if is_whole else bad).write(text)
            bad.writelines(further)

    def close(self) -> None:
        with self._file:
            os.fsync(self._file.fileno())


def _foreign(path: str, number: int) -> str:
    return f"{path}: line {number} is no result of a batch; choose another file for results"


async def run_lines(
    lines: Iterable[BatchLine], num_at_once: int, work: Callable[[BatchLine], Awaitable[None]]
) -> None:
    """Work on the lines in order, some at once.  The first error ends all and is raised."""
    todo = iter(lines)

    async def run() -> None:
        for line in todo:
            await work(line)

    workers = [asyncio.create_task(run()) for _ in range(num_at_once)]
    try:
        done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        for one in done:
            one.result()
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
