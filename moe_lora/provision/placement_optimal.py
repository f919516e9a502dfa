"""A placement whose worst server is as little loaded as can be, ranks apart, little copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from .placement_bounded import within_bytes
from .placement_caps import Cap, rank_caps
from .placement_fill import Filling
from .placement_moves import copied_bytes
from .placement_problem import PlacementProblem, Server, Shares, Table, placement_problem
from .placement_quality import own_loads, padded_loads

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class OptimalPlacement:
    """worst_load: of a server, padded to its highest rank unless asked otherwise.  optimum: the least worst
    load that any table can have, however much it copies.  target_utilisation: mean load without padding, the
    bound that the linear program gives (servers and adapters divisible).  copied_bytes: as of
    `PlacementQuality`.
    """

    table: Table
    worst_load: float
    optimum: float
    target_utilisation: float
    copied_bytes: float


def optimal_placement(
    adapters: Mapping[str, int],
    servers: Sequence[Server],
    operating_points: Mapping[int, float],
    demand: Mapping[str, float],
    previous: Mapping[str, Iterable[tuple[Server, float]]] | None = None,
    *,
    padded: bool = True,
    slack: float = 0.0,
    max_copied_bytes: float | None = None,
    adapter_bytes: Mapping[str, float] | None = None,
) -> OptimalPlacement:
    """Least worst load first, then least copied from `previous`; arguments as of `place_adapters`.

    padded: a server's tokens all count at its highest rank, which joins the two aims, even loads and ranks
    apart, in one number; without, adapters count at their own ranks and servers fill evenly.  slack: loads up
    to (1 + slack) times the optimum are as good as it, if they save copies; a previous table within it stays
    as it is.  max_copied_bytes: never more; where that is too little for the optimum, the best state on the
    way to it, never worse than staying.  adapter_bytes: sizes, in proportion to ranks if None.

    Without a bound, worst load <= (1 + slack) · optimum, and, with K ranks in demand on S >= K servers,
    optimum <= target utilisation · min(S / (S - K + 1), highest / lowest operating point of them).
    Raises ValueError as `place_adapters` does, for a slack below 0 and for a negative bound.
    """
    if not slack >= 0:
        raise ValueError(f"slack={slack} must be 0 or more; 0.05 lets loads be 5 % above the optimum")
    if max_copied_bytes is not None and not max_copied_bytes >= 0:
        raise ValueError(f"max_copied_bytes={max_copied_bytes} must be 0 or more; leave it out for no bound")
    problem = placement_problem(adapters, servers, operating_points, demand, adapter_bytes)
    before = problem.shares(previous)
    caps = _caps(problem, padded=padded)
    optimum = max((cap.load for cap in caps), default=0.0)
    loads = padded_loads if padded else own_loads
    limit = optimum * (1 + slack) * (1 + _ROUNDING)
    if _is_whole(problem, before) and (optimum <= 0 or float(loads(problem, before).max()) <= limit):
        shares = before
    else:
        shares = _filled(problem, caps, before, slack if before else 0.0, padded=padded)
        if max_copied_bytes is not None:
            shares = within_bytes(problem, shares, before, max_copied_bytes, padded=padded)
    return OptimalPlacement(
        table=problem.table(shares),
        worst_load=float(loads(problem, shares).max()),
        optimum=optimum,
        target_utilisation=problem.target_utilisation,
        copied_bytes=copied_bytes(problem, shares, before),
    )


def _caps(problem: PlacementProblem, *, padded: bool) -> list[Cap]:
    if padded:
        demand = {rank: float(problem.demand[problem.ranks == rank].sum()) for rank in problem.tokens_per_s}
        return rank_caps(demand, problem.tokens_per_s, len(problem.servers))
    if not problem.target_utilisation > 0:
        return []
    highest = max(problem.tokens_per_s)
    return [Cap(lora_rank=highest, num_servers=len(problem.servers), load=problem.target_utilisation)]


def _is_whole(problem: PlacementProblem, before: Shares) -> bool:
    """Whether every adapter has all its shares on servers that are there."""
    return len(before) == len(problem.names) and all(
        abs(sum(row.values()) - 1.0) < _ROUNDING for row in before.values()
    )


def _filled(
    problem: PlacementProblem, caps: Sequence[Cap], before: Shares, slack: float, *, padded: bool
) -> Shares:
    slots = [cap for cap in caps for _ in range(cap.num_servers)]
    slots += [Cap(lora_rank=0, num_servers=1, load=0.0)] * (len(problem.servers) - len(slots))
    own = [slots[place] for place in _slot_of_server(problem, slots, before)]
    per_s = problem.tokens_per_s if padded else dict.fromkeys(problem.tokens_per_s, 1.0)
    room = [
        cap.load * (1 + slack) * per_s[cap.lora_rank] if cap.num_servers and cap.load else 0.0 for cap in own
    ]
    amounts = (problem.demand if padded else problem.load).tolist()
    return Filling(problem, amounts, [cap.lora_rank for cap in own], room, before).fill()


def _slot_of_server(problem: PlacementProblem, slots: Sequence[Cap], before: Shares) -> list[int]:
    """Which cap each server gets: bytes of its adapters of that very rank count whole, of lower ranks half
    (they may stay if there is room), of higher ranks, which have to leave, nothing."""
    if not before:
        return list(range(len(slots)))
    place = {rank: index for index, rank in enumerate(problem.tokens_per_s)}
    had = np.zeros((len(slots), len(place)))
    for adapter, row in before.items():
        for server in row:
            had[server, place[int(problem.ranks[adapter])]] += problem.nbytes[adapter]
    at_slot = np.array([cap.lora_rank for cap in slots])
    ranks = np.array(list(place))
    worth = (ranks[None, :] == at_slot[:, None]) + 0.5 * (ranks[None, :] < at_slot[:, None])
    _, slot = linear_sum_assignment(had @ worth.T, maximize=True)
    return [int(one) for one in slot]
