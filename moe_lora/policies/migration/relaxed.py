# SPDX-License-Identifier: Apache-2.0
"""dLoRA's own fast plan: the problem of `migration` on few replicas, relaxed and rounded.

A linear program without memory limits divides requests of the K slowest replicas among these and the K
fastest; a request goes to its largest part.  Our addition: misfits return, and a
plan without gain is dropped.
Source: dLoRA, section 5.2, "Selective migration with constraints relaxation".
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .fast import Search
from .problem import (
    TOLERANCE,
    FloatArray,
    IntArray,
    MigrationPlan,
    MigrationProblem,
    Placement,
    undo_harmful,
    undo_needless,
)

if TYPE_CHECKING:
    from scipy.sparse import coo_matrix


def plan_relaxed(problem: MigrationProblem, *, num_selected: int = 4) -> MigrationPlan:
    """A plan never worse than staying, within memory limits.

    num_selected: K.
    """
    placement = Placement(problem)
    start, before = placement.costs(), placement.objective()
    by_cost = sorted(range(len(start)), key=start.__getitem__)
    num = min(num_selected, len(by_cost) // 2)
    slowest, others = by_cost[::-1][:num], by_cost[: len(by_cost) - num]
    chosen = [*slowest, *(others if len(others) <= num + 1 else others[:num])]
    program = _Relaxed(Search(placement, chosen), num)
    if program.groups:
        for group, parts in zip(program.groups, program.solve(), strict=True):
            for i, m in zip(group.tolist(), _rounded(parts), strict=True):
                placement.move(i, chosen[m])
    undo_harmful(placement, start)
    undo_needless(placement, placement.objective() * (1 + TOLERANCE))
    return placement.plan(placement.objective(), before)


def _rounded(parts: FloatArray) -> list[int]:
    num = round(float(parts.sum()))
    whole = np.floor(parts + 1e-6).astype(np.int64)
    rest = np.argsort(whole - parts, kind="stable")[: num - int(whole.sum())]
    whole[rest] += 1
    return np.repeat(np.arange(len(parts)), whole).tolist()


class _Relaxed:
    """The program: columns T, then requests of each group on each replica, y of each adapter, swapped bytes
    per replica.

    groups: like requests of the slowest replicas (one adapter, home and place, all waiting or none); they
    share a row of x, with mean seconds and bytes.
    """

    def __init__(self, search: Search, num_slowest: int) -> None:
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
        time.add(search.every, swapped, problem.swap.seconds(page) / unit)
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
