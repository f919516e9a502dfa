# SPDX-License-Identifier: Apache-2.0
"""Readers of JSON formats: Mooncake, vLLM's custom data set, this project's own, ShareGPT and LMSYS-Chat."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from .records import Requests, RowReader

CHARS_PER_TOKEN = 4
VLLM_OUTPUT_TOKENS = 256  # vLLM's default (--custom-output-len)
_OWN_KEYS = ("arrival_s", "prompt_tokens", "output_tokens", "adapter", "prompt", "hash_ids")


def estimate_tokens(text: str) -> int:
    """max(words, characters / 4): a length estimate without a tokenizer."""
    return max(len(text.split()), math.ceil(len(text) / CHARS_PER_TOKEN))


def json_lines(lines: Iterable[str], reader: RowReader) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; `reader` follows their lines."""
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


def iter_mooncake(lines: TextIO, reader: RowReader) -> Requests:
    """{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} a line."""
    for row in json_lines(lines, reader):
        yield reader.request(
            reader.time("timestamp", _need(row, "timestamp", reader), "milliseconds") / 1e3,
            reader.count("input_length", _need(row, "input_length", reader)),
            reader.count("output_length", _need(row, "output_length", reader)),
            hash_ids=_hash_ids(row, reader),
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
        yield reader.request(
            reader.time("arrival_s", _need(row, "arrival_s", reader), "seconds"),
            reader.count("prompt_tokens", _need(row, "prompt_tokens", reader) if length is None else length),
            reader.count("output_tokens", _need(row, "output_tokens", reader)),
            adapter=_text(row, "adapter", reader),
            prompt=prompt,
            hash_ids=_hash_ids(row, reader),
        )


def iter_vllm(lines: TextIO, reader: RowReader) -> Requests:
    """{"prompt": text[, "output_tokens": n]} a line, as in `vllm bench serve --dataset-name custom`.

    Prompt lengths are estimates (`estimate_tokens`); no arrival times; ignores other keys.
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

    The first two turns are prompt and answer; lengths are estimates (`estimate_tokens`); no arrival times.
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

    The first two turns are prompt and answer; lengths are estimates.  "tstamp" is optional: in all
    conversations, or in none (LMSYS-Chat-1M).
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
