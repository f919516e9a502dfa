"""A fixed number of GPUs, split between LLM instances and the LoRA Server."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_lora.core.errors import SloError
from moe_lora.dist.lora_server.protocol.partition import Layout

from moe_lora.provision.admission.admitted import Admitted
from .candidate import candidate
from .cluster_size import EQ5, EQ6, FIRST_TOKEN, LOADS, MEMORY, Cluster, largest
from moe_lora.provision.admission.load_range import largest_load


@dataclass(frozen=True, kw_only=True)
class Split:
    """L instances beside a server of `layout`, and the largest load that they hold.

    global_batch: requests at once.  tokens_per_s: output tokens per second of that load.  binding: what a
    larger batch would violate first: a name of CONSTRAINTS, or "instances".
    """

    layout: Layout
    num_instances: int
    global_batch: int
    tokens_per_s: float
    binding: str


def best_split(
    cluster: Cluster,
    probabilities: NDArray[np.float64],
    target_iar: float,
    num_gpus: int,
    admitted: Admitted,
) -> Split:
    """The split of num_gpus that holds the highest rate; L = (num_gpus - m) // GPUs of an instance.

    admitted: IAR(probabilities, global batch, capacity).  Where the load is a given global batch, the split
    that holds the largest one.  Of equals the one with fewer server GPUs wins, then the one with the shorter
    round.  Raises SloError if no split works.
    """
    held: dict[tuple[int, int], int] = {}
    best: tuple[tuple[float, ...], Split] | None = None
    for layout in cluster.layouts:
        most = _fastest(cluster, layout, num_gpus)
        if most is None or (best and _value(cluster, most) < best[0][0]):
            continue
        key = cluster.slots(layout), most.global_batch
        if key not in held:
            held[key] = largest_load(probabilities, target_iar, *key, admitted)
        if not held[key]:
            continue
        split = _split(cluster, layout, most.num_instances, held[key], most.binding)
        if held[key] < most.global_batch:
            split = replace(split, binding=MEMORY)
        round_s = cluster.stages.server(layout.ep, held[key] / split.num_instances).total_s
        order = (_value(cluster, split), -layout.num_ranks, -round_s)
        if best is None or order > best[0]:
            best = (order, split)
    if best is None:
        raise SloError(
            f"--gpus {num_gpus}: no split into instances of {cluster.instance_gpus} GPUs and a LoRA Server "
            f"holds a single request within the SLOs; give more GPUs, {cluster.instance_gpus + 1} at least"
        )
    return best[1]


def _value(cluster: Cluster, split: Split) -> float:
    return split.tokens_per_s if cluster.global_batch is None else split.global_batch


def _fastest(cluster: Cluster, layout: Layout, num_gpus: int) -> Split | None:
    """The largest load within (5), (6) and the first token's time, and what stops it; None: none."""
    num_instances = (num_gpus - layout.num_ranks) // cluster.instance_gpus
    if num_instances < 1 or cluster.slots(layout) < 1:
        return None

    def met(global_batch: int) -> dict[str, bool]:
        found = candidate(cluster, layout, 1, num_instances, global_batch / num_instances).met
        return {name: found[name] for name in (FIRST_TOKEN, LOADS, EQ5, EQ6)}

    if not all(met(1).values()):
        return None
    most = num_instances * cluster.max_batch[0]
    batch = largest(lambda rows: all(met(rows).values()), most)
    if batch == most:
        return _split(cluster, layout, num_instances, batch, "instances")
    slow = next(name for name, holds in met(batch + 1).items() if not holds)
    return _split(cluster, layout, num_instances, batch, slow)


def _split(cluster: Cluster, layout: Layout, num_instances: int, global_batch: int, binding: str) -> Split:
    return Split(
        layout=layout,
        num_instances=num_instances,
        global_batch=global_batch,
        tokens_per_s=cluster.tokens_at(layout, num_instances, global_batch),
        binding=binding,
    )
