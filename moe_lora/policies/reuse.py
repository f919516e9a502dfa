"""How soon cached KV is used again, as a function of its age: a table that the cache learns.

C: classes by number of visits.  B: bins of the time since the last visit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]

EDGES_S: Floats = 0.1 * np.sqrt(2.0) ** np.arange(34)
"""[B - 1]: where the bins of age meet, 0.1 s to 2.6 h."""
NUM_BINS = len(EDGES_S) + 1
NUM_LEVELS = 6
"""1, 2 to 3, ... and 32 or more uses: what many requests share is used in another rhythm than a dialogue."""
DEPTHS = (64, 256, 1024, 4096)
"""Tokens of the whole prefix: short prompts come back less often than long ones."""
NUM_CLASSES = NUM_LEVELS * (len(DEPTHS) + 2)
"""Levels of adapters by their recent visits, then of KV by its uses, for each depth."""
STARTS_S: Floats = np.concatenate(([0.0], EDGES_S))
WIDTHS_S: Floats = np.diff(np.concatenate((STARTS_S, [2 * EDGES_S[-1]])))


def classes_of(uses: Floats, depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N]: class of nodes with so many uses, at the end of so many tokens (0: adapters)."""
    levels = np.minimum(np.log2(np.maximum(uses, 1)).astype(np.int64), NUM_LEVELS - 1)
    return levels + NUM_LEVELS * ((depth > 0) + np.searchsorted(DEPTHS, depth))


def bins_of(age_s: Floats) -> NDArray[np.int64]:
    """[N]: bin of each age."""
    return np.searchsorted(EDGES_S, age_s, side="right")


@dataclass(frozen=True)
class ReuseRates:
    """per_s [C, B]: most uses per second of keeping that a node of this class and age can bring."""

    per_s: Floats

    def of(self, uses: Floats, depth: NDArray[np.int64], idle_s: Floats) -> Floats:
        """[N]: of nodes of these classes (`classes_of`), unused for so long."""
        return self.per_s[classes_of(uses, depth), bins_of(idle_s)]


def rates_from(hits: Floats, time_s: Floats) -> ReuseRates:
    """per_s[c, b] = max over e >= b of (1 + hits) / (end of bin e + time), sums over the bins b to e.

    What is kept from bin b to the end of bin e, or to its next use, brings hits per time; e is when to give
    up (the Gittins index of keeping).  The 1 and the end of e: one imagined node, so that without any
    knowledge the least recently used is worth least.
    hits [C, B]: uses at this age.  time_s [C, B]: time that nodes spent at this age.
    """
    best = np.zeros_like(hits)
    ends_s = STARTS_S + WIDTHS_S
    for first in range(hits.shape[1]):
        gained = 1 + np.cumsum(hits[:, first:], axis=1)
        best[:, first] = (gained / (ends_s[first:] + np.cumsum(time_s[:, first:], axis=1))).max(axis=1)
    return ReuseRates(best)


NOTHING_KNOWN = rates_from(np.zeros((NUM_CLASSES, NUM_BINS)), np.zeros((NUM_CLASSES, NUM_BINS)))
