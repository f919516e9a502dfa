# SPDX-License-Identifier: Apache-2.0
"""LoRAServe's placement (Algorithm 1): servers of an adapter, with shares phi."""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .burst_tolerance import place_by_burst_tolerance
from .optimal import optimal_placement
from .placement_problem import (
    ROUNDING,
    Placed,
    PlacementProblem,
    Server,
    Shares,
    Table,
    least_moves,
    placement_problem,
)


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Algorithm 1's table."""

    table: Table
    target_utilisation: float
    rank_budgets: dict[int, int]
    """Servers per rank, after the repair."""
    overshoot: int
    """Surplus of servers by rounding, before the repair."""


def place_adapters(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Placed | None = None,
) -> Table:
    """{adapter: [(server, phi), ...]} by LoRAServe's Algorithm 1.

    adapters: name -> rank.  servers: in a fixed order.  operating_points: rank -> tokens/s of a server with
    this rank alone within its SLO.  demand: name -> tokens/s, absent = 0.  previous: the last table; few
    adapters move.

    Raises ValueError for no or doubled servers, bad numbers, ranks outside of the operating points, and
    demand for an unknown adapter.
    """
    return place_by_rank(adapters, servers, operating_points, demand, previous).table


def place_by_rank(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Placed | None = None,
) -> RankPlacement:
    """`place_adapters` with intermediate results."""
    problem = placement_problem(adapters, servers, operating_points, demand)
    before = problem.shares(previous)
    budgets, overshoot = rank_budgets(problem)
    shares = least_moves(problem, _Packing(problem).pack(budgets), before)
    return RankPlacement(
        table=problem.table(shares),
        target_utilisation=problem.target_utilisation,
        rank_budgets=budgets,
        overshoot=overshoot,
    )


def rank_budgets(problem: PlacementProblem) -> tuple[dict[int, int], int]:
    """Servers of each rank: round(rank's load / target utilisation), and the error of the sum.

    Our repair, absent in the paper: the rank rounded up most loses a server, the rank rounded down most gains
    one.
    """
    target = problem.target_utilisation
    wanted = {
        rank: math.fsum(problem.load[problem.ranks == rank]) / target if target > 0 else 0.0
        for rank in problem.tokens_per_s
    }
    budgets = {rank: round(servers) for rank, servers in wanted.items()}
    overshoot = sum(budgets.values()) - len(problem.servers)
    if target > 0:
        for _ in range(overshoot):
            # Rounded: equal differences must be equal floats.
            most = max(
                (r for r in budgets if budgets[r]), key=lambda r: (round(budgets[r] - wanted[r], 9), -r)
            )
            budgets[most] -= 1
        for _ in range(-overshoot):
            least = max(budgets, key=lambda r: (round(wanted[r] - budgets[r], 9), r))
            budgets[least] += 1
    return budgets, overshoot if target > 0 else 0


class _Packing:
    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._shares: Shares = {}
        num_servers = len(problem.servers)
        self._load = [0.0] * num_servers
        self._held = [0] * num_servers
        self._max_rank = [0] * num_servers
        self._target = problem.target_utilisation
        self._order = sorted(
            range(len(problem.names)), key=lambda a: (-problem.ranks[a], -problem.load[a], a)
        )

    def pack(self, budgets: Mapping[int, int]) -> Shares:
        left: list[tuple[int, float]] = []
        begin = 0
        members: dict[int, list[int]] = {rank: [] for rank in budgets}
        for adapter in self._order:
            members[int(self._problem.ranks[adapter])].append(adapter)
        for rank in sorted(budgets, reverse=True):
            left += self._pack_rank(members[rank], range(begin, begin + budgets[rank]))
            begin += budgets[rank]
        for adapter, share in left:
            self._place_left(adapter, share)
        return self._shares

    def _pack_rank(self, adapters: Iterable[int], own: range) -> list[tuple[int, float]]:
        """Fractional bin packing to the target; returns remaining shares."""
        left = []
        servers = iter(own)
        server = next(servers, None)
        for adapter in adapters:
            load, share = float(self._problem.load[adapter]), 1.0
            if load <= 0 and own:
                self._put(adapter, min(own, key=lambda one: (self._held[one], one)), 1.0)
                continue
            while server is not None and share > ROUNDING:
                room = (self._target - self._load[server]) / load
                taken = min(share, room)
                if room <= ROUNDING * self._target / load:
                    server = next(servers, None)
                    continue
                self._put(adapter, server, taken)
                share -= taken
            if share > ROUNDING:
                left.append((adapter, share))
        return left

    def _place_left(self, adapter: int, share: float) -> None:
        """Within the target: the highest maximum rank, then the least use.  Else the least use first.

        Source: "the server with highest max rank and least utilization".
        """
        load = float(self._problem.load[adapter]) * share
        servers = range(len(self._load))
        if load <= 0:
            rank = int(self._problem.ranks[adapter])
            fitting = [one for one in servers if self._max_rank[one] >= rank] or list(servers)
            self._put(adapter, min(fitting, key=lambda one: (self._held[one], one)), share)
            return
        limit = self._target * (1 + ROUNDING) - load
        fitting = [one for one in servers if self._load[one] <= limit]
        if fitting:
            chosen = min(fitting, key=lambda s: (-self._max_rank[s], self._load[s], self._held[s], s))
        else:
            chosen = min(servers, key=lambda s: (self._load[s], -self._max_rank[s], self._held[s], s))
        self._put(adapter, chosen, share)

    def _put(self, adapter: int, server: int, share: float) -> None:
        row = self._shares.setdefault(adapter, {})
        self._held[server] += server not in row
        row[server] = row.get(server, 0.0) + share
        load = float(self._problem.load[adapter]) * share
        self._load[server] += load
        if load > 0:
            self._max_rank[server] = max(self._max_rank[server], int(self._problem.ranks[adapter]))


