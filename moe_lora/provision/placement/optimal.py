# SPDX-License-Identifier: Apache-2.0
"""Optimal placement: least load of the worst server, ranks apart, few copied bytes.

First the highest rank (cap) of each server, then shares under the caps.  A server pads every row to its
highest rank R (Punica's BGMV, S-LoRA; LoRAServe section III-A5): T · p(R) tokens/s at load T and operating
points p.  With x(R) servers of R, demand of ranks >= r is at most T · sum over R >= r of x(R) p(R).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog
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

_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Cap:
    """num_servers for ranks up to lora_rank, each at `load` (1: full)."""

    lora_rank: int
    num_servers: int
    load: float


def rank_caps(demand: dict[int, float], tokens_per_s: dict[int, float], num_servers: int) -> list[Cap]:
    """Caps of least worst load; then of least worst load on the remaining servers, and so on.

    demand: rank -> tokens/s.  tokens_per_s: rank -> operating point, not increasing.
    """
    ranks = sorted((rank for rank in demand if demand[rank] > 0), reverse=True)
    caps: list[Cap] = []
    while ranks and num_servers:
        tokens = [demand[rank] for rank in ranks]
        points = [tokens_per_s[rank] for rank in ranks]
        counts = _least_counts(tokens, points, num_servers)
        load, last = _tightest(tokens, points, counts)
        if last == len(ranks) - 1:
            counts[last] += num_servers - sum(counts)
            load, last = _tightest(tokens, points, counts)
        for place in range(last + 1):
            if counts[place]:
                caps.append(Cap(lora_rank=ranks[place], num_servers=counts[place], load=load))
        num_servers -= sum(counts[: last + 1])
        ranks = ranks[last + 1 :]
    return caps


def _least_counts(tokens: Sequence[float], points: Sequence[float], num_servers: int) -> list[int]:
    low = math.fsum(t / p for t, p in zip(tokens, points, strict=True)) / num_servers
    high = math.fsum(tokens) / (num_servers * points[0])
    if sum(counts := _needed(tokens, points, low * (1 + ROUNDING))) <= num_servers:
        return counts
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if sum(_needed(tokens, points, middle)) <= num_servers:
            high = middle
        else:
            low = middle
    return _needed(tokens, points, high * (1 + ROUNDING))


def _needed(tokens: Sequence[float], points: Sequence[float], load: float) -> list[int]:
    counts = []
    room = wanted = 0.0
    for demand, point in zip(tokens, points, strict=True):
        wanted += demand / load
        count = max(0, math.ceil((wanted - room) / point - ROUNDING))
        room += count * point
        counts.append(count)
    return counts


def _tightest(tokens: Sequence[float], points: Sequence[float], counts: Sequence[int]) -> tuple[float, int]:
    """The load, and index of the highest rank at this load."""
    loads = np.cumsum(tokens) / np.cumsum(np.multiply(counts, points))
    place = int(np.argmax(loads >= loads.max() / (1 + ROUNDING)))
    return float(loads[place]), place


class Filling:
    """Fills servers of given caps and room (tokens/s); adapters stay if possible.

    Adapters take room only from servers of their rank or more.
    """

    def __init__(self, slots: Slots, caps: Sequence[int], room: Sequence[float]) -> None:
        self._slots = slots
        self._ranks, self._amounts = slots.ranks, slots.amounts
        self._before = slots.before
        self._caps = caps
        self._room = list(room)
        self._least = ROUNDING * max(room, default=0.0)
        self._held = [0] * len(caps)
        self._shares: Shares = {}

    def fill(self) -> Shares:
        """Every adapter's shares."""
        for rank, adapters in self._slots.by_rank:
            self._place(rank, self._keep(rank, adapters))
        self._place_idle(self._slots.idle)
        return self._shares

    def _keep(self, rank: int, adapters: Iterable[int]) -> list[tuple[float, int]]:
        left = []
        for adapter in adapters:
            rest = amount = self._amounts[adapter]
            for server, share in self._slots.had.get(adapter, ()):
                if self._caps[server] >= rank:
                    rest -= self._put(adapter, server, min(rest, share * amount))
            if rest > ROUNDING * amount:
                left.append((rest, adapter))
        return left

    def _place(self, rank: int, left: list[tuple[float, int]]) -> None:
        allowed = sorted(
            (server for server, cap in enumerate(self._caps) if cap >= rank),
            key=lambda one: (self._caps[one], one),
        )
        allowed = allowed or [max(range(len(self._caps)), key=lambda one: (self._caps[one], -one))]
        place = 0
        for amount, adapter in sorted(left, key=lambda one: (-one[0], one[1])):
            rest = amount
            for server in sorted(self._before.get(adapter, ())):
                if self._caps[server] >= rank:
                    rest -= self._put(adapter, server, rest)
            while rest > ROUNDING * amount and place < len(allowed):
                rest -= self._put(adapter, allowed[place], rest)
                if self._room[allowed[place]] <= self._least:
                    place += 1
            if rest > ROUNDING * amount:
                roomiest = max(allowed, key=lambda one: (self._room[one], -one))
                self._room[roomiest] = max(self._room[roomiest], rest + self._least)
                self._put(adapter, roomiest, rest)

    def _place_idle(self, adapters: Iterable[int]) -> None:
        """Adapters without demand stay, or go to the emptiest server of at least their rank: a later request
        must not raise a rank.
        """
        heaps: dict[int, list[tuple[int, int]]] = {}
        for adapter in adapters:
            least = min(self._ranks[adapter], max(self._caps))
            row = {s: phi for s, phi in self._before.get(adapter, {}).items() if self._caps[s] >= least}
            if row:
                self._hold(adapter, min(row, key=lambda one: (-row[one], one)), 1.0)
                continue
            if least not in heaps:
                heaps[least] = [(self._held[s], s) for s, cap in enumerate(self._caps) if cap >= least]
                heapq.heapify(heaps[least])
            heap = heaps[least]
            while heap[0][0] < self._held[heap[0][1]]:
                heapq.heapreplace(heap, (self._held[heap[0][1]], heap[0][1]))
            server = heap[0][1]
            self._hold(adapter, server, 1.0)
            heapq.heapreplace(heap, (self._held[server], server))

    def _put(self, adapter: int, server: int, amount: float) -> float:
        room = self._room[server]
        amount, enough = min(amount, room), amount <= room
        if amount <= (0.0 if enough else self._least):
            return 0.0
        self._room[server] = room - amount
        self._hold(adapter, server, amount / self._amounts[adapter])
        return amount

    def _hold(self, adapter: int, server: int, share: float) -> None:
        row = self._shares.setdefault(adapter, {})
        self._held[server] += server not in row
        row[server] = row.get(server, 0.0) + share


