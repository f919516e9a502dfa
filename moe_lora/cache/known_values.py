"""Values that are asked for again and again within one decision."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moe_lora.policies.caching import Floats

from .ranking import Ranking


class KnownValues:
    """`Ranking.values` at one moment, each row's computed when first asked for.

    To be used for as long as no row gets another node, and where a value of a moment ago will do.
    """

    def __init__(self, ranking: Ranking, now_s: float) -> None:
        self._ranking = ranking
        self._now_s = now_s
        self._known = np.full(len(ranking.columns), np.nan)

    def of(self, rows: NDArray[np.int64]) -> Floats:
        """[N]: values of these rows."""
        unknown = rows[np.isnan(self._known[rows])]
        if unknown.size:
            self._known[unknown] = self._ranking.values(unknown, self._now_s)
        return self._known[rows]
