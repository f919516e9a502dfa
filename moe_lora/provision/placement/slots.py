# SPDX-License-Identifier: Apache-2.0
"""Highest rank of each server (exact optimum for divisible shares), and shares under these caps.

A server of highest rank R pads every row to R (Punica's BGMV, S-LoRA; LoRAServe section III-A5): at load T
it serves T · p(R) tokens/s, p the operating points.  With x(R) servers of each R, ranks >= r fit if and only
if their demand is at most T · sum over R >= r of x(R) p(R), for every r.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from scipy.optimize import linear_sum_assignment

from .placement_problem import ROUNDING, PlacementProblem, Shares, tokens_by_rank

_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Cap:
    """num_servers for ranks up to lora_rank, each at `load` (1: its whole capacity)."""

    lora_rank: int
    num_servers: int
    load: float


def rank_caps(demand: dict[int, float], tokens_per_s: dict[int, float], num_servers: int) -> list[Cap]:
    """Caps of least worst load; then, of the remaining servers, least worst load, and so on.

    demand: rank -> tokens/s.  tokens_per_s: rank -> operating point, not increasing with the rank.
    Fills servers of equal load exactly.  Ranks fall; each has servers.
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
    """The load, and the index of the highest rank with full servers at this load."""
    loads = np.cumsum(tokens) / np.cumsum(np.multiply(counts, points))
    place = int(np.argmax(loads >= loads.max() / (1 + ROUNDING)))
    return float(loads[place]), place


class Filling:
    """Fills servers of given highest rank (caps) and room (tokens/s); adapters stay in place if possible.

    Ranks fall: an adapter takes room only from servers of its rank or more.
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
        """Adapters without demand stay, or go to the server of fewest: of their rank or more, as a later
        request would raise the rank of a lower server.
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
    """Caps for numbered servers, and the shares under the caps.

    by_rank: (rank, adapters with demand) by falling rank.  idle: adapters without demand.  had: previous
    servers by adapter, greatest share first.
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
        """Shares under these caps, one per server, with loads up to (1 + slack) times the caps' loads."""
        per_s = self.problem.tokens_per_s
        room = [cap.load * (1 + slack) * per_s[cap.lora_rank] if cap.load else 0.0 for cap in caps]
        return Filling(self, [cap.lora_rank for cap in caps], room).fill()

    def least_moved(self, caps: Sequence[Cap]) -> list[Cap]:
        """Assign caps to servers.  Bytes of the cap's rank count whole, of lower ranks half, of higher ranks
        0.
        """
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
        """Caps from the highest rank of each server now (idle: the lowest in demand), at the least feasible
        load.  The highest server covers the highest rank in demand.
        """
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