def least_caps(problem: PlacementProblem) -> list[Cap]:
    """Caps of least worst load."""
    demand = {rank: float(problem.demand[problem.ranks == rank].sum()) for rank in problem.tokens_per_s}
    return rank_caps(demand, problem.tokens_per_s, len(problem.servers))


class Slots:
    """Caps for numbered servers, and shares.

    by_rank: (rank, adapters with demand) by falling rank.  had: previous servers, greatest share first.
    """

    def __init__(self, problem: PlacementProblem, before: Shares) -> None:
        self.problem = problem
        self.before = before
        self.ranks, self.amounts = problem.ranks.tolist(), problem.demand.tolist()
        sizes = np.maximum(problem.nbytes, 1e-300)
        order = np.lexsort((problem.demand / sizes, -problem.ranks)).tolist()
        wanted = [adapter for adapter in order if self.amounts[adapter] > 0]
        self.by_rank = [(rank, list(group)) for rank, group in groupby(wanted, self.ranks.__getitem__)]
        idle = (adapter for adapter in range(len(self.ranks)) if not self.amounts[adapter] > 0)
        self.idle = sorted(idle, key=lambda adapter: -self.ranks[adapter])
        self.had = {
            adapter: sorted(row.items(), key=lambda one: (-one[1], one[0])) for adapter, row in before.items()
        }

    def fill(self, caps: Sequence[Cap], slack: float) -> Shares:
        """Shares with loads up to (1 + slack) times the caps'."""
        per_s = self.problem.tokens_per_s
        room = [cap.load * (1 + slack) * per_s[cap.lora_rank] if cap.load else 0.0 for cap in caps]
        return Filling(self, [cap.lora_rank for cap in caps], room).fill()

    def least_moved(self, caps: Sequence[Cap]) -> list[Cap]:
        """Assign caps to servers.  Bytes of the cap's rank count whole, of lower ranks half, of higher 0."""
        slots = [cap for cap in caps for _ in range(cap.num_servers)]
        slots += [Cap(lora_rank=0, num_servers=1, load=0.0)] * (len(self.problem.servers) - len(slots))
        if not self.before:
            return slots
        problem = self.problem
        had = np.zeros((len(slots), len(problem.tokens_per_s)))
        for adapter, row in self.before.items():
            for server in row:
                had[server, problem.columns[adapter]] += problem.nbytes[adapter]
        at_slot = np.array([cap.lora_rank for cap in slots])
        ranks = np.array(list(problem.tokens_per_s))
        worth = (ranks[None, :] == at_slot[:, None]) + 0.5 * (ranks[None, :] < at_slot[:, None])
        _, slot = linear_sum_assignment(had @ worth.T, maximize=True)
        return [slots[int(one)] for one in slot]

    def as_they_are(self) -> list[Cap]:
        """Caps from present highest ranks, at the least feasible load; the highest cap covers all ranks."""
        problem = self.problem
        ranks = [rank for rank in problem.tokens_per_s if problem.demand[problem.ranks == rank].sum() > 0]
        served = tokens_by_rank(problem, self.before) > 0
        every = np.array(list(problem.tokens_per_s))
        per_s = problem.tokens_per_s
        highest = [int(every[row].max()) if row.any() else ranks[0] for row in served]
        highest[int(np.argmax(highest))] = ranks[-1]
        load = max(
            float(problem.demand[problem.ranks >= rank].sum())
            / sum(per_s[one] for one in highest if one >= rank)
            for rank in ranks
        )
        return [Cap(lora_rank=rank, num_servers=1, load=load) for rank in highest]


