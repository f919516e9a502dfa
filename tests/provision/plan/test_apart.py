# SPDX-License-Identifier: Apache-2.0
"""Prompts on separate instances: sized, compared with prompts beside answers, written and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_lora.cli.provision_result import plan_lines, plan_yaml, verified
from moe_lora.config.cluster import read_cluster
from moe_lora.core.errors import SloError
from moe_lora.provision.device_profile import read_profile, with_rates
from moe_lora.provision.plan import compared, verify
from moe_lora.provision.plan.checked import Loads, place_of, searched_loads
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.compared import checked_plan, with_apart
from moe_lora.provision.plan.coupled import Apart, Coupled, LargerSteps
from moe_lora.provision.plan.coupled_search import CoupledSearch, coupled_plan
from moe_lora.provision.plan.inputs import PlanInputs, SizedCluster
from moe_lora.provision.plan.memory import miss_share
from moe_lora.provision.plan.plan import Plan
from moe_lora.provision.plan.verify import PlannedLoad, Replay, planned_load, simulate, system_of
from moe_lora.workload.traces.records import Trace, TraceRequest

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


def coupled(inputs: PlanInputs) -> Plan:
    """Without a division beside a LoRA Server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compared, "_at_server", lambda *_: (None, ""))
        return checked_plan(inputs, LONG)


@pytest.fixture(scope="module")
def apart() -> Plan:
    return coupled(given())


@pytest.fixture(scope="module")
def together() -> Plan:
    return coupled(given(slo_tpot_s=0.025))


def test_tight_steps_are_cheaper_apart(apart: Plan) -> None:
    assert 0 < apart.prefill_instances < apart.instances
    assert apart.apart.startswith(f"apart: {apart.prefill_instances} of {apart.instances} instances")
    assert "together takes" in apart.apart or "together is refused" in apart.apart
    assert "a prompt token takes" in apart.apart
    text = "\n".join(plan_lines(apart))
    assert "Prompts apart" in text
    assert f" {apart.instances - apart.prefill_instances} of 1 GPU, " in text
    assert f" requests each; {apart.prefill_instances} for prompts" in text
    assert "moves of KV between instances" in apart.never_ran


def test_looser_steps_stay_together_with_numbers_of_both(together: Plan) -> None:
    assert (together.prefill_instances, together.full_steps) == (0, False)
    assert together.apart.startswith("together: P95 TTFT ")
    assert "instances for prompts P95 TTFT" in together.apart


def test_a_given_number_is_divided_if_it_holds_only_apart(apart: Plan, together: Plan) -> None:
    same, why = with_apart(
        Cluster(given(instances=apart.instances)), Loads(given(instances=apart.instances), LONG), None
    )
    assert same is not None
    assert (same.instances, same.prefill_instances) == (apart.instances, apart.prefill_instances)
    assert "together is refused" in why
    kept, why = with_apart(
        Cluster(given(gpus=together.instances, slo_tpot_s=0.025)),
        Loads(given(gpus=together.instances, slo_tpot_s=0.025), LONG),
        together,
    )
    assert kept is not None
    assert kept.prefill_instances == 0
    assert why == together.apart


def test_larger_steps_of_undivided_instances_go_before_a_division(apart: Plan) -> None:
    cluster = Cluster(given())
    larger, divided = LargerSteps(cluster), Apart(cluster)
    assert [one.step_tokens for one in larger.places(8)] == [512, 1024, 2048, larger.full_step]
    assert not any(one.prefill_instances for one in larger.places(8))
    assert not larger.places(2)
    assert [one.prefill_instances for one in divided.places(8)] == [3, 4, 5, 6, 7]
    assert [one.prefill_instances for one in divided.places(40)] == [*range(3, 15)]
    assert "with steps of up to 512 prompt tokens (with steps within the TPOT SLO it takes" in apart.apart


def test_larger_steps_need_no_rate_between_instances() -> None:
    load = {"load_bytes_per_s": 5e10}
    inputs = given(profile=with_rates(read_profile("h200"), load), assumed=load)
    plan, why = with_apart(Cluster(inputs), Loads(inputs, LONG), None)
    assert plan is not None
    assert (plan.prefill_instances, plan.full_steps, plan.max_num_batched_tokens) == (0, True, 512)
    assert why.startswith(
        "together, with steps of up to 512 prompt tokens (with steps within the TPOT SLO it is"
    )
    assert "not compared: profile 'h200' has no net_bytes_per_s" in why
    assert place_of(plan).step_tokens == 512


