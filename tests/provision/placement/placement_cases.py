# SPDX-License-Identifier: Apache-2.0
"""Small clusters for tests of placements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import strategies as st

POINTS = {8: 4000.0, 16: 3800.0, 32: 3300.0, 64: 2600.0, 128: 1700.0}


@dataclass(frozen=True)
class Case:
    adapters: dict[str, int]
    servers: list[int]
    demand: dict[str, float]

    @property
    def arguments(self):
        return self.adapters, self.servers, POINTS, self.demand


@st.composite
def cases(draw, max_adapters: int = 12, max_servers: int = 6, ranks=tuple(POINTS), least_demand: float = 0.0):
    num_adapters = draw(st.integers(1, max_adapters))
    names = [f"a{index}" for index in range(num_adapters)]
    demands = st.one_of(
        st.integers(int(least_demand), 3).map(float), st.floats(max(0.5, least_demand), 5000.0)
    )
    return Case(
        {name: draw(st.sampled_from(ranks)) for name in names},
        list(range(draw(st.integers(1, max_servers)))),
        {name: draw(demands) for name in names},
    )


def assert_whole(table, case: Case) -> None:
    """Every adapter is there, on servers that are, each once, with shares that sum to 1."""
    assert set(table) == set(case.adapters)
    for row in table.values():
        servers = [server for server, _ in row]
        assert row
        assert set(servers) <= set(case.servers)
        assert len(set(servers)) == len(servers)
        assert all(phi > 0 for _, phi in row)
        assert math.isclose(math.fsum(phi for _, phi in row), 1.0, rel_tol=1e-12)


def flatten(table, case: Case):
    """What a table is when names do not count: rank, demand and servers of each adapter."""
    return sorted(
        (case.adapters[name], case.demand.get(name, 0.0), [(server, round(phi, 9)) for server, phi in row])
        for name, row in table.items()
    )
