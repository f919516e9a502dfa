"""The smallest LoRA Server for a load, and the smallest cluster (InfiniLoRA section 4.2.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from moe_lora.core.errors import SloError

from .candidate import Candidate, CapacityOf, candidates
from .cluster_size import CONSTRAINTS, MEMORY, Cluster
from .shortfall import shortfall


@dataclass(frozen=True, kw_only=True)
class ServerSize:
    """The chosen layout.  gpus_by_constraint: the fewest ranks that each constraint alone needs."""

    chosen: Candidate
    gpus_by_constraint: Mapping[str, int]

    @property
    def binding(self) -> str:
        """The constraint that needs most ranks; of equals the first of CONSTRAINTS."""
        return max(self.gpus_by_constraint, key=lambda name: self.gpus_by_constraint[name], default=MEMORY)


def smallest_server(
    cluster: Cluster, found: Sequence[Candidate], num_instances: int, num_gpus: int | None = None
) -> ServerSize:
    """The fewest ranks, and among their layouts the one whose round is shortest, that meet all constraints.

    found: by number of ranks.  num_gpus: exactly so many.  Among equal rounds the smaller sync scope x wins
    (table 1).  Raises SloError that says which term exceeds which budget, and by how much.
    """
    allowed = [one for one in found if num_gpus in (None, one.layout.num_ranks)]
    if not allowed:
        raise SloError(
            f"no EPx-PPy of {num_gpus} ranks fits this model and {cluster.instance_gpus} GPUs a "
            "instance; choose another number"
        )
    feasible = [one for one in allowed if one.feasible]
    if not feasible:
        raise SloError(shortfall(cluster, allowed, num_instances))
    fewest = feasible[0].layout.num_ranks
    chosen = min(
        (one for one in feasible if one.layout.num_ranks == fewest),
        key=lambda one: (one.round.total_s, one.layout.ep),
    )
    return server_size(chosen, found)


def server_size(chosen: Candidate, found: Sequence[Candidate]) -> ServerSize:
    """The layout with what each constraint alone needs, where any of `found` meets it."""
    fewest = {
        name: next((one.layout.num_ranks for one in found if one.met[name]), None) for name in CONSTRAINTS
    }
    needs = {name: num_ranks for name, num_ranks in fewest.items() if num_ranks is not None}
    return ServerSize(chosen=chosen, gpus_by_constraint=needs)


def fewest_instances(cluster: Cluster) -> int:
    """L from which on the base model's time and KV allow the load's batches on some layout."""
    degrees = {layout.ep for layout in cluster.layouts}

    def too_few(num_instances: int) -> bool:
        return all(cluster.batch(ep, num_instances) > cluster.max_batch[0] for ep in degrees)

    low, high = 0, 1
    while too_few(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if too_few(middle) else (low, middle)
    return high


def smallest_cluster(cluster: Cluster, capacity_of: CapacityOf) -> tuple[int, ServerSize]:
    """(L, server) of the fewest GPUs in all, of equals the fewest instances.

    More instances have smaller batches, quicker steps, and so fewer requests at once: where nothing holds the
    load their number grows, by an eighth a time; from the first that does, all numbers are tried that may
    save more server ranks than they cost.  Raises SloError of the last try if none does.
    """

    def size(num_instances: int) -> ServerSize:
        found = candidates(cluster, capacity_of, num_instances)
        return smallest_server(cluster, found, num_instances)

    num_instances = fewest_instances(cluster)
    failed, most = num_instances - 1, max(num_instances, math.ceil(_load(cluster, num_instances)))
    while True:
        try:
            best = num_instances, size(num_instances)
            break
        except SloError:
            if num_instances >= most:
                raise
        failed, num_instances = num_instances, min(most, num_instances + max(1, num_instances // 8))
    least = capacity_of(_load(cluster, most))
    ranks = (layout.num_ranks for layout in cluster.layouts if cluster.slots(layout) >= least)
    fewest_ranks = next(ranks, 1)
    tried = failed + 1
    while tried * cluster.instance_gpus + fewest_ranks <= _gpus(cluster, *best):
        with suppress(SloError):
            best = min(best, (tried, size(tried)), key=lambda one: (_gpus(cluster, *one), one[0]))
        tried += 1
    return best


def _load(cluster: Cluster, num_instances: int) -> float:
    """The smallest global batch of any layout."""
    return num_instances * min(cluster.batch(layout.ep, num_instances) for layout in cluster.layouts)


def _gpus(cluster: Cluster, num_instances: int, server: ServerSize) -> int:
    return num_instances * cluster.instance_gpus + server.chosen.layout.num_ranks
