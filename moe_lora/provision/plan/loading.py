"""Loads of adapters into a LoRA Server: how many, how long they queue, and what that does to steps and TTFT.

Legend: lambda loads per second, D seconds of one on the links of a rank (all ranks load their parts of an
adapter side by side, so their queues are alike), rho = lambda D, L instances, t seconds of a step, t0 of one
that waits for nothing, l layers.

- Misses: Che's approximation of an LRU cache (`AdapterLoads`); a share of the requests, whatever their rate.
- Queue: M/D/1.  Its backlog exceeds x with probability exp(-theta x), lambda (exp(theta D) - 1) = theta
  (Lundberg's exponent, Kingman's bound); below rho = 1 only.
- Stall: a load is asked for at the begin of a step, a step ahead of the request's first one (prefetch), and
  needs to be whole at the last layer of that one (layer-wise loading): there are t + t0 (1 - 1/l) for it, and
  later ones hold up the whole batch.  lambda t / L loads are asked for at a time, so
  t = t0 + (1 - exp(-lambda t / L)) exp(-theta (t + t0 (1 - 1/l))) / theta.
- TTFT: P95 is that of steps alone, or the quantile of the backlog and two steps: a request asks up to one
  after it came, and those before it did, so that the queue is up to one behind that of M/D/1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

STEPS_TO_FIRST_TOKEN = 2.95
"""P95 of a decode TTFT where nothing is waited for: 0.95 of the step under way at arrival, one during which
the lease is asked for, and the request's first one."""
_TAIL = 0.05
_PRECISION = 1e-6
_MAX_ROUNDS = 1000


def miss_share(probabilities: NDArray[np.float64], slots: int) -> float:
    """Share of the requests whose adapter is in none of `slots` slots, idle ones being given up LRU.

    sum_i p_i exp(-p_i W), where W solves sum_i (1 - exp(-p_i W)) = slots: an adapter is in its slot if it was
    among the last W requests.  probabilities: [N], sum 1.  0 if every adapter that is asked for has a slot.
    Source: Che et al., "Hierarchical Web caching systems" (IEEE JSAC 2002).
    """
    rates = probabilities[probabilities > 0]
    if slots >= len(rates):
        return 0.0

    def too_many(log_window: float) -> float:
        return float(-np.expm1(-rates * math.exp(log_window)).sum()) - slots

    low = high = math.log(slots / rates.sum())
    while too_many(high) < 0:
        high += 1.0
    window = math.exp(brentq(too_many, low, high)) if high > low else math.exp(low)
    return float((rates * np.exp(-rates * window)).sum())


@dataclass(frozen=True, kw_only=True)
class LoadQueue:
    """Loads on their way to a LoRA Server.

    loads_per_s: lambda.  load_s: D.  misses: share of the requests with an adapter that need one.
    """

    loads_per_s: float
    load_s: float
    misses: float

    @property
    def utilisation(self) -> float:
        """rho, the share of the links' time."""
        return self.loads_per_s * self.load_s

    @property
    def wait_s(self) -> float:
        """Mean time until a load begins, rho D / (2 (1 - rho)); infinite from rho = 1 on."""
        rho = self.utilisation
        return rho * self.load_s / (2 * (1 - rho)) if rho < 1 else math.inf

    @property
    def decay_per_s(self) -> float:
        """theta; 0 from rho = 1 on, infinite without loads."""
        rho = self.utilisation
        if rho >= 1:
            return 0.0
        if rho <= 0:
            return math.inf
        low, high = 0.0, 1.0  # of theta D, by bisection of (exp(z) - 1) / z = 1 / rho
        while math.expm1(high) / high < 1 / rho:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if math.expm1(middle) / middle < 1 / rho else (low, middle)
        return high / self.load_s

    def step_s(self, unhindered_s: float, num_instances: int, num_layers: int) -> float:
        """t of a step that takes t0 = unhindered_s where no load is late; infinite from rho = 1 on."""
        decay = self.decay_per_s
        if decay == 0.0:
            return math.inf
        step_s = unhindered_s
        for _ in range(_MAX_ROUNDS):
            asks = -math.expm1(-self.loads_per_s * step_s / num_instances)
            slack_s = step_s + unhindered_s * (1 - 1 / num_layers)
            longer_s = unhindered_s + asks * math.exp(-decay * slack_s) / decay
            if abs(longer_s - step_s) <= _PRECISION * step_s:
                break
            step_s = (step_s + longer_s) / 2
        return step_s

    def p95_ttft_s(self, step_s: float, num_instances: int) -> float:
        """Of requests that find a slot; step_s: t."""
        unhindered_s = STEPS_TO_FIRST_TOKEN * step_s
        decay = self.decay_per_s
        if decay == 0.0 or math.isinf(step_s):
            return math.inf
        # Those that need a load, or begin with one that does.
        beside = -math.expm1(-self.loads_per_s * step_s / num_instances)
        waiting = self.misses + (1 - self.misses) * beside
        if waiting <= _TAIL or math.isinf(decay):
            return unhindered_s
        return max(unhindered_s, 2 * step_s + math.log(waiting / _TAIL) / decay)


@dataclass(frozen=True, kw_only=True)
class AdapterLoads:
    """Whom requests ask for.  probabilities: [N], of adapters.  adapter_share: of the requests, those with
    an adapter.  output_tokens: mean of a request.
    """

    probabilities: NDArray[np.float64]
    adapter_share: float
    output_tokens: float
    _found: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def queue(self, requests_per_s: float, slots: int, load_s: float) -> LoadQueue:
        """The queue at this rate before a server of `slots` adapters."""
        if slots not in self._found:
            self._found[slots] = miss_share(self.probabilities, slots) if slots else 1.0
        misses = self._found[slots]
        loads_per_s = requests_per_s * self.adapter_share * misses
        return LoadQueue(loads_per_s=loads_per_s, load_s=load_s, misses=misses)
