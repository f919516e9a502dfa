"""Shares of adapters on servers whose highest rank and room are given, as much as may be where it was."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from .placement_problem import PlacementProblem, Shares

_ROUNDING = 1e-9


class FillOrder:
    """Who comes when, for any number of fillings.  amounts: [A] demand in tokens/s, or load.

    by_rank: (rank, adapters with demand) by falling rank.  What is big in bytes and small in load comes first
    and stays; what gives way is the other.  idle: adapters without demand.  had: places of before by
    adapter, the greatest share first.
    """

    def __init__(self, problem: PlacementProblem, amounts: Sequence[float], before: Shares) -> None:
        self.problem = problem
        self.amounts = amounts
        self.before = before
        members: dict[int, list[int]] = {}
        for adapter, rank in enumerate(problem.ranks.tolist()):
            members.setdefault(rank, []).append(adapter)
        nbytes = problem.nbytes.tolist()
        self.by_rank = [
            (
                rank,
                sorted(
                    (a for a in members[rank] if amounts[a] > 0),
                    key=lambda a: (amounts[a] / max(nbytes[a], 1e-300), a),
                ),
            )
            for rank in sorted(members, reverse=True)
        ]
        self.idle = [a for rank in sorted(members, reverse=True) for a in members[rank] if not amounts[a] > 0]
        self.had = {
            adapter: sorted(row.items(), key=lambda one: (-one[1], one[0])) for adapter, row in before.items()
        }


class Filling:
    """caps: highest rank that each server may serve.  room: what each may serve, in the unit of the amounts.

    Ranks come by falling order, so an adapter takes room from servers of its rank or more only, and if every
    rank and those above it fit in the servers open to them, no order within a rank can fail.
    """

    def __init__(self, order: FillOrder, caps: Sequence[int], room: Sequence[float]) -> None:
        self._order = order
        self._problem = order.problem
        self._amounts = order.amounts
        self._before = order.before
        self._caps = caps
        self._room = list(room)
        self._least = _ROUNDING * max(room, default=0.0)
        self._held = [0] * len(caps)
        self._shares: Shares = {}

    def fill(self) -> Shares:
        """Every adapter's shares."""
        for rank, adapters in self._order.by_rank:
            self._place(rank, self._keep(rank, adapters))
        self._place_idle(self._order.idle)
        return self._shares

    def _keep(self, rank: int, adapters: Iterable[int]) -> list[tuple[float, int]]:
        """What they had they have, as far as there is room.  Returns what is left of them."""
        left = []
        for adapter in adapters:
            rest = amount = self._amounts[adapter]
            for server, share in self._order.had.get(adapter, ()):
                if self._caps[server] >= rank:
                    rest -= self._put(adapter, server, min(rest, share * amount))
            if rest > _ROUNDING * amount:
                left.append((rest, adapter))
        return left

    def _place(self, rank: int, left: list[tuple[float, int]]) -> None:
        """The rest: first where the adapter is anyway, then on servers of the lowest rank that may."""
        allowed = sorted(
            (server for server, cap in enumerate(self._caps) if cap >= rank),
            key=lambda one: (self._caps[one], one),
        )
        # Where no server may by its rank (it is noise of rounding), the highest do.
        allowed = allowed or [max(range(len(self._caps)), key=lambda one: (self._caps[one], -one))]
        place = 0
        for amount, adapter in sorted(left, key=lambda one: (-one[0], one[1])):
            rest = amount
            for server in sorted(self._before.get(adapter, ())):
                if self._caps[server] >= rank:
                    rest -= self._put(adapter, server, rest)
            while rest > _ROUNDING * amount and place < len(allowed):
                rest -= self._put(adapter, allowed[place], rest)
                if self._room[allowed[place]] <= self._least:
                    place += 1
            if rest > _ROUNDING * amount:
                roomiest = max(allowed, key=lambda one: (self._room[one], -one))
                self._room[roomiest] = max(self._room[roomiest], rest + self._least)
                self._put(adapter, roomiest, rest)

    def _place_idle(self, adapters: Iterable[int]) -> None:
        """Those without demand stay at one of their places, or go where the fewest are: on servers of their
        rank or more, because a request that comes after all would raise the rank of any other."""
        heaps: dict[int, list[tuple[int, int]]] = {}
        for adapter in adapters:
            least = min(int(self._problem.ranks[adapter]), max(self._caps))
            row = {s: phi for s, phi in self._before.get(adapter, {}).items() if self._caps[s] >= least}
            if row:
                self._hold(adapter, min(row, key=lambda one: (-row[one], one)), 1.0)
                continue
            if least not in heaps:
                heaps[least] = [(self._held[s], s) for s, cap in enumerate(self._caps) if cap >= least]
                heapq.heapify(heaps[least])
            heap = heaps[least]
            while heap[0][0] < self._held[heap[0][1]]:  # others have come by another rank's heap
                heapq.heapreplace(heap, (self._held[heap[0][1]], heap[0][1]))
            server = heap[0][1]
            self._hold(adapter, server, 1.0)
            heapq.heapreplace(heap, (self._held[server], server))

    def _put(self, adapter: int, server: int, amount: float) -> float:
        """As much of it as there is room for; where that is no more than rounding makes, nothing."""
        room = self._room[server]
        if room < amount:
            amount = room
            if amount <= self._least:
                return 0.0
        if amount <= 0:
            return 0.0
        self._room[server] = room - amount
        self._hold(adapter, server, amount / self._amounts[adapter])
        return amount

    def _hold(self, adapter: int, server: int, share: float) -> None:
        row = self._shares.setdefault(adapter, {})
        self._held[server] += server not in row
        row[server] = row.get(server, 0.0) + share
