# SPDX-License-Identifier: Apache-2.0
"""Simulation of immediate starts with fewer cache slots than adapters.

Requests arrive as a Poisson process of rate `global_batch`; service times are exponential with mean 1.  An
adapter holds a slot while a request of it is in service.  A request starts at once if its adapter holds a
slot or a slot is free, else it waits; a freed slot scans waiting requests, first come first served.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moe_lora.provision.admission.iar import (
    Probabilities,
    checked_capacity,
    checked_global_batch,
    checked_probabilities,
)

NUM_BATCHES = 20
DRAWS_AT_ONCE = 1 << 16


class SlotQueue:
    """Adapters in slots, requests in service, and waiting requests.

    With a waiting request no slot is free, so slots free one at a time, and the scan starts the requests of
    the first waiting adapter: a queue of adapters suffices.
    """

    def __init__(self, num_adapters: int, capacity: int) -> None:
        self.in_service: list[int] = []
        self.num_active = 0
        self.num_waiting = 0
        self.queue: deque[int] = deque()
        self._free = capacity
        self._running = [0] * num_adapters
        self._waiting = [0] * num_adapters

    def arrive(self, adapter: int) -> bool:
        """A request comes; True if it starts at once."""
        if self._running[adapter]:
            self._running[adapter] += 1
        elif self._free:
            self._free -= 1
            self.num_active += 1
            self._running[adapter] = 1
        else:
            if not self._waiting[adapter]:
                self.queue.append(adapter)
            self._waiting[adapter] += 1
            self.num_waiting += 1
            return False
        self.in_service.append(adapter)
        return True

    def finish(self, index: int) -> None:
        """The request `in_service[index]` ends; a freed slot starts waiting requests."""
        adapter = self.in_service[index]
        last = self.in_service.pop()
        if index < len(self.in_service):
            self.in_service[index] = last
        self._running[adapter] -= 1
        if self._running[adapter]:
            return
        if not self.queue:
            self._free += 1
            self.num_active -= 1
            return
        adapter = self.queue.popleft()
        count = self._waiting[adapter]
        self._waiting[adapter] = 0
        self._running[adapter] = count
        self.num_waiting -= count
        self.in_service.extend([adapter] * count)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionResult:
    """Statistics of the counted arrivals; means over time, times in mean service times."""

    num_arrivals: int
    immediate_admissibility_rate: float
    standard_error: float
    """Of that share, from 20 batches of successive arrivals."""
    mean_active: float
    mean_waiting: float
    mean_in_service: float
    mean_wait: float
    """Wait of a request, including immediate starts: mean_waiting / global_batch (Little's law)."""


def simulate_admission(
    popularity: Probabilities,
    global_batch: float,
    capacity: int,
    *,
    num_arrivals: int,
    seed: int,
    warm_up: float = 50.0,
) -> AdmissionResult:
    """Run the process from empty for `warm_up` mean service times, then count `num_arrivals` arrivals.

    With exponential times the next event is an arrival with probability
    global_batch / (global_batch + requests in service), else the end of any request in service; means over
    time weight each state with its mean duration.

    popularity: [N] probability of each adapter, sum 1.  Raises ValueError for bad input: see
    `moe_lora.workload.popularity.popularity`; num_arrivals is at least 20, warm_up at least 0.
    """
    probabilities = checked_probabilities(popularity)
    batch = checked_global_batch(global_batch)
    slots = SlotQueue(len(probabilities), checked_capacity(capacity))
    if num_arrivals < NUM_BATCHES:
        raise ValueError(
            f"num_arrivals={num_arrivals} is too few; choose {NUM_BATCHES} or more (100000 usual)"
        )
    if not (math.isfinite(warm_up) and warm_up >= 0):
        raise ValueError(f"warm_up={warm_up} is not allowed; choose a number of mean service times >= 0")
    draws = _draws(probabilities, np.random.default_rng(seed))
    _run(slots, draws, batch, math.ceil(warm_up * batch))
    sizes = np.diff(np.linspace(0, num_arrivals, NUM_BATCHES + 1).astype(int))
    tallies = np.array([_run(slots, draws, batch, size) for size in sizes.tolist()])
    num_started, duration, *integrals = tallies.sum(axis=0)
    active, waiting, in_service = (float(integral / duration) for integral in integrals)
    return AdmissionResult(
        num_arrivals=num_arrivals,
        immediate_admissibility_rate=float(num_started / num_arrivals),
        standard_error=float(np.std(tallies[:, 0] / sizes, ddof=1) / math.sqrt(NUM_BATCHES)),
        mean_active=active,
        mean_waiting=waiting,
        mean_in_service=in_service,
        mean_wait=waiting / batch,
    )


def _run(
    slots: SlotQueue, draws: Iterator[tuple[float, int]], global_batch: float, num_arrivals: int
) -> tuple[float, ...]:
    """Run until num_arrivals requests came; immediate starts, time, and integrals over time of active
    adapters, waiting requests and requests in service.
    """
    num_started = 0
    duration = active = waiting = in_service = 0.0
    while num_arrivals:
        rate = global_batch + len(slots.in_service)
        time = 1.0 / rate
        duration += time
        active += slots.num_active * time
        waiting += slots.num_waiting * time
        in_service += len(slots.in_service) * time
        uniform, adapter = next(draws)
        point = uniform * rate
        if point < global_batch:
            num_arrivals -= 1
            num_started += slots.arrive(adapter)
        else:
            slots.finish(min(int(point - global_batch), len(slots.in_service) - 1))
    return num_started, duration, active, waiting, in_service


def _draws(probabilities: np.ndarray, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
    while True:
        uniforms = rng.random(DRAWS_AT_ONCE).tolist()
        adapters = rng.choice(len(probabilities), size=DRAWS_AT_ONCE, p=probabilities).tolist()
        yield from zip(uniforms, adapters, strict=True)
