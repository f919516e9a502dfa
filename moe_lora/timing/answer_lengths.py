# SPDX-License-Identifier: Apache-2.0
"""Expected lengths of answers, from earlier answers."""

from __future__ import annotations

from collections.abc import Callable

FIRST_TOKENS = 128.0


class AnswerLengths:
    """expected = (PRIOR · prior_tokens + tokens of the adapter's answers) / (PRIOR + number of answers).

    Source: L_i of dLoRA table 1.
    """

    PRIOR = 8.0

    def __init__(self, prior_tokens: float = FIRST_TOKENS) -> None:
        self._prior_tokens = prior_tokens
        self._tokens: dict[str | None, int] = {}
        self._num: dict[str | None, int] = {}

    def note(self, adapter: str | None, num_tokens: int) -> None:
        """Record an ended answer."""
        self._tokens[adapter] = self._tokens.get(adapter, 0) + num_tokens
        self._num[adapter] = self._num.get(adapter, 0) + 1

    def forget(self, adapter: str) -> None:
        """Drop an adapter: its name may return with new content."""
        self._tokens.pop(adapter, None)
        self._num.pop(adapter, None)

    def retain(self, is_loaded: Callable[[str], bool]) -> None:
        """`forget` the other adapters."""
        for adapter in [name for name in self._num if name is not None and not is_loaded(name)]:
            self.forget(adapter)

    def expected(self, adapter: str | None, prior_tokens: float | None = None) -> float:
        """Expected tokens of the next answer."""
        prior = self.PRIOR * (self._prior_tokens if prior_tokens is None else prior_tokens)
        return (prior + self._tokens.get(adapter, 0)) / (self.PRIOR + self._num.get(adapter, 0))

    def left(self, adapter: str | None, num_so_far: int, num_most: int) -> float:
        """Expected remaining tokens; at least 1, within the limit."""
        return max(1.0, min(self.expected(adapter), num_most) - num_so_far)
