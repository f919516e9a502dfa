# SPDX-License-Identifier: Apache-2.0
"""Migration plans by programs of HiGHS: the whole problem, and dLoRA's relaxed part.

The whole problem takes exponential time.  The relaxed program has no memory limits, and divides requests of
the K slowest replicas among these and the K fastest; a request goes to its largest part.  Misfits return.
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
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import coo_matrix


def plan_exact(problem: MigrationProblem, *, time_limit_s: float = 60.0) -> MigrationPlan:
    """The plan of least objective; after the time limit the best found, with a bound.

    No moves without a better placement.
    """
    placement = Placement(problem)
    before = placement.objective()
    if not problem.requests:
        return placement.plan(before, before, before)
    from scipy.optimize import milp  # a third of a second

    program = _Program(problem)
    found = milp(
        program.cost,
        constraints=program.constraints(),
        bounds=program.bounds(),
        integrality=program.integrality,
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    bound = 0.0 if found.mip_dual_bound is None else max(0.0, found.mip_dual_bound * program.unit)
    if found.x is None or found.fun * program.unit >= before * (1 - TOLERANCE):
        return placement.plan(before, before, min(bound, before))
    objective = float(found.fun) * program.unit
    for i, j in enumerate(program.targets(found.x)):
        placement.move(i, j)
    if placement.objective() <= objective * (1 + TOLERANCE):
        undo_needless(placement, objective * (1 + TOLERANCE))
        objective = placement.objective()
    return placement.plan(objective, before, min(bound, objective))


class _Program:
    """Columns: T, then x^G, x^H (by request, then replica), y (by adapter).  Scaled for numbers near 1."""

    def __init__(self, problem: MigrationProblem) -> None:
        self._problem = problem
        self._num = num = len(problem.replicas)
        used = {one.adapter for one in problem.requests}
        self._adapters = [one for one in problem.adapters if one.name in used]
        self._on_device = 1 + np.arange(len(problem.requests) * num).reshape(-1, num)
        self._on_host = self._on_device + self._on_device.size
        self._loaded = 1 + 2 * self._on_device.size + np.arange(len(self._adapters) * num).reshape(-1, num)
        num_columns = 1 + 2 * self._on_device.size + self._loaded.size
        self.cost = np.zeros(num_columns)
        self.cost[0] = 1.0
        self.integrality = np.ones(num_columns)
        self.integrality[0] = 0
        self.unit = max(one.exec_s for one in problem.requests) or 1.0
        self._bytes = np.array([one.num_bytes for one in problem.requests])
        self._scale = max(float(self._bytes.max()), 1.0)
        self._adapter_bytes = np.array([one.num_bytes for one in self._adapters])
        self._rows: list[tuple[IntArray, FloatArray, float, float]] = []

    def bounds(self) -> Bounds:
        """No host memory on replicas with device room for all."""
        from scipy.optimize import Bounds

        upper = np.ones(len(self.cost))
        upper[0] = np.inf
        every = float(self._bytes.sum() + self._adapter_bytes.sum())
        for j, replica in enumerate(self._problem.replicas):
            if replica.device_bytes >= every:
                upper[self._on_host[:, j]] = 0.0
        return Bounds(np.zeros(len(upper)), upper)

    def constraints(self) -> LinearConstraint:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_matrix

        for j in range(self._num):
            self._of_replica(j)
        row_of = {one.name: k for k, one in enumerate(self._adapters)}
        for i, request in enumerate(self._problem.requests):
            places = np.concatenate([self._on_device[i], self._on_host[i]])
            self._row(places, np.ones(len(places)), 1.0, 1.0)
            if request.adapter is None:
                continue
            for j, loaded in enumerate(self._loaded[row_of[request.adapter]]):
                matching = np.array([loaded, self._on_device[i, j], self._on_host[i, j]])
                self._row(matching, np.array([1.0, -1.0, -1.0]), 0.0, np.inf)
        columns, values, lower, upper = zip(*self._rows, strict=True)
        ends = np.cumsum([0, *map(len, columns)])
        shape = (len(ends) - 1, len(self.cost))
        matrix = csr_matrix((np.concatenate(values), np.concatenate(columns), ends), shape=shape)
        return LinearConstraint(matrix, lower, upper)

    def targets(self, x: FloatArray) -> list[int]:
        return [int(j) for j in (x[self._on_device] + x[self._on_host]).argmax(axis=1)]

    def _row(self, columns: IntArray, values: FloatArray, lower: float, upper: float) -> None:
        self._rows.append((columns, values, lower, upper))

    def _of_replica(self, j: int) -> None:
        problem, replica = self._problem, self._problem.replicas[j]
        seconds = np.array(
            [
                one.exec_s * (1.0 if one.replica == replica.name else one.move_factor)
                for one in problem.requests
            ]
        )
        loads = np.array(
            [
                problem.affinity_s + (0.0 if one.name in replica.adapters else one.load_s)
                for one in self._adapters
            ]
        )
        device, host, loaded = self._on_device[:, j], self._on_host[:, j], self._loaded[:, j]
        everywhere = np.concatenate([device, host, loaded, [0]])
        times = np.concatenate([seconds, seconds + problem.swap.seconds(self._bytes), loads]) / self.unit
        self._row(everywhere, np.append(times, -1.0), -np.inf, 0.0)
        needed = np.concatenate([self._bytes, self._adapter_bytes]) / self._scale
        self._row(np.concatenate([device, loaded]), needed, -np.inf, replica.device_bytes / self._scale)
        self._row(host, self._bytes / self._scale, -np.inf, replica.host_bytes / self._scale)


def plan_relaxed(problem: MigrationProblem, *, num_selected: int = 4) -> MigrationPlan:
    """A plan never worse than staying, within memory limits."""
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
    """Columns: T, then requests of each group on each replica, y of each adapter, swapped bytes per replica.

    groups: like requests of the slowest replicas (one adapter, home and place, all waiting or none) share a
    row of x.
    """

    def __init__(self, search: Search, num_slowest: int) -> None:
        self._search = search
        self._fixed = search.every >= num_slowest  # their own requests stay
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
        from scipy.optimize import linprog  # a third of a second
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
        absent = ~self._fixed | (search.counts[self._adapters] == 0)
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
        assert found.status == 0, found.message  # staying is a solution
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
