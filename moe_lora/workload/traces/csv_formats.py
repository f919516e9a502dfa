# SPDX-License-Identifier: Apache-2.0
"""Readers of CSV formats: Azure LLM inference traces, BurstGPT, and Azure Functions traces (no lengths).

Source: Microsoft's AzurePublicDataset, AzureFunctionsDataset2019.md,
AzureFunctionsInvocationTrace2021.md.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from .records import Requests, RowReader, open_text

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")

_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d):([0-5]\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_TIMESTAMP_ALLOWED = "YYYY-MM-DD HH:MM:SS[.fraction][+HH:MM]"


def normalise(column: str) -> str:
    """A column name without case, surrounding blanks and byte order mark."""
    return column.strip().lstrip("\ufeff").strip('"').lower()


def table(lines: TextIO, reader: RowReader) -> tuple[list[str], Iterator[list[str]]]:
    """The normalised header, and the non-blank rows; `reader` follows their lines."""
    rows = csv.reader(lines)

    def checked() -> Iterator[list[str]]:
        try:
            for row in rows:
                reader.line = rows.line_num
                if "".join(row).strip():
                    yield row
        except csv.Error as error:
            reader.line = rows.line_num
            raise reader.error("-", f"not CSV ({error})", "comma-separated values") from None

    rest = checked()
    return [normalise(column) for column in next(rest, [])], rest


def csv_rows(lines: TextIO, reader: RowReader, columns: tuple[str, ...]) -> Iterator[list[str]]:
    """The named columns of each row, in that order."""
    header, rows = table(lines, reader)
    missing = [column for column in columns if normalise(column) not in header]
    if missing:
        raise ValueError(f"{reader.path}, line 1: no column {missing[0]!r}; needed: {', '.join(columns)}")
    positions = [header.index(normalise(column)) for column in columns]
    for row in rows:
        if len(row) <= max(positions):
            column = next(columns[i] for i, position in enumerate(positions) if position >= len(row))
            raise reader.error(column, f"the row has only {len(row)} columns", f"{len(header)} columns")
        yield [row[position].strip() for position in positions]


def parse_timestamp(text: str, reader: RowReader) -> tuple[int, int]:
    """(whole seconds since 1970, nanoseconds): a float would lose the 7th fractional digit."""
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise reader.error("TIMESTAMP", f"{text!r:.60} is no time", _TIMESTAMP_ALLOWED)
    minute, seconds, fraction, zone = match.groups()
    try:
        start = _minute_start(minute, zone)
    except (ValueError, OverflowError) as error:
        raise reader.error("TIMESTAMP", f"{text!r}: {error}", _TIMESTAMP_ALLOWED) from None
    return start + int(seconds), int((fraction or "0").ljust(9, "0"))


@lru_cache(maxsize=1024)
def _minute_start(minute: str, zone: str | None) -> int:
    moment = datetime.fromisoformat(
        minute.replace("T", " ") + ":00" + (zone or "+00:00").replace("Z", "+00:00")
    )
    return int((moment - datetime(1970, 1, 1, tzinfo=timezone.utc)).total_seconds())


def iter_azure(lines: TextIO, reader: RowReader) -> Requests:
    """TIMESTAMP,ContextTokens,GeneratedTokens (Azure LLM inference traces, 2023 and 2024)."""
    start: tuple[int, int] | None = None
    for timestamp, context, generated in csv_rows(lines, reader, AZURE_COLUMNS):
        moment = parse_timestamp(timestamp, reader)
        start = start or moment
        yield reader.request(
            (moment[0] - start[0]) + (moment[1] - start[1]) / 1e9,
            reader.count("ContextTokens", context),
            reader.count("GeneratedTokens", generated),
        )


def iter_burstgpt(lines: TextIO, reader: RowReader) -> Requests:
    """Timestamp (seconds), Request tokens, Response tokens; other columns vary between releases."""
    for timestamp, prompt, response in csv_rows(lines, reader, BURSTGPT_COLUMNS):
        yield reader.request(
            reader.time("Timestamp", timestamp, "seconds"),
            reader.count("Request tokens", prompt),
            reader.count("Response tokens", response),
        )


COLUMNS_2019 = ("HashApp", "HashFunction")  # HashOwner and Trigger add nothing; minutes are columns 1 … 1440
COLUMNS_2021 = ("app", "func", "end_timestamp", "duration")
_NEEDED = f"{','.join(COLUMNS_2019)},1,2,… (2019) or {','.join(COLUMNS_2021)} (2021)"


def is_2019(path: str | Path) -> bool:
    """True for counts by minute (2019), False for a list of invocations (2021); ValueError otherwise."""
    with open_text(path, "functions trace") as lines:
        header, _ = table(lines, RowReader(str(path)))
    if {column.lower() for column in COLUMNS_2019} <= set(header):
        return True
    if set(COLUMNS_2021) <= set(header):
        return False
    raise ValueError(f"{path}, line 1: no Azure Functions trace; needed: {_NEEDED}")


def rows_2019(path: str | Path) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Each row's function and its invocations by minute."""
    reader = RowReader(str(path))
    with open_text(path, "functions trace") as lines:
        header, rows = table(lines, reader)
        names = [header.index(column.lower()) for column in COLUMNS_2019]
        columns = {int(name): i for i, name in enumerate(header) if name.isdecimal() and len(name) < 6}
        if not columns or min(columns) < 1:
            raise ValueError(f"{path}, line 1: no minute columns; needed: {_NEEDED}")
        for row in rows:
            if len(row) < len(header):
                raise reader.error(header[len(row)], f"only {len(row)} columns", f"{len(header)} columns")
            minutes = np.zeros(max(columns), dtype=np.int64)
            for minute, i in columns.items():
                if row[i] != "0":
                    minutes[minute - 1] = reader.count(header[i], row[i])
            yield "/".join(row[i].strip() for i in names), minutes


def rows_2021(path: str | Path) -> Iterator[tuple[str, float]]:
    """Each invocation's function and start."""
    reader = RowReader(str(path))
    with open_text(path, "functions trace") as lines:
        for app, func, end, duration in csv_rows(lines, reader, COLUMNS_2021):
            duration_s = reader.time("duration", duration, "seconds")
            yield f"{app}/{func}", reader.number("end_timestamp", end, "seconds") - duration_s


def function_counts(path: str | Path) -> dict[str, int]:
    """Invocations by function ("app/function"), most invoked first.

    Raises ValueError with file, line and column for a bad value, and without invocations.
    """
    counts: Counter[str] = Counter()
    if is_2019(path):
        for function, minutes in rows_2019(path):
            counts[function] += int(minutes.sum())
    else:
        counts.update(function for function, _ in rows_2021(path))
    found = {name: count for name, count in counts.items() if count}
    if not found:
        raise ValueError(f"{path}: no invocation in the trace")
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
