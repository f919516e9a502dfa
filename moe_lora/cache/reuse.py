"""Counts after which time nodes are used again, for policies that want to know."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.reuse import DEPTHS, EDGES_S, NOTHING_KNOWN, NUM_BINS, NUM_CLASSES, NUM_LEVELS, STARTS_S, WIDTHS_S, Floats, bins_of, classes_of, rates_from

REFRESH_S = 1.0
"""Age above which the rates are computed anew."""
MEMORY_S = 600.0
"""Time constant with which old counts fade."""
_SIZE, _STARTS_S = NUM_CLASSES * NUM_BINS, STARTS_S.tolist()
_FIRST_S, _STEPS = float(EDGES_S[0]), 2 / math.log(2)


class ReuseAges:
    """A node's time between two visits is an interval; one that ends without a visit (nobody looks for it any
    more) has its length only.  Nodes that are there, and `cache.ghosts` of dropped ones, count up to their
    present age.
    """

    def __init__(self) -> None:
        # Plain lists, since one number at a time is added: quicker than to arrays.
        self._hits, self._ends, self._within_s = ([0.0] * _SIZE for _ in range(3))
        self._computed_s = -math.inf
        self.rates = NOTHING_KNOWN

    def note(self, uses: float, depth: int, age_s: float, *, visited: bool) -> None:
        """An interval of that length of a node of this class (`policies.reuse.classes_of`) ended, with a
        visit or without.
        """
        level = min(int(uses).bit_length() - 1, NUM_LEVELS - 1) if uses >= 1 else 0
        age_bin = _bin(age_s)
        place = (level + NUM_LEVELS * ((depth > 0) + bisect_left(DEPTHS, depth))) * NUM_BINS + age_bin
        self._hits[place] += visited
        self._ends[place] += 1
        self._within_s[place] += age_s - _STARTS_S[age_bin]

    def is_due(self, now_s: float) -> bool:
        """Whether the rates are older than `REFRESH_S`."""
        return now_s - self._computed_s >= REFRESH_S

    def refresh(self, now_s: float, uses: Floats, depth: NDArray[np.int64], age_s: Floats) -> None:
        """Compute the rates anew.  uses, depth, age_s [N]: of nodes and ghosts."""
        kept = math.exp((self._computed_s - now_s) / MEMORY_S) if self._computed_s > -math.inf else 1.0
        self._computed_s = now_s
        hits, ends, within_s = (
            kept * np.array(counts) for counts in (self._hits, self._ends, self._within_s)
        )
        self._hits, self._ends, self._within_s = hits.tolist(), ends.tolist(), within_s.tolist()
        place = classes_of(uses, depth) * NUM_BINS + (bins := bins_of(age_s))
        ends += np.bincount(place, minlength=_SIZE)
        within_s += np.bincount(place, weights=age_s - STARTS_S[bins], minlength=_SIZE)
        ends_CB = ends.reshape(NUM_CLASSES, NUM_BINS)
        later_CB = np.cumsum(ends_CB[:, ::-1], axis=1)[:, ::-1] - ends_CB
        time_CB = within_s.reshape(ends_CB.shape) + later_CB * WIDTHS_S
        self.rates = rates_from(hits.reshape(ends_CB.shape), time_CB)


def _bin(age_s: float) -> int:
    """As `bins_of`, quicker for one; at an edge it may be the bin before."""
    if age_s < _FIRST_S:
        return 0
    return min(NUM_BINS - 1, 1 + int(math.log(age_s / _FIRST_S) * _STEPS))
