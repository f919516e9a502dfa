# SPDX-License-Identifier: Apache-2.0
"""Definitions of TTFT, TPOT, ITL and E2E (docs/reference/metrics.md).

sent     the client starts to send the request
first    the first token arrives;  token_times_s[0]
end      the last token, or the chunk with the finish reason, arrives
n        num_output_tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTiming:
    """Times of one finished request, in seconds on one clock.

    token_times_s: arrival of each chunk with tokens, sorted, at least one.
    decode_ttft_ms: queueing + adapter load + first decode step, from the server.
    Raises ValueError for times out of order or without tokens.
    """

    sent_s: float
    token_times_s: tuple[float, ...]
    end_s: float
    num_output_tokens: int
    decode_ttft_ms: float | None = None

    def __post_init__(self) -> None:
        times = (self.sent_s, *self.token_times_s, self.end_s)
        if not self.token_times_s or self.num_output_tokens < 1:
            raise ValueError("a finished request has at least one token; record a failed one without timing")
        if any(later < earlier for earlier, later in pairwise(times)):
            raise ValueError("times out of order; allowed: sent <= first token <= ... <= end")

    @property
    def ttft_ms(self) -> float:
        """first - sent, with prefill and network."""
        return (self.token_times_s[0] - self.sent_s) * 1e3

    @property
    def e2el_ms(self) -> float:
        """end - sent."""
        return (self.end_s - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """(E2E - TTFT) / (n - 1); None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_ms - self.ttft_ms) / (self.num_output_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Times between successive token chunks."""
        times = self.token_times_s
        return [(later - earlier) * 1e3 for earlier, later in pairwise(times)]

    @property
    def tpt_ms(self) -> float:
        """E2E / n, prefill included.  Source: Toppings section 7.1."""
        return self.e2el_ms / self.num_output_tokens


def avg_latency_ms(timings: Iterable[ClientTiming]) -> float | None:
    """Sum of E2E / sum of n; None without requests.  Source: dLoRA section 7.1."""
    e2el_ms, num_tokens = 0.0, 0
    for timing in timings:
        e2el_ms += timing.e2el_ms
        num_tokens += timing.num_output_tokens
    return e2el_ms / num_tokens if num_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTargets:
    """The latency objectives.  Defaults: InfiniLoRA section 6.1."""

    ttft_s: float = 0.25
    tpot_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"slo {name}={value} is not allowed; choose a finite number of seconds > 0")

    def met_by(self, timing: ClientTiming) -> bool:
        """TTFT and TPOT within target; a single token meets TPOT."""
        return self._met(timing.ttft_ms, timing.tpot_ms)

    def met_in_decode_by(self, timing: ClientTiming) -> bool:
        """As `met_by`, with decode_ttft_ms in place of TTFT (InfiniLoRA section 2.3, footnote)."""
        return timing.decode_ttft_ms is not None and self._met(timing.decode_ttft_ms, timing.tpot_ms)

    def _met(self, ttft_ms: float, tpot_ms: float | None) -> bool:
        return ttft_ms <= self.ttft_s * 1e3 and (tpot_ms is None or tpot_ms <= self.tpot_s * 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request: finished (`timing`), failed (`error`), or interrupted.

    adapter: None for the base model.  arrival_s: planned, sent_s: actual, after the run's start.  exact: the
    text equals the known answer.
    """

    adapter: str | None
    arrival_s: float
    sent_s: float
    input_tokens: int
    timing: ClientTiming | None = None
    error: str | None = None
    text: str = ""
    exact: bool | None = None
    queue_ms: float | None = None
    adapter_load_ms: float | None = None
    kv_load_ms: float | None = None

    @property
    def interrupted(self) -> bool:
        return self.timing is None and self.error is None
