"""A migration plan in milliseconds: the problem of `migration` on few replicas, relaxed, rounded and mended.

Each round takes the K replicas that need longest and the K that need least.  A linear program lets parts of
requests go; each request goes to the replica that has most of it.  The paper ends here, without limits of
memory.  Then (ours) what does not fit goes back, and single requests, groups of one adapter and pairs move as
long as the slowest replica gets faster.
Source: dLoRA, section 5.2, "Selective migration with constraints relaxation".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .migration import (
    TOLERANCE,
    FloatArray,
    IntArray,
    MigrationPlan,
    MigrationProblem,
    Placement,
    undo_needless,
)

if TYPE_CHECKING:
    from scipy.sparse import coo_matrix

LACK_S = 1e12
"""What memory that lacks counts as, so that it goes first."""
NUM_SWAPPED, NUM_PAIRED = 32, 12
"""Requests of a replica of which one, and of which up to two, are exchanged."""
NUM_TRIED = 8
"""Of the moves that look best by fractions of swapped requests, so many are looked at in whole ones."""


def plan_fast(
    problem: MigrationProblem, *, num_selected: int = 4, max_rounds: int = 4, relaxed: bool | None = None
) -> MigrationPlan:
    """A plan that is never worse than to leave things as they are, and fills no memory beyond its limit.

    num_selected: K.  max_rounds: selections of K; fewer where one gains nothing or is of all.  relaxed: True:
    begin with the linear program; False: only requests, groups and pairs move; None: with it, and where K
    selects all replicas without it too, which may end better.
    """
    ways = [relaxed is not False]
    if relaxed is None and len(problem.replicas) <= 2 * num_selected:
        ways.append(False)
    plans = [_plan(problem, num_selected, max_rounds, relaxed=way) for way in ways]
    return min(plans, key=lambda plan: plan.objective)


def _plan(problem: MigrationProblem, num_selected: int, max_rounds: int, *, relaxed: bool) -> MigrationPlan:
    placement = Placement(problem)
    before = placement.objective()
    for _ in range(max_rounds):
        slowest, fastest = _selected(placement, num_selected)
        search = _Search(placement, [*slowest, *fastest])
        moved = relaxed and _relax(search, len(slowest))
        while search.step():
            moved = True
        if not moved or len(search.every) == len(problem.replicas):
            break
    undo_needless(placement, placement.objective() * (1 + TOLERANCE))
    return placement.plan(placement.objective(), before)


def _selected(placement: Placement, num_selected: int) -> tuple[list[int], list[int]]:
    """The K replicas that need longest (first those that lack memory), the K that need least."""
    by_cost = sorted(range(len(placement.members)), key=placement.cost)
    num = min(num_selected, len(by_cost) // 2)
    rest = by_cost[: len(by_cost) - num]
    return by_cost[len(rest) :][::-1], rest if len(rest) <= num + 1 else rest[:num]


class _Search:
    """Requests on the chosen replicas, which move as long as the slowest of these gets faster.

    Legend: m position among the chosen; c a candidate: requests of one adapter that would go together.
    seconds: [m] without swapping.  used, adapters_used: [m] bytes.  counts: [adapters + 1, m] requests.
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
        """Count the replica's requests anew."""
        placement, members = self.placement, self.members(m)
        counts = np.bincount(placement.adapter[members], minlength=len(placement.adapter_bytes))
        self.counts[:, m] = counts
        self.seconds[m] = self.request_s(members, m).sum() + self.adapter_s[counts > 0, m].sum()
        self.used[m] = placement.num_bytes[members].sum() + placement.adapter_bytes[counts > 0].sum()

    def request_s(self, requests: IntArray, m: IntArray | int) -> FloatArray:
        """Seconds of each there; both may have any shapes that go together."""
        at_home = self.placement.home[requests] == self.chosen[m]
        return np.where(at_home, self.placement.exec_s[requests], self.placement.moved_s[requests])

    def total(self, seconds: FloatArray, used: FloatArray, m: IntArray | int) -> FloatArray:
        """Seconds with swapping, by the byte; memory that lacks outweighs them all."""
        over = np.maximum(used - self.device[m], 0.0)
        lacks = np.maximum(over - self.host[m], 0.0)
        return seconds + over / self.placement.problem.swap_bytes_per_s + (lacks > 0) * LACK_S * (1.0 + lacks)

    def step(self) -> bool:
        """Make the slowest replica faster; whether that went."""
        totals = self.total(self.seconds, self.used, self.every)
        slowest = int(totals.argmax())
        if len(self.chosen) < 2 or not self.placement.members[self.chosen[slowest]]:
            return False
        limit = float(totals[slowest]) * (1 - TOLERANCE)
        return self._move(slowest, limit) or self._swap(slowest, limit) or self._exchange(slowest, limit)

    def _move(self, m: int, limit: float) -> bool:
        """One request goes elsewhere, or several of one adapter, those first whose move costs least."""
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
        """One request goes elsewhere, another comes for it."""
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
        """Up to two requests go elsewhere, up to two others come; adapters count only when it is tried."""
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
        """A few of the replica's requests; 1.0 where one is in a set: [sets of 0 to 2, requests]."""
        some = self._sample(m, NUM_PAIRED)
        one = np.eye(len(some))
        return some, np.array([0.0 * some, *one, *(a + b for a, b in combinations(one, 2))])

    def _sample(self, m: int, most: int) -> IntArray:
        """The replica's requests; of more than that, some of each length."""
        members = self.members(m)
        if len(members) <= most:
            return members
        by_time = members[np.argsort(self.placement.exec_s[members], kind="stable")]
        return by_time[np.linspace(0, len(members) - 1, most).astype(np.int64)]

    def _after(self, m: int, goes: IntArray, comes: IntArray) -> FloatArray:
        """The total of a replica when one request has gone and another come."""
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
        """Move them, unless the slower of the two replicas gets no faster or more memory lacks than did."""
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


