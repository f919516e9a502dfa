"""LoRAServe's popularities, which are over ranks: 8, 16, 32, 64, 128, each with its own adapters.

Every shape splits the adapters over the five ranks in order, as evenly as may be (25 adapters: 5 a rank), and
a rank's share evenly over its adapters unless it says otherwise.
Source: LoRAServe sections V-E and V-H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .popularity import Popularity, from_weights
from .shapes import Shifting

LORA_RANKS = (8, 16, 32, 64, 128)
_HALF = 0.5


def _ranks(adapters: Sequence[str]) -> tuple[int, ...]:
    """Rank of each adapter, non-decreasing; the lowest ranks get one more where 5 does not divide."""
    if len(adapters) < len(LORA_RANKS):
        raise ValueError(
            f"{len(adapters)} adapters for the ranks {LORA_RANKS}; name at least {len(LORA_RANKS)}"
        )
    each, more = divmod(len(adapters), len(LORA_RANKS))
    return tuple(rank for place, rank in enumerate(LORA_RANKS) for _ in range(each + (place < more)))


def _over_ranks(adapters: Sequence[str], shares: Sequence[float], alpha: float = 0.0) -> Popularity:
    """Each rank's share, split over its adapters in proportion to 1 / place**alpha."""
    if len(shares) != len(LORA_RANKS):
        raise ValueError(f"{len(shares)} shares for the ranks {LORA_RANKS}; give one a rank")
    ranks = _ranks(adapters)
    weights: list[float] = []
    for rank, share in zip(LORA_RANKS, shares, strict=True):
        split = [place**-alpha for place in range(1, ranks.count(rank) + 1)]
        total = math.fsum(split)
        weights += [share * part / total for part in split]
    return from_weights(adapters, weights, ranks)


def uniform_ranks(adapters: Sequence[str]) -> Popularity:
    """Every rank a fifth."""
    return _over_ranks(adapters, [1.0] * len(LORA_RANKS))


def exponential_ranks(adapters: Sequence[str], decay: float = 1.0) -> Popularity:
    """Share of the k-th rank ~ exp(-decay · k), the smallest rank first.

    The paper does not state the decay; 1.0 gives 64, 23, 9, 3 and 1 %.
    """
    if not (math.isfinite(decay) and decay >= 0):
        raise ValueError(f"decay={decay} is not allowed; choose a finite number >= 0 (0 is uniform)")
    return _over_ranks(adapters, [math.exp(-decay * place) for place in range(len(LORA_RANKS))])


def power_ranks(adapters: Sequence[str], alpha: float = 1.0) -> Popularity:
    """Share of the k-th rank ~ k**-alpha, k = 1 the smallest rank.

    alpha was 1/3 … 3 over 100 adapters. That places are ranks, not single adapters, follows from the largest
    rank's share: 16 % at alpha = 1/3, as the paper says (14 % over single adapters).
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha={alpha} is not allowed; choose a finite number >= 0 (1/3 to 3 are usual)")
    return _over_ranks(adapters, [place**-alpha for place in range(1, len(LORA_RANKS) + 1)])


def shifting_ranks(adapters: Sequence[str]) -> Shifting:
    """Rank 128 has half of the requests, moving linearly to rank 8 having half; the others share the rest."""
    others = _HALF / (len(LORA_RANKS) - 1)
    start = [others] * (len(LORA_RANKS) - 1) + [_HALF]
    return Shifting(_over_ranks(adapters, start), _over_ranks(adapters, start[::-1]))


def production_ranks(adapters: Sequence[str], *rank_shares: float) -> Popularity:
    """Each rank's share split over its adapters by a power law of alpha = 1 (50, 100 or 200 adapters in all).

    rank_shares: one a rank; the paper shows them in a figure only (15), so even where not given.
    """
    return _over_ranks(adapters, rank_shares or (1.0,) * len(LORA_RANKS), alpha=1.0)
