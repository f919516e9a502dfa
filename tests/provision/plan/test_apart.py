# SPDX-License-Identifier: Apache-2.0
"""Prompts on separate instances: sized, compared with prompts beside answers, written and checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_lora.cli.provision_result import plan_lines, plan_yaml, verified
from moe_lora.config.cluster import read_cluster
from moe_lora.provision.device_profile import read_profile, with_rates
from moe_lora.provision.plan import verify
from moe_lora.provision.plan.checked import place_of
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.compared import checked_plan, with_apart
from moe_lora.provision.plan.coupled import Apart
from moe_lora.provision.plan.inputs import PlanInputs, SizedCluster
from moe_lora.provision.plan.plan import Plan
from moe_lora.provision.plan.verify import system_of

from .plans import zipf
from .test_bound import load_inputs, trace_of

LONG = trace_of([(2000, 200), (3000, 100)])
NET = {"net_bytes_per_s": 5e10, "load_bytes_per_s": 5e10}
H200 = with_rates(read_profile("h200"), NET)
TIGHT_S = 0.0195
"""A decode step of the base model alone takes 17.3 ms."""


@pytest.fixture(scope="module", autouse=True)
def few_requests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "NUM_REQUESTS", 600)
        yield


def given(**changes: Any) -> PlanInputs:
    usual = {
        "profile": H200,
        "assumed": NET,
        "instance_gpus": 1,
        "probabilities": zipf(8),
        "rate_per_s": 30.0,
        "slo_tpot_s": TIGHT_S,
    }
    return load_inputs(LONG, "GPT-OSS-20B", **usual | changes)


@pytest.fixture(scope="module")
def apart() -> Plan:
    return checked_plan(given(), LONG)


@pytest.fixture(scope="module")
def together() -> Plan:
    return checked_plan(given(slo_tpot_s=0.025), LONG)


def test_tight_steps_are_cheaper_apart(apart: Plan) -> None:
    assert 0 < apart.prefill_instances < apart.instances
    assert apart.apart.startswith(f"apart: {apart.prefill_instances} of {apart.instances} instances")
    assert "together takes" in apart.apart or "together is refused" in apart.apart
    assert "a prompt token takes" in apart.apart
    assert "Prompts apart" in "\n".join(plan_lines(apart))
    assert "moves of KV between instances" in apart.never_ran


def test_looser_steps_stay_together_with_numbers_of_both(together: Plan) -> None:
    assert (together.prefill_instances, together.full_steps) == (0, False)
    assert together.apart.startswith("together: P95 TTFT ")
    assert "instances for prompts P95 TTFT" in together.apart


def test_a_given_number_is_divided_if_it_holds_only_apart(apart: Plan, together: Plan) -> None:
    same = with_apart(Cluster(given(instances=apart.instances)), LONG, None)
    assert same is not None
    assert (same.instances, same.prefill_instances) == (apart.instances, apart.prefill_instances)
    assert "together is refused" in same.apart
    kept = with_apart(Cluster(given(gpus=together.instances, slo_tpot_s=0.025)), LONG, together)
    assert kept is not None
    assert kept.prefill_instances == 0
    assert kept.apart == together.apart


def test_larger_steps_of_undivided_instances_go_before_a_division() -> None:
    sizing = Apart(Cluster(given()))
    first, *others = sizing.places(8)
    assert (first.prefill_instances, first.full_steps) == (0, True)
    assert [one.prefill_instances for one in others] == [3, 4, 5]
    assert not [one for one in sizing.places(2) if not one.prefill_instances]


def test_the_file_names_the_instances_for_prompts(apart: Plan, together: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan_yaml(apart, None))
    read = read_cluster(path)
    expected = tuple(f"instance-{number}" for number in range(apart.prefill_instances))
    assert read.front_end.prefill_instances == expected
    assert read.engine.num_instances == apart.instances
    assert read.engine.max_num_batched_tokens >= read.engine.max_num_seqs
    path.write_text(plan_yaml(together, None))
    assert read_cluster(path).front_end.prefill_instances == ()


def test_verify_replays_the_division_on_both_simulators(apart: Plan) -> None:
    content, lines, missed = verified(given(), apart, LONG)
    assert not missed
    assert content["held"]
    assert [one["simulator"] for one in content["simulators"]] == ["provision.replayed", "moe_lora.sim"]
    assert "second trials of failed moves" in lines[-1]


def test_the_replayed_cluster_has_the_plans_instances_and_kv(apart: Plan) -> None:
    system = system_of(Cluster(given()), place_of(apart), [str(index) for index in range(8)])
    assert system.prefill is not None
    assert system.prefill.num_instances == apart.prefill_instances
    # K and V of 32 layers, 8 heads of 64 values, 2 bytes each.
    assert system.prefill.kv_token_bytes == 2 * 32 * 8 * 64 * 2
    assert system.prefill.link_bytes_per_s == 5e10
    assert system.instance.max_num_batched_tokens == apart.max_num_batched_tokens


def test_models_of_the_division_follow_by_hand() -> None:
    inputs = given()
    sizing = Apart(Cluster(inputs))
    assert inputs.prompts is not None
    assert inputs.prompts.prompt_tokens == 2500
    assert sizing.move_s == pytest.approx(2500 * 65536 / 5e10)
    token_s = Cluster(inputs).token_s(None, sizing.full_step)
    assert sizing.prompts_share(2) == pytest.approx(30 * 2500 * token_s / 2)
    assert token_s <= 1.05 * Cluster(inputs).token_s(None, 8192)
    for place in sizing.places(6):
        assert place.full_steps
        assert place.num_decoding == 6 - place.prefill_instances
        needed = sizing.prompts_share(place.prefill_instances or 6)
        assert needed <= 1 or place.prefill_instances == 0
        assert sizing.nearness(place) >= needed


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"profile": read_profile("h200"), "assumed": {}}, "profile 'h200' has no net_bytes_per_s"),
        ({"instance_gpus": 2}, "instances of several GPUs move no KV"),
        (
            {"instances": 1, "rate_per_s": 1.0, "probabilities": zipf(2)},
            "of 1 instances, and a division leaves too few for answers",
        ),
    ],
)
def test_a_division_without_a_comparison_says_why(changes: dict[str, Any], why: str) -> None:
    plan = checked_plan(given(slo_tpot_s=0.1, **changes), LONG)
    assert why in plan.apart
    assert plan.prefill_instances == 0


def test_a_cluster_says_its_division() -> None:
    place = SizedCluster(None, 5, 3, prefill_instances=2, full_steps=True)
    assert str(place) == "5 instances (2 for prompts) and 3 adapters beside the weights"
    assert replace(place, prefill_instances=0).num_decoding == 5
