# SPDX-License-Identifier: Apache-2.0
"""A migration plan in milliseconds: longest requests first (Graham), then a local search.

Replicas above `lower_bound` give their cheapest moves to the replica of earliest end.  Then requests, groups
and pairs move between slowest and fastest.
Source: dLoRA, section 5.2, for the problem; the algorithm is ours.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import combinations

import numpy as np

from .problem import (
    TOLERANCE,
    FloatArray,
    IntArray,
    MigrationPlan,
    MigrationProblem,
    Placement,
    lower_bound,
    undo_harmful,
    undo_needless,
)

LACK_S = 1e12
"""Cost of missing memory, resolved first."""
NUM_SWAPPED, NUM_PAIRED = 32, 12
"""Requests of a replica in exchanges of one, and of up to two."""
NUM_TRIED = 8
"""Best moves by fractional swapping, checked with whole requests."""
NEAR = 0.02
"""Accepted share above the bound."""
MAX_STEPS = 48
DEPTHS = (1.0, 0.75)
"""Fractions of the bound for givers; the next after a bad result."""


def plan_fast(problem: MigrationProblem, *, num_selected: int = 4) -> MigrationPlan:
    """A plan never worse than staying, within memory limits.

    num_selected: K; covers the slowest replica and 2 K - 1 of the fastest.
    """
    placement = Placement(problem)
    bound, before = lower_bound(placement), placement.objective()
    best = placement.plan(before, before, min(bound, before))
    for depth in DEPTHS if len(problem.replicas) <= 2 * num_selected else DEPTHS[:1]:
        if best.objective <= bound * (1 + NEAR):
            break
        if depth != DEPTHS[0]:
            placement = Placement(problem)
        start = placement.costs()
        _spread(placement, bound, depth)
        undo_harmful(placement, start)
        _search(placement, bound * (1 + NEAR), 2 * num_selected)
        objective = placement.objective()
        undo_needless(placement, max(objective, bound * (1 + NEAR)) * (1 + TOLERANCE))
        objective = placement.objective()
        if objective < best.objective * (1 - TOLERANCE):
            best = placement.plan(objective, before, min(bound, objective))
    return best


def _search(placement: Placement, near_s: float, num_chosen: int) -> None:
    costs = placement.costs()
    for _ in range(MAX_STEPS):
        slowest = max(range(len(costs)), key=costs.__getitem__, default=-1)
        if slowest < 0 or costs[slowest] <= (0.0, near_s):
            return
        fastest = nsmallest(num_chosen - 1, range(len(costs)), key=costs.__getitem__)
        chosen = [slowest, *(j for j in fastest if j != slowest)]
        if not Search(placement, chosen).step():
            return
        for j in chosen:
            costs[j] = placement.cost(j)


def _spread(placement: Placement, bound_s: float, depth: float) -> None:
    fleet = _Fleet(placement)
    given: list[int] = []
    for j, cost in enumerate(placement.costs()):
        if cost > (0.0, bound_s):
            given += fleet.give(j, bound_s * depth)
    for i in sorted(given, key=lambda i: -placement.exec_s[i]):
        target = fleet.best(i)
        if target != placement.replica_of[i]:
            placement.move(i, target)


class _Fleet:
    """seconds: [replicas] without swapping.  room: [replicas] device bytes left; below 0: swapped."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        replicas = placement.problem.replicas
        self._seconds = np.array(placement.seconds)
        self._room = np.array([one.device_bytes for one in replicas]) - np.array(placement.used)
        self._host = np.array([one.host_bytes for one in replicas])
        self._counts = [dict(one) for one in placement.counts]
        self._holders = placement.holders()
        self._where: defaultdict[int, list[int]] = defaultdict(list)
        for j, counts in enumerate(self._counts):
            for k in counts:
                self._where[k].append(j)
        self._absent: dict[int, tuple[FloatArray, FloatArray]] = {}
        self._swap = placement.problem.swap

    def give(self, j: int, most_s: float) -> list[int]:
        """Take the cheapest requests until the replica's time is at most most_s."""
        placement, found = self._placement, []
        lost = (placement.moved_s - placement.exec_s) / np.maximum(placement.exec_s, TOLERANCE)
        members = sorted(placement.members[j])
        by_loss = sorted(members, key=lambda i: (float(lost[i]), -float(placement.exec_s[i])))
        for i in by_loss:
            swapped = max(0.0, -self._room[j])
            if self._seconds[j] + self._swap.seconds(swapped) <= most_s and swapped <= self._host[j]:
                break
            k = int(placement.adapter[i])
            self._counts[j][k] -= 1
            self._seconds[j] -= placement.exec_s[i]
            self._room[j] += placement.num_bytes[i]
            if not self._counts[j][k]:
                del self._counts[j][k]
                self._seconds[j] -= placement.adapter_at(j, k)
                self._room[j] += placement.adapter_bytes[k]
            found.append(i)
        return found

    def best(self, i: int) -> int:
        """The replica where the request ends first, home on ties; counts it there."""
        placement, home = self._placement, int(self._placement.home[i])
        k, num_bytes = int(placement.adapter[i]), placement.num_bytes[i]
        more_s, more_bytes = self._of_adapter(k)
        room = self._room - more_bytes
        room -= num_bytes
        total = self._seconds + more_s
        if room.min() < 0:
            over = np.maximum(-room, 0.0)
            total += self._swap.seconds(over)
            total[over > self._host] = math.inf
        target = int(total.argmin())
        if total[home] + placement.exec_s[i] <= total[target] + placement.moved_s[i]:
            target = home
        self._seconds[target] += more_s[target] + (
            placement.exec_s[i] if target == home else placement.moved_s[i]
        )
        self._room[target] = room[target]
        more_s[target] = more_bytes[target] = 0.0
        return target

    def _of_adapter(self, k: int) -> tuple[FloatArray, FloatArray]:
        if k not in self._absent:
            placement, num = self._placement, len(self._counts)
            is_adapter = k < len(placement.problem.adapters)
            seconds = np.full(num, placement.load_s[k] + placement.problem.affinity_s * is_adapter)
            num_bytes = np.full(num, placement.adapter_bytes[k])
            seconds[self._holders[k]] = placement.problem.affinity_s
            there = [j for j in self._where[k] if k in self._counts[j]]
            seconds[there] = num_bytes[there] = 0.0
            self._absent[k] = seconds, num_bytes
        return self._absent[k]


