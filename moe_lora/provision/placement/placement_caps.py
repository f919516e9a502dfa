"""How many servers serve up to which rank: the exact optimum where shares may be split at will.

A server whose highest rank is R computes every row padded to R (Punica's BGMV, S-LoRA's kernels by LoRAServe
section III-A5), so at load T it serves T · p(R) tokens/s, p the operating points.  With x(R) servers of each
R, ranks >= r fit if and only if their demand is at most T · sum over R >= r of x(R) p(R), for every r.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 60
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Cap:
    """num_servers that serve ranks up to lora_rank, each at `load` (1: its whole capacity)."""

    lora_rank: int
    num_servers: int
    load: float


def rank_caps(demand: dict[int, float], tokens_per_s: dict[int, float], num_servers: int) -> list[Cap]:
    """The caps whose worst load is least, then, of the servers left, whose worst is least, and so on.

    demand: rank -> tokens/s.  tokens_per_s: rank -> operating point, not increasing with the rank.
    Within each group of equal load, servers are filled exactly.  Ranks fall; none is without servers.
    """
    ranks = sorted((rank for rank in demand if demand[rank] > 0), reverse=True)
    caps: list[Cap] = []
    while ranks and num_servers:
        tokens = [demand[rank] for rank in ranks]
        points = [tokens_per_s[rank] for rank in ranks]
        counts = _least_counts(tokens, points, num_servers)
        load, last = _tightest(tokens, points, counts)
        if last == len(ranks) - 1:
            counts[last] += num_servers - sum(counts)  # a server too many can only be of use here
            load, last = _tightest(tokens, points, counts)
        for place in range(last + 1):
            if counts[place]:
                caps.append(Cap(lora_rank=ranks[place], num_servers=counts[place], load=load))
        num_servers -= sum(counts[: last + 1])
        ranks = ranks[last + 1 :]
    return caps


def _least_counts(tokens: Sequence[float], points: Sequence[float], num_servers: int) -> list[int]:
    """Servers of each rank, at most num_servers, at the least load for which that is possible."""
    low = math.fsum(t / p for t, p in zip(tokens, points, strict=True)) / num_servers
    high = math.fsum(tokens) / (num_servers * points[0])  # all servers take all ranks
    if sum(counts := _needed(tokens, points, low * (1 + _ROUNDING))) <= num_servers:
        return counts
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if sum(_needed(tokens, points, middle)) <= num_servers:
            high = middle
        else:
            low = middle
    return _needed(tokens, points, high * (1 + _ROUNDING))


def _needed(tokens: Sequence[float], points: Sequence[float], load: float) -> list[int]:
    """The fewest servers of each rank that serve all at this load.

    From the highest rank down, as few as needed: one more would serve more tokens at a lower rank.
    """
    counts = []
    room = wanted = 0.0
    for demand, point in zip(tokens, points, strict=True):
        wanted += demand / load
        count = max(0, math.ceil((wanted - room) / point - _ROUNDING))
        room += count * point
        counts.append(count)
    return counts


def _tightest(tokens: Sequence[float], points: Sequence[float], counts: Sequence[int]) -> tuple[float, int]:
    """The load, and the place of the highest rank down to which servers are full at it."""
    found, place = 0.0, 0
    wanted = room = 0.0
    for index, (demand, point, count) in enumerate(zip(tokens, points, counts, strict=True)):
        wanted += demand
        room += count * point
        if wanted / room > found * (1 + _ROUNDING):
            found, place = wanted / room, index
    return found, place
