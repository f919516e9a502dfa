"""Inputs that the tests of sizing and planning share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lora.provision.plan.inputs import PlanInputs
from moe_lora.provision.plan.memory import AdapterMix, known_model
from moe_lora.provision.profile_file import read_profile


def zipf(num_adapters: int = 512, s: float = 1.2) -> NDArray[np.float64]:
    weights = np.arange(1, num_adapters + 1) ** -s
    return weights / weights.sum()


def inputs(model: str = "Mixtral-8x7B", **changes: Any) -> PlanInputs:
    """The named model on the paper's hardware, 512 adapters, Zipf 1.2, 25 requests/s of 230 tokens."""
    known = known_model(model)
    given: dict[str, Any] = {
        "model": known.name,
        "shape": known.shape,
        "mix": AdapterMix(ranks=((known.lora_rank, 1.0),)),
        "profile": read_profile("hopper96"),
        "instance_gpus": known.instance_gpus,
        "probabilities": zipf(),
        "output_tokens": 230.0,
        "context_tokens": 900.0,
        "rate_per_s": 25.0,
    }
    return PlanInputs(**given | changes)
