"""The stopwatch of one request, which feeds the metrics and the load on adapters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moe_lora.core.request import RequestTiming

if TYPE_CHECKING:
    from .metrics import Metrics
    from moe_lora.dist.cluster.controller.controller_views import VisitView


class RequestWatch:
    """Stamps the tokens of one choice as they leave the engine."""

    __slots__ = ("_arrival_s", "_first_s", "_last_s", "_metrics", "_num_tokens", "_visit")

    def __init__(self, metrics: Metrics, visit: VisitView | None) -> None:
        self._metrics = metrics
        self._visit = visit
        self._arrival_s = time.perf_counter()
        self._first_s = self._last_s = self._arrival_s
        self._num_tokens = 0

    def tokens(self, num_tokens: int) -> None:
        """Tokens that came just now; of several at once each took an equal share of the time."""
        if not num_tokens:
            return
        now_s = time.perf_counter()
        if self._num_tokens == 0:
            self._first_s = now_s
            self._metrics.ttft.observe(now_s - self._arrival_s)
            if self._visit is not None:
                self._visit.start()
        else:
            gap_s = (now_s - self._last_s) / num_tokens
            for _ in range(num_tokens):
                for histogram in self._metrics.itl:
                    histogram.observe(gap_s)
        self._last_s = now_s
        self._num_tokens += num_tokens

    def refuse(self) -> None:
        """The engine never took the request."""
        if self._visit is not None:
            self._visit.refuse()

    def end(self, reason: str, timing: RequestTiming | None) -> None:
        if self._visit is not None:
            self._visit.end(timing)
        metrics = self._metrics
        metrics.count(reason)
        if reason in ("stop", "length"):
            metrics.e2e.observe(self._last_s - self._arrival_s)
            if self._num_tokens > 1:
                metrics.tpot.observe((self._last_s - self._first_s) / (self._num_tokens - 1))
        if timing is not None:
            metrics.queue.observe(timing.queue_s)
            metrics.prefill.observe(timing.prefill_s)
            metrics.adapter_load.observe(timing.adapter_load_s)
            metrics.kv_load.observe(timing.kv_load_s)
            metrics.decode_ttft.observe(timing.decode_ttft_s)
