"""Shapes of popularity beside Zipf and uniform: two levels, Dirichlet, long tail, Gaussian, turns, shifts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .popularity import Popularity, from_weights, uniform, zipf

_STEEPEST = 60.0  # a power law this steep leaves nothing to the second adapter


def _need(allowed: bool, name: str, value: float, range_text: str) -> None:
    if not allowed:
        raise ValueError(f"{name}={value} is not allowed; choose {range_text}")


def two_level(adapters: Sequence[str], num_hot: int, hot_share: float) -> Popularity:
    """The first num_hot adapters have hot_share of the requests, evenly; the others the rest, evenly.

    num_hot = 1 is one hot adapter.
    """
    _need(1 <= num_hot < len(adapters), "num_hot", num_hot, f"1 to {len(adapters) - 1}, below all adapters")
    _need(0 <= hot_share <= 1, "hot_share", hot_share, "a number from 0 to 1")
    num_cold = len(adapters) - num_hot
    weights = [hot_share / num_hot] * num_hot + [(1 - hot_share) / num_cold] * num_cold
    return from_weights(adapters, weights)


def dirichlet(adapters: Sequence[str], concentration: float, seed: int = 0) -> Popularity:
    """One draw from the symmetric Dirichlet distribution; the smaller the concentration, the more uneven."""
    _need(
        math.isfinite(concentration) and concentration > 0,
        "concentration",
        concentration,
        "a finite number > 0",
    )
    _need(seed >= 0, "seed", seed, "a whole number >= 0")
    drawn = np.random.default_rng(seed).gamma(concentration, size=len(adapters))
    if not drawn.any():
        raise ValueError(f"concentration={concentration} is too small to draw from; choose a larger one")
    return from_weights(adapters, drawn.tolist())


def long_tail(adapters: Sequence[str], num_head: int = 5, head_share: float = 0.7) -> Popularity:
    """P(i-th adapter) ~ 1 / i**s, s such that the first num_head adapters have head_share of the requests.

    Source: LoRAServe section IV and figure 8 (the top five of an adapter fleet have more than 70 %).
    """
    from scipy.optimize import brentq  # a third of a second, for this shape only

    num_adapters = len(adapters)
    _need(1 <= num_head < num_adapters, "num_head", num_head, f"1 to {num_adapters - 1}, below all adapters")
    least = num_head / num_adapters
    _need(least <= head_share < 1, "head_share", head_share, f"from {least:.4g} (all even) to below 1")
    places = np.arange(1, num_adapters + 1, dtype=np.float64)

    def beyond(s: float) -> float:
        weights = places**-s
        return float(weights[:num_head].sum() / weights.sum()) - head_share

    if beyond(0.0) >= 0.0:  # rounding, where head_share is that of even popularity
        return uniform(adapters)
    return zipf(adapters, float(brentq(beyond, 0.0, _STEEPEST)))


def gaussian(adapters: Sequence[str], sigma: float) -> Popularity:
    """P(i-th of N adapters): mass of a normal distribution (mean 1/2, deviation sigma) on (i, i + 1) / N.

    Cut to [0, 1]: the adapters in the middle are asked for most.
    Source: FastLibra section 6.9 (Skewed-0.1, Skewed-0.3); it gives the deviation, not the mean or the unit.
    """
    _need(math.isfinite(sigma) and sigma > 0, "sigma", sigma, "a finite number > 0 (0.1 and 0.3 are usual)")
    num_adapters = len(adapters)
    _need(num_adapters >= 1, "number of adapters", num_adapters, "at least one")
    edges = [math.erf((i / num_adapters - 0.5) / (sigma * math.sqrt(2))) for i in range(num_adapters + 1)]
    return from_weights(adapters, [right - left for left, right in pairwise(edges)])


@dataclass(frozen=True, slots=True)
class Distinct:
    """Adapters in turn, each as often as the others ("distinct").

    Source: FastLibra section 6.9.
    """

    adapters: tuple[str, ...]
    lora_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        uniform(self.adapters)  # which refuses none at all and names given twice

    def at(self, time_share: float) -> Popularity:
        return uniform(self.adapters)

    def draw(self, time_shares: NDArray[np.float64], rng: np.random.Generator) -> list[str]:
        return [self.adapters[index % len(self.adapters)] for index in range(len(time_shares))]


@dataclass(frozen=True, slots=True)
class Shifting:
    """P(t) = (1 - t) · start + t · end, with t the share of the time that has passed."""

    start: Popularity
    end: Popularity

    def __post_init__(self) -> None:
        if self.start.adapters != self.end.adapters or self.start.lora_ranks != self.end.lora_ranks:
            raise ValueError("start and end of a shift must name the same adapters and ranks, in one order")

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.start.adapters

    @property
    def lora_ranks(self) -> tuple[int, ...]:
        return self.start.lora_ranks

    def at(self, time_share: float) -> Popularity:
        """Raises ValueError for a time outside 0 to 1."""
        _need(0 <= time_share <= 1, "time_share", time_share, "a number from 0 (start) to 1 (end)")
        mixed = (1 - time_share) * np.asarray(self.start.probabilities) + time_share * np.asarray(
            self.end.probabilities
        )
        return from_weights(self.adapters, mixed.tolist(), self.lora_ranks)

    def draw(self, time_shares: NDArray[np.float64], rng: np.random.Generator) -> list[str]:
        """A request at t draws from `end` with probability t, else from `start`: that is P(t)."""
        from_end = rng.random(len(time_shares)) < time_shares
        early = self.start.sample(len(time_shares), rng)
        late = self.end.sample(len(time_shares), rng)
        return [late[i] if from_end[i] else early[i] for i in range(len(time_shares))]
