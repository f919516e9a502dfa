"""What came out of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .requests import SimRequest


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """The requests with their stamps, and what it took.

    requests: in the order in which they finished.  num_steps: of all instances.  num_loads: of adapters.
    end_s: when the last one was done.  stopped: given up before all were done.  num_fetches: adapters that
    came from another host.  held: adapters that each table of a placement gave each instance.
    """

    requests: Sequence[SimRequest]
    num_events: int
    num_steps: int
    num_loads: int
    end_s: float
    stopped: bool = False
    num_fetches: int = 0
    held: Sequence[Sequence[int]] = ()
    kind: str = "simulated"

    def column(self, name: str, since_s: float = 0.0) -> NDArray[np.float64]:
        """A number of every request that arrived at since_s or later, by its attribute's name."""
        return np.array([getattr(r, name) for r in self.requests if r.arrival_s >= since_s], dtype=np.float64)

    def summary(self, since_s: float = 0.0) -> dict[str, Any]:
        """Of the requests that arrived at since_s or later; None where there is nothing to average.

        admitted_at_once: share that started with the first step after their arrival.  waited_for_adapter,
        waited_for_room: of the others, those that waited for an adapter's slot, and for KV or the batch; the
        three sum to 1.  ttft: as `SimRequest.decode_ttft_s`.
        """
        at_once = self.column("at_once", since_s)
        for_adapter = self.column("waited_for_adapter", since_s)
        ttft_s = self.column("decode_ttft_s", since_s)
        tpot_s = self.column("tpot_s", since_s)
        return {
            "kind": self.kind,
            "num_requests": len(at_once),
            "admitted_at_once": _mean(at_once),
            "waited_for_adapter": _mean(for_adapter),
            "waited_for_room": _mean(1 - at_once - for_adapter),
            "mean_ttft_s": _mean(ttft_s),
            "p50_ttft_s": percentile(ttft_s, 50),
            "p95_ttft_s": percentile(ttft_s, 95),
            "mean_tpot_s": _mean(tpot_s[~np.isnan(tpot_s)]),
        }


def percentile(values: NDArray[np.float64], percent: float) -> float | None:
    """Linear between the two nearest values, as in `report.summary`; None of no values."""
    return float(np.percentile(values, percent)) if len(values) else None


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None
