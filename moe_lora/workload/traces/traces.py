# SPDX-License-Identifier: Apache-2.0
"""Reads traces of any known format."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from .formats import (
    AZURE_COLUMNS,
    BURSTGPT_COLUMNS,
    COLUMNS_2019,
    COLUMNS_2021,
    iter_azure,
    iter_bailian,
    iter_burstgpt,
    iter_lmsys,
    iter_mooncake,
    iter_own,
    iter_sharegpt,
    iter_vllm,
    normalise,
)
from .records import Requests, RowReader, Trace, TraceRequest, open_text

FORMATS: dict[str, Callable[[TextIO, RowReader], Requests]] = {
    "azure": iter_azure,
    "burstgpt": iter_burstgpt,
    "mooncake": iter_mooncake,
    "sharegpt": iter_sharegpt,
    "lmsys": iter_lmsys,
    "vllm": iter_vllm,
    "own": iter_own,
    "bailian": iter_bailian,
}
_HEAD_CHARS = 1 << 16


def _json_format(line: str, head: str) -> str | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    keys = set(row) if isinstance(row, dict) else set()
    if {"timestamp", "input_length"} <= keys:
        return "bailian" if "chat_id" in keys else "mooncake"
    if "arrival_s" in keys:
        return "own"
    if "prompt" in keys:
        return "vllm"
    if '"conversation"' in head and '"model"' in head and '"role"' in head:
        return "lmsys"
    return "sharegpt" if '"conversation' in head else None


def detect_format(path: str | Path) -> str:
    """The format's name, from the file's head.  Raises ValueError."""
    with open_text(path, "trace") as lines:
        head = lines.read(_HEAD_CHARS)
    text = head.lstrip()
    if not text:
        raise ValueError(f"{path}: the trace is empty")
    line = re.split(r"[\r\n]", text, maxsplit=1)[0]
    found, columns = None, set[str]()
    if text[0] in "[{":
        found = _json_format(line, head)
    else:
        columns = {normalise(column) for column in line.split(",")}
        for name, needed in (("azure", AZURE_COLUMNS), ("burstgpt", BURSTGPT_COLUMNS)):
            if {normalise(column) for column in needed} <= columns:
                found = name
    if any({column.lower() for column in needed} <= columns for needed in (COLUMNS_2019, COLUMNS_2021)):
        raise ValueError(
            f"{path}: an Azure Functions trace has arrivals and adapters but no lengths; give it with "
            "--functions or as --popularity functions:FILE, and a trace that has lengths with --trace"
        )
    if found is None:
        names = ", ".join(FORMATS)
        raise ValueError(
            f"{path}, line 1: unknown trace format ({line[:80]!r}); give --format, one of {names}"
        )
    return found


def iter_requests(reader: RowReader, format: str | None = None) -> Iterator[TraceRequest]:
    """As `iter_trace`, on the caller's reader."""
    path, name = reader.path, format or detect_format(reader.path)
    if name not in FORMATS:
        raise ValueError(f"--format {name} is unknown; choose one of {', '.join(FORMATS)}")
    with open_text(path, "trace") as lines:
        first_s = last_s = None
        for request in filter(None, FORMATS[name](lines, reader)):
            first_s = request.arrival_s if first_s is None else first_s
            if last_s is not None and request.arrival_s < last_s:
                raise ValueError(
                    f"{path}, line {reader.line}: goes back in time by {last_s - request.arrival_s:.6g} s; "
                    "sort the file by time"
                )
            last_s = request.arrival_s
            yield request if first_s == 0.0 else replace(request, arrival_s=request.arrival_s - first_s)
    if last_s is None:
        left_out = ", ".join(f"{count} rows: {reason}" for reason, count in reader.dropped.items())
        raise ValueError(f"{path}: no request in the trace ({left_out or 'no rows after the header'})")


def iter_trace(
    path: str | Path, format: str | None = None, dropped: Counter[str] | None = None
) -> Iterator[TraceRequest]:
    """The trace's requests in file order; arrival_s counts from the first.

    format: None detects it.  Raises ValueError for a bad value, with its place, for decreasing times, and for
    no request.
    """
    return iter_requests(RowReader(str(path), dropped=Counter() if dropped is None else dropped), format)


PARTS = 12


def spread(requests: Iterable[TraceRequest], total: int, most: int) -> Iterator[TraceRequest]:
    """About `most` of `total` requests, in PARTS runs over the trace, without the time between runs."""
    before_s = clock_s = 0.0
    for index, one in enumerate(requests):
        if index * PARTS % total < most:
            clock_s += one.arrival_s - before_s
            yield one if total <= most else replace(one, arrival_s=clock_s)
        before_s = one.arrival_s


def runs_of(total: int, most: int) -> list[int]:
    """The run of each request of `spread`."""
    return [index * PARTS // total for index in range(total) if index * PARTS % total < most]


def read_trace(path: str | Path, format: str | None = None) -> Trace:
    """The whole trace in memory.  Raises ValueError as `iter_trace`."""
    name = format or detect_format(path)
    reader = RowReader(str(path))
    requests = tuple(iter_requests(reader, name))
    return Trace(str(path), name, requests, dict(reader.dropped), reader.has_arrival_times)