def _by_names(place: Callable[..., Table]) -> Callable[..., Table]:

    @functools.wraps(place)
    def placed(
        adapters: Mapping[str, int],
        servers: Sequence[Server],
        operating_points: Mapping[int, float],
        demand: Mapping[str, float],
        previous: Placed | None = None,
        **options: Any,
    ) -> Table:
        problem = placement_problem(adapters, servers, operating_points, demand)
        return place(problem, problem.shares(previous), **options)

    return placed


@_by_names
def random_placement(problem: PlacementProblem, before: Shares, seed: int = 0) -> Table:
    """Each adapter on a random server; placed adapters stay (LoRAServe, section V-D)."""
    rng = random.Random(seed)
    drawn = [rng.randrange(len(problem.servers)) for _ in problem.names]
    had = {adapter: max(row, key=lambda one: (row[one], -one)) for adapter, row in before.items()}
    return problem.table({adapter: {had.get(adapter, server): 1.0} for adapter, server in enumerate(drawn)})


@_by_names
def contiguous_placement(problem: PlacementProblem, before: Shares) -> Table:
    """By rank, equally many adapters on each server (LoRAServe, section V-D)."""
    order = np.argsort(problem.ranks, kind="stable").tolist()
    num_servers = len(problem.servers)
    return problem.table({a: {place * num_servers // len(order): 1.0} for place, a in enumerate(order)})


def balanced_assignment(loads: Mapping[str, float], num_instances: int) -> dict[str, int]:
    """Adapter -> instance: the heaviest first, to the least load (ties: fewest adapters).

    The heaviest instance carries at most 4/3 - 1/(3 num_instances) times the optimum (Graham 1969, LPT).
    Source: InfiniLoRA, section 6.1.  Raises ValueError for num_instances < 1 and impossible loads.
    """
    if num_instances < 1:
        raise ValueError(f"num_instances={num_instances} must be 1 or more")
    for name, load in loads.items():
        if not 0 <= load < float("inf"):
            raise ValueError(f"the load of adapter {name!r} is {load}; it must be a number >= 0")
    heap = [(0.0, 0, index) for index in range(num_instances)]
    assignment = {}
    for name in sorted(loads, key=lambda name: (-loads[name], name)):
        load, num_adapters, index = heap[0]
        assignment[name] = index
        heapq.heapreplace(heap, (load + loads[name], num_adapters + 1, index))
    return assignment


@_by_names
def disjoint_placement(problem: PlacementProblem, before: Shares) -> Table:
    """Each adapter on one server: heaviest first, on the least loaded (InfiniLoRA, section 6.1).

    Servers then exchange names to save copies.
    """
    loads = dict(zip(problem.names, problem.load.tolist(), strict=True))
    owner = balanced_assignment(loads, len(problem.servers))
    shares = {adapter: {owner[name]: 1.0} for adapter, name in enumerate(problem.names)}
    return problem.table(least_moves(problem, shares, before))


@_by_names
def replicate_everywhere(problem: PlacementProblem, before: Shares) -> Table:
    """Each adapter on all servers, in equal shares (Toppings section 5)."""
    row = dict.fromkeys(range(len(problem.servers)), 1.0)
    return problem.table(dict.fromkeys(range(len(problem.names)), row))


@_by_names
def _optimal(problem: PlacementProblem, before: Shares) -> Table:
    return optimal_placement(problem, before, slack=0.05).table


PLACEMENTS: dict[str, Callable[..., Table]] = {
    "loraserve": place_adapters,
    "optimal": _optimal,
    "random": random_placement,
    "contiguous": contiguous_placement,
    "disjoint": disjoint_placement,
    "everywhere": replicate_everywhere,
    "burst_tolerance": place_by_burst_tolerance,
}
