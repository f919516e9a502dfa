"""Immediate admissibility rate of a cache whose refused requests wait, and so keep slots busy for longer.

Call an adapter wanting while requests of it are in service (it is active and holds a slot) or wait for a
slot.  The number n of wanting adapters is followed as a birth-death chain, M slots:

- An idle adapter waits 1 / lambda_i for its next request; a wanting one spends W_i in the queue, then B_i in
  its slot.  Alone it would be wanting with odds lambda_i (W_i + B_i); given n, these odds are multiplied by
  the common factor that makes n wanting adapters expected (as a product form is conditioned on its sum).
- k = max(n - M, 0) adapters queue, while slots free at rate mu = sum_i P(i active) / B_i: W = k / mu.  While
  i queues only others hold slots, so W_i = W / r_i, r_i being their mean of 1 / B by that of all active ones.
  Requests that come during the wait start together and lengthen B_i (`BusyPeriods`).  mu and r are solved
  for as a fixed point.
- From n the chain goes up at sum_i lambda_i P(i idle | n) and down at mu(n).

Its stationary weights follow from detailed balance.  A request is turned away if its adapter is not active
while n >= M, so IAR = 1 - sum_{n >= M} Pr[n] sum_i p_i P(i not active | n): Poisson arrivals see time
averages.  While nobody queues these are the rates of the product form, which is exact; with a queue the
adapters are taken to reach their shares at n before n moves on.  No constant is fitted; those in the code
are numerical.
"""

from __future__ import annotations

import numpy as np
from scipy.interpolate import PchipInterpolator

from moe_lora.workload.popularity.probabilities import Probabilities, checked_capacity, checked_global_batch, checked_probabilities

from .admissibility import BELOW_ONE
from .slot_demand import SlotDemand

GRID_RATIO = 1.3  # between distances from M at which the chain's rates are computed


def corrected_admissibility_rate(popularity: Probabilities, global_batch: float, capacity: int) -> float:
    """Share of requests that start at once, in [0, 1], if those that can't wait first come first served.

    popularity: [N] probability of each adapter, sum 1 (up to a millionth, then scaled to 1).
    global_batch: mean number of requests in service, > 0.  capacity: adapters that fit, >= 1.
    1.0 exactly if and only if capacity covers every adapter of popularity > 0.  Arrivals are Poisson,
    services exponential with mean 1: the process of `moe_lora.sim.slot_queue`, which this agrees with
    (docs/provisioning.md).
    Raises ValueError for anything else, saying what was given.
    """
    demand = _demand(popularity, global_batch, capacity)
    return 1.0 if demand is None else min(1.0 - _refused(demand)[0], BELOW_ONE)


def corrected_wait(popularity: Probabilities, global_batch: float, capacity: int) -> float:
    """Mean wait of the requests that don't start at once, in mean service times; 0.0 where all do.

    Little's law: requests that wait, over the rate of those that have to.  Arguments, process and errors as
    in `corrected_admissibility_rate`.
    """
    demand = _demand(popularity, global_batch, capacity)
    if demand is None:
        return 0.0
    turned_away, num_waiting = _refused(demand)
    return num_waiting / (turned_away * global_batch) if turned_away > 1 - BELOW_ONE else 0.0


def _demand(popularity: Probabilities, global_batch: float, capacity: int) -> SlotDemand | None:
    """None if there is a slot for each adapter that is used."""
    probabilities = checked_probabilities(popularity)
    batch, slots = checked_global_batch(global_batch), checked_capacity(capacity)
    used = probabilities[probabilities > 0]
    return None if slots >= len(used) else SlotDemand(used, batch, slots)


def _refused(demand: SlotDemand) -> tuple[float, float]:
    """sum_{n >= M} Pr[n] P(adapter of a request not active | n), and the mean number of waiting requests."""
    capacity, num_adapters = demand.capacity, demand.num_adapters
    below = capacity - _distances(capacity)[::-1]
    above = capacity + _distances(num_adapters - capacity)
    up_below, down_below, _, _ = _columns(demand, below)
    up_above, down_above, not_active, num_waiting = _columns(demand, above)
    idle_below, idle_above = num_adapters - below, num_adapters - above
    log_steps = [
        _log_rates(below, up_below, idle_below)[:-1] - _log_rates(below[1:], down_below[1:], below[1:]),
        _log_rates(above[:-1], up_above[:-1], idle_above[:-1]) - _log_rates(above, down_above, above)[1:],
    ]
    log_weights = np.concatenate([[0.0], np.cumsum(np.concatenate(log_steps))])
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    whole = np.arange(capacity, num_adapters + 1)
    refused = float(weights[capacity:] @ PchipInterpolator(above, not_active)(whole))
    waiting = float(weights[capacity:] @ PchipInterpolator(above, num_waiting)(whole))
    return min(max(refused, 0.0), 1.0), max(waiting, 0.0)


def _distances(last: int) -> np.ndarray:
    """0, 1, 2, ... growing by GRID_RATIO, up to last - 1 and last (in state 0 or N one rate is 0)."""
    distances = [0]
    while distances[-1] < last:
        distances.append(min(last, max(distances[-1] + 1, int(distances[-1] * GRID_RATIO))))
    return np.unique([*distances, last - 1])


def _columns(demand: SlotDemand, grid: np.ndarray) -> list[np.ndarray]:
    """Each field of the states, over the grid."""
    return [np.array(column) for column in zip(*(demand.at(int(n)) for n in grid), strict=True)]


def _log_rates(grid: np.ndarray, rates: np.ndarray, num_sources: np.ndarray) -> np.ndarray:
    """Logarithms of the rates at each whole number from grid[0] to grid[-1].

    num_sources: adapters that can make the step, linear in n: a rate per source is what changes smoothly.
    """
    whole = np.arange(grid[0], grid[-1] + 1)
    if len(grid) == 1:
        return np.log(rates)
    sources = np.interp(whole, grid, num_sources)
    return PchipInterpolator(grid, np.log(rates / num_sources))(whole) + np.log(sources)