# The linear program over the chosen replicas.


def _relax(search: _Search, num_slowest: int) -> bool:
    """Let parts of requests go from the slowest to any of the chosen, then whole ones; whether any moved."""
    if len(search.every) < 2:
        return False
    placement, chosen = search.placement, search.chosen.tolist()
    before = {i: j for j in chosen[:num_slowest] for i in placement.members[j]}
    worst = max(map(placement.cost, chosen))
    lacking = {j: placement.cost(j)[0] for j in chosen}
    relaxed = _Relaxed(search, num_slowest)
    if not relaxed.groups:
        return False
    for group, parts in zip(relaxed.groups, relaxed.solve(), strict=True):
        for i, m in zip(group, _rounded(parts), strict=True):
            placement.move(int(i), chosen[m])
    moved = {i for i, j in before.items() if placement.replica_of[i] != j}
    too_full = [j for j in chosen if placement.cost(j)[0] > lacking[j]]
    while too_full:
        j = too_full.pop()
        for i in sorted(moved & placement.members[j], key=lambda i: placement.problem.requests[i].num_bytes):
            if placement.cost(j)[0] > lacking[j]:
                placement.move(i, before[i])
                moved.remove(i)
                too_full.append(before[i])
    if max(map(placement.cost, chosen)) >= worst:
        for i in moved:
            placement.move(i, before[i])
        moved.clear()
    for m in search.every.tolist():
        search.refresh(m)
    return bool(moved)


def _rounded(parts: FloatArray) -> list[int]:
    """Where each of a group's requests goes: whole parts as they are, of the rest the largest first."""
    num = round(float(parts.sum()))
    whole = np.floor(parts + 1e-6).astype(np.int64)
    rest = np.argsort(whole - parts, kind="stable")[: num - int(whole.sum())]
    whole[rest] += 1
    return np.repeat(np.arange(len(parts)), whole).tolist()


