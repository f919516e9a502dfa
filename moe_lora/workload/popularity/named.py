# SPDX-License-Identifier: Apache-2.0
"""Popularity by name, for `--popularity`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_lora.workload.statistics import trace_statistics
from moe_lora.workload.traces.records import need

from .functions import functions_popularity, mapped_popularity
from .popularity import Popularity, from_weights, read_counts, uniform, zipf

_STEEPEST = 60.0


def two_level(adapters: Sequence[str], num_hot: int, hot_share: float) -> Popularity:
    """The first num_hot adapters share hot_share evenly, the rest the remainder."""
    need(1 <= num_hot < len(adapters), "num_hot", num_hot, f"1 to {len(adapters) - 1}, below all adapters")
    need(0 <= hot_share <= 1, "hot_share", hot_share, "a number from 0 to 1")
    num_cold = len(adapters) - num_hot
    weights = [hot_share / num_hot] * num_hot + [(1 - hot_share) / num_cold] * num_cold
    return from_weights(adapters, weights)


def dirichlet(adapters: Sequence[str], concentration: float, seed: int = 0) -> Popularity:
    """A draw from the symmetric Dirichlet distribution; smaller concentration is more uneven."""
    need(0 < concentration < math.inf, "concentration", concentration, "a finite number > 0")
    need(seed >= 0, "seed", seed, "a whole number >= 0")
    drawn = np.random.default_rng(seed).gamma(concentration, size=len(adapters))
    if not drawn.any():
        raise ValueError(f"concentration={concentration} is too small to draw from; choose a larger one")
    return from_weights(adapters, drawn.tolist())


def long_tail(adapters: Sequence[str], num_head: int = 5, head_share: float = 0.7) -> Popularity:
    """P(i-th adapter) ~ 1 / i**s, with s for head_share of the requests on the first num_head adapters.

    Source: LoRAServe section IV and figure 8.
    """
    from scipy.optimize import brentq

    num_adapters = len(adapters)
    need(1 <= num_head < num_adapters, "num_head", num_head, f"1 to {num_adapters - 1}, below all adapters")
    least = num_head / num_adapters
    need(least <= head_share < 1, "head_share", head_share, f"from {least:.4g} (all even) to below 1")
    places = np.arange(1, num_adapters + 1, dtype=np.float64)

    def beyond(s: float) -> float:
        weights = places**-s
        return float(weights[:num_head].sum() / weights.sum()) - head_share

    if beyond(0.0) >= 0.0:
        return uniform(adapters)
    return zipf(adapters, float(brentq(beyond, 0.0, _STEEPEST)))


def gaussian(adapters: Sequence[str], sigma: float) -> Popularity:
    """P(i-th of N adapters): mass of a normal distribution (mean 1/2, deviation sigma) on (i, i + 1) / N.

    Cut to [0, 1]: middle adapters are the most popular.
    Source: FastLibra section 6.9 (Skewed-0.1, Skewed-0.3).
    """
    need(0 < sigma < math.inf, "sigma", sigma, "a finite number > 0 (0.1 and 0.3 are usual)")
    num_adapters = len(adapters)
    need(num_adapters >= 1, "number of adapters", num_adapters, "at least one")
    edges = [math.erf((i / num_adapters - 0.5) / (sigma * math.sqrt(2))) for i in range(num_adapters + 1)]
    return from_weights(adapters, [right - left for left, right in pairwise(edges)])


@dataclass(frozen=True, slots=True)
class Distinct(Popularity):
    """Adapters in turn ("distinct").  Source: FastLibra section 6.9."""

    def draw(self, time_shares: NDArray[np.float64], rng: np.random.Generator) -> list[str]:
        return [self.adapters[index % len(self.adapters)] for index in range(len(time_shares))]


def distinct(adapters: Sequence[str]) -> Distinct:
    even = uniform(adapters)
    return Distinct(even.adapters, even.probabilities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifting(Popularity):
    """P(t) = (1 - t) · probabilities + t · end, with t the passed share of the time."""

    end: tuple[float, ...]

    def at(self, time_share: float) -> Popularity:
        """Raises ValueError outside 0 to 1."""
        need(0 <= time_share <= 1, "time_share", time_share, "a number from 0 (start) to 1 (end)")
        mixed = (1 - time_share) * np.asarray(self.probabilities) + time_share * np.asarray(self.end)
        return from_weights(self.adapters, mixed.tolist(), self.lora_ranks)

    def draw(self, time_shares: NDArray[np.float64], rng: np.random.Generator) -> list[str]:
        """A request at t draws by `end` with probability t, else by `probabilities`."""
        from_end = rng.random(len(time_shares)) < time_shares
        early = self.sample(len(time_shares), rng)
        late = Popularity(self.adapters, self.end).sample(len(time_shares), rng)
        return [late[i] if from_end[i] else early[i] for i in range(len(time_shares))]


LORA_RANKS = (8, 16, 32, 64, 128)
_HALF = 0.5


def _ranks(adapters: Sequence[str]) -> tuple[int, ...]:
    """Non-decreasing, over 8, 16, 32, 64, 128; remainders go to the lowest ranks.

    Source: LoRAServe sections V-E and V-H.
    """
    if len(adapters) < len(LORA_RANKS):
        raise ValueError(
            f"{len(adapters)} adapters for the ranks {LORA_RANKS}; name at least {len(LORA_RANKS)}"
        )
    each, more = divmod(len(adapters), len(LORA_RANKS))
    return tuple(rank for place, rank in enumerate(LORA_RANKS) for _ in range(each + (place < more)))


def _over_ranks(adapters: Sequence[str], shares: Sequence[float], alpha: float = 0.0) -> Popularity:
    if len(shares) != len(LORA_RANKS):
        raise ValueError(f"{len(shares)} shares for the ranks {LORA_RANKS}; give one a rank")
    ranks = _ranks(adapters)
    weights: list[float] = []
    for rank, share in zip(LORA_RANKS, shares, strict=True):
        split = [place**-alpha for place in range(1, ranks.count(rank) + 1)]
        total = math.fsum(split)
        weights += [share * part / total for part in split]
    return from_weights(adapters, weights, ranks)


def exponential_ranks(adapters: Sequence[str], decay: float = 1.0) -> Popularity:
    """Share of the k-th rank ~ exp(-decay · k), the smallest first.

    Decay: not in the paper; 1.0 gives 64, 23, 9, 3 and 1 %.
    """
    need(0 <= decay < math.inf, "decay", decay, "a finite number >= 0 (0 is uniform)")
    return _over_ranks(adapters, [math.exp(-decay * place) for place in range(len(LORA_RANKS))])


def power_ranks(adapters: Sequence[str], alpha: float = 1.0) -> Popularity:
    """Share of the k-th rank ~ k**-alpha, k = 1 the smallest rank; alpha 0: a fifth each.

    The paper has alpha 1/3 … 3 over 100 adapters.
    """
    need(0 <= alpha < math.inf, "alpha", alpha, "a finite number >= 0 (1/3 to 3 are usual)")
    return _over_ranks(adapters, [place**-alpha for place in range(1, len(LORA_RANKS) + 1)])


def shifting_ranks(adapters: Sequence[str]) -> Shifting:
    """Rank 128 has half of the requests, moving linearly to rank 8; the rest share the other half."""
    others = _HALF / (len(LORA_RANKS) - 1)
    shares = [others] * (len(LORA_RANKS) - 1) + [_HALF]
    start, end = _over_ranks(adapters, shares), _over_ranks(adapters, shares[::-1])
    return Shifting(start.adapters, start.probabilities, start.lora_ranks, end=end.probabilities)


def production_ranks(adapters: Sequence[str], *rank_shares: float) -> Popularity:
    """Each rank's share split over its adapters by a power law of alpha = 1.

    rank_shares: only in a figure (15) of the paper, so even by default.
    """
    return _over_ranks(adapters, rank_shares or (1.0,) * len(LORA_RANKS), alpha=1.0)


USUAL_ZIPF = 1.2  # InfiniLoRA section 6.1

# (argument text, argument types, least number of arguments, shape)
_Shape = tuple[str, tuple[type, ...], int, Callable[..., Popularity]]
_SHAPES: dict[str, _Shape] = {
    "uniform": ("", (), 0, uniform),
    "zipf": ("[:S]", (float,), 0, lambda adapters, s=USUAL_ZIPF: zipf(adapters, s)),
    "distinct": ("", (), 0, distinct),
    "gaussian": (":SIGMA", (float,), 1, gaussian),
    "long-tail": ("[:NUM_HEAD,SHARE]", (int, float), 0, long_tail),
    "two-level": (":NUM_HOT,SHARE", (int, float), 2, two_level),
    "dirichlet": (":CONCENTRATION[,SEED]", (float, int), 1, dirichlet),
    "loraserve:uniform": ("", (), 0, lambda adapters: power_ranks(adapters, 0.0)),
    "loraserve:exponential": ("[:DECAY]", (float,), 0, exponential_ranks),
    "loraserve:shifting": ("", (), 0, shifting_ranks),
    "loraserve:power": ("[:ALPHA]", (float,), 0, power_ranks),
    "loraserve:production": ("[:SHARE,SHARE,SHARE,SHARE,SHARE]", (float,) * 5, 0, production_ranks),
}
POPULARITY_NAMES = (
    *(name + rest for name, (rest, *_) in _SHAPES.items()),
    "functions[:SKEWNESS]:FILE",
    "trace[:SKEWNESS]:FILE",
    "FILE",
)


def parse_popularity(text: str, adapters: Sequence[str] = ()) -> Popularity:
    """The named popularity (`POPULARITY_NAMES`), over `adapters`.

    FILE holds counts and names the adapters (`read_counts`).  trace:FILE names adapters too; with `adapters`,
    its names are mapped to them (`map_identities`), as functions always are.  Raises ValueError for an
    unknown name or bad arguments.
    """
    name, arguments = _split(text)
    if name in _SHAPES:
        _need_adapters(text, adapters)
        return _shape(text, name, arguments, adapters)
    if name in ("functions", "trace"):
        skewness, colon, path = arguments.partition(":")
        if not (colon and skewness.isdecimal()):
            skewness, path = "1", arguments
        return _of_identities(text, name, path, adapters, int(skewness))
    if not Path(text).is_file():
        raise ValueError(
            f"popularity {text!r} is neither a file nor known; choose one of {', '.join(POPULARITY_NAMES)}"
        )
    if adapters:
        raise ValueError(f"popularity {text}: the file names the adapters itself; name none beside it")
    return read_counts(text)


def _split(text: str) -> tuple[str, str]:
    known = [name for name in (*_SHAPES, "functions", "trace") if text == name or text.startswith(f"{name}:")]
    name = max(known, key=len, default="")
    return name, text[len(name) + 1 :]


def _need_adapters(text: str, adapters: Sequence[str]) -> None:
    if not adapters:
        raise ValueError(f"popularity {text}: no adapter to choose from; name them, or how many there are")


def _shape(text: str, name: str, arguments: str, adapters: Sequence[str]) -> Popularity:
    rest, types, least, shape = _SHAPES[name]
    values = arguments.split(",") if arguments else []
    if not least <= len(values) <= len(types):
        raise ValueError(f"popularity {text!r}: {len(values)} arguments; write {name}{rest}")
    try:
        parsed = [kind(value) for kind, value in zip(types, values, strict=False)]
    except ValueError:
        raise ValueError(f"popularity {text!r}: {arguments!r} are no numbers; write {name}{rest}") from None
    return shape(adapters, *parsed)


def _of_identities(text: str, name: str, path: str, adapters: Sequence[str], skewness: int) -> Popularity:
    if name == "functions":
        _need_adapters(text, adapters)
        return functions_popularity(path, adapters, skewness)
    found = trace_statistics(path)
    popularity = found.popularity()
    if popularity is None:
        raise ValueError(f"popularity {text}: the trace names no adapter; choose another popularity")
    return mapped_popularity(found.adapter_counts, adapters, skewness) if adapters else popularity
