# SPDX-License-Identifier: Apache-2.0
"""Plans that are chosen by replays."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from moe_lora.core.errors import SloError
from moe_lora.provision.plan import verify as replayed
from moe_lora.provision.plan.checked import PlaceSearch, place_of
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.compared import checked_plan
from moe_lora.provision.plan.plan import CHECK, Plan, make_plan
from moe_lora.provision.plan.verify import OTHER_DRAWS, holds, planned_load, replays
from moe_lora.workload.traces.records import Trace
from moe_lora.workload.traces.traces import read_trace

from .plans import inputs, zipf

FEW = 1500


@pytest.fixture(scope="module", autouse=True)
def few_requests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed, "NUM_REQUESTS", FEW)
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Short answers, sixty requests at once every second."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [{"arrival_s": i // 60 * 1.0, "prompt_tokens": 300, "output_tokens": 20} for i in range(400)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_trace(path)


LOAD = {
    "output_tokens": 20.0,
    "context_tokens": 320.0,
    "rate_per_s": 60.0,
    "probabilities": zipf(256, 0.8),
}


@pytest.fixture(scope="module")
def plan(trace: Trace) -> Plan:
    return checked_plan(inputs(**LOAD), trace)


def test_plan_holds_in_a_replay_by_other_draws(plan: Plan, trace: Trace) -> None:
    given = inputs(**LOAD)
    place = place_of(plan)
    load = planned_load(given, 60.0, trace, num_requests=FEW, seed=1)
    found = replays(Cluster(given), place, load)
    assert holds(given, found, OTHER_DRAWS)
    assert {one.arrivals for one in plan.checked} == {"scaled", "poisson"}
    assert holds(given, plan.checked)


def test_plan_of_the_models_that_misses_is_replaced_by_one_that_holds(plan: Plan, trace: Trace) -> None:
    given = inputs(**LOAD)
    modelled = make_plan(given)
    load = planned_load(given, 60.0, trace, num_requests=FEW)
    search = PlaceSearch(Cluster(given), lambda _: [load])
    assert not search.holds(place_of(modelled))
    assert plan.total_gpus >= modelled.total_gpus
    assert plan.binding_constraint == CHECK


def test_one_gpu_fewer_does_not_hold(plan: Plan, trace: Trace) -> None:
    given = inputs(**LOAD)
    load = planned_load(given, 60.0, trace, num_requests=FEW)
    search = PlaceSearch(Cluster(given), lambda _: [load], farthest=1.5, busiest=1.2)
    assert search.holding(plan.total_gpus - 1, at_most=20) is None


def test_given_instances_are_kept(trace: Trace) -> None:
    assert checked_plan(inputs(**LOAD, instances=3), trace).instances == 3


def test_budget_is_kept(trace: Trace) -> None:
    plan = checked_plan(inputs(**LOAD, gpus=12), trace)
    assert plan.total_gpus <= 12
    assert plan.serviceable_rate_per_s is not None


def test_budget_whose_clusters_all_miss_is_refused_with_what_the_models_one_misses(trace: Trace) -> None:
    with pytest.raises(
        SloError,
        match=r"none of \d+ clusters of up to 4 GPUs holds it; .* P95 TTFT missed by .* with the trace's",
    ):
        checked_plan(inputs(**LOAD, gpus=4), trace)


def test_margin_is_load_that_is_replayed_too(plan: Plan, trace: Trace) -> None:
    more = checked_plan(inputs(**LOAD, load_margin=1.0), trace)
    assert more.total_gpus >= plan.total_gpus
    assert (more.checked[0].loads_per_s, more.inputs["load_margin"]) > (0.0, 0.5)


@pytest.mark.slow
def test_load_that_nothing_holds_is_refused_with_what_it_misses(trace: Trace) -> None:
    with pytest.raises(SloError, match="steps are the longer term"):
        checked_plan(inputs(**LOAD, slo_ttft_s=0.02), trace)
