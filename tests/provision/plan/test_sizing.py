# SPDX-License-Identifier: Apache-2.0
"""Memory, equations 5 and 6, and the split of a budget."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.config.weight_format import weight_format
from moe_lora.core.errors import ConfigError, SloError
from moe_lora.core.partition import Layout
from moe_lora.core.weight_format import UNQUANTISED, WeightFormat
from moe_lora.provision.admission.admitted import largest
from moe_lora.provision.admission.iar import immediate_admissibility_rate
from moe_lora.provision.plan.cluster_size import CONSTRAINTS, EQ5, EQ6, MEMORY, Cluster
from moe_lora.provision.plan.memory import AdapterMix, base_bytes, base_parameters, known_model
from moe_lora.provision.plan.sizing import (
    Candidate,
    ServerSize,
    best_split,
    candidate,
    fewest_instances,
    smallest_server,
)

from .plans import inputs, zipf


def fared(cluster: Cluster, capacity: int, num_instances: int, batch: float) -> list[Candidate]:
    return [candidate(cluster, layout, capacity, num_instances, batch) for layout in cluster.layouts]


def minimum_server(
    cluster: Cluster, capacity: int, num_instances: int, batch: float, num_gpus: int | None = None
) -> ServerSize:
    return smallest_server(cluster, fared(cluster, capacity, num_instances, batch), num_gpus)


def test_bytes_of_qwen_adapters_in_both_forms() -> None:
    shape = known_model("qwen3-30b-a3b").shape
    for form, gigabytes in (("separate", 3.32), ("shared", 2.52)):
        mix = AdapterMix(ranks=((32, 1.0),), form=form)
        assert mix.adapter_bytes(shape) / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_two_gpus_hold_the_papers_104_mixtral_adapters() -> None:
    mixtral = known_model("Mixtral-8x7B")
    mix = AdapterMix(ranks=((64, 1.0),))
    assert mix.adapter_bytes(mixtral.shape) / 2**30 == pytest.approx(1.69, abs=0.005)
    assert Cluster(inputs()).slots(Layout(ep=2)) == 104


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Mixtral-8x7B", 46.7), ("Qwen3-30B-A3B", 30.5), ("DBRX", 131.6), ("Scaled-MoE", 119.2)],
)
def test_base_parameters_are_those_published(name: str, billions: float) -> None:
    assert base_parameters(known_model(name).shape) / 1e9 == pytest.approx(billions, abs=0.05)


def test_uneven_stages_count_by_the_fullest_rank() -> None:
    shape, mix = known_model("Mixtral-8x7B").shape, AdapterMix(ranks=((64, 1.0),))
    third = mix.bytes_on_rank(shape, Layout(pp=3))
    assert third == pytest.approx(mix.adapter_bytes(shape) * 11 / 32)


def test_mix_of_ranks_is_their_mean_and_shares_must_sum_to_one() -> None:
    shape = known_model("Mixtral-8x7B").shape
    half = AdapterMix(ranks=((64, 0.5), (32, 0.5)))
    assert half.adapter_bytes(shape) == pytest.approx(AdapterMix(ranks=((48, 1.0),)).adapter_bytes(shape))
    with pytest.raises(ConfigError, match="must sum to 1"):
        AdapterMix(ranks=((64, 0.5), (32, 0.4)))
    with pytest.raises(ConfigError, match="form='tied' is unknown"):
        AdapterMix(ranks=((64, 1.0),), form="tied")


def test_equations_5_and_6_by_hand() -> None:
    # Table 4 at 128 rows, EP4: 145 + 142 + 207 = 494 us a round, its longest stage 207 us.
    cluster = Cluster(inputs(slo_tpot_s=32 * 1.3e-3))
    attention_s = cluster.stages.attention_s(128)
    assert 0.1e-3 < attention_s < 0.3e-3
    assert candidate(cluster, Layout(ep=4), 1, 6, 128).met == dict.fromkeys(CONSTRAINTS, True)
    assert not candidate(cluster, Layout(ep=4), 1, 7, 128).met[EQ6]  # 7 * 207 us > 1.3 ms
    assert candidate(cluster, Layout(ep=4, pp=2), 1, 12, 128).met[EQ6]  # two stages serve six each
    tight = Cluster(inputs(slo_tpot_s=32 * (494e-6 + attention_s - 1e-6)))
    assert not candidate(tight, Layout(ep=4), 1, 1, 128).met[EQ5]


def test_binding_constraint_is_the_one_that_needs_most_ranks() -> None:
    cluster = Cluster(inputs(slo_tpot_s=32 * 1.3e-3))
    by_memory = minimum_server(cluster, 400, 1, 128)
    assert by_memory.binding == MEMORY
    by_throughput = minimum_server(cluster, 1, 12, 128)
    assert by_throughput.binding == EQ6
    assert by_throughput.chosen.layout.num_ranks == by_throughput.gpus_by_constraint[EQ6]


def test_eight_ranks_of_mixtral_become_ep4_pp2_as_in_the_paper() -> None:
    size = minimum_server(Cluster(inputs()), 400, 4, 128, num_gpus=8)
    assert str(size.chosen.layout) == "EP4-PP2"


@cache
def cluster_of(model: str) -> Cluster:
    return Cluster(inputs(model))


@settings(max_examples=15, deadline=None)
@given(
    capacity=st.integers(1, 600),
    num_instances=st.integers(1, 12),
    batch=st.floats(1, 400),
    model=st.sampled_from(["Mixtral-8x7B", "Qwen3-30B-A3B", "GPT-OSS-20B", "DBRX"]),
)
def test_no_smaller_server_would_do(capacity: int, num_instances: int, batch: float, model: str) -> None:
    cluster = cluster_of(model)
    found = fared(cluster, capacity, num_instances, batch)
    size = smallest_server(cluster, found, None)
    assert size.chosen.feasible
    assert min(one.layout.num_ranks for one in found if one.feasible) == size.chosen.layout.num_ranks
    for name in CONSTRAINTS:
        assert size.gpus_by_constraint[name] <= size.chosen.layout.num_ranks


def test_what_no_layout_holds_is_named_with_its_excess() -> None:
    cluster = Cluster(inputs(slo_tpot_s=32 * 0.9e-3))
    with pytest.raises(SloError, match=r"eq\. 5: receive .* exceeds SLO_FFN = .* by .* the longest is send"):
        minimum_server(cluster, 1, 1, 256)
    with pytest.raises(
        SloError, match=r"eq\. 6: send = .* 500 instances over 32 stages .* exceeds SLO_Layer"
    ):
        minimum_server(cluster, 1, 500, 128)
    with pytest.raises(SloError, match=r"memory: M\* = 100000 adapters of 1\.81 GB; .* too few"):
        minimum_server(cluster, 100_000, 1, 1)
    with pytest.raises(SloError, match=r"alone take .* ms more"):
        fewest_instances(Cluster(inputs(slo_tpot_s=1e-3)))


def test_model_that_does_not_fit_an_instance_says_by_how_much() -> None:
    with pytest.raises(ConfigError, match=r"263\.2 GB exceed .* by .* raise --instance-gpus"):
        fewest_instances(Cluster(inputs("DBRX", instance_gpus=2)))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(0, 60))
def test_bisection_finds_the_last_that_holds(most: int, last: int) -> None:
    assert largest(lambda n: n <= max(1, last), most) == min(most, max(1, last))


@pytest.mark.parametrize("model", ["Mixtral-8x7B", "DBRX", "Qwen3-30B-A3B"])
def test_split_of_a_budget_beats_every_other_number_of_server_ranks(model: str) -> None:
    given_inputs = inputs(model, global_batch=100, gpus=16, estimator="paper")
    cluster, probabilities = Cluster(given_inputs), zipf()
    best = best_split(cluster)
    assert best.num_instances == (16 - best.layout.num_ranks) // given_inputs.instance_gpus
    slots = cluster.slots(best.layout)
    assert immediate_admissibility_rate(probabilities, best.global_batch, slots) >= 0.95
    rows = cluster.max_batch[0]
    for layout in cluster.layouts:
        instances = (16 - layout.num_ranks) // given_inputs.instance_gpus
        more = best.global_batch + 1
        if instances < 1 or math.ceil(more / instances) > rows:
            continue
        held = immediate_admissibility_rate(probabilities, more, cluster.slots(layout)) >= 0.95
        assert not (held and candidate(cluster, layout, 1, instances, more / instances).feasible)


@pytest.mark.parametrize(("name", "fewest"), [("Scaled-MoE", (4, 1)), ("Mixtral-8x7B", (2, 1))])
def test_an_int4_base_needs_fewer_gpus(name: str, fewest: tuple[int, int]) -> None:
    """Where the weights in bf16 do not fit beside a request's KV."""
    int4 = weight_format({}, "int4", 64)
    found = []
    for weights in (UNQUANTISED, int4):
        for gpus in (1, 2, 4):
            cluster = Cluster(inputs(name, instance_gpus=gpus, weights=weights, slo_tpot_s=1.0))
            with suppress(ConfigError):
                assert cluster.max_batch[0] >= 1
                found.append(gpus)
                break
    assert tuple(found) == fewest


def test_bytes_of_a_quantised_base_are_those_of_its_formats() -> None:
    shape = known_model("Mixtral-8x7B").shape
    plain = base_bytes(shape, UNQUANTISED)
    assert plain == base_parameters(shape) * 2
    experts = 32 * 8 * 3 * 4096 * 14336
    packed = base_bytes(shape, WeightFormat("mxfp4", None, 4.25))
    assert plain - packed == pytest.approx(experts * (16 - 4.25) / 8)
    with_head = base_bytes(shape, weight_format({}, "int8", None, True))
    assert base_bytes(shape, weight_format({}, "int8")) - with_head == 32000 * 4096
