# SPDX-License-Identifier: Apache-2.0
"""Evidence of a plan: lower bound, and runs on hardware."""

from __future__ import annotations

from typing import Any

from moe_lora.core.errors import SloError
from moe_lora.provision.device_profile import Part
from moe_lora.provision.lower_bound import LowerBound, Work, lower_bound

from .inputs import PlanInputs, SizedCluster

TEXTS: dict[Part, str] = {
    "decode": "decode steps",
    "prefill": "prompts",
    "chunks": "chunks of prompts beside decode rows",
    "adapters": "adapters beside the weights",
    "loads": "loads of adapters during steps",
    "prefixes": "prefix hits",
    "several GPUs": "an instance on several GPUs",
    "LoRA Server": "a LoRA Server and its network",
    "moves": "moves of KV between instances",
}


def bound_of(inputs: PlanInputs, rate_per_s: float) -> LowerBound | None:
    """The bound of a rate, with the margin; None without peak rates."""
    gpu, weights = inputs.profile.gpu, inputs.weights
    if gpu.flop_per_s is None or gpu.bytes_per_s is None:
        return None
    margin = inputs.load_margin if inputs.global_batch is None else 0.0
    unquantised = 8.0 * inputs.shape.dtype_bytes
    work = Work(computed_tokens=max(0.0, inputs.output_tokens - 1), prompt_pairs=0.0, decode_pairs=0.0)
    return lower_bound(
        inputs.shape,
        work if inputs.prompts is None else inputs.prompts.work,
        rate_per_s=rate_per_s * (1 + margin),
        adapter_rank=inputs.mix.mean_rank * inputs.adapter_share,
        flop_per_s=gpu.flop_per_s,
        bytes_per_s=gpu.bytes_per_s,
        weight_bits=(weights.attention_bits or unquantised, weights.expert_bits or unquantised),
        memory_bytes=gpu.memory_bytes,
    )


def check_bound(bound: LowerBound | None, place: SizedCluster, inputs: PlanInputs) -> LowerBound | None:
    """The bound.  Raises SloError for a place of fewer GPUs."""
    number = place.num_gpus(inputs.instance_gpus)
    if bound is not None and number < bound.gpus:
        raise SloError(
            f"{number} GPUs ({place}) are fewer than the lower bound, {bound.text}: profile "
            f"{inputs.profile.name!r} has times beyond its own peak rates; correct the rates or the times"
        )
    return bound


def evidence(inputs: PlanInputs, place: SizedCluster, rate_per_s: float) -> dict[str, Any]:
    """The fields lower_bound, ran and never_ran.  Raises SloError below the bound."""
    return {
        "lower_bound": check_bound(bound_of(inputs, rate_per_s), place, inputs),
        "ran": ran(inputs, place),
        "never_ran": never_ran(inputs, place),
    }


def _parts(inputs: PlanInputs, place: SizedCluster) -> list[Part]:
    resident = place.layout is None and place.slots >= len(inputs.probabilities)
    used: dict[Part, bool] = {
        "decode": True,
        "prefill": inputs.prompts is not None,
        "chunks": inputs.prompts is not None and not place.prefill_instances,
        "adapters": place.layout is None or place.prefill_instances > 0,
        "loads": not resident,
        "prefixes": inputs.prompts is not None and inputs.prompts.hit_share > 0,
        "several GPUs": inputs.instance_gpus > 1,
        "LoRA Server": place.layout is not None,
        "moves": place.prefill_instances > 0,
    }
    return [part for part, is_used in used.items() if is_used]


def ran(inputs: PlanInputs, place: SizedCluster) -> tuple[str, ...]:
    """Parts with a run on the device, and the runs."""
    found = inputs.profile.ran
    return tuple(f"{TEXTS[part]} ({found[part]})" for part in _parts(inputs, place) if part in found)


def never_ran(inputs: PlanInputs, place: SizedCluster) -> tuple[str, ...]:
    """Parts without a run on the device."""
    profile = inputs.profile
    missing = [TEXTS[part] for part in _parts(inputs, place) if part not in profile.ran]
    if inputs.model not in profile.models_run:
        missing.insert(0, f"{inputs.model} as a whole model")
    return tuple(missing)
