"""Readers of conversations: ShareGPT and LMSYS-Chat, as a JSON array or as JSON lines, read as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from .records import RowReader, TraceRequest
from .json_formats import estimate_tokens

_CHUNK_CHARS = 1 << 20
_MAX_OBJECT_CHARS = 1 << 26  # a conversation longer than this is a broken file
_BETWEEN_OBJECTS = re.compile(r"[\s,\[\]\ufeff]*")


def _objects(lines: TextIO, reader: RowReader) -> Iterator[Any]:
    """The objects of a JSON array (or of JSON lines), one by one, without loading the file whole."""
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
    """Prompt and answer; None, with a count in `dropped`, for a conversation without an answer."""
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


def iter_sharegpt(lines: TextIO, reader: RowReader) -> Iterator[TraceRequest]:
    """[{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, ...]}, ...].

    The first two turns are prompt and answer; lengths are estimates (`estimate_tokens`); no arrival times.
    """
    reader.has_arrival_times = False
    for item in _objects(lines, reader):
        texts = _first_turns(item, reader, "value", '{"from": "human", "value": "text"}')
        if texts is None:
            continue
        prompt, answer = texts
        request = reader.request(0.0, estimate_tokens(prompt), estimate_tokens(answer), prompt=prompt)
        if request is not None:
            yield request


def iter_lmsys(lines: TextIO, reader: RowReader) -> Iterator[TraceRequest]:
    """{"model": name, "conversation": [{"role", "content"}, ...][, "tstamp": s]}: the model is the adapter.

    The first two turns are prompt and answer; lengths are estimates. LMSYS-Chat-1M has no times; the "tstamp"
    of other exports is used where the first conversation has it, and must then be in all.
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
        request = reader.request(
            arrival_s, estimate_tokens(prompt), estimate_tokens(answer), adapter=model, prompt=prompt
        )
        if request is not None:
            yield request
