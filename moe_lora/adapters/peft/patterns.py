# SPDX-License-Identifier: Apache-2.0
"""Untrusted regular expressions of an adapter's config, matched within bounds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import regex

from moe_lora.core.errors import AdapterError

from .config import AdapterConfig

MAX_MATCH_S = 1.0
"""Limit for all matches of one config; 40 000 modules take a tenth."""
MAX_PATTERN_CHARS = 10_000
MAX_EXPANDED_CHARS = 100_000
"""Limit for one config's expressions, with counted repeats expanded."""
_COUNTS = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def expanded_chars(pattern: str) -> int:
    """Upper bound of the length with counted repeats expanded."""
    num = len(pattern)
    for found in _COUNTS.finditer(pattern[:MAX_PATTERN_CHARS]):
        if num > MAX_EXPANDED_CHARS:
            break
        num *= max([1, *(int(number.lstrip("0")[:9] or 0) for number in found.groups() if number)])
    return num


def check_expressions(expressions: Mapping[str, Sequence[str]], where: str) -> tuple[str, str] | None:
    """Key and text of the first unusable expression; None: all are usable.

    Raises AdapterError if the expressions together are too long.
    """
    if sum(map(expanded_chars, chain.from_iterable(expressions.values()))) > MAX_EXPANDED_CHARS:
        raise AdapterError(
            f"{where}: {', '.join(expressions)}: regular expressions of more than {MAX_EXPANDED_CHARS} "
            "characters together, counted repeats written out; write them shorter, or list modules by name"
        )
    for key, listed in expressions.items():
        form = {"layers_pattern": as_layer, "rank_pattern": as_end, "alpha_pattern": as_end}.get(key, str)
        for expression in listed:
            if not compiles(expression, form):
                return key, expression
    return None


def compiles(pattern: str, form: Callable[[str], str]) -> bool:
    """True for a usable expression, alone and in its matched form.

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
    """The expression for layers in the module `pattern`; the last group is the layer."""
    return rf"(?:^|.*?\.){pattern}\.(\d+)\."


class Rules:
    """The patterns of one key with their values, compiled once."""

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
        """Candidate patterns for the path, in order."""
        leaf = path.rpartition(".")[2]
        if leaf not in self._by_leaf:
            self._by_leaf[leaf] = [rule for end, rule in self._all if leaf.endswith(end)]
        return self._by_leaf[leaf]


class Patterns:
    """Matches of one config's expressions.

    Raises AdapterError after `MAX_MATCH_S` in total.
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._left_s = MAX_MATCH_S

    def matches(self, pattern: str, path: str) -> bool:
        return self._run(compiled(pattern).fullmatch, path) is not None

    def in_layers(self, path: str) -> bool:
        """True if the path is in one of `layers_to_transform`."""
        for pattern in self._layers:
            found = self._run(pattern.match, path)
            if found:
                return int(found[pattern.groups]) in self._config.layers_to_transform
        return False

    def rank(self, path: str, default: int) -> float:
        """Of the first rank_pattern at the path's end."""
        return self._first(self._ranks, path, default)

    def alpha(self, path: str, default: float) -> float:
        """Of the first alpha_pattern at the path's end."""
        return self._first(self._alphas, path, default)

    @cached_property
    def _ranks(self) -> Rules:
        return Rules(self._config.rank_pattern)

    @cached_property
    def _alphas(self) -> Rules:
        return Rules(self._config.alpha_pattern)

    @cached_property
    def _layers(self) -> list[regex.Pattern[str]]:
        return [regex.compile(as_layer(pattern)) for pattern in self._config.layers_pattern or (r"[^.]*",)]

    def _first(self, rules: Rules, path: str, default: float) -> float:
        for pattern, value in rules.of(path):
            if self._run(pattern.match, path):
                return value
        return default

    def _run(self, method: Callable[..., Any], path: str) -> Any:
        begun_s = time.thread_time()
        try:
            found = method(path, timeout=max(self._left_s, 1e-6))
        except TimeoutError as error:
            raise AdapterError(
                f"{self._config.where}: its regular expressions take more than {MAX_MATCH_S:g} s to match; "
                "write them simpler, without repeats in repeats, or list the modules by name"
            ) from error
        self._left_s -= time.thread_time() - begun_s
        return found
