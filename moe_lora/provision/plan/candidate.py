"""How one layout of a LoRA Server fares under a load: equations 5 and 6, memory, the first token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moe_lora.dist.lora_server.protocol.partition import Layout

from .cluster_size import EQ5, EQ6, FIRST_TOKEN, LOADS, MEMORY, Cluster, largest
from .loading import LoadQueue
from .memory import kv_requests
from .stages import ServerRound

MOST_ROWS = 1024
ROUND = 8
CapacityOf = Callable[[float], int]
"""M* of a global batch."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout under one load: what fits, how long a round takes, and which constraints it meets.

    batch: rows of each instance.  capacity: adapters that the load needs.  step_s: of an instance, waits for
    the loads of `queue` included.  p95_ttft_s: of requests that find a slot.
    """

    layout: Layout
    batch: float
    capacity: int
    slots: int
    round: ServerRound
    step_s: float
    queue: LoadQueue
    p95_ttft_s: float
    met: Mapping[str, bool]

    @property
    def feasible(self) -> bool:
        return all(self.met.values())


def candidate(cluster: Cluster, layout: Layout, capacity: int, num_instances: int, batch: float) -> Candidate:
    """How this layout fares with M = capacity and L = num_instances of `batch` rows each."""
    served = cluster.stages.server(layout.ep, batch)
    slots = cluster.slots(layout)
    step_s, queue = cluster.step_s(layout, num_instances, batch)
    first_load_s, steps_s = cluster.first_token_s(layout, cluster.tpot_s(layout.ep, batch))
    p95_ttft_s = first_load_s + queue.p95_ttft_s(step_s, num_instances)
    return Candidate(
        layout=layout,
        batch=batch,
        capacity=capacity,
        slots=slots,
        round=served,
        step_s=step_s,
        queue=queue,
        p95_ttft_s=p95_ttft_s,
        met={
            MEMORY: slots >= capacity,
            LOADS: p95_ttft_s <= cluster.slo_ttft_s and step_s <= cluster.slo_tpot_s,
            FIRST_TOKEN: first_load_s + steps_s <= cluster.slo_ttft_s,
            **_equations(cluster, layout, num_instances, batch),
        },
    )


def _equations(cluster: Cluster, layout: Layout, num_instances: int, batch: float) -> dict[str, bool]:
    """Whether (5) and (6) hold."""
    served = cluster.stages.server(layout.ep, batch)
    return {
        EQ5: served.total_s <= cluster.ffn_budget_s(batch),
        EQ6: served.longest[1] * math.ceil(num_instances / layout.pp) <= cluster.layer_budget_s,
    }


def candidates(cluster: Cluster, capacity_of: CapacityOf, num_instances: int) -> list[Candidate]:
    """Every layout with the batch that it keeps running, but those whose batch the base model or KV forbid.

    Where only the waits for loads make a batch too large, it is the one without them, and LOADS is not met.
    M* is asked for only of layouts that meet all but memory, up to the first that does that too; beyond, it
    is that one's, and of the others the one of the batch without loads.
    """
    alone = {layout.ep: cluster.batch(layout.ep, num_instances) for layout in cluster.layouts}
    found = [
        _loaded(cluster, layout, num_instances, alone[layout.ep])
        for layout in cluster.layouts
        if alone[layout.ep] <= cluster.max_batch[0]
    ]
    if not any(one.feasible for one in found):
        return found
    fewest: int | None = None
    sized = []
    for one in found:
        loaded = one.feasible and (fewest is None or one.layout.num_ranks == fewest)
        batch = one.batch if loaded else alone[one.layout.ep]
        needed = with_capacity(one, capacity_of(batch * num_instances))
        if needed.feasible and fewest is None:
            fewest = one.layout.num_ranks
        sized.append(needed)
    return sized


def with_capacity(one: Candidate, capacity: int) -> Candidate:
    """The same, when so many adapters must be resident."""
    return replace(one, capacity=capacity, met={**one.met, MEMORY: one.slots >= capacity})


def _loaded(cluster: Cluster, layout: Layout, num_instances: int, alone: float) -> Candidate:
    """With the batch that steps and loads keep running; alone: the one without loads."""
    batch = cluster.batch(layout.ep, num_instances, layout)
    if batch <= cluster.max_batch[0]:
        return candidate(cluster, layout, 1, num_instances, batch)
    one = candidate(cluster, layout, 1, num_instances, alone)
    return replace(one, met={**one.met, LOADS: False})


def most_rows(cluster: Cluster, layout: Layout, num_instances: int) -> int:
    """Most requests that an instance may decode at once: within the TPOT SLO, (5), (6) and its KV.

    MOST_ROWS at most, as an engine keeps tables of that many, but always the mean batch and four standard
    deviations of a Poisson count.  A multiple of ROUND where that is not too few.
    """

    def in_time(rows: int) -> bool:
        return cluster.base_holds(rows) and all(_equations(cluster, layout, num_instances, rows).values())

    batch = cluster.batch(layout.ep, num_instances)
    least = math.ceil(batch + 4 * math.sqrt(batch))
    room = int(kv_requests(cluster.gpu, cluster.shape, cluster.instance_gpus, cluster.context_tokens))
    most = min(MOST_ROWS, room)
    if most <= least:
        return least
    found = largest(in_time, most, least)
    return max(least, found - found % ROUND)
