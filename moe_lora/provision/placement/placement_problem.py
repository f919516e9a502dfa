# SPDX-License-Identifier: Apache-2.0
"""Input and quality of a placement."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from moe_lora.core.records import PlacementQuality

logger = logging.getLogger(__name__)

Server: TypeAlias = Hashable
Table: TypeAlias = dict[str, list[tuple[Server, float]]]
"""Routing table: adapter -> [(server, share phi)]; phi of an adapter sum to 1."""
Placed: TypeAlias = Mapping[str, Iterable[tuple[Server, float]]]
Shares: TypeAlias = dict[int, dict[int, float]]
"""A table by numbers: adapter -> server -> phi > 0 (0 allowed for an only server)."""
ROUNDING = 1e-9
"""Least share or room: float sums differ by less."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementProblem:
    """Checked input, numbered; A adapters, S servers."""

    names: tuple[str, ...]
    """[A], sorted."""
    servers: tuple[Server, ...]
    ranks: NDArray[np.int64]
    """[A]."""
    demand: NDArray[np.float64]
    """[A], tokens/s."""
    tokens_per_s: dict[int, float]
    """Operating point by occurring rank, not increasing."""
    load: NDArray[np.float64]
    """[A], demand / operating point."""
    nbytes: NDArray[np.float64]
    """[A]."""

    @property
    def target_utilisation(self) -> float:
        """Mean load, a bound on the worst (LoRAServe Algorithm 1, lines 7-14)."""
        return math.fsum(self.load) / len(self.servers)

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """[A] Index of each adapter's rank among occurring ranks."""
        return np.searchsorted(np.array(list(self.tokens_per_s)), self.ranks)

    def without_padding(self) -> PlacementProblem:
        """The problem for servers indifferent to rank."""
        highest = max(self.tokens_per_s, default=1)
        return replace(
            self, ranks=np.full_like(self.ranks, highest), demand=self.load, tokens_per_s={highest: 1.0}
        )

    def table(self, shares: Shares) -> Table:
        """The table by names, servers in order."""
        found: Table = {}
        for adapter, name in enumerate(self.names):
            row = shares[adapter]
            total = math.fsum(row.values())
            if len(row) == 1 or total <= 0:
                row, total = {min(row): 1.0}, 1.0
            found[name] = [(self.servers[server], row[server] / total) for server in sorted(row)]
        return found

    def shares(self, table: Placed | None) -> Shares:
        """The table by numbers; skips unknown names."""
        if table is None:
            return {}
        number = {server: index for index, server in enumerate(self.servers)}
        found: Shares = {}
        for adapter, name in enumerate(self.names):
            row = {number[server]: phi for server, phi in table.get(name, ()) if server in number}
            if row:
                found[adapter] = row
        return found


def operating_point(points: Mapping[int, float], lora_rank: int) -> float:
    """Tokens/s of a server with this rank alone.

    1 / (tokens/s) is linear between ranks (Toppings equation 2); outside, the nearest point counts.
    """
    ranks = sorted(points)
    return 1.0 / float(np.interp(lora_rank, ranks, [1.0 / points[rank] for rank in ranks]))


@lru_cache(maxsize=1024)
def _warn_outside(lora_rank: int, least: int, most: int, name: str) -> None:
    logger.warning(
        "adapter %r: rank %d is outside of the operating points, %d to %d; the nearest counts, add a point",
        *(name, lora_rank, least, most),
    )


def placement_problem(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    adapter_bytes: Mapping[str, float] | None = None,
) -> PlacementProblem:
    """Check the input.  Missing demand is 0, missing bytes are proportional to the rank.

    An operating point above a smaller rank's is lowered: measurements are noisy.  Raises ValueError.
    """
    if not servers:
        raise ValueError("servers is empty; name at least one")
    if len(set(servers)) != len(servers):
        raise ValueError(f"servers={list(servers)!r} names one twice; name each once")
    if not operating_points:
        raise ValueError("operating_points is empty; give tokens/s for at least one rank")
    for rank, point in operating_points.items():
        if rank < 1 or not 0 < point < math.inf:
            raise ValueError(
                f"operating_points[{rank}]={point}: ranks are >= 1, tokens/s positive and finite"
            )
    sizes = adapters if adapter_bytes is None else adapter_bytes
    for setting, values in (("demand", demand), ("adapter_bytes", sizes)):
        for name, value in values.items():
            if name not in adapters:
                raise ValueError(
                    f"{setting} names {name!r}, which is not among the adapters; add its rank there"
                )
            if not 0 <= value < math.inf:
                raise ValueError(f"{setting}[{name!r}]={value} must be a finite number >= 0")
    lacking = next((name for name in adapters if name not in sizes), None)
    if lacking is not None:
        raise ValueError(f"adapter_bytes has no {lacking!r}; name every adapter, or give none")
    for name, rank in adapters.items():
        if not isinstance(rank, int | np.integer) or rank < 1:
            raise ValueError(f"adapter {name!r} has rank {rank!r}; a rank is a whole number >= 1")
    names = tuple(sorted(adapters))
    points: dict[int, float] = {}
    least = math.inf
    for rank in sorted({int(adapters[name]) for name in names}):
        least = points[rank] = min(least, operating_point(operating_points, rank))
        if not min(operating_points) <= rank <= max(operating_points):
            name = next(name for name in names if adapters[name] == rank)
            _warn_outside(rank, min(operating_points), max(operating_points), name)
    ranks = np.array([adapters[name] for name in names], dtype=np.int64)
    tokens = np.array([demand.get(name, 0.0) for name in names], dtype=np.float64)
    per_s = np.array([points[int(rank)] for rank in ranks], dtype=np.float64)
    return PlacementProblem(
        names=names,
        servers=tuple(servers),
        ranks=ranks,
        demand=tokens,
        tokens_per_s=points,
        load=tokens / per_s if names else tokens,
        nbytes=np.array([sizes[name] for name in names], dtype=np.float64),
    )


