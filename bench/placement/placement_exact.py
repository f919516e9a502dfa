# SPDX-License-Identifier: Apache-2.0
"""The least worst load under a bound on copied bytes, by a mixed-integer program; for small clusters.

Variables: T, the worst load; x[a, s] in [0, 1], shares; y[a, s] in {0, 1}, 1 if s holds a; z[s, c] in
{0, 1}, 1 if c is the highest rank on s.

    minimise T  subject to  sum_s x[a, s] = 1,  x[a, s] <= y[a, s],  sum_c z[s, c] = 1,
    x[a, s] <= sum over c >= rank(a) of z[s, c],
    sum_a demand(a) x[a, s] <= p(c) T + D (1 - z[s, c])   (p: operating points, D: all demand),
    sum of bytes(a) y[a, s] over s that did not hold a <= the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from moe_lora.provision.placement.placement_problem import PlacementProblem, Server, Shares, placement_problem


def exact_worst_load(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Mapping[str, Iterable[tuple[Server, float]]] | None = None,
    *,
    max_copied_bytes: float | None = None,
    adapter_bytes: Mapping[str, float] | None = None,
    time_limit_s: float = 60.0,
) -> float:
    """Arguments as of `optimal_placement`, padded.  Adapters of no previous server go anywhere for nothing.

    Raises ValueError as `place_adapters` does, and RuntimeError if HiGHS does not prove an optimum in time.
    """
    problem = placement_problem(adapters, servers, operating_points, demand, adapter_bytes)
    program = _Program(problem, problem.shares(previous), max_copied_bytes)
    found = milp(
        program.cost,
        constraints=program.constraints(),
        bounds=program.bounds,
        integrality=program.integrality,
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-9},
    )
    if found.status != 0:
        raise RuntimeError(f"no optimum within time_limit_s={time_limit_s}: {found.message}")
    return float(found.fun) * program.unit


class _Program:
    """The program in arrays; tokens/s relative to all demand, T in `unit`s, for numbers near 1."""

    def __init__(self, problem: PlacementProblem, before: Shares, max_copied_bytes: float | None) -> None:
        self._problem = problem
        self._before = before
        self._max_copied_bytes = max_copied_bytes
        self._num_servers = len(problem.servers)
        self._caps = list(problem.tokens_per_s)
        num_places = len(problem.names) * self._num_servers
        self._num_places = num_places
        num = 1 + 2 * num_places + self._num_servers * len(self._caps)
        self._tokens = max(float(problem.demand.sum()), 1e-300)
        self.unit = max(problem.target_utilisation, 1e-300)
        self.cost = np.zeros(num)
        self.cost[0] = 1.0
        self.integrality = np.ones(num)
        self.integrality[: 1 + num_places] = 0
        upper = np.ones(num)
        upper[0] = np.inf
        self.bounds = Bounds(np.zeros(num), upper)
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def constraints(self) -> LinearConstraint:
        for adapter in range(len(self._problem.names)):
            self._whole(adapter)
        for server in range(self._num_servers):
            self._load(server)
        if self._max_copied_bytes is not None:
            self._copies(self._max_copied_bytes)
        matrix = lil_matrix((len(self._rows), len(self.cost)))
        for number, (row, _, _) in enumerate(self._rows):
            for column, value in row.items():
                matrix[number, column] = value
        bounds: NDArray[np.float64] = np.array([[low, high] for _, low, high in self._rows])
        return LinearConstraint(matrix.tocsr(), bounds[:, 0], bounds[:, 1])

    def _x(self, adapter: int, server: int) -> int:
        return 1 + adapter * self._num_servers + server

    def _y(self, adapter: int, server: int) -> int:
        return self._x(adapter, server) + self._num_places

    def _z(self, server: int, place: int) -> int:
        return 1 + 2 * self._num_places + server * len(self._caps) + place

    def _whole(self, adapter: int) -> None:
        servers = range(self._num_servers)
        rank = int(self._problem.ranks[adapter])
        self._rows.append(({self._x(adapter, s): 1.0 for s in servers}, 1.0, 1.0))
        for server in servers:
            self._rows.append(({self._x(adapter, server): 1.0, self._y(adapter, server): -1.0}, -np.inf, 0.0))
            if self._problem.demand[adapter] > 0:
                high = {self._z(server, i): -1.0 for i, cap in enumerate(self._caps) if cap >= rank}
                self._rows.append(({self._x(adapter, server): 1.0, **high}, -np.inf, 0.0))

    def _load(self, server: int) -> None:
        self._rows.append(({self._z(server, i): 1.0 for i in range(len(self._caps))}, 1.0, 1.0))
        tokens = {self._x(a, server): d / self._tokens for a, d in enumerate(self._problem.demand.tolist())}
        for place, cap in enumerate(self._caps):
            per_unit = self._problem.tokens_per_s[cap] * self.unit / self._tokens
            self._rows.append(({**tokens, 0: -per_unit, self._z(server, place): 1.0}, -np.inf, 1.0))

    def _copies(self, max_copied_bytes: float) -> None:
        row = {
            self._y(adapter, server): float(self._problem.nbytes[adapter])
            for adapter, had in self._before.items()
            for server in range(self._num_servers)
            if server not in had
        }
        self._rows.append((row, -np.inf, max_copied_bytes))
