# SPDX-License-Identifier: Apache-2.0
"""Requests, tokens and TTFT by adapter or by tenant, as metric families with a bound on names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

OTHER = "other"
"""Series of the names above the bound."""


class _Counts:
    """Counts of a name since the start of its series."""

    __slots__ = ("generation_tokens", "prompt_tokens", "requests", "ttft_counts", "ttft_s")

    def __init__(self, num_buckets: int) -> None:
        self.requests: dict[str, int] = {}
        self.prompt_tokens = self.generation_tokens = 0
        self.ttft_counts = [0] * num_buckets
        self.ttft_s = 0.0


class CountsByName:
    """The first `limit` names have a series each; further names share `OTHER`.

    label: "adapter" or "tenant", in family names and as label.  bounds_s: bounds of the TTFT buckets.
    fixed: names with a series beside the limit.
    """

    def __init__(
        self, label: str, limit: int, bounds_s: Sequence[float], fixed: Collection[str] = ()
    ) -> None:
        self._label = label
        self._limit = limit + len(fixed)
        self._bounds_s = bounds_s
        self._fixed = frozenset(fixed)
        self._counts = {name: self._new() for name in fixed}
        self._other: _Counts | None = None

    def _new(self) -> _Counts:
        return _Counts(len(self._bounds_s) + 1)

    def add(
        self, name: str, reason: str, prompt_tokens: int, generation_tokens: int, ttft_s: float | None
    ) -> None:
        """Count a finished request.  ttft_s: None without a token; the prompt does not count then."""
        counts = self._counts.get(name)
        if counts is None:
            counts = self._first(name)
        counts.requests[reason] = counts.requests.get(reason, 0) + 1
        counts.generation_tokens += generation_tokens
        if ttft_s is not None:
            counts.prompt_tokens += prompt_tokens
            counts.ttft_counts[bisect_left(self._bounds_s, ttft_s)] += 1
            counts.ttft_s += ttft_s

    def _first(self, name: str) -> _Counts:
        if name != OTHER and len(self._counts) < self._limit:
            counts = self._counts[name] = self._new()
            return counts
        if self._other is None:
            self._other = self._new()
        return self._other

    def remove_all_but(self, names: Collection[str]) -> None:
        """Keep the series of these names alone.  Free places go to new names."""
        for name in self._counts.keys() - self._fixed - set(names):
            del self._counts[name]

    def collect(self, model_name: str) -> Iterator[Metric]:
        label, found = self._label, dict(self._counts)
        if self._other is not None:
            found[OTHER] = self._other
        what, labels = f"moe_lora:{label}", ["model_name", label]
        requests = CounterMetricFamily(
            f"{what}_requests", f"Finished requests by {label}.", labels=[*labels, "finished_reason"]
        )
        prompts = CounterMetricFamily(
            f"{what}_prompt_tokens", f"Prompt tokens of these, by {label}.", labels=labels
        )
        answers = CounterMetricFamily(
            f"{what}_generation_tokens", f"Tokens generated, by {label}.", labels=labels
        )
        ttft = HistogramMetricFamily(
            f"{what}_time_to_first_token_seconds", f"TTFT by {label}.", labels=labels
        )
        bounds = [*(str(float(bound)) for bound in self._bounds_s), "+Inf"]
        for name, counts in found.items():
            values = [model_name, name]
            for reason, number in counts.requests.items():
                requests.add_metric([*values, reason], number)
            prompts.add_metric(values, counts.prompt_tokens)
            answers.add_metric(values, counts.generation_tokens)
            buckets = list(zip(bounds, accumulate(counts.ttft_counts), strict=True))
            ttft.add_metric(values, buckets, counts.ttft_s)
        yield from (requests, prompts, answers, ttft)