class _Relaxed:
    """The program: columns T, then requests of each group on each replica, y of each adapter there, bytes
    swapped of each replica.

    groups: requests of the slowest replicas that are alike: of one adapter, one home and place, all waiting
    or none; they share a row of x, with their mean seconds and bytes.
    """

    def __init__(self, search: _Search, num_slowest: int) -> None:
        self._search = search
        self._fixed = search.every >= num_slowest  # whose own requests stay
        placement = search.placement
        groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for m in range(num_slowest):
            members = search.members(m)
            for i in members[
                np.argsort((placement.exec_s - placement.moved_s)[members], kind="stable")
            ].tolist():
                waits = placement.moved_s[i] == placement.exec_s[i]
                groups[int(placement.adapter[i]), m, int(placement.home[i]), int(waits)].append(i)
        self.groups = [np.array(group, dtype=np.int64) for group in groups.values()]
        self._of_group = [k for k, *_ in groups]
        self._adapters = sorted({k for k in self._of_group if k < len(placement.adapter_bytes) - 1})

    def solve(self) -> FloatArray:
        """[groups, replicas] requests of each group there."""
        from scipy.optimize import linprog  # a third of a second, which a front end without moves saves
        from scipy.sparse import vstack

        search, placement = self._search, self._search.placement
        num, problem = len(search.every), placement.problem
        x = 1 + np.arange(len(self.groups) * num).reshape(-1, num)
        y = 1 + x.size + np.arange(len(self._adapters) * num).reshape(-1, num)
        swapped = 1 + x.size + y.size + search.every
        sizes = np.array([len(group) for group in self.groups], dtype=np.float64)
        seconds = np.array(
            [search.request_s(one[:, None], search.every).mean(axis=0) for one in self.groups]
        ).reshape(x.shape)
        num_bytes = np.array([placement.num_bytes[group].mean() for group in self.groups])
        absent = ~self._fixed | (search.counts[self._adapters] == 0)  # else the adapter is there in any case
        unit = max(float(seconds.max(initial=0.0)), TOLERANCE)
        page = max(float(num_bytes.max(initial=0.0)), 1.0)
        time, memory, matching = _Rows(), _Rows(), _Rows()
        time.add(search.every, x, seconds / unit)
        time.add(search.every, y, absent * search.adapter_s[self._adapters] / unit)
        time.add(search.every, swapped, page / problem.swap_bytes_per_s / unit)
        time.add(search.every, np.zeros(num, dtype=np.int64), -1.0)
        memory.add(search.every, x, num_bytes[:, None] / page)
        memory.add(search.every, y, absent * placement.adapter_bytes[self._adapters][:, None] / page)
        memory.add(search.every, swapped, -1.0)
        row = 0
        for g, k in enumerate(self._of_group):
            if k in self._adapters:
                needed = np.flatnonzero(absent[self._adapters.index(k)])
                rows = row + np.arange(len(needed))
                matching.add(rows, x[g, needed], 1.0 / sizes[g])
                matching.add(rows, y[self._adapters.index(k), needed], -1.0)
                row += len(needed)
        above = np.concatenate(
            [
                -(self._fixed * search.seconds) / unit,
                (search.device - self._fixed * search.used) / page,
                np.zeros(row),
            ]
        )
        existence = _Rows()
        existence.add(np.arange(len(x))[:, None], x, 1.0)
        width = 1 + x.size + y.size + num
        found = linprog(
            np.eye(1, width)[0],
            vstack([time.matrix(num, width), memory.matrix(num, width), matching.matrix(row, width)]),
            above,
            existence.matrix(len(x), width),
            sizes,
            bounds=(0, None),
            method="highs-ds",
        )
        assert found.status == 0, found.message  # all that stay are a solution
        return found.x[x]


class _Rows:
    """Entries of some rows of a program; what is added is broadcast."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []

    def add(self, rows: IntArray, columns: IntArray, values: FloatArray | float) -> None:
        self._parts.append(tuple(map(np.ravel, np.broadcast_arrays(rows, columns, values))))

    def matrix(self, num_rows: int, num_columns: int) -> coo_matrix:
        from scipy.sparse import coo_matrix

        if not self._parts:
            return coo_matrix((num_rows, num_columns))
        rows, columns, values = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        return coo_matrix((values, (rows, columns)), shape=(num_rows, num_columns))
