"""The smallest LoRA Server for a load, and the fewest instances (InfiniLoRA section 4.2.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moe_lora.core.errors import SloError

from .cluster import CONSTRAINTS, Candidate, Cluster, candidate
from .shortfall import shortfall


@dataclass(frozen=True, kw_only=True)
class ServerSize:
    """The chosen layout.  gpus_by_constraint: the fewest ranks that each constraint alone needs."""

    chosen: Candidate
    gpus_by_constraint: Mapping[str, int]

    @property
    def binding(self) -> str:
        """The constraint that needs most ranks; of equals the first of CONSTRAINTS."""
        return max(CONSTRAINTS, key=lambda name: self.gpus_by_constraint[name])


def minimum_server(
    cluster: Cluster, capacity: int, num_instances: int, batch: float, num_gpus: int | None = None
) -> ServerSize:
    """The fewest ranks, and among their layouts the one whose round is shortest, that meet all constraints.

    num_gpus: exactly so many ranks.  Among equal rounds the smaller sync scope x wins (table 1).
    Raises SloError that says which term exceeds which budget, and by how much.
    """
    found = [candidate(cluster, layout, capacity, num_instances, batch) for layout in cluster.layouts]
    allowed = [one for one in found if num_gpus in (None, one.layout.num_ranks)]
    if not allowed:
        raise SloError(
            f"no EPx-PPy of {num_gpus} ranks fits this model and {cluster.instance_gpus} GPUs a "
            "instance; choose another number"
        )
    feasible = [one for one in allowed if one.feasible]
    if not feasible:
        raise SloError(shortfall(cluster, allowed, capacity, num_instances, batch))
    fewest = feasible[0].layout.num_ranks
    chosen = min(
        (one for one in feasible if one.layout.num_ranks == fewest),
        key=lambda one: (one.round.total_s, one.layout.ep),
    )
    needs = {name: next(one.layout.num_ranks for one in found if one.met[name]) for name in CONSTRAINTS}
    return ServerSize(chosen=chosen, gpus_by_constraint=needs)


def fewest_instances(cluster: Cluster, capacity: int, global_batch: float) -> tuple[int, ServerSize]:
    """(L, server) for a load: the fewest instances that the base model's time and KV allow, and its server.

    More instances have smaller batches, so where equation 5 or 6 or the first token fails, their number
    grows, by an eighth a time, until a LoRA Server holds them.  Raises SloError of the last try if none does.
    """
    most, num_instances = max(1, math.ceil(global_batch)), math.ceil(global_batch / cluster.max_batch()[0])
    while True:
        try:
            return num_instances, minimum_server(
                cluster, capacity, num_instances, global_batch / num_instances
            )
        except SloError:
            if num_instances >= most:
                raise
        num_instances = min(most, num_instances + max(1, num_instances // 8))
