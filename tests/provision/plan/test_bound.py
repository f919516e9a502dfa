# SPDX-License-Identifier: Apache-2.0
"""No plan has fewer GPUs than its load needs at peak rates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moe_lora.core.errors import ConfigError, SloError
from moe_lora.provision.device_profile import MeasuredProfile, read_profile, with_rates
from moe_lora.provision.plan import evidence, verify
from moe_lora.provision.plan.compared import checked_plan
from moe_lora.provision.plan.coupled_search import CoupledSearch
from moe_lora.provision.plan.inputs import PlanInputs
from moe_lora.provision.plan.plan import make_plan
from moe_lora.workload.traces.records import Trace, TraceRequest

from .plans import inputs, prompt_load, zipf

PROFILES = {
    "hopper96": read_profile("hopper96"),
    "h200": with_rates(read_profile("h200"), {"load_bytes_per_s": 5e10, "net_bytes_per_s": 5e10}),
}


@pytest.fixture(autouse=True)
def few_requests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "NUM_REQUESTS", 300)
        yield


def trace_of(lengths: list[tuple[int, int]]) -> Trace:
    rows = tuple(TraceRequest(i * 0.05, *lengths[i % len(lengths)]) for i in range(100))
    return Trace(path="drawn", format="jsonl", requests=rows)


def load_inputs(trace: Trace, model: str, hit: float | None = None, **changes: Any) -> PlanInputs:
    prompts = prompt_load(trace.requests, hit)
    lengths = {
        "prompts": prompts,
        "output_tokens": prompts.output_tokens,
        "context_tokens": prompts.prompt_tokens + prompts.output_tokens,
        "slo_ttft_s": 4.0,
        "probabilities": zipf(24, 1.0),
    }
    return inputs(model, **lengths | changes)


def independent_bound(given_inputs: PlanInputs, trace: Trace, hit: float) -> tuple[float, float, float]:
    """GPUs' worth of operations, KV reads and weights, counted token by token and without deltas."""
    shape, gpu, number = given_inputs.shape, given_inputs.profile.gpu, len(trace.requests)
    heads = shape.num_heads + shape.num_kv_heads
    attention = 2 * shape.hidden_size * shape.head_dim * heads
    expert = 3 * shape.hidden_size * shape.intermediate_size
    whole_layers = shape.num_layers - shape.num_windowed_layers
    tokens = pairs = read = 0
    for prompt, output in {(one.prompt_tokens, one.output_tokens) for one in trace.requests}:
        times = sum((one.prompt_tokens, one.output_tokens) == (prompt, output) for one in trace.requests)
        first = min(int(hit * prompt), prompt - 1)
        decoded = range(prompt, prompt + output - 1)
        tokens += times * (prompt - first + len(decoded))
        pairs += times * sum(at + 1 for at in range(first, prompt + len(decoded)))
        read += times * sum(at + 1 for at in decoded)
    rate = (given_inputs.rate_per_s or 0.0) / number
    flop = tokens * 2 * shape.num_layers * (attention + shape.num_experts_per_token * expert)
    flop += pairs * 4 * whole_layers * shape.num_heads * shape.head_dim
    kv_bytes = read * 2 * whole_layers * shape.num_kv_heads * shape.head_dim * shape.dtype_bytes
    weight_bytes = shape.num_layers * (attention + shape.num_experts * expert) * shape.dtype_bytes
    return (
        rate * flop / (gpu.flop_per_s or 1),
        rate * kv_bytes / (gpu.bytes_per_s or 1),
        weight_bytes / gpu.memory_bytes,
    )


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizing alone: no plan is refused below its bound, and no search begins there."""
    monkeypatch.setattr(evidence, "check_bound", lambda bound, place, of: bound)
    monkeypatch.setattr(CoupledSearch, "_least", lambda search: 1)


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    model=st.sampled_from(["Mixtral-8x7B", "GPT-OSS-20B", "Qwen3-30B-A3B", "DBRX"]),
    hardware=st.sampled_from(sorted(PROFILES)),
    rate=st.floats(0.5, 60),
    lengths=st.lists(st.tuples(st.integers(1, 6000), st.integers(1, 300)), min_size=1, max_size=4),
    hit=st.sampled_from([0.0, 0.3, 0.9]),
    margin=st.sampled_from([0.0, 0.5]),
)
def test_no_plan_is_below_its_bound(unguarded, model, hardware, rate, lengths, hit, margin) -> None:
    trace = trace_of(lengths)
    given_inputs = load_inputs(
        trace, model, hit, rate_per_s=rate, load_margin=margin, profile=PROFILES[hardware]
    )
    try:
        plan = checked_plan(given_inputs, trace)
    except (SloError, ConfigError):
        assume(False)
    assert plan.lower_bound is not None
    assert plan.total_gpus >= plan.lower_bound.gpus
    flop, byte, memory = independent_bound(given_inputs, trace, hit)
    assert plan.lower_bound.flop_gpus >= (1 + margin) * flop * (1 - 1e-9)
    assert plan.lower_bound.byte_gpus == pytest.approx((1 + margin) * byte)
    assert plan.lower_bound.memory_gpus == pytest.approx(memory)


def test_times_beyond_the_profiles_own_peak_are_refused(tmp_path: Path) -> None:
    content = json.loads(
        (Path(verify.__file__).parents[1] / "profiles" / "hopper96.json").read_text(encoding="utf-8")
    )
    content["gpu"]["flop_per_s"] = 1e9
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(content))
    profile = read_profile(path)
    assert isinstance(profile, MeasuredProfile)
    with pytest.raises(SloError, match=r"fewer than the lower bound, .* times beyond its own peak rates"):
        make_plan(inputs(profile=profile, probabilities=zipf(4)))


def test_prefix_hits_are_subtracted() -> None:
    trace = trace_of([(4000, 20)])
    found = {
        hit: checked_plan(load_inputs(trace, "Mixtral-8x7B", hit, rate_per_s=20.0), trace)
        for hit in (0.0, 0.9)
    }
    bounds = {hit: plan.lower_bound for hit, plan in found.items()}
    assert bounds[0.9].flop_gpus < 0.2 * bounds[0.0].flop_gpus
    assert found[0.9].total_gpus < found[0.0].total_gpus


def test_a_profile_without_peak_rates_has_no_bound_and_says_so(tmp_path: Path) -> None:
    from moe_lora.cli.provision_result import plan_lines

    content = json.loads((Path(verify.__file__).parents[1] / "profiles" / "hopper96.json").read_text())
    del content["gpu"]["flop_per_s"], content["gpu"]["bytes_per_s"]
    content["base_us"]["attention"] = [100, 150]
    path = tmp_path / "own.json"
    path.write_text(json.dumps(content))
    trace = trace_of([(200, 50)])
    plan = checked_plan(load_inputs(trace, "Mixtral-8x7B", profile=read_profile(path), rate_per_s=5.0), trace)
    assert plan.lower_bound is None
    assert "Lower bound        not known: the profile names no peak rates" in "\n".join(plan_lines(plan))
    assert replace(plan, checked=()).total_gpus >= 2
