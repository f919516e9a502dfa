"""What a placement is worth: loads, ranks mixed, adapters held, bytes copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .placement_moves import copied_bytes, num_copies
from .placement_problem import PlacementProblem, Server, Shares, placement_problem

_NO_TOKENS = 1e-9


@dataclass(frozen=True, kw_only=True)
class PlacementQuality:
    """Of one table under one demand.  Loads are shares of a server's capacity.

    target_utilisation: mean load, a lower bound on both worst loads.  worst_load: of a server, each adapter
    at its own rank's operating point (kernels that compute true ranks).  worst_padded_load: of a server, all
    its tokens at its highest rank's point (kernels that pad).  rank_mixing: padded over own load, of all
    servers together; 1 = no rank is served beside a higher one.  most_held, mean_held: adapters per server.
    copied_bytes, num_copies: what servers get that they did not have, of adapters that were anywhere.
    """

    target_utilisation: float
    worst_load: float
    worst_padded_load: float
    rank_mixing: float
    most_held: int
    mean_held: float
    copied_bytes: float
    num_copies: int


def placement_quality(
    table: Mapping[str, Iterable[tuple[Server, float]]],
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Mapping[str, Iterable[tuple[Server, float]]] | None = None,
    adapter_bytes: Mapping[str, float] | None = None,
) -> PlacementQuality:
    """Judge a table (arguments as of `place_adapters`).  Raises ValueError if it lacks an adapter."""
    problem = placement_problem(adapters, servers, operating_points, demand, adapter_bytes)
    shares = problem.shares(table)
    lacking = next((name for number, name in enumerate(problem.names) if number not in shares), None)
    if lacking is not None:
        raise ValueError(f"the table has no server for {lacking!r}")
    return quality_of(problem, shares, problem.shares(previous))


def quality_of(problem: PlacementProblem, shares: Shares, before: Shares) -> PlacementQuality:
    """The same, by numbers."""
    own, padded = own_loads(problem, shares), padded_loads(problem, shares)
    held = np.bincount([s for row in shares.values() for s in row], minlength=len(problem.servers))
    return PlacementQuality(
        target_utilisation=problem.target_utilisation,
        worst_load=float(own.max()),
        worst_padded_load=float(padded.max()),
        rank_mixing=float(padded.sum() / own.sum()) if own.sum() > 0 else 1.0,
        most_held=int(held.max()),
        mean_held=float(held.mean()),
        copied_bytes=copied_bytes(problem, shares, before),
        num_copies=num_copies(shares, before),
    )


def own_loads(problem: PlacementProblem, shares: Shares) -> NDArray[np.float64]:
    """[S] Each server's load, adapters at their own ranks."""
    loads = np.zeros(len(problem.servers))
    for adapter, row in shares.items():
        for server, share in row.items():
            loads[server] += problem.load[adapter] * share
    return loads


def tokens_by_rank(problem: PlacementProblem, shares: Shares) -> NDArray[np.float64]:
    """[S, ranks that occur, rising] tokens/s of each server."""
    place = {rank: index for index, rank in enumerate(problem.tokens_per_s)}
    tokens = np.zeros((len(problem.servers), max(1, len(place))))
    for adapter, row in shares.items():
        column = place[int(problem.ranks[adapter])]
        for server, share in row.items():
            tokens[server, column] += problem.demand[adapter] * share
    return tokens


def padded_of(problem: PlacementProblem, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Load by tokens of each rank, [..., ranks] -> [...]: all at the highest rank that has any."""
    if not problem.tokens_per_s:
        return np.zeros(tokens.shape[:-1])
    per_s = np.array(list(problem.tokens_per_s.values()))
    total = tokens.sum(axis=-1)
    some = tokens > _NO_TOKENS * np.maximum(total, 1e-300)[..., None]
    highest = some.shape[-1] - 1 - np.argmax(some[..., ::-1], axis=-1)
    return total / per_s[highest]


def padded_loads(problem: PlacementProblem, shares: Shares) -> NDArray[np.float64]:
    """[S] Each server's load, all its tokens at its highest rank's operating point."""
    return padded_of(problem, tokens_by_rank(problem, shares))