_SHARE_WEIGHT = 1e-3


def least_moves(problem: PlacementProblem, shares: Shares, before: Shares) -> Shares:
    """The placement under the permutation of servers that keeps most bytes (LoRAServe, Algorithm 1, step 5).

    Then adapters equal in rank and demand swap (not in the paper).
    """
    if not before:
        return shares
    num_servers = len(problem.servers)
    kept = np.zeros((num_servers, num_servers))
    for adapter, row in shares.items():
        had = before.get(adapter)
        if had:
            for part, share in row.items():
                for server, phi in had.items():
                    kept[part, server] += problem.nbytes[adapter] * (1 + _SHARE_WEIGHT * min(share, phi))
    # Equal sums must be equal floats: rounding must not prefer a permutation to staying.
    _, server_of = linear_sum_assignment(np.round(kept / max(kept.max(), 1e-300), 9), maximize=True)
    moved = {
        adapter: {int(server_of[part]): share for part, share in row.items()}
        for adapter, row in shares.items()
    }
    return _swap_equal(problem, moved, before)


def _swap_equal(problem: PlacementProblem, shares: Shares, before: Shares) -> Shares:
    equal: dict[tuple[int, float], list[int]] = {}
    for adapter in shares:
        equal.setdefault((int(problem.ranks[adapter]), float(problem.demand[adapter])), []).append(adapter)
    found: Shares = {}
    for adapters in equal.values():
        apart = [
            adapter
            for adapter in sorted(adapters)
            if shares[adapter].keys() != before.get(adapter, {}).keys()
        ]
        found.update((adapter, shares[adapter]) for adapter in adapters)
        rows: dict[frozenset[int], list[int]] = {}
        for adapter in reversed(apart):
            rows.setdefault(frozenset(shares[adapter]), []).append(adapter)
        rest = []
        for adapter in apart:
            wanted = rows.get(frozenset(before.get(adapter, ())))
            if wanted:
                found[adapter] = shares[wanted.pop()]
            else:
                rest.append(adapter)
        left = sorted(adapter for row in rows.values() for adapter in row)
        found.update((adapter, shares[row]) for adapter, row in zip(rest, left, strict=True))
    return found


def copied_bytes(problem: PlacementProblem, shares: Shares, before: Shares) -> float:
    """Bytes on new servers; new adapters do not count."""
    return sum(
        float(problem.nbytes[adapter])
        for adapter, row in shares.items()
        if adapter in before
        for server in row
        if server not in before[adapter]
    )


def placement_quality(
    table: Placed,
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Placed | None = None,
    adapter_bytes: Mapping[str, float] | None = None,
) -> PlacementQuality:
    """Judge a table (arguments as of `place_adapters`).  Raises ValueError for a missing adapter."""
    problem = placement_problem(adapters, servers, operating_points, demand, adapter_bytes)
    shares, before = problem.shares(table), problem.shares(previous)
    lacking = next((name for number, name in enumerate(problem.names) if number not in shares), None)
    if lacking is not None:
        raise ValueError(f"the table has no server for {lacking!r}")
    own, padded = loads(problem.without_padding(), shares), loads(problem, shares)
    held = np.bincount([s for row in shares.values() for s in row], minlength=len(servers))
    copies = [server not in before[a] for a, row in shares.items() if a in before for server in row]
    return PlacementQuality(
        target_utilisation=problem.target_utilisation,
        worst_load=float(own.max()),
        worst_padded_load=float(padded.max()),
        rank_mixing=float(padded.sum() / own.sum()) if own.sum() > 0 else 1.0,
        most_held=int(held.max()),
        mean_held=float(held.mean()),
        copied_bytes=copied_bytes(problem, shares, before),
        num_copies=sum(copies),
    )


def tokens_by_rank(problem: PlacementProblem, shares: Shares) -> NDArray[np.float64]:
    """[S, occurring ranks, rising] tokens/s of each server."""
    tokens = np.zeros((len(problem.servers), max(1, len(problem.tokens_per_s))))
    columns, demand = problem.columns.tolist(), problem.demand.tolist()
    for adapter, row in shares.items():
        for server, share in row.items():
            tokens[server, columns[adapter]] += demand[adapter] * share
    return tokens


def loads_of(problem: PlacementProblem, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., ranks] tokens -> [...] load, padded: all tokens at the highest rank with tokens."""
    if not problem.tokens_per_s:
        return np.zeros(tokens.shape[:-1])
    total = tokens.sum(axis=-1)
    some = tokens > ROUNDING * np.maximum(total, 1e-300)[..., None]
    highest = some.shape[-1] - 1 - np.argmax(some[..., ::-1], axis=-1)
    return total / np.array(list(problem.tokens_per_s.values()))[highest]


def loads(problem: PlacementProblem, shares: Shares) -> NDArray[np.float64]:
    """[S] Each server's load."""
    return loads_of(problem, tokens_by_rank(problem, shares))
