# SPDX-License-Identifier: Apache-2.0
"""Demand of adapters: metered at arrival, and forecast."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping

from moe_lora.timing.answer_lengths import FIRST_TOKENS, AnswerLengths

from .routing import RequestListener, RoutedView

_OVERALL = None


class DemandMeter(RequestListener):
    """Tokens of requests to each adapter, counted at arrival.

    A request counts as prompt and expected answer: the mean of the adapter's answers, else of all answers,
    else mean_output_tokens (None: FIRST_TOKENS).  Not thread-safe.
    """

    def __init__(self, mean_output_tokens: float | None = None) -> None:
        self._lengths = AnswerLengths(mean_output_tokens or FIRST_TOKENS)
        self._tokens: Counter[str] = Counter()
        self._expected: dict[Hashable, tuple[str, int, int]] = {}
        """Adapter, prompt tokens, expected answer tokens."""
        self._earlier: set[Hashable] = set()
        """Requests of forgotten content."""

    def start(self, key: Hashable, request: RoutedView, max_tokens: int | None = None) -> None:
        """Count an arrived request.  key: names the request until its `stop`."""
        adapter = request.adapter
        if adapter is None:
            return
        expected = round(self._lengths.expected(adapter, self._lengths.expected(_OVERALL)))
        if max_tokens is not None:
            expected = min(expected, max_tokens)
        self._expected[key] = adapter, request.prompt_tokens, expected
        self._tokens[adapter] += request.prompt_tokens + expected

    def stop(self, key: Hashable, answer_tokens: int) -> None:
        """Correct an ended request's count by the answer.

        Without a token the count stays: a client that left a queue wanted its answer.
        """
        adapter, _, expected = self._expected.pop(key, (None, 0, 0))
        if adapter is not None and answer_tokens:
            self._tokens[adapter] += answer_tokens - expected
            self._lengths.note(_OVERALL, answer_tokens)
            if key not in self._earlier:
                self._lengths.note(adapter, answer_tokens)
        self._earlier.discard(key)

    def cancel(self, key: Hashable) -> None:
        """Undo the count of a refused request."""
        adapter, prompt_tokens, expected = self._expected.pop(key, (None, 0, 0))
        if adapter is not None:
            self._tokens[adapter] -= prompt_tokens + expected
        self._earlier.discard(key)

    def forget(self, adapter: str) -> None:
        """Drop the mean of an unloaded adapter."""
        self._lengths.forget(adapter)
        self._earlier.update(key for key, expected in self._expected.items() if expected[0] == adapter)

    def add(self, tokens: Mapping[str, int]) -> None:
        """Add another meter's reading."""
        self._tokens.update(tokens)

    def read(self) -> Counter[str]:
        """Tokens since the last call; negative after large corrections."""
        tokens, self._tokens = self._tokens, Counter()
        return tokens


class DemandForecast:
    """Tokens/s of each adapter in the next time step.

    Holt's linear method with a damped trend: level(t) = predicted + gain · (rate(t) - predicted), predicted =
    level(t-1) + DAMPING · trend(t-1), trend(t) = DAMPING · trend(t-1) + trend_gain · (level(t) - predicted).
    gain: smoothing, or 1 / t in step t if more.  At most twice the largest rate.  Source: LoRAServe,
    Algorithm 1, lines 3-6.
    """

    DAMPING = 0.8

    def __init__(self, num_steps: int = 8, smoothing: float = 1.0, trend_gain: float = 0.0) -> None:
        self._smoothing, self._trend_gain = smoothing, trend_gain
        self._steps: deque[dict[str, float]] = deque(maxlen=num_steps)

    def observe(self, tokens: Mapping[str, float], length_s: float) -> None:
        """Add the last time step.  Raises ValueError."""
        if not length_s > 0:
            raise ValueError(f"length_s={length_s} must be positive")
        self._steps.append({adapter: max(0.0, number) / length_s for adapter, number in tokens.items()})

    def read(self) -> dict[str, float]:
        """Tokens/s of each adapter with demand."""
        adapters = dict.fromkeys(adapter for step in self._steps for adapter in step)
        return {adapter: self._next([step.get(adapter, 0.0) for step in self._steps]) for adapter in adapters}

    def _next(self, rates: list[float]) -> float:
        level = trend = 0.0
        for number, rate in enumerate(rates, 1):
            predicted = level + self.DAMPING * trend
            change = max(self._smoothing, 1 / number) * (rate - predicted)
            level = predicted + change
            if number > 1:
                trend = self.DAMPING * trend + self._trend_gain * change
        return min(max(0.0, level + self.DAMPING * trend), 2.0 * max(rates))
