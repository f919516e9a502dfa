"""Readers of the CSV formats: Azure LLM inference traces and BurstGPT."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TextIO

from .records import RowReader, TraceRequest

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_TIMESTAMP_ALLOWED = "YYYY-MM-DD HH:MM:SS[.fraction][+HH:MM]"


def normalise(column: str) -> str:
    """Column names are compared without case, surrounding blanks and byte order mark."""
    return column.strip().lstrip("\ufeff").strip('"').lower()


def _rows(lines: TextIO, reader: RowReader, columns: tuple[str, ...]) -> Iterator[list[str]]:
    """The named columns of each row, in that order, whatever the file's order and extra columns."""
    rows = csv.reader(lines)
    header = [normalise(column) for column in next(rows, [])]
    missing = [column for column in columns if normalise(column) not in header]
    if missing:
        raise ValueError(f"{reader.path}, line 1: no column {missing[0]!r}; needed: {', '.join(columns)}")
    positions = [header.index(normalise(column)) for column in columns]
    for row in rows:
        reader.line = rows.line_num
        if not any(cell.strip() for cell in row):
            continue
        for column, position in zip(columns, positions, strict=True):
            if position >= len(row):
                raise reader.error(column, f"the row has only {len(row)} columns", f"{len(header)} columns")
        yield [row[position].strip() for position in positions]


def parse_timestamp(text: str, reader: RowReader) -> tuple[int, int]:
    """(whole seconds since 1970, nanoseconds): split, as a float would lose the 7th fractional digit."""
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise reader.error("TIMESTAMP", f"{text!r} is no time", _TIMESTAMP_ALLOWED)
    day, time, fraction, zone = match.groups()
    zone = "+0000" if zone in (None, "Z") else zone.replace(":", "")
    try:
        moment = datetime.strptime(f"{day} {time} {zone}", "%Y-%m-%d %H:%M:%S %z")
    except ValueError as error:
        raise reader.error("TIMESTAMP", f"{text!r}: {error}", _TIMESTAMP_ALLOWED) from None
    seconds = (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)).total_seconds()
    return int(seconds), int((fraction or "0").ljust(9, "0"))


def iter_azure(lines: TextIO, reader: RowReader) -> Iterator[TraceRequest]:
    """TIMESTAMP,ContextTokens,GeneratedTokens (Azure LLM inference traces, 2023 and 2024)."""
    start: tuple[int, int] | None = None
    for timestamp, context, generated in _rows(lines, reader, AZURE_COLUMNS):
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
    for timestamp, prompt, response in _rows(lines, reader, BURSTGPT_COLUMNS):
        request = reader.request(
            reader.number("Timestamp", timestamp, "seconds, a finite number"),
            reader.count("Request tokens", prompt),
            reader.count("Response tokens", response),
        )
        if request is not None:
            yield request
