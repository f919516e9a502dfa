"""What came out of the simulation of an instance with a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_lora.cache.counters import CacheCounters

from .cached_requests import CachedRequest
from .result import percentile

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
