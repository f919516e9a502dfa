# SPDX-License-Identifier: Apache-2.0
"""Inputs that the tests of sizing and planning share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.provision import plan_cases
from moe_lora.provision.plan.inputs import PlanInputs, PromptCount, PromptLoad
from moe_lora.provision.plan.plan import Plan, make_plan
from moe_lora.workload.traces.records import TraceRequest


def zipf(num_adapters: int = 24, s: float = 1.2) -> NDArray[np.float64]:
    return plan_cases.zipf(num_adapters, s)


def inputs(model: str = "Mixtral-8x7B", **changes: Any) -> PlanInputs:
    """The named model on the paper's hardware, 24 adapters, Zipf 1.2, 25 requests/s of 230 tokens."""
    given: dict[str, Any] = {
        "probabilities": zipf(),
        "output_tokens": 230.0,
        "context_tokens": 900.0,
        "rate_per_s": 25.0,
    }
    return plan_cases.model_inputs(model, **given | changes)


@cache
def planned(model: str = "Mixtral-8x7B", num_adapters: int = 24, **changes: Any) -> Plan:
    """The plan of `inputs`, made once for all tests; changes: values that can be compared."""
    return make_plan(inputs(model, probabilities=zipf(num_adapters), **changes))


def prompt_load(requests: Iterable[TraceRequest], stated: float | None = None) -> PromptLoad:
    """The prompts of these requests."""
    count = PromptCount(stated)
    for one in requests:
        count.add(one)
    return count.load()
