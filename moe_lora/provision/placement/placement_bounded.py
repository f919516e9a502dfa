"""The part of a change of placement that a bound on copied bytes leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .placement_moves import copied_bytes
from .placement_phi import even_out
from .placement_problem import PlacementProblem, Shares
from .placement_quality import padded_of

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
