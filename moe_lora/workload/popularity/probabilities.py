"""Checks of the inputs that capacity questions share: a popularity, a global batch, a number of slots."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import numpy as np

SUM_TOLERANCE = 1e-6

Probabilities = Sequence[float] | np.ndarray


def checked_probabilities(popularity: Probabilities) -> np.ndarray:
    """The probability of each adapter, [N], scaled to sum 1 where it is off by up to a millionth.

    Raises ValueError for no adapter, for values that are negative or not finite, and for another sum.
    """
    probabilities = np.asarray(popularity, dtype=float)
    if probabilities.ndim != 1 or not len(probabilities):
        raise ValueError(f"popularity has shape {probabilities.shape}; give one probability per adapter")
    bad = np.flatnonzero(~(np.isfinite(probabilities) & (probabilities >= 0)))
    if len(bad):
        raise ValueError(
            f"popularity[{bad[0]}]={probabilities[bad[0]]} is not a probability; give finite numbers >= 0"
        )
    total = float(probabilities.sum())
    if not math.isclose(total, 1.0, rel_tol=SUM_TOLERANCE):
        raise ValueError(f"popularity sums to {total:.9g}, not 1; divide each value by the sum of all")
    return probabilities / total


def checked_global_batch(global_batch: float) -> float:
    """Requests in service over all instances, on average. Raises ValueError if it is not finite and > 0."""
    real = isinstance(global_batch, numbers.Real) and not isinstance(global_batch, bool)
    if not (real and math.isfinite(global_batch) and global_batch > 0):
        raise ValueError(f"global_batch={global_batch!r} is not allowed; give requests in service, > 0")
    return float(global_batch)


def checked_capacity(capacity: int) -> int:
    """Adapters that fit. Raises ValueError if it is no whole number >= 1."""
    if isinstance(capacity, bool) or not isinstance(capacity, numbers.Integral) or capacity < 1:
        raise ValueError(f"capacity={capacity!r} is not allowed; give a whole number of adapters, 1 or more")
    return int(capacity)
