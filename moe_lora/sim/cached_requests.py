"""A request on its way through an instance that has a cache, and where its time to the first token went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_lora.cache.orders import CacheCounters
from moe_lora.cache.pages import BlockTable
from moe_lora.scheduling.views import Waits
from moe_lora.workload.conversations import TurnRequest

from .system import percentile


@dataclass(slots=True, eq=False)
class CachedRequest:
    """A `scheduling.views.Schedulable`; the parts of its TTFT are those of the engine's `RequestTiming`.

    tokens: of prompt and answer so far, of which num_computed have KV in `table`; num_left are to come.
    num_cached: tokens of its prompt whose KV it found.  Stamps in seconds; NaN: not yet.
    """

    planned: TurnRequest
    tokens: list[int] = field(init=False)
    table: BlockTable = field(init=False)
    num_left: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    matched: bool = False
    adapter_hit: bool = True
    waits: Waits = field(default_factory=Waits)
    first_token_s: float = math.nan
    finish_s: float = math.nan

    def __post_init__(self) -> None:
        self.tokens = list(self.planned.prompt)
        self.num_left = len(self.planned.answer)
        self.table = BlockTable(self.planned.adapter)

    @property
    def arrival_s(self) -> float:
        return self.planned.arrival_s

    @property
    def adapter(self) -> str:
        return self.planned.adapter

    @property
    def adapter_uid(self) -> str:
        return self.planned.adapter

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    def append(self, now_s: float) -> bool:
        """Take the answer's next token; whether it is the last."""
        answer = self.planned.answer
        if self.num_left == len(answer):
            self.first_token_s = now_s
        self.tokens.append(answer[-self.num_left])
        self.num_left -= 1
        if self.num_left:
            return False
        self.finish_s = now_s
        return True

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """Waited for the step under way, and for room."""
        return self.waits.queue_s(self.arrival_s, self._admitted_s)

    @property
    def adapter_cold_s(self) -> float:
        """Waited for its adapter's bytes, to the next step's begin."""
        return self.waits.adapter_load_s

    @property
    def history_cold_s(self) -> float:
        """Waited for its history's bytes, the adapter being there, to the next step's begin."""
        return self.waits.kv_load_s

    @property
    def prefill_s(self) -> float:
        """From its first step to its first token."""
        return self.first_token_s - self._admitted_s

    @property
    def tpot_s(self) -> float:
        num_tokens = len(self.planned.answer)
        return (self.finish_s - self.first_token_s) / (num_tokens - 1) if num_tokens > 1 else math.nan

    @property
    def _admitted_s(self) -> float:
        assert self.waits.admitted_s is not None
        return self.waits.admitted_s


# What came out of the simulation of an instance with a cache.


PARTS = ("queue", "adapter_cold", "history_cold", "prefill")
"""Of a TTFT, in their order."""


@dataclass(frozen=True, kw_only=True)
class CachedResult:
    """requests: finished ones.  samples: `UnifiedCache.usage` every second.  copied_s: time that the links
    were busy, towards the device and away from it.  aborted: more requests waited than allowed.
    """

    requests: Sequence[CachedRequest]
    counters: CacheCounters
    samples: Sequence[Mapping[str, int]]
    num_preemptions: int
    num_steps: int
    copied_s: tuple[float, float]
    end_s: float
    num_device_pages: int
    num_host_pages: int
    aborted: bool
    kind: str = "simulated"

    def summary(self, since_s: float = 0.0) -> dict[str, Any]:
        """Means over the requests that arrived at since_s or later (ms), shares over the whole run.

        ttft = queue + adapter_cold + history_cold + prefill.  invalid_kv_share: of the device's KV, whose
        adapter is not there; each look weighs alike.  *_usage: shares of the arenas.
        """
        judged = [request for request in self.requests if request.arrival_s >= since_s]
        ttft_ms = _column(judged, "ttft_s")
        looks = [look for second, look in enumerate(self.samples) if second >= since_s]
        counters = self.counters
        return {
            "num_requests": len(judged),
            "ttft_ms": _mean(ttft_ms),
            "p99_ttft_ms": percentile(ttft_ms, 99),
            **{f"{part}_ms": _mean(_column(judged, f"{part}_s")) for part in PARTS},
            "tpot_ms": _mean(_column(judged, "tpot_s")),
            "adapter_hit_rate": _share(
                counters.adapter_hits, counters.adapter_hits + counters.adapter_misses
            ),
            "kv_device_hit_rate": _share(counters.kv_device_hit_tokens, counters.kv_query_tokens),
            "kv_host_hit_rate": _share(counters.kv_host_hit_tokens, counters.kv_query_tokens),
            "invalid_kv_share": _mean(
                [_share(look["device_kv_invalid"], look["device_kv"]) or 0.0 for look in looks]
            ),
            "device_usage": _mean([1 - look["device_free"] / self.num_device_pages for look in looks]),
            "device_adapter_usage": _mean(
                [look["device_adapters"] / self.num_device_pages for look in looks]
            ),
            "host_usage": _mean([1 - look["host_free"] / max(1, self.num_host_pages) for look in looks]),
            "link_in_busy": self.copied_s[0] / self.end_s,
            "link_out_busy": self.copied_s[1] / self.end_s,
            "num_preemptions": self.num_preemptions,
            "aborted": self.aborted,
        }


def _column(requests: Sequence[CachedRequest], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """An attribute in seconds of all that have it, in ms."""
    values = np.array([getattr(request, name) for request in requests], dtype=np.float64)
    return values[~np.isnan(values)] * 1e3


def _mean(values: Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
