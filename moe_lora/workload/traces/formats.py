# SPDX-License-Identifier: Apache-2.0
"""Readers of trace formats, as CSV and as JSON.

Source: Microsoft's AzurePublicDataset, AzureFunctionsDataset2019.md, AzureFunctionsInvocationTrace2021.md.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from .records import HASH_BLOCK_TOKENS, Requests, RowReader, open_text

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")

_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d):([0-5]\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_TIMESTAMP_ALLOWED = "YYYY-MM-DD HH:MM:SS[.fraction][+HH:MM]"


def normalise(column: str) -> str:
    """A column name in lower case, without outer blanks and byte order mark."""
    return column.strip().lstrip("\ufeff").strip('"').lower()


def table(lines: TextIO, reader: RowReader) -> tuple[list[str], Iterator[list[str]]]:
    """The normalised header, and non-blank rows; sets `reader.line`."""
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
    """The named columns of each row."""
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
    """Timestamp (seconds), Request tokens, Response tokens; further columns vary."""
    for timestamp, prompt, response in csv_rows(lines, reader, BURSTGPT_COLUMNS):
        yield reader.request(
            reader.time("Timestamp", timestamp, "seconds"),
            reader.count("Request tokens", prompt),
            reader.count("Response tokens", response),
        )


COLUMNS_2019 = ("HashApp", "HashFunction")  # minutes are columns 1 … 1440
COLUMNS_2021 = ("app", "func", "end_timestamp", "duration")
_NEEDED = f"{','.join(COLUMNS_2019)},1,2,… (2019) or {','.join(COLUMNS_2021)} (2021)"


def is_2019(path: str | Path) -> bool:
    """True for counts by minute (2019), False for invocations (2021); else ValueError."""
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
    """Invocations by function ("app/function"), most first.

    Raises ValueError for a bad value, and without invocations.
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


CHARS_PER_TOKEN = 4
VLLM_OUTPUT_TOKENS = 256  # vLLM's default (--custom-output-len)
_OWN_KEYS = ("arrival_s", "prompt_tokens", "output_tokens", "adapter", "prompt", "hash_ids")


def estimate_tokens(text: str) -> int:
    """max(words, characters / 4)."""
    return max(len(text.split()), math.ceil(len(text) / CHARS_PER_TOKEN))


def json_lines(lines: Iterable[str], reader: RowReader) -> Iterator[dict[str, Any]]:
    """The objects of the lines; sets `reader.line`."""
    for reader.line, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise reader.error("-", f"not JSON ({error})", "one JSON object a line") from None
        if not isinstance(row, dict):
            raise reader.error("-", f"a JSON {type(row).__name__}", "one JSON object a line")
        yield row


def _need(row: dict[str, Any], key: str, reader: RowReader) -> Any:
    if key not in row:
        raise reader.error(key, "missing", f"present in every row; the row has {', '.join(map(str, row))}")
    return row[key]


