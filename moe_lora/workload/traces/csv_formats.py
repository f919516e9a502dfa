"""Readers of the CSV formats: Azure LLM inference traces and BurstGPT."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import lru_cache
from typing import TextIO

from .records import RowReader, TraceRequest

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")

_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d):([0-5]\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_TIMESTAMP_ALLOWED = "YYYY-MM-DD HH:MM:SS[.fraction][+HH:MM]"


def normalise(column: str) -> str:
    """Column names are compared without case, surrounding blanks and byte order mark."""
    return column.strip().lstrip("\ufeff").strip('"').lower()


def table(lines: TextIO, reader: RowReader) -> tuple[list[str], Iterator[list[str]]]:
    """The normalised header, and the rows that are not blank; `reader` stands at the line of each."""
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
    """The named columns of each row, in that order, whatever the file's order and extra columns."""
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
    """(whole seconds since 1970, nanoseconds): split, as a float would lose the 7th fractional digit."""
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
    """Seconds since 1970, cached: a busy trace has thousands of rows a minute."""
    moment = datetime.fromisoformat(
        minute.replace("T", " ") + ":00" + (zone or "+00:00").replace("Z", "+00:00")
    )
    return int((moment - datetime(1970, 1, 1, tzinfo=timezone.utc)).total_seconds())


def iter_azure(lines: TextIO, reader: RowReader) -> Iterator[TraceRequest]:
    """TIMESTAMP,ContextTokens,GeneratedTokens (Azure LLM inference traces, 2023 and 2024)."""
    start: tuple[int, int] | None = None
    for timestamp, context, generated in csv_rows(lines, reader, AZURE_COLUMNS):
        moment = parse_timestamp(timestamp, reader)
        start = start or moment
        request = reader.request(
            (moment[0] - start[0]) + (moment[1] - start[1]) / 1e9,
            reader.count("ContextTokens", context),
            reader.count("GeneratedTokens", generated),
        )
        if request is not None:
            yield request


def iter_burstgpt(lines: TextIO, reader: RowReader) -> Iterator[TraceRequest]:
    """Timestamp (seconds), Request tokens, Response tokens; other columns vary between releases."""
    for timestamp, prompt, response in csv_rows(lines, reader, BURSTGPT_COLUMNS):
        request = reader.request(
            reader.time("Timestamp", timestamp, "seconds"),
            reader.count("Request tokens", prompt),
            reader.count("Response tokens", response),
        )
        if request is not None:
            yield request
