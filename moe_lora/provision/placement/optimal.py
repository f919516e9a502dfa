"""A placement whose worst server is as little loaded as can be, ranks apart, little copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from .placement_problem import (
    PlacementProblem,
    Server,
    Shares,
    Table,
    copied_bytes,
    own_loads,
    padded_loads,
    padded_of,
    placement_problem,
    tokens_by_rank,
)
from .slots import Cap, Slots, least_caps

# The best shares on the servers that hold an adapter anyway: nothing is copied.


_LEAST_SHARE = 1e-9


def even_out(problem: PlacementProblem, shares: Shares, *, padded: bool) -> Shares:
    """Shares of the same adapters on the same servers with the least worst load.

    A linear program over the adapters that are on several servers: minimise T subject to each server's load
    <= T, sum of an adapter's shares = 1.  padded: servers count at the highest rank that they serve now.
    """
    split = [a for a, row in shares.items() if len(row) > 1 and problem.demand[a] > 0]
    if not split:
        return shares
    per_token = _seconds_per_token(problem, shares, padded=padded)
    column_of = {rank: column for column, rank in enumerate(problem.tokens_per_s)}
    fixed = np.zeros(len(problem.servers))
    for adapter, row in shares.items():
        if len(row) == 1:
            server = next(iter(row))
            fixed[server] += (
                problem.demand[adapter] * per_token[server, column_of[int(problem.ranks[adapter])]]
            )
    pairs = [(place, a, server) for place, a in enumerate(split) for server in sorted(shares[a])]
    load = [problem.demand[a] * per_token[s, column_of[int(problem.ranks[a])]] for _, a, s in pairs]
    unit = max(problem.target_utilisation, 1e-300)
    columns = np.arange(len(pairs))
    servers = np.array([server for _, _, server in pairs])
    every = np.arange(len(fixed))
    on_server = coo_matrix(
        (
            np.concatenate([np.array(load) / unit, -np.ones(len(fixed))]),
            (np.concatenate([servers, every]), np.concatenate([columns, np.full(len(fixed), len(pairs))])),
        )
    )
    rows = [place for place, _, _ in pairs]
    of_adapter = coo_matrix((np.ones(len(pairs)), (rows, columns)), shape=(len(split), len(pairs) + 1))
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1.0
    found = linprog(cost, on_server, -fixed / unit, of_adapter, np.ones(len(split)), bounds=(0, None))
    if found.status != 0:  # can't be: the shares as they are are a solution
        raise RuntimeError(f"the shares could not be evened out: {found.message}")
    apart = set(split)
    evened = {adapter: row for adapter, row in shares.items() if adapter not in apart}
    for (_, adapter, server), share in zip(pairs, found.x[:-1], strict=True):
        if share > _LEAST_SHARE:
            evened.setdefault(adapter, {})[server] = float(share)
    return evened


def _seconds_per_token(problem: PlacementProblem, shares: Shares, *, padded: bool) -> np.ndarray:
    """[S, ranks that occur]: what a token of an adapter costs on a server."""
    own = 1.0 / np.array(list(problem.tokens_per_s.values()))
    if not padded:
        return np.tile(own, (len(problem.servers), 1))
    tokens = tokens_by_rank(problem, shares)
    total = np.maximum(tokens.sum(axis=1), 1e-300)
    padded_cost = np.where(tokens.sum(axis=1) > 0, padded_of(problem, tokens) / total, own[0])
    return np.tile(padded_cost[:, None], (1, len(own)))


# The part of a change of placement that a bound on copied bytes leaves.


_ROUNDING = 1e-9


def within_bytes(
    problem: PlacementProblem, shares: Shares, before: Shares, max_copied_bytes: float, *, padded: bool
) -> Shares:
    """A placement between `before` and `shares` that copies at most so many bytes.

    From the server with the worst load, adapters go to their new places one after the other, first the one
    that takes most load from it per byte; the best state on the way, its shares evened out, is the result, so
    it is never worse than staying.  Adapters that were nowhere before take their new places and cost nothing.
    """
    if copied_bytes(problem, shares, before) <= max_copied_bytes:
        return shares
    best = _Course(problem, shares, before, padded=padded).run(max_copied_bytes)
    return even_out(problem, best, padded=padded)


class _Course:
    def __init__(self, problem: PlacementProblem, shares: Shares, before: Shares, *, padded: bool) -> None:
        self._problem = problem
        self._after = shares
        self._now = {adapter: _whole(before.get(adapter, row)) for adapter, row in shares.items()}
        self._place = {rank: index for index, rank in enumerate(problem.tokens_per_s)}
        self._tokens = np.zeros((len(problem.servers), len(self._place)))
        for adapter, row in self._now.items():
            self._shift(adapter, row, 1.0)
        self._load_of = self._load_function(padded=padded)
        self._loads = self._load_of(self._tokens)
        self._leaving = self._by_server()

    def run(self, max_copied_bytes: float) -> Shares:
        left = max_copied_bytes
        moved: list[int] = []
        best, num_best = float(self._loads.max()), 0
        done: set[int] = set()
        while True:
            worst = int(self._loads.argmax())
            adapter = self._next(worst, done, left)
            if adapter is None:
                break
            done.add(adapter)
            left -= self._cost(adapter)
            moved.append(adapter)
            self._move(adapter)
            load = float(self._loads.max())
            if load < best * (1 - _ROUNDING):
                best, num_best = load, len(moved)
        kept = dict(self._now)
        for adapter in moved[:num_best]:
            kept[adapter] = self._after[adapter]
        return kept

    def _next(self, server: int, done: set[int], left: float) -> int | None:
        """The best adapter to leave the server now; those that cost too much never will cost less."""
        queue = self._leaving[server]
        while queue:
            adapter = queue.pop()
            if adapter not in done and self._cost(adapter) <= left:
                return adapter
        return None

    def _by_server(self) -> list[list[int]]:
        """Of each server the adapters of which it will have less, the best to move last."""
        queues: list[list[tuple[float, int]]] = [[] for _ in self._loads]
        for adapter, row in self._now.items():
            for server, share in row.items():
                less = (share - self._after[adapter].get(server, 0.0)) * self._problem.load[adapter]
                if less > _ROUNDING * self._problem.load[adapter]:
                    queues[server].append((less / max(self._cost(adapter), 1e-300), adapter))
        return [
            [adapter for _, adapter in sorted(queue, key=lambda one: (one[0], -one[1]))] for queue in queues
        ]

    def _cost(self, adapter: int) -> float:
        before = self._now[adapter]
        return float(self._problem.nbytes[adapter]) * sum(s not in before for s in self._after[adapter])

    def _move(self, adapter: int) -> None:
        old, new = self._now[adapter], _whole(self._after[adapter])
        self._shift(adapter, old, -1.0)
        self._shift(adapter, new, 1.0)
        for server in {*old, *new}:
            self._tokens[server] = np.maximum(self._tokens[server], 0.0)
            self._loads[server] = self._load_of(self._tokens[server])

    def _shift(self, adapter: int, row: dict[int, float], sign: float) -> None:
        column = self._place[int(self._problem.ranks[adapter])]
        for server, share in row.items():
            self._tokens[server, column] += sign * share * self._problem.demand[adapter]

    def _load_function(self, *, padded: bool) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        if padded:
            return lambda tokens: padded_of(self._problem, tokens)
        per_s = np.array(list(self._problem.tokens_per_s.values()))
        return lambda tokens: np.asarray((tokens / per_s).sum(axis=-1))


def _whole(row: dict[int, float]) -> dict[int, float]:
    """Shares that sum to 1: a server that is gone leaves its share to the others."""
    total = sum(row.values())
    if total <= 0:
        return {min(row): 1.0}
    return {server: share / total for server, share in row.items()}


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
