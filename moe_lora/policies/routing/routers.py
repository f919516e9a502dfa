# SPDX-License-Identifier: Apache-2.0
"""Routers by setting name."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from moe_lora.core.errors import ConfigError

from .routing import Instance, LeastOutstanding, RoundRobin, RoutedView, Router

if TYPE_CHECKING:
    from .model_routing import CostModel


_NUM_REQUESTS = attrgetter("load.num_requests")


class RandomChoice:
    """A random instance; equal seeds choose alike."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        return instances[self._rng.randrange(len(instances))]


class JoinShortestQueue:
    """The instance of fewest unfinished requests, the first on ties."""

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        return min(instances, key=_NUM_REQUESTS)


class FirstFit:
    """The first instance with fewer than max_requests, else the one of fewest (Toppings section 7.4)."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._otherwise = JoinShortestQueue()

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        found = next((one for one in instances if one.load.num_requests < self._max_requests), None)
        return self._otherwise.choose(request, instances) if found is None else found


class AdapterAffinity:
    """The least busy instance with the adapter, or requests for it, unless much busier.

    Token work is at most (1 + max_imbalance) · the least of all + slack_tokens; else the least of all.
    """

    def __init__(self, max_imbalance: float = 0.5, slack_tokens: int = 2048) -> None:
        self._max_imbalance = max_imbalance
        self._slack_tokens = slack_tokens
        self._otherwise = LeastOutstanding()

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        idlest = self._otherwise.choose(request, instances)
        adapter = request.adapter
        if idlest.load.has(adapter):
            return idlest
        # As `InstanceLoad.has`, without a call per instance: there may be hundreds.
        having = [one for one in instances if adapter in (load := one.load).recent or adapter in load.used]
        chosen = self._otherwise.choose(request, having or [idlest])
        limit = (1 + self._max_imbalance) * idlest.outstanding_tokens + self._slack_tokens
        return chosen if chosen.outstanding_tokens <= limit else idlest


_Row = tuple[tuple[int, float], ...]


class PhiRouting:
    """Each adapter's requests over its instances in proportion to phi.

    Smooth weighted round robin in place of the paper's draw: of n requests an instance gets below phi · n + 1
    and above phi · n - (instances - 1).  Absent instances leave shares to the others.  The base model and
    unplaced adapters go to the least token work.  Source: LoRAServe, section IV; disjoint assignment:
    InfiniLoRA, section 6.1.
    """

    def __init__(self, table: Mapping[str, Iterable[tuple[int, float]]] | None = None) -> None:
        self.version = 0
        self._otherwise = LeastOutstanding()
        self._table = _checked(table or {})
        self._credits: dict[str, dict[int, float]] = {}

    @property
    def table(self) -> dict[str, list[tuple[int, float]]]:
        """A copy of the current table."""
        return {adapter: list(row) for adapter, row in self._table.items()}

    def swap(self, table: Mapping[str, Iterable[tuple[int, float]]]) -> None:
        """Route by this table from now on; unchanged rows keep their turn.

        Raises ValueError, keeping the old table, unless shares are positive and sum to 1.
        """
        before, self._table = self._table, _checked(table)
        self._credits = {
            adapter: credit
            for adapter, credit in self._credits.items()
            if self._table.get(adapter) == before[adapter]
        }
        self.version += 1

    def choose(self, request: RoutedView, instances: Sequence[Instance]) -> Instance:
        row = self._table.get(request.adapter) if request.adapter is not None else None
        if row is None or request.adapter is None:
            return self._otherwise.choose(request, instances)
        there = {one.index: one for one in instances}
        row = tuple((index, phi) for index, phi in row if index in there)
        if not row:
            return self._otherwise.choose(request, instances)
        credit = self._credits.setdefault(request.adapter, {})
        total = math.fsum(phi for _, phi in row)
        for index, phi in row:
            credit[index] = credit.get(index, 0.0) + phi / total
        chosen, _ = max(row, key=lambda one: (round(credit[one[0]], 9), one[1], -one[0]))
        credit[chosen] -= 1.0
        return there[chosen]


def _checked(table: Mapping[str, Iterable[tuple[int, float]]]) -> dict[str, _Row]:
    found = {}
    for adapter, given in table.items():
        row = tuple((int(index), float(phi)) for index, phi in given)
        if not all(phi > 0 for _, phi in row) or not math.isclose(sum(p for _, p in row), 1.0, rel_tol=1e-6):
            raise ValueError(f"routing of adapter {adapter!r} is {row}; shares must be positive and sum to 1")
        if len({index for index, _ in row}) != len(row):
            raise ValueError(f"routing of adapter {adapter!r} is {row}; name each instance once")
        found[adapter] = row
    return found


@dataclass(frozen=True, kw_only=True)
class RoutingContext:
    """max_loras: on a device; None: unlimited.  ranks: updated at run time.  table: for `phi`.  seed: of
    `random`.
    """

    max_num_seqs: int = 64
    max_loras: int | None = None
    model: CostModel | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    table: Mapping[str, Iterable[tuple[int, float]]] = field(default_factory=dict)
    seed: int = 0

    def need_model(self, name: str) -> CostModel:
        if self.model is None:
            raise ConfigError(
                f"routing={name!r} needs a performance model; give --set front_end.performance_model=FILE"
            )
        return self.model


def _rank_aware(context: RoutingContext) -> Router:
    from .model_routing import RankAware

    return RankAware(context.need_model("rank_aware"), context.ranks, context.max_loras)


def _shortest_pending_time(context: RoutingContext) -> Router:
    from .model_routing import ShortestPendingTime

    model = context.need_model("shortest_pending_time")
    return ShortestPendingTime(model, context.ranks, context.max_num_seqs, context.max_loras)


ROUTERS: dict[str, Callable[[RoutingContext], Router]] = {
    "least_outstanding": lambda _: LeastOutstanding(),
    "round_robin": lambda _: RoundRobin(),
    "random": lambda context: RandomChoice(context.seed),
    "join_shortest_queue": lambda _: JoinShortestQueue(),
    "first_fit": lambda context: FirstFit(context.max_num_seqs),
    "adapter_affinity": lambda _: AdapterAffinity(),
    "rank_aware": _rank_aware,
    "shortest_pending_time": _shortest_pending_time,
    "phi": lambda context: PhiRouting(context.table),
}


def make_router(name: str, context: RoutingContext | None = None) -> Router:
    """The named router.  Raises ConfigError, also for a missing model."""
    if name not in ROUTERS:
        raise ConfigError(f"routing={name!r} is unknown; choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name](context or RoutingContext())