def even_out(problem: PlacementProblem, shares: Shares) -> Shares:
    """Shares of the same adapters on the same servers with the least worst load.

    A linear program: minimise T subject to loads <= T.
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
    """A placement between `before` and `shares` with at most max_copied_bytes copied, never worse than
    `before`.

    Moves adapters from the worst server, most load per byte first.
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
        """The best adapter to leave; drops adapters beyond the budget."""
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
    """A removed server's share goes to the rest."""
    total = sum(row.values())
    return {min(row): 1.0} if total <= 0 else {server: share / total for server, share in row.items()}


_SLACKS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


@dataclass(frozen=True, kw_only=True)
class OptimalPlacement:
    """A placement and its quality."""

    table: Table
    worst_load: float
    """Padded to the highest rank by default."""
    optimum: float
    """Least worst load of any table."""
    target_utilisation: float
    """Mean load without padding."""
    copied_bytes: float


def optimal_placement(
    problem: PlacementProblem, before: Shares, *, slack: float = 0.0, max_copied_bytes: float | None = None
) -> OptimalPlacement:
    """Least worst load first, then fewest bytes copied from `before`.

    slack: accepts loads up to (1 + slack) times the optimum.  max_copied_bytes: hard limit, never worse than
    staying.  With K ranks in demand on S >= K servers, optimum <= target utilisation · min(S / (S - K + 1),
    highest / lowest operating point).  Raises ValueError for negative arguments.
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
    """Part of the way, and the whole way at the least affordable slack."""
    problem, before = slots.problem, slots.before
    yield within_bytes(problem, slots.fill(caps, slack), before, max_copied_bytes)
    filled = cache(lambda more: slots.fill(caps, slack + more))
    place = bisect_left(
        _SLACKS, True, key=lambda more: copied_bytes(problem, filled(more), before) <= max_copied_bytes
    )
    if place < len(_SLACKS):
        yield even_out(problem, filled(_SLACKS[place]))
