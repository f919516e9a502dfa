# SPDX-License-Identifier: Apache-2.0
"""The optimal migration plan: the whole problem of `migration`, by HiGHS.

For small clusters and as the oracle of `fast_migration`: exponential time.
Source: dLoRA, section 5.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .problem import (
    TOLERANCE,
    FloatArray,
    IntArray,
    MigrationPlan,
    MigrationProblem,
    Placement,
    undo_needless,
)

if TYPE_CHECKING:
    from scipy.optimize import Bounds, LinearConstraint


def plan_exact(problem: MigrationProblem, *, time_limit_s: float = 60.0) -> MigrationPlan:
    """The plan of least objective, by HiGHS; after the time limit the best found, with a bound.

    No moves if nothing better is found, or no placement fits memory.
    """
    placement = Placement(problem)
    before = placement.objective()
    if not problem.requests:
        return placement.plan(before, before, before)
    from scipy.optimize import milp  # a third of a second, for this alone

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
    """The problem in arrays.  Columns: T, then x^G, x^H (by request, then replica), y (by adapter).

    Seconds in `unit`s, bytes relative to the largest request, for numbers near 1.
    """

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
