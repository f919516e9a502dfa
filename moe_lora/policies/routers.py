"""Routers by the names users give, made from what a front end knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from moe_lora.core.errors import ConfigError

from .model_routing import CostModel, RankAware, ShortestPendingTime
from .phi_routing import PhiRouting
from .routing import LeastOutstanding, RoundRobin, Router
from .spread import AdapterAffinity, FirstFit, JoinShortestQueue, RandomChoice


@dataclass(frozen=True, kw_only=True)
class RoutingContext:
    """max_num_seqs: requests that an instance computes at once.  model: None if there is none.  ranks: of the
    adapters, filled and changed while it runs.  table: for `phi`; a controller swaps it.  seed: of `random`.
    """

    max_num_seqs: int = 64
    model: CostModel | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    table: Mapping[str, Iterable[tuple[int, float]]] = field(default_factory=dict)
    seed: int = 0

    def need_model(self, name: str) -> CostModel:
        if self.model is None:
            raise ConfigError(f"routing={name!r} needs a performance model; give --performance-model FILE")
        return self.model


ROUTERS: dict[str, Callable[[RoutingContext], Router]] = {
    "least_outstanding": lambda _: LeastOutstanding(),
    "round_robin": lambda _: RoundRobin(),
    "random": lambda context: RandomChoice(context.seed),
    "join_shortest_queue": lambda _: JoinShortestQueue(),
    "first_fit": lambda context: FirstFit(context.max_num_seqs),
    "adapter_affinity": lambda _: AdapterAffinity(),
    "rank_aware": lambda context: RankAware(context.need_model("rank_aware"), context.ranks),
    "shortest_pending_time": lambda context: ShortestPendingTime(
        context.need_model("shortest_pending_time"), context.ranks, context.max_num_seqs
    ),
    "phi": lambda context: PhiRouting(context.table),
}


def make_router(name: str, context: RoutingContext | None = None) -> Router:
    """The router of that name.  Raises ConfigError for an unknown one, and for one that lacks its model."""
    if name not in ROUTERS:
        raise ConfigError(f"routing={name!r} is unknown; choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name](context or RoutingContext())
