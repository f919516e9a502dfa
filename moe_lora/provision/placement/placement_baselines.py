"""Placements to compare with: random, contiguous, everything everywhere.  Signatures as `place_adapters`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from .placement import place_adapters
from .optimal import optimal_placement
from .placement_problem import Server, Shares, Table, placement_problem

Previous: TypeAlias = Mapping[str, Iterable[tuple[Server, float]]] | None


def random_placement(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Previous = None,
    seed: int = 0,
) -> Table:
    """Each adapter on one server drawn evenly; one that has a place keeps it, as S-LoRA Random is static.

    Source: LoRAServe, section V-D.  Raises ValueError as `place_adapters` does.
    """
    problem = placement_problem(adapters, servers, operating_points, demand)
    rng = random.Random(seed)
    drawn = [rng.randrange(len(servers)) for _ in problem.names]
    before = problem.shares(previous)
    shares: Shares = {}
    for adapter, server in enumerate(drawn):
        row = before.get(adapter)
        shares[adapter] = {max(row, key=lambda one: (row[one], -one)) if row else server: 1.0}
    return problem.table(shares)


def contiguous_placement(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Previous = None,
) -> Table:
    """By rank, an equal number of adapters on each server; neither demand nor `previous` changes anything.

    Source: LoRAServe, section V-D.  Raises ValueError as `place_adapters` does.
    """
    problem = placement_problem(adapters, servers, operating_points, demand)
    order = sorted(range(len(problem.names)), key=lambda a: (problem.ranks[a], problem.names[a]))
    count = len(order)
    return problem.table({a: {place * len(servers) // count: 1.0} for place, a in enumerate(order)})


def replicate_everywhere(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Previous = None,
) -> Table:
    """Each adapter on all servers, in equal shares.  Source: Toppings section 5, as LoRAServe section V-D."""
    problem = placement_problem(adapters, servers, operating_points, demand)
    row = dict.fromkeys(range(len(servers)), 1.0)
    return problem.table(dict.fromkeys(range(len(problem.names)), row))


def _optimal(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Previous = None,
) -> Table:
    """`optimal_placement` with the slack that keeps it from following noise."""
    return optimal_placement(adapters, servers, operating_points, demand, previous, slack=0.05).table


PLACEMENTS: dict[str, Callable[..., Table]] = {
    "loraserve": place_adapters,
    "optimal": _optimal,
    "random": random_placement,
    "contiguous": contiguous_placement,
    "everywhere": replicate_everywhere,
}
"""Placements by the names users give."""
