"""What a running system sees of its requests: a sliding window over them.

Time comes in by a clock; nothing here has threads or waits.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from moe_lora.core.clock import Clock
from moe_lora.core.request import RequestTiming

NUM_BUCKETS = 30
AT_ONCE_S = 0.1
"""A request that waits no longer than this for its adapter's place counts as admitted at once: the answer of
a LoRA Server takes a round trip, and an engine looks for it between two steps."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a window saw.  counts: [adapters seen] requests of each.  global_batch: requests in service, mean
    over the window: from admission, not arrival, to the end (the time up to the first token is added when
    the request ends).  num_timed, num_at_once: requests that ended in the window and said when they were
    admitted, and those of them admitted at once.
    """

    counts: np.ndarray
    global_batch: float
    num_timed: int
    num_at_once: int

    @property
    def num_requests(self) -> int:
        return int(self.counts.sum())


@dataclass(slots=True)
class _Bucket:
    """Arrivals and request seconds of a stretch of time."""

    number: int
    counts: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    num_timed: int = 0
    num_at_once: int = 0


class Visit:
    """One request in a window: it arrives, starts, and ends or turns out to be none."""

    __slots__ = ("_window", "adapter", "arrival", "started")

    def __init__(self, window: DemandWindow, adapter: str, arrival: int) -> None:
        self._window = window
        self.adapter = adapter
        self.arrival = arrival
        self.started = False

    def start(self) -> None:
        """Its first token is there."""
        assert not self.started
        self.started = True
        self._window.start()

    def refuse(self) -> None:
        """It could not run, for a name that does not exist, say: it does not count."""
        self._window.refuse(self)

    def end(self, timing: RequestTiming | None) -> None:
        """It ends.  timing: the engine's account, None if there is none."""
        self._window.end(self, timing)


class DemandWindow:
    """Counts requests for adapters over the last window_s, in a ring of buckets.

    window_s: seconds.  Memory is bounded by the adapters requested within the window, times the buckets that
    they are in.  Not thread-safe: fed and read from one thread.
    """

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
            if bucket.number == visit.arrival:
                _take(bucket.counts, visit.adapter, 1)
                _take(self._total, visit.adapter, 1)

    def start(self) -> None:
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
        """A copy of what the window holds now.

        Buckets leave the window whole, so it is up to a bucket shorter than window_s; before the first ones
        leave it is as long as it has been fed.
        """
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
        """The bucket of now, the time up to now accounted for in those before."""
        now_s = self._clock.now_s()
        number = int((now_s - self._start_s) / self._bucket_s)
        while self._buckets[-1].number < number:
            last = self._buckets[-1]
            # After a long silence only the buckets that are still in the window are made.
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