def replayed_as(ttft_s: float, tpot_s: float, arrivals: str = "poisson", stopped: bool = False) -> Replay:
    share = {"admitted_at_once": 1.0, "waited_for_adapter": 0.0, "waited_for_room": 0.0}
    times = {"p95_ttft_s": ttft_s, "p95_decode_ttft_s": ttft_s, "mean_tpot_s": tpot_s}
    return Replay(arrivals=arrivals, num_requests=9, loads_per_s=0.0, stopped=stopped, **share, **times)


class Falling(CoupledSearch):
    """Only `number` instances for prompts hold; fewer miss TTFT, more miss TPOT."""

    def __init__(self, cluster: Cluster, number: int | None, slow_from: int) -> None:
        super().__init__(cluster, lambda _: (), Apart(cluster))
        self._number, self._slow_from = number, slow_from

    def replayed(self, place: SizedCluster) -> list[Replay]:
        number = place.prefill_instances
        late, slow = number < (self._number or self._slow_from), number >= self._slow_from
        self._found[place] = [replayed_as(8.0 - number / 10 if late else 1.0, 0.03 if slow else 0.018)]
        return self._found[place]


@pytest.mark.parametrize("number", range(3, 15))
def test_every_number_of_instances_for_prompts_is_found(number: int) -> None:
    found = Falling(Cluster(given()), number, number + 1).holding(40)
    assert found is not None
    assert found.prefill_instances == number


def test_without_a_number_that_holds_the_nearest_is_named() -> None:
    cluster = Cluster(given())
    search = Falling(cluster, None, 9)
    assert search.holding(40) is None
    tried = [one for one in Apart(cluster).places(40) if one in search._found]
    assert {one.prefill_instances for one in tried} >= {8, 9}
    # TPOT is missed by 54 %; TTFT by 80 %, with 8 instances.
    assert search.nearest(tried).prefill_instances >= 9


def test_slow_answers_end_the_search_of_instances_for_prompts() -> None:
    search = Falling(Cluster(given()), None, 3)
    assert search.holding(40) is None
    assert [one.prefill_instances for one in search._found] == [3]


def test_a_burst_of_prompts_gets_more_instances() -> None:
    requests = tuple(
        TraceRequest(
            number // 40 * 2.0 + number % 40 * 0.001, 2000 + number % 2 * 1000, 200 - number % 2 * 100
        )
        for number in range(200)
    )
    bursts = Trace(path="bursts", format="jsonl", requests=requests)
    cluster = Cluster(given(slo_ttft_s=0.4))
    search = CoupledSearch(
        cluster, lambda rate_per_s: searched_loads(cluster.inputs, rate_per_s, bursts), Apart(cluster)
    )
    place = search.holding(16)
    assert place is not None
    assert place.prefill_instances > math.ceil(Apart(cluster).prompts_share(1) / 0.95) + 2


def test_each_number_of_instances_has_the_rate_of_a_global_batch() -> None:
    cluster, rates = Cluster(given(global_batch=30)), []

    def loads_of(rate_per_s: float) -> list[PlannedLoad]:
        rates.append(rate_per_s)
        return [planned_load(cluster.inputs, rate_per_s, LONG, num_requests=20)]

    search = CoupledSearch(cluster, loads_of)
    for number in (2, 4):
        search.replayed(SizedCluster(None, number, 1))
    assert rates == [Coupled(cluster).rate_per_s(number) for number in (2, 4)]
    assert rates[0] < rates[1]


def test_a_division_of_more_than_64_instances_is_found_by_the_models() -> None:
    cluster = Cluster(given(rate_per_s=600.0, slo_ttft_s=0.25))
    assert CoupledSearch(cluster, lambda _: (), Apart(cluster)).fewest() > 64


