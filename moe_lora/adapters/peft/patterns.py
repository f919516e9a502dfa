"""Regular expressions of an adapter's config, which come from anyone: compiled and matched within bounds."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import regex

from moe_lora.core.errors import AdapterError

MAX_MATCH_S = 1.0
"""All matching of one config's expressions; for 40 000 modules it takes a tenth."""
MAX_PATTERN_CHARS = 10_000
_MAX_EXPANDED_CHARS = 100_000
"""Of an expression with each counted repeat written out, as the library does."""
_COUNTS = re.compile(r"\{(\d*)(?:,(\d*))?\}")

Rule = tuple[str, regex.Pattern[str], float]
"""What a path that matches ends with, the expression, and its value."""


def compiles(pattern: str) -> bool:
    """True if this is a regular expression of bounded size, alone and as the end of a path (rank_pattern)."""
    counts = [
        max(1, *(int(number) for number in found if number))
        for found in _COUNTS.findall(pattern[:MAX_PATTERN_CHARS])
        if any(found)
    ]
    if len(pattern) > MAX_PATTERN_CHARS or math.prod(counts) * len(pattern) > _MAX_EXPANDED_CHARS:
        return False
    try:
        for form in (pattern, as_end(pattern)):
            re.compile(form)  # PEFT's own: what only the other library takes is refused
            compiled(form)
    except (re.error, regex.error, OverflowError, RecursionError, ValueError):
        return False
    return True


@lru_cache(maxsize=64)
def compiled(pattern: str) -> regex.Pattern[str]:
    """By a library whose matches can be given up, unlike those of `re`."""
    return regex.compile(pattern)


def as_end(pattern: str) -> str:
    """The expression that a path matches whose end matches `pattern`."""
    return rf"(.*\.)?({pattern})$"


def rules(patterns: Mapping[str, float]) -> list[Rule]:
    """Compiled once for all paths."""
    return [
        (
            pattern.rpartition(".")[2] if re.fullmatch(r"[\w.]+", pattern) else "",
            regex.compile(as_end(pattern)),
            value,
        )
        for pattern, value in patterns.items()
    ]


class Matching:
    """Matches of one config's expressions, which could take for ever, within one time.

    where: what errors call the config.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._left_s = MAX_MATCH_S

    def run(self, method: Callable[..., Any], path: str) -> Any:
        """method(path), a method of a compiled expression.

        Raises AdapterError where all of them take longer than `MAX_MATCH_S`.
        """
        begun_s = time.thread_time()
        try:
            found = method(path, timeout=max(self._left_s, 1e-6))
        except TimeoutError as error:
            raise AdapterError(
                f"{self._where}: its regular expressions take more than {MAX_MATCH_S:g} s to match; write "
                "them simpler, without repeats in repeats, or list the modules by name"
            ) from error
        self._left_s -= time.thread_time() - begun_s
        return found

    def first(self, of: list[Rule], path: str, default: float) -> float:
        """The value of the first rule that the path's end matches."""
        for end, pattern, value in of:
            if path.endswith(end) and self.run(pattern.match, path):
                return value
        return default
