# SPDX-License-Identifier: Apache-2.0
"""The record of every trace format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from moe_lora.config.settings import MAX_COUNT

HASH_BLOCK_TOKENS = 512
"""Mooncake: one hash id per 512-token block."""
_COUNT_ALLOWED = f"a whole number >= 0 and <= {MAX_COUNT}"


def need(allowed: bool, name: str, value: object, range_text: str) -> None:
    """Raises ValueError with the allowed range, unless allowed."""
    if not allowed:
        raise ValueError(f"{name}={value} is not allowed; choose {range_text}")


@contextmanager
def open_text(path: str | Path, what: str) -> Iterator[TextIO]:
    """The open file.  Raises ValueError, naming `what`, unless readable UTF-8."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            yield lines
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}; give the path of a readable file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path}: not UTF-8 text ({error.reason}); is it compressed?") from error


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    arrival_s: seconds after the first request (0.0 without times).  prompt_tokens, output_tokens: >= 1.
    hash_ids: of the prompt's 512-token blocks (Mooncake); equal ids mean equal tokens.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: str | None = None
    prompt: str | None = None
    hash_ids: tuple[int, ...] = ()


Requests: TypeAlias = Iterator["TraceRequest | None"]
"""A format reader's requests; None for a skipped row."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace in memory.  has_arrival_times: False without timestamps."""

    path: str
    format: str
    requests: tuple[TraceRequest, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    has_arrival_times: bool = True

    def without_adapters(self) -> Trace:
        return replace(self, requests=tuple(replace(one, adapter=None) for one in self.requests))


@dataclass(slots=True)
class RowReader:
    """A position in a file; raises errors with the place."""

    path: str
    line: int = 1
    dropped: Counter[str] = field(default_factory=Counter)
    has_arrival_times: bool = True

    def error(self, column: str, problem: str, allowed: str) -> ValueError:
        return ValueError(f"{self.path}, line {self.line}, column {column!r}: {problem}; allowed: {allowed}")

    def count(self, column: str, value: Any) -> int:
        """An integer from 0 to MAX_COUNT, as text or JSON number."""
        if isinstance(value, str) and len(value) < 10 and value.isascii() and value.isdecimal():
            return int(value)
        number = self.number(column, value, _COUNT_ALLOWED)
        if not 0 <= number <= MAX_COUNT or number != int(number):
            raise self.error(column, f"{value!r:.60} is no count", _COUNT_ALLOWED)
        return int(number)

    def number(self, column: str, value: Any, allowed: str = "a finite number") -> float:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise self.error(column, f"{value!r} is no number", allowed)
        try:
            number = float(value)
        except ValueError:
            raise self.error(column, f"{value!r:.60} is no number", allowed) from None
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error(column, f"{value!r:.60} is not finite", allowed)
        return number

    def time(self, column: str, value: Any, unit: str) -> float:
        """A time: finite and >= 0, in the file's unit."""
        allowed = f"{unit}, a finite number >= 0"
        number = self.number(column, value, allowed)
        if number < 0:
            raise self.error(column, f"{value!r} is negative", allowed)
        return number

    def request(
        self, arrival_s: float, prompt_tokens: int, output_tokens: int, **extra: Any
    ) -> TraceRequest | None:
        """None, counted in `dropped`, for a failed request or an empty prompt."""
        if output_tokens == 0:
            self.dropped["no output tokens (failed request)"] += 1
            return None
        if prompt_tokens == 0:
            self.dropped["empty prompt"] += 1
            return None
        return TraceRequest(arrival_s, prompt_tokens, output_tokens, **extra)
