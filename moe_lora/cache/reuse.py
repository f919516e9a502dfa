"""Counts after which time nodes are used again, for policies that want to know."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.reuse import (
    DEPTHS,
    EDGES_S,
    NOTHING_KNOWN,
    NUM_BINS,
    NUM_CLASSES,
    NUM_LEVELS,
    STARTS_S,
    WIDTHS_S,
    Floats,
    bins_of,
    classes_of,
    rates_from,
)

REFRESH_S = 1.0
"""Age above which the rates are computed anew."""
MEMORY_S = 600.0
"""Time constant with which old counts fade."""
_FIRST_S, _STEPS = float(EDGES_S[0]), 2 / math.log(2)


class ReuseAges:
    """A node's time between two visits is an interval; one that ends without a visit (the node is removed)
    has its length only.  Nodes that are there count up to their present age.
    """

    def __init__(self) -> None:
        self._hits = np.zeros((NUM_CLASSES, NUM_BINS))
        self._ends = np.zeros((NUM_CLASSES, NUM_BINS))
        self._within_s = np.zeros((NUM_CLASSES, NUM_BINS))
        self._computed_s = -math.inf
        self.rates = NOTHING_KNOWN

    def note(self, uses: float, depth: int, age_s: float, *, visited: bool) -> None:
        """An interval of that length of a node of this class (`policies.reuse.classes_of`) ended, with a
        visit or without.
        """
        level = min(int(math.log2(max(uses, 1.0))), NUM_LEVELS - 1)
        place = level + NUM_LEVELS * ((depth > 0) + bisect_left(DEPTHS, depth)), _bin(age_s)
        self._hits[place] += visited
        self._ends[place] += 1
        self._within_s[place] += age_s - STARTS_S[place[1]]

    def is_due(self, now_s: float) -> bool:
        """Whether the rates are older than `REFRESH_S`."""
        return now_s - self._computed_s >= REFRESH_S

    def refresh(self, now_s: float, uses: Floats, depth: NDArray[np.int64], age_s: Floats) -> None:
        """Compute the rates anew.  uses, depth, age_s [N]: of the nodes that are there."""
        if self._computed_s > -math.inf:
            kept = math.exp((self._computed_s - now_s) / MEMORY_S)
            for counts in (self._hits, self._ends, self._within_s):
                counts *= kept
        self._computed_s = now_s
        place = classes_of(uses, depth) * NUM_BINS + (bins := bins_of(age_s))
        size = NUM_CLASSES * NUM_BINS
        ends = self._ends + np.bincount(place, minlength=size).reshape(self._ends.shape)
        within_s = np.bincount(place, weights=age_s - STARTS_S[bins], minlength=size)
        later = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1] - ends
        time_s = self._within_s + within_s.reshape(self._ends.shape) + later * WIDTHS_S
        self.rates = rates_from(self._hits, time_s)


def _bin(age_s: float) -> int:
    """As `bins_of`, quicker for one; at an edge it may be the bin before."""
    if age_s < _FIRST_S:
        return 0
    return min(NUM_BINS - 1, 1 + int(math.log(age_s / _FIRST_S) * _STEPS))
