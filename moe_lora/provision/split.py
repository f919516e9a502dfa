"""A fixed number of GPUs, split between LLM instances and the LoRA Server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_lora.core.errors import SloError
from moe_lora.dist.lora_server.partition import Layout

from .admitted import Admitted
from .cluster import EQ5, EQ6, FIRST_TOKEN, MEMORY, Cluster, candidate, largest
from .iar import expected_active


@dataclass(frozen=True, kw_only=True)
class Split:
    """L instances beside a server of `layout`, and the largest global batch they hold.

    binding: what a larger batch would violate first: a name of CONSTRAINTS, or "instances".
    """

    layout: Layout
    num_instances: int
    global_batch: int
    binding: str


def best_split(
    cluster: Cluster,
    probabilities: NDArray[np.float64],
    target_iar: float,
    num_gpus: int,
    admitted: Admitted,
) -> Split:
    """The split of num_gpus that holds the largest global batch; L = (num_gpus - m) // GPUs of an instance.

    admitted: IAR(probabilities, global batch, capacity).  The global batch is to the serviceable rate as
    tokens of an answer times TPOT (Little), so the largest one means the highest rate.  Of equals the one
    with fewer server GPUs wins, then the one with the shorter round.  Raises SloError if no split works.
    """
    most_rows, _ = cluster.max_batch()
    reached: dict[tuple[int, int], int] = {}
    best: tuple[tuple[float, ...], Split] | None = None
    for layout in cluster.layouts:
        num_instances = (num_gpus - layout.num_ranks) // cluster.instance_gpus
        if num_instances < 1:
            break  # layouts come by number of ranks
        slots, most = cluster.slots(layout), num_instances * most_rows
        in_time = _largest_in_time(cluster, layout, num_instances, most)
        if slots < 1 or in_time is None:
            continue
        batch, slow = in_time
        if best is not None and batch < best[1].global_batch:
            continue
        key = (slots, batch)
        if key not in reached:
            reached[key] = _largest_admitted(probabilities, target_iar, slots, batch, admitted)
        held = reached[key]
        binding = MEMORY if held < batch else slow
        split = Split(layout=layout, num_instances=num_instances, global_batch=held, binding=binding)
        round_s = cluster.stages.server(layout.ep, held / num_instances).total_s
        order = (held, -layout.num_ranks, -round_s)
        if held and (best is None or order > best[0]):
            best = (order, split)
    if best is None:
        raise SloError(
            f"--gpus {num_gpus}: no split into instances of {cluster.instance_gpus} GPUs and a LoRA Server "
            f"holds a single request within the SLOs; give more GPUs, {cluster.instance_gpus + 1} at least"
        )
    return best[1]


def _largest_in_time(
    cluster: Cluster, layout: Layout, num_instances: int, most: int
) -> tuple[int, str] | None:
    """The largest global batch within (5), (6) and the first token's time, and what stops it; None: none."""

    def met(global_batch: int) -> dict[str, bool]:
        found = candidate(cluster, layout, 1, num_instances, global_batch / num_instances).met
        return {name: found[name] for name in (FIRST_TOKEN, EQ5, EQ6)}

    if not all(met(1).values()):
        return None
    batch = largest(lambda rows: all(met(rows).values()), most)
    if batch == most:
        return batch, "instances"
    return batch, next(name for name, holds in met(batch + 1).items() if not holds)


def _largest_admitted(
    probabilities: NDArray[np.float64], target_iar: float, slots: int, most: int, admitted: Admitted
) -> int:
    """The largest global batch, at most `most`, up to which `slots` adapters admit the target share.

    0 if there is none.  IAR is not monotone in the batch (far above, the hot adapters that fit are all the
    model sees), so the first failure is looked for, upwards in steps of a quarter from where half the slots
    are in use.
    """
    if slots >= np.count_nonzero(probabilities):
        return most

    def holds(global_batch: int) -> bool:
        return admitted(probabilities, float(global_batch), slots) >= target_iar

    def half_used(global_batch: int) -> bool:
        return expected_active(probabilities, float(global_batch)) <= slots / 2

    held = largest(half_used, most)
    if not holds(held):
        return largest(holds, held) if holds(1) else 0
    while held < most:
        tried = min(most, max(held + 1, held * 5 // 4))
        if not holds(tried):
            return largest(holds, tried - 1, held)
        held = tried
    return held
