# SPDX-License-Identifier: Apache-2.0
"""InfiniLoRA's loads, with the paper's LoRA Servers.

The paper gives rates, adapters, skew and GPUs, but no lengths: BurstGPT's are sampled, without a stated mean,
so the global batch is unknown too.  Here: 250 output tokens, 900 tokens of context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_lora.provision.device_profile import read_profile
from moe_lora.provision.plan.inputs import PlanInputs
from moe_lora.provision.plan.memory import AdapterMix, known_model

OUTPUT_TOKENS = 250.0
CONTEXT_TOKENS = 900.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load.  gpus: the whole budget, None: as few as needed.  paper: the paper's statement.

    not_stated: further inputs missing in the paper.
    """

    model: str
    rate_per_s: float
    gpus: int | None
    paper: str
    num_adapters: int = 512
    zipf: float = 1.2
    instances: int | None = None
    not_stated: str = ""

    @property
    def label(self) -> str:
        of = f"{self.num_adapters} adapters, s = {self.zipf:g}, {self.rate_per_s:g} requests/s"
        given = (
            f", {self.gpus} GPUs" if self.gpus else f", {self.instances} instances" if self.instances else ""
        )
        return of + given


_RATE = "request rates of figure 11, its capacities"
CASES = (
    Case(model="GPT-OSS-20B", rate_per_s=35, gpus=8, paper="8 GPUs in all (6.1)", not_stated=_RATE),
    Case(
        model="Qwen3-30B-A3B",
        rate_per_s=35,
        gpus=16,
        paper="8 server GPUs as EP4-PP2, capacity 256; 128 on 4 and 192 on 6 GPUs are too few (6.3.2)",
    ),
    Case(
        model="Mixtral-8x7B",
        rate_per_s=35,
        gpus=16,
        paper="8 server GPUs in most runs (6.2)",
        not_stated=_RATE,
    ),
    Case(
        model="Scaled-MoE", rate_per_s=35, gpus=16, paper="8 server GPUs in most runs (6.2)", not_stated=_RATE
    ),
    Case(model="DBRX", rate_per_s=30, gpus=16, paper="8 server GPUs in most runs (6.2)", not_stated=_RATE),
    Case(model="Mixtral-8x7B", rate_per_s=70, gpus=None, paper="8 server GPUs hold the SLOs (A.1.1)"),
    Case(model="Mixtral-8x7B", rate_per_s=70, gpus=None, zipf=1.5, paper="4 server GPUs (A.1.1)"),
    Case(model="Mixtral-8x7B", rate_per_s=70, gpus=None, num_adapters=256, paper="4 server GPUs (A.1.1)"),
    Case(
        model="Mixtral-8x7B",
        rate_per_s=70,
        gpus=None,
        num_adapters=1024,
        paper="8 server GPUs are too few (A.1.1)",
    ),
    Case(model="Mixtral-8x7B", rate_per_s=60, gpus=None, instances=5, paper="4 server GPUs do (6.3.1)"),
    Case(
        model="Mixtral-8x7B", rate_per_s=72, gpus=None, instances=6, paper="4 server GPUs are too few (6.3.1)"
    ),
    Case(
        model="Mixtral-8x7B",
        rate_per_s=25,
        gpus=8,
        num_adapters=256,
        paper="2 server GPUs, capacity 104, 3 instances (6.4)",
    ),
)


def zipf(num_adapters: int, s: float) -> NDArray[np.float64]:
    """Probabilities ~ 1 / place**s."""
    weights = np.arange(1, num_adapters + 1.0) ** -s
    return weights / weights.sum()


def model_inputs(name: str, **given: Any) -> PlanInputs:
    """A model of table 3 for the planner, with its usual adapters and goals, on the paper's hardware.

    Without `prompts` another device computes these, as in the paper.
    """
    known = known_model(name)
    usual: dict[str, Any] = {
        "model": known.name,
        "shape": known.shape,
        "mix": AdapterMix(ranks=((known.lora_rank, 1.0),)),
        "profile": read_profile("hopper96"),
        "instance_gpus": known.instance_gpus,
        "slo_ttft_s": 0.25,
    }
    return PlanInputs(**usual | given)


def case_inputs(case: Case, **changes: Any) -> PlanInputs:
    """The case as the planner takes it."""
    own: dict[str, Any] = {
        "probabilities": zipf(case.num_adapters, case.zipf),
        "popularity_source": f"Zipf {case.zipf:g}",
        "output_tokens": OUTPUT_TOKENS,
        "context_tokens": CONTEXT_TOKENS,
        "rate_per_s": case.rate_per_s,
        "gpus": case.gpus,
        "instances": case.instances,
    }
    return model_inputs(case.model, **own | changes)
