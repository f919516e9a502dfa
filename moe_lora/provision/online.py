# SPDX-License-Identifier: Apache-2.0
"""The provisioning solver on a sliding window of requests."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moe_lora.config.plan import ESTIMATORS
from moe_lora.core.clock import Clock
from moe_lora.core.records import Outlook
from moe_lora.core.request import RequestTiming
from moe_lora.provision.admission.admitted import rates_at, smallest_capacity_of
from moe_lora.provision.admission.iar import expected_active

NUM_BUCKETS = 30
AT_ONCE_S = 0.1
"""Longest wait of an immediate admission: a LoRA Server answers between two steps."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Requests in a window."""

    counts: np.ndarray
    """[seen adapters]."""
    global_batch: float
    """Mean requests in service; time to the first token counts at the end."""
    num_timed: int
    """Ended, with a known admission time."""
    num_at_once: int
    """Ended, with immediate admission."""

    @property
    def num_requests(self) -> int:
        return int(self.counts.sum())


@dataclass(slots=True)
class _Bucket:
    number: int
    counts: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    num_timed: int = 0
    num_at_once: int = 0


class VisitWindow(Protocol):
    """Records requests for adapters."""

    def begin(self, adapter: str) -> Visit: ...

    def start(self, visit: Visit) -> None: ...

    def refuse(self, visit: Visit) -> None: ...

    def end(self, visit: Visit, timing: RequestTiming | None) -> None: ...


class Visit:
    """A request in a window."""

    __slots__ = ("_window", "adapter", "number", "started")

    def __init__(self, window: VisitWindow, adapter: str, number: int) -> None:
        self._window = window
        self.adapter = adapter
        self.number = number
        self.started = False

    def start(self) -> None:
        """The first token is there."""
        assert not self.started
        self.started = True
        self._window.start(self)

    def refuse(self) -> None:
        """Drop a request that could not run."""
        self._window.refuse(self)

    def end(self, timing: RequestTiming | None) -> None:
        """The request ends.  timing: from the engine, or None."""
        self._window.end(self, timing)


class DemandWindow:
    """Requests for adapters over the last window_s.  Not thread-safe."""

    def __init__(self, clock: Clock, window_s: float, num_buckets: int = NUM_BUCKETS) -> None:
        self._clock = clock
        self._bucket_s = window_s / num_buckets
        self._num_buckets = num_buckets
        self._total: Counter[str] = Counter()
        self._num_started = 0
        self._start_s = self._seen_s = clock.now_s()
        self._buckets: deque[_Bucket] = deque([_Bucket(0)])

    def begin(self, adapter: str) -> Visit:
        """A request for the adapter arrives."""
        bucket = self._advance()
        bucket.counts[adapter] += 1
        self._total[adapter] += 1
        return Visit(self, adapter, bucket.number)

    def refuse(self, visit: Visit) -> None:
        self._advance()
        self._num_started -= visit.started
        for bucket in self._buckets:
            if bucket.number == visit.number:
                _take(bucket.counts, visit.adapter, 1)
                _take(self._total, visit.adapter, 1)

    def start(self, visit: Visit) -> None:
        self._advance()
        self._num_started += 1

    def end(self, visit: Visit, timing: RequestTiming | None) -> None:
        bucket = self._advance()
        self._num_started -= visit.started
        if visit.started and timing is not None:
            bucket.busy_s += timing.prefill_s
            bucket.num_timed += 1
            bucket.num_at_once += timing.adapter_wait_s <= AT_ONCE_S

    def demand(self) -> Demand:
        """A copy of the window, up to a bucket shorter than window_s."""
        self._advance()
        begin_s = max(self._start_s, self._start_s + self._buckets[0].number * self._bucket_s)
        length_s = self._seen_s - begin_s
        busy_s = max(0.0, sum(bucket.busy_s for bucket in self._buckets))
        return Demand(
            counts=np.fromiter(self._total.values(), dtype=np.int64, count=len(self._total)),
            global_batch=busy_s / length_s if length_s > 0 else float(self._num_started),
            num_timed=sum(bucket.num_timed for bucket in self._buckets),
            num_at_once=sum(bucket.num_at_once for bucket in self._buckets),
        )

    def _advance(self) -> _Bucket:
        now_s = self._clock.now_s()
        number = int((now_s - self._start_s) / self._bucket_s)
        while self._buckets[-1].number < number:
            last = self._buckets[-1]
            following = max(last.number + 1, number - self._num_buckets + 1)
            end_s = self._start_s + following * self._bucket_s
            last.busy_s += self._num_started * max(0.0, end_s - self._seen_s)
            self._seen_s = end_s
            self._buckets.append(_Bucket(following))
            while self._buckets[0].number <= following - self._num_buckets:
                for adapter, count in self._buckets.popleft().counts.items():
                    _take(self._total, adapter, count)
        last = self._buckets[-1]
        last.busy_s += self._num_started * max(0.0, now_s - self._seen_s)
        self._seen_s = max(self._seen_s, now_s)
        return last


def _take(counts: Counter[str], adapter: str, count: int) -> None:
    counts[adapter] -= count
    if counts[adapter] <= 0:
        del counts[adapter]


MARGIN = 0.1
SHRINK_ABOVE = 1.25


def outlook(demand: Demand, capacity: int, target_iar: float, num_pools: int = 1) -> Outlook:
    """Solve the provisioning model for the demand.

    num_pools: of `capacity` adapters.  Without requests IAR is 1 and one slot suffices.
    """
    batch = demand.global_batch / num_pools
    active, needed = 0.0, 1
    predicted = dict.fromkeys(ESTIMATORS, 1.0)
    if demand.num_requests and batch > 0:
        popularity = demand.counts / demand.num_requests
        active = expected_active(popularity, batch)
        predicted = rates_at(popularity, batch, capacity)
        needed = smallest_capacity_of("corrected", popularity, batch, target_iar)
    return Outlook(
        num_requests=demand.num_requests,
        num_adapters=len(demand.counts),
        global_batch=demand.global_batch,
        expected_active=active,
        capacity=capacity,
        predicted_iar=predicted["corrected"],
        predicted_iar_paper=predicted["paper"],
        measured_iar=demand.num_at_once / demand.num_timed if demand.num_timed else None,
        target_iar=target_iar,
        needed_capacity=needed,
    )


def resized(found: Outlook, *, min_capacity: int, max_capacity: int) -> int:
    """The next capacity: the need and a tenth (MARGIN).

    Stays without requests, and within a quarter (SHRINK_ABOVE) above the need.
    """
    if not found.num_requests:
        return found.capacity
    wanted = math.ceil((1 + MARGIN) * found.needed_capacity)
    if found.suffices and found.capacity <= max(wanted, SHRINK_ABOVE * found.needed_capacity):
        wanted = found.capacity
    return max(min_capacity, min(wanted, max_capacity))
