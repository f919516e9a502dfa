"""A placement whose worst server is as little loaded as can be, ranks apart, little copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .placement_bounded import within_bytes
from .placement_caps import Cap
from .placement_moves import copied_bytes
from .placement_phi import even_out
from .placement_problem import PlacementProblem, Server, Shares, Table, placement_problem
from .placement_quality import own_loads, padded_loads
from .slots import Slots, least_caps

_ROUNDING = 1e-9
_SLACKS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


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
    caps = least_caps(problem, padded=padded)
    optimum = max((cap.load for cap in caps), default=0.0)
    loads = padded_loads if padded else own_loads
    limit = optimum * (1 + slack) * (1 + _ROUNDING)
    if _is_whole(problem, before) and (optimum <= 0 or float(loads(problem, before).max()) <= limit):
        shares = before
    else:
        slots = Slots(problem, before, padded=padded)
        own = slots.least_moved(caps)
        shares = slots.fill(own, slack if before else 0.0)
        if max_copied_bytes is not None and copied_bytes(problem, shares, before) > max_copied_bytes:
            ways = [own, slots.as_they_are()] if padded else [own]
            found = [_bounded(slots, way, slack, max_copied_bytes) for way in ways]
            shares = min(found, key=lambda one: float(loads(problem, one).max()))
    return OptimalPlacement(
        table=problem.table(shares),
        worst_load=float(loads(problem, shares).max()),
        optimum=optimum,
        target_utilisation=problem.target_utilisation,
        copied_bytes=copied_bytes(problem, shares, before),
    )


def _is_whole(problem: PlacementProblem, before: Shares) -> bool:
    """Whether every adapter has all its shares on servers that are there."""
    return len(before) == len(problem.names) and all(
        abs(sum(row.values()) - 1.0) < _ROUNDING for row in before.values()
    )


def _bounded(slots: Slots, caps: Sequence[Cap], slack: float, max_copied_bytes: float) -> Shares:
    """The better of two: the whole way at the least slack of a few at which it copies little enough, and a
    part of the way without further slack."""
    problem, before = slots.problem, slots.before
    part = within_bytes(problem, slots.fill(caps, slack), before, max_copied_bytes, padded=slots.padded)
    whole = None
    least, most = 0, len(_SLACKS)
    while least < most:
        middle = (least + most) // 2
        shares = slots.fill(caps, slack + _SLACKS[middle])
        if copied_bytes(problem, shares, before) <= max_copied_bytes:
            whole, most = shares, middle
        else:
            least = middle + 1
    if whole is None:
        return part
    loads = padded_loads if slots.padded else own_loads
    found = (part, even_out(problem, whole, padded=slots.padded))
    return min(found, key=lambda one: float(loads(problem, one).max()))