class Search:
    """Moves requests between the chosen replicas.

    Legend: m position among the chosen; c a candidate: requests of one adapter that move together.  seconds:
    [m] without swapping.  used: [m] bytes.  counts: [adapters + 1, m].
    """

    def __init__(self, placement: Placement, chosen: Sequence[int]) -> None:
        self.placement = placement
        self.chosen = np.array(chosen, dtype=np.int64)
        self.every = np.arange(len(chosen))
        replicas = [placement.problem.replicas[j] for j in chosen]
        self.device = np.array([one.device_bytes for one in replicas])
        self.host = np.array([one.host_bytes for one in replicas])
        self.adapter_s = np.array([placement.adapter_s(j) for j in chosen]).T
        self.seconds = np.zeros(len(chosen))
        self.used = np.zeros(len(chosen))
        self.counts = np.zeros(self.adapter_s.shape, dtype=np.int64)
        for m in range(len(chosen)):
            self.refresh(m)

    def members(self, m: int) -> IntArray:
        return np.array(sorted(self.placement.members[self.chosen[m]]), dtype=np.int64)

    def refresh(self, m: int) -> None:
        """Recount the replica's requests."""
        placement, members = self.placement, self.members(m)
        counts = np.bincount(placement.adapter[members], minlength=len(placement.adapter_bytes))
        self.counts[:, m] = counts
        self.seconds[m] = self.request_s(members, m).sum() + self.adapter_s[counts > 0, m].sum()
        self.used[m] = placement.num_bytes[members].sum() + placement.adapter_bytes[counts > 0].sum()

    def request_s(self, requests: IntArray, m: IntArray | int) -> FloatArray:
        """Seconds of each request; broadcasts."""
        at_home = self.placement.home[requests] == self.chosen[m]
        return np.where(at_home, self.placement.exec_s[requests], self.placement.moved_s[requests])

    def total(self, seconds: FloatArray, used: FloatArray, m: IntArray | int) -> FloatArray:
        """Seconds with swapping, by the byte; missing memory outweighs all."""
        over = np.maximum(used - self.device[m], 0.0)
        lacks = np.maximum(over - self.host[m], 0.0)
        return seconds + self.placement.problem.swap.seconds(over) + (lacks > 0) * LACK_S * (1.0 + lacks)

    def step(self) -> bool:
        """Speed up the slowest replica; True on success."""
        totals = self.total(self.seconds, self.used, self.every)
        slowest = int(totals.argmax())
        if len(self.chosen) < 2 or not self.placement.members[self.chosen[slowest]]:
            return False
        limit = float(totals[slowest]) * (1 - TOLERANCE)
        return self._move(slowest, limit) or self._swap(slowest, limit) or self._exchange(slowest, limit)

    def _move(self, m: int, limit: float) -> bool:
        placement, members = self.placement, self.members(m)
        members = members[np.argsort((placement.moved_s - placement.exec_s)[members], kind="stable")]
        there_s = self.request_s(members[:, None], self.every)
        groups: list[IntArray] = []
        parts: list[tuple[FloatArray, FloatArray]] = []
        for k in np.unique(placement.adapter[members]):
            own = np.flatnonzero(placement.adapter[members] == k)
            sizes = placement.num_bytes[members[own]]
            groups += [members[own[: num + 1]] for num in range(len(own))] + [members[[i]] for i in own[1:]]
            parts.append((np.cumsum(there_s[own], axis=0), np.cumsum(sizes)))
            parts.append((there_s[own[1:]], sizes[1:]))
        coming_s, num_bytes = (np.concatenate(part) for part in zip(*parts, strict=True))
        adapter = placement.adapter[[group[0] for group in groups]]
        last = np.array([len(group) for group in groups]) == self.counts[adapter, m]
        new = self.counts[adapter] == 0
        left = self.total(
            self.seconds[m] - coming_s[:, m] - last * self.adapter_s[adapter, m],
            self.used[m] - num_bytes - last * placement.adapter_bytes[adapter],
            m,
        )
        there = self.total(
            self.seconds + coming_s + new * self.adapter_s[adapter],
            self.used + num_bytes[:, None] + new * placement.adapter_bytes[adapter][:, None],
            self.every,
        )
        value = np.maximum(left[:, None], there)
        value[:, m] = np.inf
        for at in np.argsort(value, axis=None, kind="stable")[:NUM_TRIED].tolist():
            c, target = divmod(at, len(self.chosen))
            if not value[c, target] < limit:
                return False
            if self._try(m, target, groups[c], ()):
                return True
        return False

    def _swap(self, m: int, limit: float) -> bool:
        mine, found = self._sample(m, NUM_SWAPPED), []
        for target in self.every[self.every != m].tolist():
            theirs = self._sample(target, NUM_SWAPPED)
            if len(theirs):
                value = np.maximum(
                    self._after(m, mine[:, None], theirs), self._after(target, theirs, mine[:, None])
                )
                i, other = divmod(int(value.argmin()), len(theirs))
                found.append((float(value[i, other]), target, int(mine[i]), int(theirs[other])))
        for value_s, target, goes, comes in sorted(found)[:NUM_TRIED]:
            if not value_s < limit:
                return False
            if self._try(m, target, [goes], [comes]):
                return True
        return False

    def _exchange(self, m: int, limit: float) -> bool:
        found: list[tuple[float, int, list[int], list[int]]] = []
        mine, goes = self._pairs(m)
        num_bytes = self.placement.num_bytes
        for target in self.every[self.every != m].tolist():
            theirs, comes = self._pairs(target)
            more = comes @ num_bytes[theirs] - (goes @ num_bytes[mine])[:, None]
            more_s = comes @ self.request_s(theirs, m) - (goes @ self.request_s(mine, m))[:, None]
            there_s = (goes @ self.request_s(mine, target))[:, None] - comes @ self.request_s(theirs, target)
            value = np.maximum(
                self.total(self.seconds[m] + more_s, self.used[m] + more, m),
                self.total(self.seconds[target] + there_s, self.used[target] - more, target),
            )
            below = np.flatnonzero(value < limit)
            for at in below[np.argsort(value.flat[below], kind="stable")[:NUM_TRIED]].tolist():
                i, j = divmod(at, len(comes))
                here, there = mine[goes[i] > 0].tolist(), theirs[comes[j] > 0].tolist()
                found.append((float(value[i, j]), target, here, there))
        best = sorted(found)[: 2 * NUM_TRIED]
        return any(self._try(m, target, here, there) for _, target, here, there in best)

    def _pairs(self, m: int) -> tuple[IntArray, FloatArray]:
        """Some of the replica's requests; 1.0 for members: [sets of 0 to 2, requests]."""
        some = self._sample(m, NUM_PAIRED)
        one = np.eye(len(some))
        return some, np.array([0.0 * some, *one, *(a + b for a, b in combinations(one, 2))])

    def _sample(self, m: int, most: int) -> IntArray:
        """Above `most`, a sample over lengths."""
        members = self.members(m)
        if len(members) <= most:
            return members
        by_time = members[np.argsort(self.placement.exec_s[members], kind="stable")]
        return by_time[np.linspace(0, len(members) - 1, most).astype(np.int64)]

    def _after(self, m: int, goes: IntArray, comes: IntArray) -> FloatArray:
        placement = self.placement
        old, new = placement.adapter[goes], placement.adapter[comes]
        last = (self.counts[old, m] == 1) & (old != new)
        first = (self.counts[new, m] == 0) & (old != new)
        seconds = self.request_s(comes, m) - self.request_s(goes, m)
        seconds = seconds + first * self.adapter_s[new, m] - last * self.adapter_s[old, m]
        used = placement.num_bytes[comes] - placement.num_bytes[goes]
        used = used + first * placement.adapter_bytes[new] - last * placement.adapter_bytes[old]
        return self.total(self.seconds[m] + seconds, self.used[m] + used, m)

    def _try(self, m: int, target: int, goes: Iterable[int], comes: Iterable[int]) -> bool:
        here, there = self.chosen[m], self.chosen[target]
        before = [self.placement.cost(j) for j in (here, there)]
        for i in goes:
            self.placement.move(i, there)
        for i in comes:
            self.placement.move(i, here)
        after = [self.placement.cost(j) for j in (here, there)]
        lacking, seconds = max(before)
        if max(after) < (lacking, seconds * (1 - TOLERANCE)) and all(
            new[0] <= old[0] for new, old in zip(after, before, strict=True)
        ):
            self.refresh(m)
            self.refresh(target)
            return True
        for i in goes:
            self.placement.move(i, here)
        for i in comes:
            self.placement.move(i, there)
        return False
