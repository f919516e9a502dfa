"""Many adapters' request rates as few weighted rates, with the same sums of smooth functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EXACT_UP_TO = 2048  # so many distinct rates are kept as they are
NUM_NODES = 16  # Chebyshev points of a panel
NODES = np.cos(np.pi * (np.arange(NUM_NODES) + 0.5) / NUM_NODES)
COLD = 1e-13  # rates that sum to less than this count as 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RateGroups:
    """sum_i f(lambda_i) ~ counts @ f(rates) and sum_i p_i f(lambda_i) ~ mass @ f(rates), for smooth f.

    rates: [G] requests of one adapter in a global batch.  counts: [G], sums to the number of adapters.
    mass: [G], sums to 1.  Counts are whole numbers where adapters share one rate, else real (some < 0).
    """

    rates: np.ndarray
    counts: np.ndarray
    mass: np.ndarray


def group_rates(probabilities: np.ndarray, global_batch: float) -> RateGroups:
    """Groups of equal rates; of more than 2048 distinct ones, those in a panel with many others are moved to
    its 16 Chebyshev points, with the weights of the interpolating polynomial (the transposed interpolation).

    probabilities: [N], > 0.  Panels are 1 long in 2 ln(rate) up to rate 1, and in 2 sqrt(rate) above, where
    that is a Poisson's standard deviation: over such a length Poisson tails, and the logarithms of their
    generating functions, are polynomials of degree 15 up to 1e-11 of their largest value (tested).
    Rates below 1e-13 / N become 0, which moves any probability of the sum by less than 1e-13.
    """
    rates = probabilities * global_batch
    cold = rates < COLD / len(rates)
    values, counts = np.unique(rates[~cold], return_counts=True)
    weights = counts.astype(float)
    if len(values) > EXACT_UP_TO:
        values, weights = _to_nodes(values, weights)
    mass = values * weights / global_batch
    if cold.any():
        values = np.append(values, 0.0)
        weights = np.append(weights, float(cold.sum()))
        mass = np.append(mass, probabilities[cold].sum())
    return RateGroups(rates=values, counts=weights, mass=mass)


def _to_nodes(rates: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    place = np.where(rates <= 1, 2 * np.log(rates), 2 * np.sqrt(rates) - 2)
    panel_of, panel = np.unique(np.floor(place), return_inverse=True)[:2]
    crowded = np.bincount(panel) > NUM_NODES
    moved = crowded[panel]
    weights = _node_weights(2 * (place - panel_of[panel])[moved] - 1, panel[moved], counts[moved])
    used = np.flatnonzero(crowded)
    nodes = panel_of[used, None] + (NODES + 1) / 2
    values = np.where(nodes <= 0, np.exp(np.minimum(nodes, 0) / 2), (nodes / 2 + 1) ** 2)
    return (
        np.concatenate([rates[~moved], values.ravel()]),
        np.concatenate([counts[~moved], weights[used].ravel()]),
    )


def _node_weights(x: np.ndarray, panel: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[panels, nodes]: sum over a panel's x of counts times the Lagrange polynomials of the nodes at x.

    A Lagrange polynomial of Chebyshev points is (1 + 2 sum_k T_k(node) T_k(x)) / NUM_NODES.
    """
    degrees = np.arange(1, NUM_NODES)
    moments = [np.bincount(panel, counts)]
    before, now = np.ones_like(x), x
    for _ in degrees:
        moments.append(2 * np.bincount(panel, counts * now))
        before, now = now, 2 * x * now - before
    chebyshev = np.cos(np.outer(np.arange(NUM_NODES), np.arccos(NODES)))
    return np.stack(moments, axis=1) @ chebyshev / NUM_NODES
