# SPDX-License-Identifier: Apache-2.0
"""Statistics of a trace in one pass and bounded memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_lora.workload.popularity.popularity import Popularity, from_weights
from moe_lora.workload.replay_plan import positive
from moe_lora.workload.traces.records import RowReader, TraceRequest
from moe_lora.workload.traces.traces import detect_format, iter_requests

WINDOW_S = 60.0
_STEPS_PER_WINDOW = 60
_EXACT_BITS = 16  # lengths below 2**16 are exact, longer ones to 1 part in 2**15


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthStatistics:
    """Token counts; p50 and p95 are smallest lengths with that percentage at or below."""

    mean: float
    p50: int
    p95: int
    max: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceStatistics:
    """A trace in numbers.

    mean_rate_per_s: (num_requests - 1) / duration_s; None without two moments.  peak_rate_per_s: most
    requests within window_s, over window_s; at least the mean rate.  adapter_counts: without the base model.
    """

    path: str
    format: str
    num_requests: int
    duration_s: float
    mean_rate_per_s: float | None
    peak_rate_per_s: float | None
    window_s: float
    prompt_tokens: LengthStatistics
    output_tokens: LengthStatistics
    adapter_counts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def popularity(self) -> Popularity | None:
        """In proportion to adapter_counts, most popular first, or None."""
        ranked = sorted(self.adapter_counts.items(), key=lambda item: (-item[1], item[0]))
        return from_weights([name for name, _ in ranked], [count for _, count in ranked]) if ranked else None


class Lengths:
    """Counts of lengths in bounded memory."""

    def __init__(self) -> None:
        self.total = 0
        self.max = 0
        self.counts: Counter[int] = Counter()

    def add(self, num_tokens: int) -> None:
        self.total += num_tokens
        self.max = max(self.max, num_tokens)
        shift = max(0, num_tokens.bit_length() - _EXACT_BITS)
        self.counts[num_tokens >> shift << shift] += 1

    def statistics(self) -> LengthStatistics:
        num = self.counts.total()
        return LengthStatistics(
            mean=self.total / num, p50=self._percentile(0.5), p95=self._percentile(0.95), max=self.max
        )

    def _percentile(self, share: float) -> int:
        left = math.ceil(share * self.counts.total())
        for length in sorted(self.counts):
            left -= self.counts[length]
            if left <= 0:
                return length
        raise AssertionError("a percentile of nothing")


class _Window:
    """Most arrivals within a window that moves in steps of 1/60 of its length."""

    def __init__(self, window_s: float) -> None:
        self._step_s = window_s / _STEPS_PER_WINDOW
        self._steps: deque[list[int]] = deque()  # [step, arrivals] of the last window
        self._inside = 0
        self.most = 0

    def add(self, arrival_s: float) -> None:
        step = int(arrival_s / self._step_s)
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append([step, 0])
        while self._steps[0][0] <= step - _STEPS_PER_WINDOW:
            self._inside -= self._steps.popleft()[1]
        self._steps[-1][1] += 1
        self._inside += 1
        self.most = max(self.most, self._inside)


def trace_statistics(
    path: str | Path,
    format: str | None = None,
    *,
    window_s: float = WINDOW_S,
    each: Callable[[TraceRequest], None] = lambda _: None,
) -> TraceStatistics:
    """Read the trace once; memory grows with the number of adapters, and by `each`.

    each: called with every request.  Raises ValueError as `iter_trace`.
    """
    positive("window_s", window_s)
    name = format or detect_format(path)
    reader = RowReader(str(path))
    prompts, outputs, window = Lengths(), Lengths(), _Window(window_s)
    adapters: Counter[str] = Counter()
    num_requests, duration_s = 0, 0.0
    for num_requests, request in enumerate(iter_requests(reader, name), start=1):  # noqa: B007
        each(request)
        prompts.add(request.prompt_tokens)
        outputs.add(request.output_tokens)
        window.add(duration_s := request.arrival_s)
        if request.adapter is not None:
            adapters[request.adapter] += 1
    mean = (num_requests - 1) / duration_s if duration_s > 0 else None
    return TraceStatistics(
        path=str(path),
        format=name,
        num_requests=num_requests,
        duration_s=duration_s,
        mean_rate_per_s=mean,
        peak_rate_per_s=None if mean is None else max(mean, window.most / window_s),
        window_s=window_s,
        prompt_tokens=prompts.statistics(),
        output_tokens=outputs.statistics(),
        adapter_counts=dict(adapters),
        dropped=dict(reader.dropped),
    )


def percentile(values: NDArray[np.float64], percent: float) -> float | None:
    """Linear between the nearest values, or None."""
    return float(np.percentile(values, percent)) if len(values) else None


def mean(values: Sequence[float] | NDArray[np.float64]) -> float | None:
    """None without values."""
    return float(np.mean(values)) if len(values) else None
