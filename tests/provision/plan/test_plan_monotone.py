# SPDX-License-Identifier: Apache-2.0
"""What must not happen when a load or a goal moves: looser never costs more, harder never less."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.core.errors import SloError
from moe_lora.provision.admission.admitted import ADMITTED, NeededCapacity
from moe_lora.provision.plan.plan import make_plan

from .plans import inputs, zipf

MODELS = st.sampled_from(["Mixtral-8x7B", "GPT-OSS-20B"])
RATES = st.floats(2, 40)
FACTORS = st.floats(1.05, 4)


def gpus(model: str, **changes: Any) -> float:
    """GPUs in all; infinitely many where no number holds it."""
    try:
        return make_plan(inputs(model, probabilities=zipf(12, 1.0), **changes)).total_gpus
    except SloError:
        return float("inf")


@settings(max_examples=3, deadline=None)
@given(MODELS, RATES, st.floats(0.01, 0.3), FACTORS)
def test_looser_tpot_slo_never_needs_more_gpus(model: str, rate: float, slo_s: float, factor: float) -> None:
    tight = gpus(model, rate_per_s=rate, slo_tpot_s=slo_s)
    assert gpus(model, rate_per_s=rate, slo_tpot_s=slo_s * factor) <= tight


@settings(max_examples=3, deadline=None)
@given(MODELS, RATES, st.floats(0.03, 0.3), FACTORS)
def test_looser_ttft_slo_never_needs_more_gpus(model: str, rate: float, slo_s: float, factor: float) -> None:
    tight = gpus(model, rate_per_s=rate, slo_ttft_s=slo_s)
    assert gpus(model, rate_per_s=rate, slo_ttft_s=slo_s * factor) <= tight


@settings(max_examples=3, deadline=None)
@given(MODELS, RATES, FACTORS)
def test_more_load_never_needs_fewer_gpus(model: str, rate: float, factor: float) -> None:
    assert gpus(model, rate_per_s=rate * factor) >= gpus(model, rate_per_s=rate)


@settings(max_examples=2, deadline=None)
@given(MODELS, RATES, st.floats(0.5, 0.99), st.floats(0.5, 1.0))
def test_higher_target_never_needs_fewer_gpus(model: str, rate: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert gpus(model, rate_per_s=rate, target_iar=high) >= gpus(model, rate_per_s=rate, target_iar=low)


@settings(max_examples=3, deadline=None)
@given(RATES, st.floats(0, 1), st.floats(0, 1))
def test_larger_margin_never_needs_fewer_gpus(rate: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    model = "Mixtral-8x7B"
    assert gpus(model, rate_per_s=rate, load_margin=high) >= gpus(model, rate_per_s=rate, load_margin=low)


@pytest.mark.parametrize("slo_s", [0.05, 0.1, 0.2, 0.4])
def test_budgets_rate_does_not_grow_as_the_slo_tightens(slo_s: float) -> None:
    assert serviceable_rate(slo_s) <= serviceable_rate(2 * slo_s)


@cache
def serviceable_rate(slo_s: float) -> float:
    given_inputs = {"gpus": 8, "rate_per_s": 10.0, "probabilities": zipf(128, 0.8)}
    return make_plan(inputs("GPT-OSS-20B", slo_tpot_s=slo_s, **given_inputs)).serviceable_rate_per_s or 0.0


def test_load_that_needs_a_capacity_needs_it_at_twice_the_load_too() -> None:
    # The corrected estimator alone: 175, 172, 162, 158 slots for 256 adapters.
    needed = NeededCapacity("corrected", zipf(256), 0.95)
    capacities = [needed(load) for load in (2000.0, 3000.0, 5800.0, 7538.0)]
    assert capacities == sorted(capacities)
    admitted = ADMITTED["corrected"]
    assert min(admitted(zipf(256), load, capacities[-1]) for load in (100, 1300, 2000, 5000)) >= 0.945
    assert admitted(zipf(256), 2000.0, 158) < 0.945 <= admitted(zipf(256), 7538.0, 158)


def test_budget_and_plan_without_one_ask_for_the_same_capacity() -> None:
    given_inputs = {"probabilities": zipf(96), "global_batch": 900.0}
    free = make_plan(inputs(**given_inputs))
    held = make_plan(inputs(gpus=free.total_gpus + 2, **given_inputs))
    assert held.capacity == free.capacity
    assert held.global_batch == 900.0
    assert held.binding_constraint == "budget: highest rate"
