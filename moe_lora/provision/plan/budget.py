"""Whether what was given, GPUs or instances, holds the load."""

from __future__ import annotations

from moe_lora.core.errors import SloError

from .cluster_size import Cluster
from .inputs import PlanInputs
from .sizing import fewest_instances
from .split import Split


def check_budget(inputs: PlanInputs, split: Split) -> None:
    """Raises SloError if the best split holds less than the load."""
    if inputs.global_batch is not None:
        held, asked, unit = float(split.global_batch), inputs.global_batch, "requests at once"
    else:
        assert inputs.rate_per_s is not None  # one of the two is given
        held, asked, unit = split.tokens_per_s / inputs.output_tokens, inputs.rate_per_s, "requests/s"
    if asked <= held:
        return
    raise SloError(
        f"--gpus {inputs.gpus} hold {held:.1f} {unit} at best ({split.num_instances} instances and "
        f"{split.layout}), the load is {asked:.1f}, {asked - held:.1f} more; {split.binding} limits it; "
        "give more --gpus or loosen the SLOs"
    )


def check_instances(inputs: PlanInputs, cluster: Cluster) -> None:
    """Raises SloError if so many instances can't take the load, with the number that can."""
    most, limit = cluster.max_batch
    assert inputs.instances is not None  # asked for only then
    least = fewest_instances(cluster)
    if inputs.instances >= least:
        return
    batch = min(cluster.batch(layout.ep, inputs.instances) for layout in cluster.layouts)
    why = "fit beside the weights" if limit == "kv" else "the base model decodes within the TPOT SLO"
    raise SloError(
        f"--instances {inputs.instances}: {batch:.1f} requests each or more, {batch - most:.1f} more than "
        f"the {most} that {why}; give {least} or more"
    )
