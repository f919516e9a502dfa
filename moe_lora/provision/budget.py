"""Whether what was given, GPUs or instances, holds the load."""

from __future__ import annotations

import math

from moe_lora.core.errors import SloError

from .cluster import Cluster
from .inputs import PlanInputs
from .split import Split


def check_budget(inputs: PlanInputs, split: Split) -> None:
    """Raises SloError if the best split holds fewer requests than the load."""
    if inputs.load <= split.global_batch:
        return
    raise SloError(
        f"--gpus {inputs.gpus} hold {split.global_batch} requests at once at best ({split.num_instances} "
        f"instances and {split.layout}), the load is {inputs.load:.1f}, "
        f"{inputs.load - split.global_batch:.1f} more; {split.binding} limits it; "
        "give more --gpus or loosen the SLOs"
    )


def check_instances(inputs: PlanInputs, cluster: Cluster) -> None:
    """Raises SloError if so many instances can't take the load, with the number that can."""
    most, limit = cluster.max_batch()
    assert inputs.instances is not None  # asked for only then
    batch = inputs.load / inputs.instances
    if batch <= most:
        return
    why = "fit beside the weights" if limit == "kv" else "the base model decodes within the TPOT SLO"
    raise SloError(
        f"--instances {inputs.instances}: {batch:.1f} requests each, {batch - most:.1f} more than the {most} "
        f"that {why}; give "
        f"{math.ceil(inputs.load / most)} or more"
    )
