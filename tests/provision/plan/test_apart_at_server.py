# SPDX-License-Identifier: Apache-2.0
"""Prompts on instances with adapters of their own, answers beside a LoRA Server: sized, written, checked."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from moe_lora.cli.provision_result import plan_lines, plan_yaml, verified
from moe_lora.config.cluster import read_cluster
from moe_lora.core.errors import SloError
from moe_lora.core.partition import Layout
from moe_lora.engine.arena_size import arena_size
from moe_lora.kernels.operands import kv_layout
from moe_lora.provision.device_profile import read_profile, with_rates
from moe_lora.provision.plan import checked, compared
from moe_lora.provision.plan.checked import DividedSearch, Loads, divided_plan, place_of
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.compared import checked_plan
from moe_lora.provision.plan.coupled import Apart
from moe_lora.provision.plan.inputs import SizedCluster
from moe_lora.provision.plan.memory import AdapterMix, LoadQueue, miss_share
from moe_lora.provision.plan.plan import Plan
from moe_lora.provision.plan.verify import PlannedLoad, planned_load, system_of
from moe_lora.provision.replayed.system_config import SimLoraServerConfig

from .plans import zipf
from .test_apart import LONG, NET, few_requests, given  # noqa: F401  (the fixture)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return checked_plan(given(), LONG)


def searched(**changes: object) -> DividedSearch:
    return DividedSearch(Cluster(given(**changes)), lambda _: (), farthest=1.5, busiest=1.2)


def test_decode_rows_alone_pay_for_a_server_where_steps_are_tight(plan: Plan) -> None:
    assert plan.kind == "lora_server"
    assert 0 < plan.prefill_instances < plan.instances
    assert plan.total_gpus == plan.instances + plan.lora_server_gpus
    assert plan.compared.startswith(f"{compared.AT_SERVER}: coupled instances take ")
    number = f"apart: {plan.prefill_instances} of {plan.instances} instances compute prompts, with 8 adapters"
    assert plan.apart.startswith(number)
    assert "; without a LoRA Server: apart: " in plan.apart
    parts = " ".join(plan.never_ran + plan.ran)
    assert "moves of KV between instances" in parts
    assert "a LoRA Server" in parts
    assert "adapters beside the weights" in parts
    text = "\n".join(plan_lines(plan))
    assert f"{plan.prefill_instances} of them for prompts with 8 adapters on each, the others" in text


def test_verify_replays_it_on_both_simulators(plan: Plan) -> None:
    content, _, missed = verified(given(), plan, LONG)
    assert not missed
    assert content["held"]
    assert [one["simulator"] for one in content["simulators"]] == ["provision.replayed", "moe_lora.sim"]


def test_instances_of_the_written_file_have_the_planned_kv_and_adapters(plan: Plan, tmp_path: Path) -> None:
    plan = divided_plan(Cluster(given(probabilities=zipf(1000))), replace(place_of(plan), slots=40))
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan, None))
    read = read_cluster(tmp_path / "plan.yaml")
    assert read.lora_server is not None
    assert (read.lora_server.layout, read.lora_server.capacity) == (plan.layout, plan.slots)
    expected = tuple(f"instance-{number}" for number in range(plan.prefill_instances))
    assert read.front_end.prefill_instances == expected
    assert read.engine.num_instances == plan.instances
    assert read.engine.max_num_batched_tokens >= read.engine.max_num_seqs
    inputs = given()
    room = inputs.profile.gpu.memory_bytes * inputs.profile.gpu.instance_memory_share - inputs.weight_bytes
    layout = kv_layout(inputs.shape, read.engine.block_size, torch.bfloat16)
    for local in ([site.name for site in inputs.shape.sites], ["qkv", "o"]):
        config = replace(read.engine, device="cuda")
        size = arena_size(config, inputs.shape, layout, [], torch.device("cuda"), int(90e9), local)
        assert 0.998 * room <= size.num_pages * layout.page_bytes <= room
        assert size.max_kv_pages == size.num_pages
    assert read.engine.max_loras == 40
    # The longest request and an adapter fit together.
    longest = read.engine.max_model_len or inputs.shape.max_position
    assert longest * inputs.kv_token_bytes + inputs.coupled_adapter_bytes <= room


def test_adapters_of_an_instance_for_prompts_by_hand() -> None:
    inputs = given(probabilities=zipf(1000))
    apart = Apart(Cluster(inputs))
    room = inputs.profile.gpu.memory_bytes * inputs.profile.gpu.instance_memory_share - inputs.weight_bytes
    # A step, and four requests of 3100 tokens with the file's rounding.
    kv_bytes = (apart.full_step + 4 * (1.002 * 3100 + 16)) * 65536
    fitting = int((room - kv_bytes) / inputs.coupled_adapter_bytes)
    assert 8 < fitting < 1000
    assert apart.own_slots == fitting
    assert Apart(Cluster(given())).own_slots == 8, "all"
    assert inputs.prompts is not None
    hits = given(probabilities=zipf(1000), prompts=replace(inputs.prompts, hit_share=0.2))
    assert Apart(Cluster(hits)).own_slots == math.ceil(fitting / 2)
    long = given(
        prompts=replace(inputs.prompts, longest=10**6), shape=replace(inputs.shape, max_position=10**7)
    )
    assert Apart(Cluster(long)).own_slots == 0
    assert not DividedSearch(Cluster(long), lambda _: (), farthest=1.5, busiest=1.2).of(40)


def test_every_division_of_a_number_of_gpus_is_a_candidate() -> None:
    search = searched()
    found = search.of(9, math.inf)
    assert {one.num_gpus(1) for one in found} == {9}
    # At least 3 for prompts, 1 for answers and 1 rank.
    assert {one.prefill_instances for one in found} == {3, 4, 5, 6, 7}
    assert {(one.slots, one.step_tokens) for one in found} == {(8, search.apart.full_step)}
    assert not search.of(4, math.inf)
    share = search.apart.prompts_share(3) / 0.95
    near = {place: nearness for nearness, _, place in search._candidates(9)}
    assert min(nearness for place, nearness in near.items() if place.prefill_instances == 3) >= share
    assert [near[one] for one in found] == sorted(near[one] for one in found)


def test_kv_has_to_enter_the_instances_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    # 30 x 2500 tokens x 65536 bytes each second, over a link of 4 GB/s: 1.2288.
    slow = NET | {"net_bytes_per_s": 4e9}
    apart = Apart(
        Cluster(given(profile=with_rates(read_profile("h200"), slow), assumed=slow, slo_tpot_s=0.1))
    )
    place = next(one for one in apart.places(4) if one.num_decoding == 1)
    assert apart.nearness(place) == pytest.approx(1.2288)
    monkeypatch.setattr(Apart, "move_s", 0.1)
    near = {one.num_decoding: near for near, _, one in searched()._candidates(9) if near < math.inf}
    assert near[3] == pytest.approx(1.0)


def test_the_replayed_cluster_has_both_kinds_of_instances(plan: Plan) -> None:
    cluster, place = Cluster(given()), place_of(plan)
    assert place == SizedCluster(place.layout, plan.instances, 8, plan.prefill_instances, 2496)
    system = system_of(cluster, place, [str(index) for index in range(8)])
    assert system.prompts is not None
    assert system.prefill is not None
    assert isinstance(system.adapters, SimLoraServerConfig)
    assert (system.num_instances, system.prefill.num_instances) == (plan.instances, plan.prefill_instances)
    assert system.prompts.adapters.capacity == 8
    assert system.prompts.instance.max_num_batched_tokens == plan.max_num_batched_tokens
    beside = 8 * cluster.inputs.coupled_adapter_bytes / cluster.inputs.kv_token_bytes
    assert system.prompts.instance.kv_tokens == pytest.approx(system.instance.kv_tokens - beside)


def test_a_plan_has_prompts_in_its_share_and_in_ttft(plan: Plan) -> None:
    cluster = Cluster(given())
    apart, alone = Apart(cluster), Apart(cluster).cluster
    token_s = cluster.token_s(None, 2496)
    assert plan.prompt_share == pytest.approx(30 * 2500 * token_s / plan.prefill_instances)
    assert plan.p95_ttft_s is not None
    assert plan.p95_decode_ttft_s is not None
    assert plan.p95_ttft_s - plan.p95_decode_ttft_s == pytest.approx((2496 + 3000) * token_s)
    assert alone.inputs.prompts is None
    assert plan.inputs["prompts"] is not None
    assert apart.own_slots == plan.prefill_slots


def test_loads_of_both_sides_are_two_numbers() -> None:
    cluster = Cluster(given(probabilities=zipf(40, 1.0)))
    place = SizedCluster(Layout.parse("EP1-PP1"), 5, 8, 3, 2496)
    plan, misses = divided_plan(cluster, place), miss_share(cluster.inputs.probabilities, 8)
    assert (plan.loads_per_s, misses > 0.05) == (0.0, True), "the server holds all 40"
    assert plan.prefill_loads_per_s == pytest.approx(30.0 * misses)
    assert f"{30.0 * misses:.2f} adapters/s to the instances for prompts" in "\n".join(plan_lines(plan))


def test_the_longest_request_fits_beside_the_adapter_of_the_largest_rank() -> None:
    mix = AdapterMix(ranks=((16, 0.9), (256, 0.1)))
    inputs = given(mix=mix, shape=replace(given().shape, max_position=10**7))
    largest = replace(inputs, mix=mix.largest()).coupled_adapter_bytes
    place = SizedCluster(Layout.parse("EP1-PP1"), 5, 8, 3, 2496)
    plan = divided_plan(Cluster(inputs), place)
    assert plan.max_model_len is not None
    room = plan.kv_gb_per_rank * 1e9 - largest
    assert room - 16 * inputs.kv_token_bytes < plan.max_model_len * inputs.kv_token_bytes <= room


def test_each_load_is_made_once_and_all_requests_are_for_busy_links(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []

    def counted(*args: Any, num_requests: int | None = None, **words: Any) -> PlannedLoad:
        made.append(num_requests)
        return planned_load(*args, num_requests=num_requests, **words)

    monkeypatch.setattr(checked, "planned_load", counted)
    checked_plan(given(slo_tpot_s=0.1), LONG)
    assert made == [400, 600]
    inputs, place = given(probabilities=zipf(1000)), SizedCluster(Layout.parse("EP1-PP1"), 1)
    loads_of = compared._server_loads(Cluster(inputs), Loads(inputs, LONG))
    for busy, number in ((0.8, 2), (1.2, 3), (1.2, 3)):
        queue = LoadQueue(loads_per_s=busy, load_s=1.0, misses=1.0)
        monkeypatch.setattr(Cluster, "load_queue", Mock(return_value=queue))
        assert len(list(loads_of(place))) == number
    assert made[2:] == [400, 600, None]


def test_if_nothing_else_holds_the_division_does_or_the_refusal_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = SloError("not coupled")

    def refuse(*_: object) -> Plan:
        raise SloError("not served")

    monkeypatch.setattr(compared, "_coupled", lambda *_: (None, refused))
    monkeypatch.setattr(compared, "with_apart", lambda *_: (None, "not apart"))
    monkeypatch.setattr(compared, "checked_server_plan", refuse)
    plan = checked_plan(given(), LONG)
    assert (plan.kind, plan.prefill_instances > 0) == ("lora_server", True)
    assert "as nothing else holds the load: not coupled. Nor with prompts apart: not apart" in plan.compared
    with pytest.raises(SloError, match="Nor do answers alone beside a LoRA Server: TPOT SLO"):
        checked_plan(given(slo_tpot_s=0.001), LONG)
    of_gpus = checked_plan(given(gpus=plan.total_gpus), LONG)
    of_instances = checked_plan(given(instances=plan.instances), LONG)
    for one in (of_gpus, of_instances):
        assert (one.total_gpus, one.instances) == (plan.total_gpus, plan.instances)
        assert one.prefill_instances > 0
    more = checked_plan(given(instances=plan.instances + 2), LONG)
    assert (more.instances, more.prefill_instances > 0) == (plan.instances + 2, True)
    with pytest.raises(SloError, match="beside a LoRA Server: no division of 3 GPUs holds"):
        checked_plan(given(gpus=3), LONG)


def test_without_a_rate_between_instances_no_division_is_named() -> None:
    load = {"load_bytes_per_s": 5e10}
    inputs = given(profile=with_rates(read_profile("h200"), load), assumed=load, slo_tpot_s=0.1)
    assert "beside a LoRA Server" not in checked_plan(inputs, LONG).apart