def _hash_ids(
    row: dict[str, Any], num_tokens: int, reader: RowReader, block_tokens: int = HASH_BLOCK_TOKENS
) -> tuple[int, ...]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(item) is int and item >= 0 for item in ids):
        raise reader.error("hash_ids", f"{ids!r:.60}", "a list of whole numbers >= 0")
    most = -(-num_tokens // block_tokens)
    if len(ids) > most:
        allowed = f"{most} at most, one a block of {block_tokens} tokens"
        raise reader.error("hash_ids", f"{len(ids)} blocks of {num_tokens} tokens", allowed)
    return tuple(ids)


def iter_mooncake(lines: TextIO, reader: RowReader) -> Requests:
    """{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} a line.

    Refuses Qwen-Bailian traces, with equal keys in other units.
    """
    for row in json_lines(lines, reader):
        if "chat_id" in row:
            other = "a Qwen-Bailian trace, with seconds and blocks of 16 tokens"
            way_out = 'milliseconds and blocks of 512 tokens, without "chat_id"; or give --format bailian'
            raise reader.error("chat_id", other, way_out)
        tokens = reader.count("input_length", _need(row, "input_length", reader))
        yield reader.request(
            reader.time("timestamp", _need(row, "timestamp", reader), "milliseconds") / 1e3,
            tokens,
            reader.count("output_length", _need(row, "output_length", reader)),
            hash_ids=_hash_ids(row, tokens, reader),
        )


_BAILIAN_BLOCK_TOKENS = 16


def iter_bailian(lines: TextIO, reader: RowReader) -> Requests:
    """{"chat_id", "timestamp": s, "input_length": n, "output_length": n, "hash_ids": [...]} a line.

    16-token blocks are joined to 512: equal ids mean equal prompts up to the block's end.
    Source: alibaba-edu/qwen-bailian-usagetraces-anon, README.md.
    """
    joined: dict[tuple[int, ...], int] = {}
    size = HASH_BLOCK_TOKENS // _BAILIAN_BLOCK_TOKENS
    for row in json_lines(lines, reader):
        _need(row, "chat_id", reader)
        tokens = reader.count("input_length", _need(row, "input_length", reader))
        ids = _hash_ids(row, tokens, reader, _BAILIAN_BLOCK_TOKENS)
        blocks: list[int] = []
        for start in range(0, len(ids), size):
            prefix = (*blocks[-1:], -1, *ids[start : start + size])
            blocks.append(joined.setdefault(prefix, len(joined)))
        yield reader.request(
            reader.time("timestamp", _need(row, "timestamp", reader), "seconds"),
            tokens,
            reader.count("output_length", _need(row, "output_length", reader)),
            hash_ids=tuple(blocks),
        )


def _text(row: dict[str, Any], key: str, reader: RowReader) -> str | None:
    value = row.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise reader.error(key, f"{value!r:.60}", "non-empty text, or left out")
    return value


def iter_own(lines: TextIO, reader: RowReader) -> Requests:
    """{"arrival_s", "prompt_tokens", "output_tokens"[, "adapter", "prompt", "hash_ids"]} a line.

    With "prompt", a missing "prompt_tokens" is estimated.  Unknown keys are errors.
    """
    for row in json_lines(lines, reader):
        unknown = [key for key in row if key not in _OWN_KEYS]
        if unknown:
            raise reader.error(unknown[0], "unknown key", ", ".join(_OWN_KEYS))
        prompt = _text(row, "prompt", reader)
        length = row.get("prompt_tokens")
        if length is None and prompt is not None:
            length = estimate_tokens(prompt)
        tokens = reader.count(
            "prompt_tokens", _need(row, "prompt_tokens", reader) if length is None else length
        )
        yield reader.request(
            reader.time("arrival_s", _need(row, "arrival_s", reader), "seconds"),
            tokens,
            reader.count("output_tokens", _need(row, "output_tokens", reader)),
            adapter=_text(row, "adapter", reader),
            prompt=prompt,
            hash_ids=_hash_ids(row, tokens, reader),
        )


def iter_vllm(lines: TextIO, reader: RowReader) -> Requests:
    """{"prompt": text[, "output_tokens": n]} a line, as in `vllm bench serve --dataset-name custom`.

    Estimates prompt lengths; no arrival times; ignores other keys.
    """
    reader.has_arrival_times = False
    for row in json_lines(lines, reader):
        _need(row, "prompt", reader)
        prompt = _text(row, "prompt", reader)
        if prompt is None:
            raise reader.error("prompt", "null", "non-empty text")
        output_tokens = row.get("output_tokens")
        yield reader.request(
            0.0,
            estimate_tokens(prompt),
            VLLM_OUTPUT_TOKENS if output_tokens is None else reader.count("output_tokens", output_tokens),
            prompt=prompt,
        )


_CHUNK_CHARS = 1 << 20
_MAX_OBJECT_CHARS = 1 << 26
_BETWEEN_OBJECTS = re.compile(r"[\s,\[\]\ufeff]*")


def _objects(lines: TextIO, reader: RowReader) -> Iterator[Any]:
    decoder, buffer, position = json.JSONDecoder(), "", 0
    while True:
        start = _BETWEEN_OBJECTS.match(buffer, position).end()  # type: ignore[union-attr]
        reader.line += buffer.count("\n", position, start)
        position = start
        try:
            item, end = decoder.raw_decode(buffer, position)
        except json.JSONDecodeError as error:
            more = lines.read(_CHUNK_CHARS) if len(buffer) - position < _MAX_OBJECT_CHARS else ""
            if not more and position == len(buffer):
                return
            if not more:
                raise reader.error("-", f"not JSON ({error.msg})", "a JSON array of conversations") from None
            buffer, position = buffer[position:] + more, 0
            continue
        except (ValueError, RecursionError) as error:
            raise reader.error("-", f"not JSON ({error})", "a JSON array of conversations") from None
        yield item
        reader.line += buffer.count("\n", position, end)
        position = end


def _first_turns(item: Any, reader: RowReader, text_key: str, example: str) -> tuple[str, str] | None:
    turns = item.get("conversations", item.get("conversation")) if isinstance(item, dict) else None
    if not isinstance(turns, list):
        raise reader.error("conversations", "missing", "a list of turns in every conversation")
    if len(turns) < 2:
        reader.dropped["fewer than two turns"] += 1
        return None
    prompt, answer = (turn.get(text_key) if isinstance(turn, dict) else None for turn in turns[:2])
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise reader.error(text_key, "missing", f"turns of the form {example}")
    return prompt, answer


def iter_sharegpt(lines: TextIO, reader: RowReader) -> Requests:
    """[{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, ...]}, ...].

    The first two turns are prompt and answer; estimated lengths; no arrival times.
    """
    reader.has_arrival_times = False
    for item in _objects(lines, reader):
        texts = _first_turns(item, reader, "value", '{"from": "human", "value": "text"}')
        if texts is None:
            continue
        prompt, answer = texts
        yield reader.request(0.0, estimate_tokens(prompt), estimate_tokens(answer), prompt=prompt)


def iter_lmsys(lines: TextIO, reader: RowReader) -> Requests:
    """{"model": name, "conversation": [{"role", "content"}, ...][, "tstamp": s]}: the model is the adapter.

    As `iter_sharegpt`, but "tstamp" may be in all conversations (LMSYS-Chat-1M).
    """
    timed: bool | None = None
    for item in _objects(lines, reader):
        texts = _first_turns(item, reader, "content", '{"role": "user", "content": "text"}')
        if timed is None:
            timed = reader.has_arrival_times = item.get("tstamp") is not None
        model = item.get("model")
        if not isinstance(model, str) or not model:
            raise reader.error("model", f"{model!r:.60}", "the name of a model, non-empty text")
        arrival_s = reader.time("tstamp", item.get("tstamp"), "seconds") if timed else 0.0
        if texts is None:
            continue
        prompt, answer = texts
        yield reader.request(
            arrival_s, estimate_tokens(prompt), estimate_tokens(answer), adapter=model, prompt=prompt
        )
