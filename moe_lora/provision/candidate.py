"""How one layout of a LoRA Server fares under a load: equations 5 and 6, memory, the first token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_lora.dist.lora_server.partition import Layout

from .cluster import EQ5, EQ6, FIRST_TOKEN, MEMORY, Cluster, largest
from .memory import kv_requests
from .stages import ServerRound

MOST_ROWS = 1024
CapacityOf = Callable[[float], int]
"""M* of a global batch."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout under one load: what fits, how long a round takes, and which constraints it meets.

    batch: rows of each instance.  capacity: adapters that the load needs.
    """

    layout: Layout
    batch: float
    capacity: int
    slots: int
    round: ServerRound
    met: Mapping[str, bool]

    @property
    def feasible(self) -> bool:
        return all(self.met.values())


def candidate(cluster: Cluster, layout: Layout, capacity: int, num_instances: int, batch: float) -> Candidate:
    """How this layout fares with M = capacity and L = num_instances of `batch` rows each."""
    served = cluster.stages.server(layout.ep, batch)
    slots = cluster.slots(layout)
    waiting = math.ceil(num_instances / layout.pp)
    return Candidate(
        layout=layout,
        batch=batch,
        capacity=capacity,
        slots=slots,
        round=served,
        met={
            MEMORY: slots >= capacity,
            FIRST_TOKEN: sum(cluster.first_token_s(layout, cluster.tpot_s(layout.ep, batch)))
            <= cluster.slo_ttft_s,
            EQ5: served.total_s <= cluster.ffn_budget_s(batch),
            EQ6: served.longest[1] * waiting <= cluster.layer_budget_s,
        },
    )


def candidates(cluster: Cluster, capacity_of: CapacityOf, num_instances: int) -> list[Candidate]:
    """Every layout with the batch that it keeps running, but those whose batch the base model or KV forbid.

    M* is asked for only if some layout meets all but memory.
    """

    def found(needed: CapacityOf) -> list[Candidate]:
        batches = {layout.ep: cluster.batch(layout.ep, num_instances) for layout in cluster.layouts}
        return [
            candidate(cluster, layout, needed(batch * num_instances), num_instances, batch)
            for layout in cluster.layouts
            if (batch := batches[layout.ep]) <= cluster.max_batch[0]
        ]

    in_time = found(lambda load: 1)
    return found(capacity_of) if any(one.feasible for one in in_time) else in_time


def most_rows(cluster: Cluster, layout: Layout, num_instances: int, batch: float) -> int:
    """Most requests that an instance may decode at once: within the TPOT SLO, (5), (6) and its KV.

    MOST_ROWS at most, as an engine keeps tables of that many, but always the mean batch and four standard
    deviations of a Poisson count.
    """

    def in_time(rows: int) -> bool:
        met = candidate(cluster, layout, 1, num_instances, rows).met
        return cluster.base_holds(rows) and met[EQ5] and met[EQ6]

    least = math.ceil(batch + 4 * math.sqrt(batch))
    room = int(kv_requests(cluster.gpu, cluster.shape, cluster.instance_gpus, cluster.context_tokens))
    most = min(MOST_ROWS, room)
    return max(least, largest(in_time, most, least)) if most > least else least
