"""Readers of the JSON-lines formats: Mooncake, vLLM's custom data set, and this project's own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from .records import RowReader, TraceRequest

CHARS_PER_TOKEN = 4  # what English text takes with the vocabularies in use
VLLM_OUTPUT_TOKENS = 256  # vLLM's default where a row does not say (--custom-output-len)
_OWN_KEYS = ("arrival_s", "prompt_tokens", "output_tokens", "adapter", "prompt", "hash_ids")


def estimate_tokens(text: str) -> int:
    """max(words, characters / 4): a length estimate that needs no tokenizer."""
    return max(len(text.split()), math.ceil(len(text) / CHARS_PER_TOKEN))


def json_lines(lines: Iterable[str], reader: RowReader) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, blank lines left out; `reader` stands at the line of each."""
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


def _hash_ids(row: dict[str, Any], reader: RowReader) -> tuple[int, ...]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(item) is int and item >= 0 for item in ids):
        raise reader.error("hash_ids", f"{ids!r:.60}", "a list of whole numbers >= 0")
    return tuple(ids)


def iter_mooncake(lines: TextIO, reader: RowReader) -> Iterator[TraceRequest]:
    """{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} a line."""
    for row in json_lines(lines, reader):
        request = reader.request(
            reader.time("timestamp", _need(row, "timestamp", reader), "milliseconds") / 1e3,
            reader.count("input_length", _need(row, "input_length", reader)),
            reader.count("output_length", _need(row, "output_length", reader)),
            hash_ids=_hash_ids(row, reader),
        )
        if request is not None:
            yield request


def _text(row: dict[str, Any], key: str, reader: RowReader) -> str | None:
    value = row.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise reader.error(key, f"{value!r:.60}", "non-empty text, or left out")
    return value


def iter_own(lines: TextIO, reader: RowReader) -> Iterator[TraceRequest]:
    """{"arrival_s", "prompt_tokens", "output_tokens"[, "adapter", "prompt", "hash_ids"]} a line.

    With "prompt" given, "prompt_tokens" may be left out and is then estimated. Unknown keys are errors.
    """
    for row in json_lines(lines, reader):
        unknown = [key for key in row if key not in _OWN_KEYS]
        if unknown:
            raise reader.error(unknown[0], "unknown key", ", ".join(_OWN_KEYS))
        prompt = _text(row, "prompt", reader)
        length = row.get("prompt_tokens")
        if length is None and prompt is not None:
            length = estimate_tokens(prompt)
        request = reader.request(
            reader.time("arrival_s", _need(row, "arrival_s", reader), "seconds"),
            reader.count("prompt_tokens", _need(row, "prompt_tokens", reader) if length is None else length),
            reader.count("output_tokens", _need(row, "output_tokens", reader)),
            adapter=_text(row, "adapter", reader),
            prompt=prompt,
            hash_ids=_hash_ids(row, reader),
        )
        if request is not None:
            yield request


def iter_vllm(lines: TextIO, reader: RowReader) -> Iterator[TraceRequest]:
    """{"prompt": text[, "output_tokens": n]} a line, what `vllm bench serve --dataset-name custom` reads.

    Prompt lengths are estimates (`estimate_tokens`); no arrival times; other keys are passed over.
    """
    reader.has_arrival_times = False
    for row in json_lines(lines, reader):
        _need(row, "prompt", reader)
        prompt = _text(row, "prompt", reader)
        if prompt is None:
            raise reader.error("prompt", "null", "non-empty text")
        output_tokens = row.get("output_tokens")
        request = reader.request(
            0.0,
            estimate_tokens(prompt),
            VLLM_OUTPUT_TOKENS if output_tokens is None else reader.count("output_tokens", output_tokens),
            prompt=prompt,
        )
        if request is not None:
            yield request