def test_both_numbers_are_of_the_same_arrivals(together: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = [replayed_as(9.0, 0.02, "scaled", stopped=True)]
    monkeypatch.setattr(
        CoupledSearch, "replayed", lambda search, place: search._found.setdefault(place, stopped)
    )
    plan = replace(together, checked=(replayed_as(1.0, 0.021, "scaled"), replayed_as(3.0, 0.024)))
    _, why = with_apart(
        Cluster(given(gpus=4, slo_tpot_s=0.025)), Loads(given(gpus=4, slo_tpot_s=0.025), LONG), plan
    )
    assert (
        "together: P95 TTFT 1000 ms, TPOT 21.0 ms; with 3 of 4 instances for prompts P95 TTFT 9000 ms" in why
    )
    assert "(both with the trace's arrivals scaled to the plan's rate), which does not hold: P95 TTFT " in why


def test_a_refusal_says_why_no_division_holds() -> None:
    with pytest.raises(SloError, match=r"Nor with prompts apart: 2 coupled .* Nor does a LoRA Server: "):
        checked_plan(given(instances=2), LONG)


def test_a_lora_server_says_why_no_division_is_beside_it(
    together: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = replace(together, kind="lora_server", total_gpus=3)
    monkeypatch.setattr(compared, "_coupled", lambda *_: (together, None))
    monkeypatch.setattr(compared, "with_apart", lambda *_: (together, "together: as it is"))
    monkeypatch.setattr(compared, "_cheaper", lambda *_: server)
    said = checked_plan(given(), LONG).apart
    why = "by the models no division of fewer than 3 GPUs holds"
    assert said == f"without a LoRA Server: together: as it is; beside a LoRA Server: {why}"
    said = checked_plan(given(gpus=3), LONG).apart
    assert said.endswith("; beside a LoRA Server: not sized for a given number")


def test_a_global_batch_is_named_as_the_cause(together: Plan) -> None:
    plan, why = with_apart(Cluster(given(global_batch=30)), Loads(given(global_batch=30), LONG), together)
    assert plan is together
    assert why == "not compared: --global-batch states no rate of prompts"


def test_both_sides_of_a_division_load_adapters() -> None:
    cluster = Cluster(given(probabilities=zipf(40, 1.0)))
    place = next(one for one in Apart(cluster).places(9) if one.prefill_instances == 3)
    plan = coupled_plan(cluster, place)
    misses = miss_share(cluster.inputs.probabilities, place.slots)
    assert misses > 0.05
    assert plan.loads_per_s == pytest.approx(2 * 30.0 * misses, rel=0.02)
    load_s = cluster.inputs.coupled_adapter_bytes / 5e10
    assert plan.loading_share == pytest.approx(30.0 * misses / 3 * load_s, rel=0.02)


def test_a_full_step_is_the_smallest_near_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(given())
    step, token_s = LargerSteps(cluster).full_step, cluster.token_s
    assert token_s(None, step - 64) > 1.05 * token_s(None, 8192)
    # 20 us and 2048 us a step: 20.25 us at 8192 tokens, 5 % more are 21.2625 us, from 1622.2 tokens on.
    monkeypatch.setattr(cluster, "token_s", lambda ep, tokens: 20e-6 + 2048e-6 / tokens)
    sizing = LargerSteps(cluster)
    assert sizing.full_step == 1664
    assert sizing.prompts_share(4, 1024) == pytest.approx(30 * 2500 * 22e-6 / 4)


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
    for place in (*LargerSteps(Cluster(inputs)).places(6), *sizing.places(6)):
        assert place.step_tokens
        assert place.num_decoding == 6 - place.prefill_instances
        needed = sizing.prompts_share(place.prefill_instances or 6, place.step_tokens)
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
    place = SizedCluster(None, 5, 3, prefill_instances=2, step_tokens=2496)
    assert str(place) == "5 instances (2 for prompts) and 3 adapters beside the weights"
    assert replace(place, prefill_instances=0).num_decoding == 5


def test_answers_of_a_full_plan_leave_the_prompts_instances_after_a_failed_move() -> None:
    inputs = given(rate_per_s=57.5, slo_tpot_s=0.06)
    cluster = Cluster(inputs)
    [place] = (one for one in Apart(cluster).places(8) if one.prefill_instances == 7)
    load = planned_load(inputs, 57.5, LONG, num_requests=1500)
    system = simulate(system_of(cluster, place, load.popular), load.requests["poisson"])
    moves = system.prefill_first
    assert moves is not None
    remained = sum(one.instance < 7 and one.output_tokens > 1 for one in system.requests)
    assert 0 < remained < moves.num_failed
    assert moves.num_moved + remained == len(system.requests)
