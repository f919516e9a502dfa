# SPDX-License-Identifier: Apache-2.0
"""Optimal placement: least load of the worst server, ranks apart, few copied bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from .placement_problem import (
    ROUNDING,
    PlacementProblem,
    Shares,
    Table,
    copied_bytes,
    loads,
    loads_of,
    tokens_by_rank,
)
from .slots import Cap, Slots, least_caps


def even_out(problem: PlacementProblem, shares: Shares) -> Shares:
    """Shares of the same adapters on the same servers with the least worst load; copies nothing.

    A linear program: minimise T subject to each server's load <= T, shares of an adapter sum to 1.
    """
    split = [a for a, row in shares.items() if len(row) > 1 and problem.demand[a] > 0]
    if not split:
        return shares
    tokens = tokens_by_rank(problem, shares)
    total, lowest = tokens.sum(axis=1), next(iter(problem.tokens_per_s.values()))
    per_token = np.where(total > 0, loads_of(problem, tokens) / np.maximum(total, 1e-300), 1 / lowest)
    per_token /= max(problem.target_utilisation, 1e-300)
    evened = {adapter: row for adapter, row in shares.items() if adapter not in set(split)}
    fixed = tokens_by_rank(problem, evened).sum(axis=1) * per_token
    pairs = [(place, a, server) for place, a in enumerate(split) for server in sorted(shares[a])]
    rows, adapters, servers = np.array(pairs).T
    columns, every = np.arange(len(pairs)), np.arange(len(fixed))
    load = problem.demand[adapters] * per_token[servers]
    worst = np.full(len(fixed), len(pairs))
    at = np.concatenate([servers, every]), np.concatenate([columns, worst])
    on_server = coo_matrix((np.concatenate([load, -np.ones(len(fixed))]), at))
    of_adapter = coo_matrix((np.ones(len(pairs)), (rows, columns)), shape=(len(split), len(pairs) + 1))
    cost = np.append(np.zeros(len(pairs)), 1.0)
    found = linprog(cost, on_server, -fixed, of_adapter, np.ones(len(split)), bounds=(0, None))
    assert found.status == 0, found.message  # the current shares are a solution
    for (_, adapter, server), share in zip(pairs, found.x[:-1], strict=True):
        if share > ROUNDING:
            evened.setdefault(adapter, {})[server] = float(share)
    return evened


def within_bytes(
    problem: PlacementProblem, shares: Shares, before: Shares, max_copied_bytes: float
) -> Shares:
    """A placement between `before` and `shares` with at most max_copied_bytes
    copied, never worse than `before`.

    Moves adapters from the worst server, most load per byte first; new adapters cost nothing.
    """
    if copied_bytes(problem, shares, before) <= max_copied_bytes:
        return shares
    now = {adapter: _whole(before.get(adapter, row)) for adapter, row in shares.items()}
    cost = {a: problem.nbytes[a] * sum(s not in now[a] for s in row) for a, row in shares.items()}
    leaving = _leaving(problem, shares, now, cost)
    tokens = tokens_by_rank(problem, now)
    loads = loads_of(problem, tokens)
    best, num_best, left = float(loads.max()), 0, max_copied_bytes
    moved: dict[int, None] = {}

    def next_from(queue: list[int]) -> int | None:
        """The best adapter to leave the server now; drops adapters beyond the budget for good."""
        while queue:
            adapter = queue.pop()
            if adapter not in moved and cost[adapter] <= left:
                return adapter
        return None

    while (adapter := next_from(leaving[int(loads.argmax())])) is not None:
        moved[adapter] = None
        left -= cost[adapter]
        change = Counter(_whole(shares[adapter]))
        change.subtract(now[adapter])
        for server, share in change.items():
            column = problem.columns[adapter]
            tokens[server, column] = max(0.0, tokens[server, column] + share * problem.demand[adapter])
            loads[server] = loads_of(problem, tokens[server])
        if loads.max() < best * (1 - ROUNDING):
            best, num_best = float(loads.max()), len(moved)
    return even_out(problem, now | {adapter: shares[adapter] for adapter in list(moved)[:num_best]})


def _leaving(
    problem: PlacementProblem, shares: Shares, now: Shares, cost: Mapping[int, float]
) -> list[list[int]]:
    queues: list[list[tuple[float, int]]] = [[] for _ in problem.servers]
    for adapter, row in now.items():
        for server, share in row.items():
            less = (share - shares[adapter].get(server, 0.0)) * problem.load[adapter]
            if less > ROUNDING * problem.load[adapter]:
                queues[server].append((less / max(cost[adapter], 1e-300), -adapter))
    return [[-adapter for _, adapter in sorted(queue)] for queue in queues]


def _whole(row: dict[int, float]) -> dict[int, float]:
    """Shares that sum to 1: the share of a removed server goes to the rest."""
    total = sum(row.values())
    if total <= 0:
        return {min(row): 1.0}
    return {server: share / total for server, share in row.items()}


_SLACKS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


@dataclass(frozen=True, kw_only=True)
class OptimalPlacement:
    """worst_load: of a server, padded to its highest rank by default.  optimum: least worst load of any
    table.  target_utilisation: mean load without padding, the bound of the linear program.
    copied_bytes: as in `PlacementQuality`.
    """

    table: Table
    worst_load: float
    optimum: float
    target_utilisation: float
    copied_bytes: float


def optimal_placement(
    problem: PlacementProblem, before: Shares, *, slack: float = 0.0, max_copied_bytes: float | None = None
) -> OptimalPlacement:
    """Least worst load first, then fewest bytes copied from `before`.

    slack: accepts loads up to (1 + slack) times the optimum to save copies.  max_copied_bytes: hard limit,
    never worse than staying.

    Without a limit, worst load <= (1 + slack) · optimum, and, with K ranks in demand on S >= K servers,
    optimum <= target utilisation · min(S / (S - K + 1), highest / lowest operating point of them).
    Raises ValueError for a negative slack and for a negative limit.
    """
    if not slack >= 0:
        raise ValueError(f"slack={slack} must be 0 or more; 0.05 lets loads be 5 % above the optimum")
    if max_copied_bytes is not None and not max_copied_bytes >= 0:
        raise ValueError(f"max_copied_bytes={max_copied_bytes} must be 0 or more; leave it out for no bound")
    caps = least_caps(problem)
    optimum = max((cap.load for cap in caps), default=0.0)
    limit = optimum * (1 + slack) * (1 + ROUNDING)
    if _is_whole(problem, before) and (optimum <= 0 or float(loads(problem, before).max()) <= limit):
        shares = before
    else:
        slots = Slots(problem, before)
        own = slots.least_moved(caps)
        shares = slots.fill(own, slack if before else 0.0)
        if max_copied_bytes is not None and copied_bytes(problem, shares, before) > max_copied_bytes:
            ways = own, slots.as_they_are()
            found = [one for way in ways for one in _bounded(slots, way, slack, max_copied_bytes)]
            shares = min(found, key=lambda one: float(loads(problem, one).max()))
    return OptimalPlacement(
        table=problem.table(shares),
        worst_load=float(loads(problem, shares).max()),
        optimum=optimum,
        target_utilisation=problem.target_utilisation,
        copied_bytes=copied_bytes(problem, shares, before),
    )


def _is_whole(problem: PlacementProblem, before: Shares) -> bool:
    return len(before) == len(problem.names) and all(
        abs(sum(row.values()) - 1.0) < ROUNDING for row in before.values()
    )


def _bounded(slots: Slots, caps: Sequence[Cap], slack: float, max_copied_bytes: float) -> Iterator[Shares]:
    """Up to two placements: part of the way without further slack, and the whole
    way at the least affordable slack.
    """
    problem, before = slots.problem, slots.before
    yield within_bytes(problem, slots.fill(caps, slack), before, max_copied_bytes)
    filled = cache(lambda more: slots.fill(caps, slack + more))
    place = bisect_left(
        _SLACKS, True, key=lambda more: copied_bytes(problem, filled(more), before) <= max_copied_bytes
    )
    if place < len(_SLACKS):
        yield even_out(problem, filled(_SLACKS[place]))
