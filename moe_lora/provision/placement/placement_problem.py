"""What a placement is asked: adapters with their ranks and demands, servers, operating points."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Server: TypeAlias = Hashable
Table: TypeAlias = dict[str, list[tuple[Server, float]]]
"""Routing table: the servers of each adapter with the share phi of its requests; a row's phi sum to 1."""
Shares: TypeAlias = dict[int, dict[int, float]]
"""A table by numbers: adapter -> server -> phi > 0 (0 allowed for an adapter's only server)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementProblem:
    """Checked input, adapters and servers numbered; A adapters, S servers.

    names: [A] sorted, so that the order in which they were given changes nothing.  ranks: [A].  demand: [A]
    tokens/s.  tokens_per_s: operating point of each rank that occurs, not increasing.  load: [A] seconds of a
    server per second, demand / operating point: 1 is a server's whole capacity.  nbytes: [A].
    """

    names: tuple[str, ...]
    servers: tuple[Server, ...]
    ranks: NDArray[np.int64]
    demand: NDArray[np.float64]
    tokens_per_s: dict[int, float]
    load: NDArray[np.float64]
    nbytes: NDArray[np.float64]

    @property
    def target_utilisation(self) -> float:
        """Mean load of a server: no placement's worst server has less (LoRAServe Algorithm 1, lines 7-14)."""
        return math.fsum(self.load) / len(self.servers)

    def table(self, shares: Shares) -> Table:
        """By names, servers in their order; phi sum to 1 exactly as floats allow."""
        found: Table = {}
        for adapter, name in enumerate(self.names):
            row = shares[adapter]
            total = math.fsum(row.values())
            if len(row) == 1 or total <= 0:
                found[name] = [(self.servers[min(row)], 1.0)]
                continue
            found[name] = [(self.servers[server], row[server] / total) for server in sorted(row)]
        return found

    def shares(self, table: Mapping[str, Iterable[tuple[Server, float]]] | None) -> Shares:
        """By numbers what a table says of these adapters and servers; the others are left out."""
        if table is None:
            return {}
        number = {server: index for index, server in enumerate(self.servers)}
        found: Shares = {}
        for adapter, name in enumerate(self.names):
            row = {number[server]: phi for server, phi in table.get(name, ()) if server in number}
            if row:
                found[adapter] = row
        return found


def operating_point(points: Mapping[int, float], lora_rank: int) -> float:
    """Tokens/s of a server that serves this rank alone; between given ranks the time of a token,
    1 / (tokens/s), is linear in the rank (Toppings equation 2).  Raises ValueError outside of them.
    """
    ranks = sorted(points)
    if not ranks[0] <= lora_rank <= ranks[-1]:
        raise ValueError(
            f"rank {lora_rank} is outside of the operating points, {ranks[0]} to {ranks[-1]}; "
            "add a point for it"
        )
    return 1.0 / float(np.interp(lora_rank, ranks, [1.0 / points[rank] for rank in ranks]))


def placement_problem(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    adapter_bytes: Mapping[str, float] | None = None,
) -> PlacementProblem:
    """Check the input; adapters without a demand have 0, bytes are in proportion to the rank where not given.

    An operating point above that of a smaller rank counts as that: measured ones are noisy, and a server of
    high rank can serve a low one.  Raises ValueError, naming what is wrong.
    """
    _check_servers(servers)
    _check_points(operating_points)
    _check_numbers("demand", demand, adapters)
    if adapter_bytes is not None:
        _check_numbers("adapter_bytes", adapter_bytes, adapters)
        lacking = next((name for name in adapters if name not in adapter_bytes), None)
        if lacking is not None:
            raise ValueError(f"adapter_bytes has no {lacking!r}; name every adapter, or give none")
    for name, rank in adapters.items():
        if not isinstance(rank, int | np.integer) or rank < 1:
            raise ValueError(f"adapter {name!r} has rank {rank!r}; a rank is a whole number >= 1")
    names = tuple(sorted(adapters))
    points: dict[int, float] = {}
    least = math.inf
    for rank in sorted({int(adapters[name]) for name in names}):
        least = points[rank] = min(least, operating_point(operating_points, rank))
    ranks = np.array([adapters[name] for name in names], dtype=np.int64)
    tokens = np.array([demand.get(name, 0.0) for name in names], dtype=np.float64)
    per_s = np.array([points[int(rank)] for rank in ranks], dtype=np.float64)
    sizes = ranks if adapter_bytes is None else [adapter_bytes[name] for name in names]
    return PlacementProblem(
        names=names,
        servers=tuple(servers),
        ranks=ranks,
        demand=tokens,
        tokens_per_s=points,
        load=tokens / per_s if names else tokens,
        nbytes=np.array(sizes, dtype=np.float64),
    )


def _check_servers(servers: Sequence[Server]) -> None:
    if not servers:
        raise ValueError("servers is empty; name at least one")
    if len(set(servers)) != len(servers):
        raise ValueError(f"servers={list(servers)!r} names one twice; name each once")


def _check_points(points: Mapping[int, float]) -> None:
    if not points:
        raise ValueError("operating_points is empty; give tokens/s for at least one rank")
    for rank, tokens_per_s in points.items():
        if rank < 1 or not 0 < tokens_per_s < math.inf:
            raise ValueError(
                f"operating_points[{rank}]={tokens_per_s}: ranks are >= 1, tokens/s positive and finite"
            )


def _check_numbers(setting: str, values: Mapping[str, float], adapters: Mapping[str, int]) -> None:
    for name, value in values.items():
        if name not in adapters:
            raise ValueError(f"{setting} names {name!r}, which is not among the adapters; add its rank there")
        if not 0 <= value < math.inf:
            raise ValueError(f"{setting}[{name!r}]={value} must be a finite number >= 0")
