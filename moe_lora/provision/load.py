"""What a trace asks of a cluster: rate, lengths and, where it names adapters, their popularity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from moe_lora.workload.popularity import Popularity
from moe_lora.workload.records import TraceRequest
from moe_lora.workload.traces import iter_trace

PEAK_WINDOW_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TraceLoad:
    """Statistics of a trace, in requests, seconds and tokens.

    rate_per_s: (n - 1) / (last - first arrival); None where all arrive at once, or there are no times.
    peak_rate_per_s: of the busiest whole minute counted from the first arrival; None where `rate_per_s` is.
    adapter_counts: requests by adapter; empty where the trace names none.
    """

    num_requests: int
    rate_per_s: float | None
    peak_rate_per_s: float | None
    mean_prompt_tokens: float
    mean_output_tokens: float
    p95_output_tokens: int
    adapter_counts: dict[str, int] = field(default_factory=dict)

    @property
    def context_tokens(self) -> float:
        """Mean length of prompt and whole answer: at least what a decode row reads of KV on average."""
        return self.mean_prompt_tokens + self.mean_output_tokens

    def popularity(self) -> Popularity | None:
        """Shares of the adapters that the trace names; None if it names none."""
        total = sum(self.adapter_counts.values())
        if not total:
            return None
        shares = tuple(count / total for count in self.adapter_counts.values())
        return Popularity(tuple(self.adapter_counts), shares)


def read_load(path: str | Path, format: str | None = None) -> TraceLoad:
    """Statistics of the trace in a file, read as a stream.

    Raises ValueError as `iter_trace` does, and if there is no request.
    """
    dropped: Counter[str] = Counter()
    found = load_of(iter_trace(path, format, dropped))
    if found is None:
        left_out = ", ".join(f"{count} rows: {reason}" for reason, count in dropped.items())
        raise ValueError(f"{path}: no request in the trace ({left_out or 'no rows after the header'})")
    return found


def load_of(requests: Iterable[TraceRequest]) -> TraceLoad | None:
    """Statistics of requests sorted by arrival; None if there are none."""
    num_requests = prompt_tokens = 0
    last_s = 0.0
    outputs: Counter[int] = Counter()
    minutes: Counter[int] = Counter()
    adapters: Counter[str] = Counter()
    for request in requests:
        num_requests += 1
        prompt_tokens += request.prompt_tokens
        outputs[request.output_tokens] += 1
        last_s = request.arrival_s
        minutes[int(last_s / PEAK_WINDOW_S)] += 1
        if request.adapter is not None:
            adapters[request.adapter] += 1
    if not num_requests:
        return None
    rate = (num_requests - 1) / last_s if last_s > 0 else None
    whole_minutes = last_s >= PEAK_WINDOW_S
    peak = max(minutes.values()) / PEAK_WINDOW_S if whole_minutes else rate
    return TraceLoad(
        num_requests=num_requests,
        rate_per_s=rate,
        peak_rate_per_s=None if rate is None or peak is None else max(rate, peak),
        mean_prompt_tokens=prompt_tokens / num_requests,
        mean_output_tokens=sum(length * count for length, count in outputs.items()) / num_requests,
        p95_output_tokens=_quantile(outputs, 0.95),
        adapter_counts=dict(adapters),
    )


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least this share of all does not exceed."""
    wanted, seen = share * counts.total(), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    raise AssertionError("no values")
