"""Which server serves up to which rank, and what it then gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from .placement_caps import Cap, rank_caps
from .placement_fill import Filling, FillOrder
from .placement_problem import PlacementProblem, Shares
from .placement_quality import tokens_by_rank


def least_caps(problem: PlacementProblem, *, padded: bool) -> list[Cap]:
    """The caps with the least worst load; unless `padded`, all servers may serve all ranks."""
    if padded:
        demand = {rank: float(problem.demand[problem.ranks == rank].sum()) for rank in problem.tokens_per_s}
        return rank_caps(demand, problem.tokens_per_s, len(problem.servers))
    if not problem.target_utilisation > 0:
        return []
    highest = max(problem.tokens_per_s)
    return [Cap(lora_rank=highest, num_servers=len(problem.servers), load=problem.target_utilisation)]


class Slots:
    """Caps for servers, by number, and the shares that follow."""

    def __init__(self, problem: PlacementProblem, before: Shares, *, padded: bool) -> None:
        self.problem = problem
        self.before = before
        self.padded = padded
        amounts = (problem.demand if padded else problem.load).tolist()
        self._order = FillOrder(problem, amounts, before)

    def fill(self, caps: Sequence[Cap], slack: float) -> Shares:
        """Shares under these caps, one a server, with loads up to (1 + slack) times theirs."""
        problem = self.problem
        per_s = problem.tokens_per_s if self.padded else dict.fromkeys(problem.tokens_per_s, 1.0)
        room = [cap.load * (1 + slack) * per_s[cap.lora_rank] if cap.load else 0.0 for cap in caps]
        return Filling(self._order, [cap.lora_rank for cap in caps], room).fill()

    def least_moved(self, caps: Sequence[Cap]) -> list[Cap]:
        """Which server gets which cap: bytes of its adapters of that very rank count whole, of lower ranks
        half (they may stay if there is room), of higher ranks, which have to leave, nothing."""
        slots = [cap for cap in caps for _ in range(cap.num_servers)]
        slots += [Cap(lora_rank=0, num_servers=1, load=0.0)] * (len(self.problem.servers) - len(slots))
        if not self.before:
            return slots
        place = {rank: index for index, rank in enumerate(self.problem.tokens_per_s)}
        had = np.zeros((len(slots), len(place)))
        for adapter, row in self.before.items():
            for server in row:
                had[server, place[int(self.problem.ranks[adapter])]] += self.problem.nbytes[adapter]
        at_slot = np.array([cap.lora_rank for cap in slots])
        ranks = np.array(list(place))
        worth = (ranks[None, :] == at_slot[:, None]) + 0.5 * (ranks[None, :] < at_slot[:, None])
        _, slot = linear_sum_assignment(had @ worth.T, maximize=True)
        return [slots[int(one)] for one in slot]

    def as_they_are(self) -> list[Cap]:
        """Every server up to the highest rank that it serves now (idle ones up to the lowest in demand), the
        highest of them up to the highest in demand, at the least load that this allows."""
        problem = self.problem
        ranks = [rank for rank in problem.tokens_per_s if problem.demand[problem.ranks == rank].sum() > 0]
        served = tokens_by_rank(problem, self.before) > 0
        every = np.array(list(problem.tokens_per_s))
        per_s = problem.tokens_per_s
        highest = [int(every[row].max()) if row.any() else ranks[0] for row in served]
        highest[int(np.argmax(highest))] = ranks[-1]
        load = max(
            float(problem.demand[problem.ranks >= rank].sum())
            / sum(per_s[one] for one in highest if one >= rank)
            for rank in ranks
        )
        return [Cap(lora_rank=rank, num_servers=1, load=load) for rank in highest]
