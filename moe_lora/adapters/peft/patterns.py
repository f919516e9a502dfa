# SPDX-License-Identifier: Apache-2.0
"""Untrusted regular expressions of an adapter's config, compiled and matched within bounds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import regex

from moe_lora.core.errors import AdapterError

MAX_MATCH_S = 1.0
"""Time for all matches of one config; 40 000 modules take a tenth."""
MAX_PATTERN_CHARS = 10_000
MAX_EXPANDED_CHARS = 100_000
"""Limit for one config's expressions, with counted repeats expanded as in the library."""
_COUNTS = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def expanded_chars(pattern: str) -> int:
    """Upper bound of the expression's length with counted repeats expanded."""
    num = len(pattern)
    for found in _COUNTS.finditer(pattern[:MAX_PATTERN_CHARS]):
        if num > MAX_EXPANDED_CHARS:
            break
        num *= max([1, *(int(number.lstrip("0")[:9] or 0) for number in found.groups() if number)])
    return num


def compiles(pattern: str, form: Callable[[str], str]) -> bool:
    """True for a regular expression of bounded length, alone and in its matched form.

    Time grows with `expanded_chars`: check that first.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        return False
    try:
        for text in (pattern, form(pattern)):
            re.compile(text)  # PEFT's library must accept the pattern too
            compiled(text)
    except (re.error, regex.error, OverflowError, RecursionError, ValueError):
        return False
    return True


@lru_cache(maxsize=64)
def compiled(pattern: str) -> regex.Pattern[str]:
    """By a library with a match timeout, unlike `re`."""
    return regex.compile(pattern)


def as_end(pattern: str) -> str:
    """The expression for paths whose end matches `pattern`."""
    return rf"(.*\.)?({pattern})$"


def as_layer(pattern: str) -> str:
    """The expression for paths of layers in a module called `pattern`; the last group is the layer."""
    return rf"(?:^|.*?\.){pattern}\.(\d+)\."


class Rules:
    """The patterns of one key with their values, compiled once for all paths."""

    def __init__(self, patterns: Mapping[str, float]) -> None:
        self._all = [
            (
                pattern.rpartition(".")[2] if re.fullmatch(r"[\w.]+", pattern) else "",
                (regex.compile(as_end(pattern)), value),
            )
            for pattern, value in patterns.items()
        ]
        self._by_leaf: dict[str, list[tuple[regex.Pattern[str], float]]] = {}

    def of(self, path: str) -> list[tuple[regex.Pattern[str], float]]:
        """Candidate patterns for the path, in order: a plain name must end the path."""
        leaf = path.rpartition(".")[2]
        if leaf not in self._by_leaf:
            self._by_leaf[leaf] = [rule for end, rule in self._all if leaf.endswith(end)]
        return self._by_leaf[leaf]


class Matching:
    """Matches of one config's expressions, within one time limit.

    where: the config's name in errors.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._left_s = MAX_MATCH_S

    def run(self, method: Callable[..., Any], path: str) -> Any:
        """method(path), a method of a compiled expression.

        Raises AdapterError after a total of `MAX_MATCH_S`.
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

    def first(self, rules: Rules, path: str, default: float) -> float:
        """The value of the first rule that matches the path's end."""
        for pattern, value in rules.of(path):
            if self.run(pattern.match, path):
                return value
        return default
