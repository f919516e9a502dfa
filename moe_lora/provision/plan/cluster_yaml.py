"""A plan as the file that `moe-lora serve --config` takes."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from .memory import bytes_text
from .plan import Plan
from .plan_text import deployment, ranks_text

PLACEHOLDER_DIR = "MODEL_DIR"


def plan_yaml(plan: Plan, model_dir: str | None, adapters: Sequence[tuple[str, str]] = ()) -> str:
    """cluster.yaml for the plan (fields: docs/cluster.md).

    model_dir: None writes a placeholder, and a comment that says so.  adapters: (name, directory) pairs;
    others come over HTTP or from --lora-dir.
    """
    content = {
        "model_dir": model_dir or PLACEHOLDER_DIR,
        **({"adapters": dict(adapters)} if adapters else {}),
        "engine": {
            "max_num_seqs": plan.max_num_seqs,
            "expert_parallel": plan.instance_gpus,
            "num_instances": plan.instances,
        },
        "lora_server": {
            "layout": plan.layout,
            "capacity": plan.slots,
            "memory_gb": plan.memory_gb_per_rank,
        },
    }
    lines = [
        f"# {plan.total_gpus} GPUs of {plan.inputs['hardware']}: {deployment(plan)}",
        f"# Model: {plan.inputs['model']}.  Adapters: {plan.inputs['num_adapters']} of LoRA rank "
        f"{ranks_text(plan)}, {bytes_text(plan.bytes_per_adapter)} each; name their",
        "# folders under adapters (name: folder), or give --lora-dir, or load them over HTTP.",
        f"# M* = {plan.capacity} for an IAR of {plan.inputs['target_iar']:g}; the server's GPUs hold "
        f"{plan.slots}; bound by {plan.binding_constraint}",
        "# For one host. Over several (docs/cluster.md) add certificates, lora_server.address, store_dir and",
        "# transport, front_end.engines_address, and set engine.num_instances to the instances of a host.",
    ]
    if model_dir is None:
        lines.append(f"# {PLACEHOLDER_DIR} is a placeholder: put the checkpoint's folder there.")
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False)
