# SPDX-License-Identifier: Apache-2.0
"""Coupled instances beside a LoRA Server: which is chosen, why, and what a profile must have for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from moe_lora.cli.provision_result import plan_lines, plan_yaml
from moe_lora.core.errors import ConfigError, SloError
from moe_lora.core.partition import Layout
from moe_lora.provision.device_profile import read_profile, with_rates
from moe_lora.provision.plan import verify
from moe_lora.provision.plan.checked import place_of, planned_rate
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.compared import checked_plan, sized, smallest_server
from moe_lora.provision.plan.inputs import SizedCluster
from moe_lora.provision.plan.plan import Plan
from moe_lora.provision.plan.verify import OTHER_DRAWS, holds, planned_load, replays

from .plans import zipf
from .test_bound import load_inputs, trace_of

PROMPTS = trace_of([(2000, 30), (500, 60)])
SHORT = trace_of([(50, 250)])


@pytest.fixture(scope="module", autouse=True)
def few_requests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "NUM_REQUESTS", 900)
        yield


@pytest.fixture(scope="module")
def coupled() -> Plan:
    return checked_plan(load_inputs(PROMPTS, "Mixtral-8x7B", rate_per_s=40.0), PROMPTS)


@pytest.fixture(scope="module")
def served() -> Plan:
    adapters = zipf(400, 0.2)
    return checked_plan(load_inputs(SHORT, "Mixtral-8x7B", rate_per_s=35.0, probabilities=adapters), SHORT)


def test_long_prompts_are_cheaper_beside_the_weights(coupled: Plan) -> None:
    assert (coupled.kind, coupled.lora_server_gpus) == ("coupled", 0)
    assert coupled.compared.startswith("coupled: a LoRA Server takes ")
    assert "more" in coupled.compared
    assert "prompts too, moves 6.6 MB over the network" in coupled.compared


def test_many_adapters_beside_short_prompts_are_cheaper_on_a_server(served: Plan) -> None:
    assert served.kind == "lora_server"
    assert served.compared.startswith("a LoRA Server, as it holds adapters once for all instances: coupled")


@pytest.mark.parametrize("kind", ["coupled", "lora_server"])
def test_plan_holds_by_other_draws(kind: str, coupled: Plan, served: Plan) -> None:
    plan = coupled if kind == "coupled" else served
    trace = PROMPTS if kind == "coupled" else SHORT
    changes = {} if kind == "coupled" else {"probabilities": zipf(400, 0.2)}
    given = load_inputs(trace, plan.inputs["model"], rate_per_s=plan.rate_per_s, **changes)
    load = planned_load(given, planned_rate(given, plan), trace, seed=1)
    found = replays(Cluster(given), place_of(plan), load)
    assert holds(given, found, OTHER_DRAWS)
    for one in found:  # a prompt of one step takes about as long as the decode step after it
        assert (one.p95_ttft_s or 0.0) > (one.p95_decode_ttft_s or 0.0) * (1.2 if kind == "coupled" else 0.9)


class ByNumber:
    """A search where a cluster holds for some numbers of GPUs, and no cluster has another number."""

    instance_gpus = 4

    def __init__(self, *numbers: int) -> None:
        self._places = {
            number: SizedCluster(Layout.parse(f"EP1-PP{number % 4 or 4}"), (number - 1) // 4)
            for number in numbers
        }

    def of(self, number: int) -> list[SizedCluster]:
        return [self._places[number]] if number in self._places else []

    def holding(self, number: int) -> SizedCluster | None:
        return self._places.get(number)


@pytest.mark.parametrize(
    ("numbers", "least"), [((270,), 270), ((268, 270), 268), ((269,), 269), ((267,), None), ((), None)]
)
def test_numbers_of_gpus_without_a_cluster_hide_no_smaller_server(numbers, least) -> None:
    search = ByNumber(*numbers)
    found = smallest_server(search, 272)
    assert (found and found.num_gpus(4)) == least
    assert sized(search, 271) == (least is not None)


def test_fewer_instances_do_not_hold(coupled: Plan) -> None:
    given = load_inputs(PROMPTS, "Mixtral-8x7B", rate_per_s=40.0, instances=coupled.instances // 2)
    with pytest.raises(SloError, match="coupled instances"):
        checked_plan(given, PROMPTS)


def test_the_written_file_has_the_split_and_the_budget_of_a_step(coupled: Plan, served: Plan) -> None:
    engine = yaml.safe_load(plan_yaml(coupled, None))["engine"]
    assert engine["max_loras"] == coupled.slots
    assert engine["max_num_batched_tokens"] == coupled.max_num_batched_tokens >= engine["max_num_seqs"]
    usable = 95.6 * 2**30 * 0.9 / 1e9
    weights = 46.7  # of each of two GPUs
    assert engine["lora_memory_gb"] + engine["kv_cache_gb"] == pytest.approx(usable - weights, abs=0.3)
    content = yaml.safe_load(plan_yaml(served, None))
    assert content["lora_server"]["layout"] == served.layout
    assert content["engine"]["max_num_batched_tokens"] == served.max_num_batched_tokens


def test_plan_says_whose_numbers_it_has_and_what_never_ran(coupled: Plan, served: Plan) -> None:
    text = "\n".join(plan_lines(coupled))
    assert "InfiniLoRA (arXiv 2604.07173) table 4" in text
    assert "are assumed" in text
    assert "Never ran there    Mixtral-8x7B as a whole model, decode steps, prompts" in text
    assert "a LoRA Server and its network" not in coupled.never_ran
    assert "a LoRA Server and its network" in served.never_ran
    assert "P95 decode TTFT" in text


def test_h200_plans_what_was_measured_and_names_the_rest() -> None:
    few = load_inputs(
        PROMPTS,
        "GPT-OSS-20B",
        rate_per_s=10.0,
        profile=read_profile("h200"),
        instance_gpus=1,
        probabilities=zipf(8),
    )
    plan = checked_plan(few, PROMPTS)
    assert plan.kind == "coupled"
    assert "a LoRA Server was not compared: profile 'h200' has no" in plan.compared
    assert not [part for part in plan.never_ran if "decode steps" in part or "whole model" in part]
    assert any(part.startswith("decode steps (GPT-OSS-20B") for part in plan.ran)
    assert plan.never_ran == ("chunks of prompts beside decode rows",)


def test_h200_refuses_loads_that_nobody_measured_until_the_user_gives_a_rate() -> None:
    profile = read_profile("h200")
    changes = {"rate_per_s": 10.0, "probabilities": zipf(4000, 0.5), "instance_gpus": 1}
    with pytest.raises(
        ConfigError, match=r"no load_bytes_per_s .copies from host to device.: nobody measured"
    ):
        checked_plan(load_inputs(PROMPTS, "GPT-OSS-20B", profile=profile, **changes), PROMPTS)
    assumed = {"load_bytes_per_s": 5e10}
    given = load_inputs(
        PROMPTS, "GPT-OSS-20B", profile=with_rates(profile, assumed), assumed=assumed, **changes
    )
    plan = checked_plan(given, PROMPTS)
    assert "load_bytes_per_s = 5e+10 as given with --assume" in "\n".join(plan_lines(plan))
    assert "loads of adapters during steps" in plan.never_ran


@pytest.mark.parametrize(
    ("assumed", "message"),
    [
        ({"load_bytes_per_s": 1.0}, "has load_bytes_per_s=5e\\+10; leave the assumption out"),
        ({"flop_per_s": 1.0}, "'flop_per_s' is unknown; choose one of load_bytes_per_s, net_bytes_per_s"),
    ],
)
def test_assumptions_do_not_replace_what_a_profile_has(assumed: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_rates(read_profile("hopper96"), assumed)
    with pytest.raises(ConfigError, match="must be finite and above 0"):
        with_rates(read_profile("h200"), {"net_bytes_per_s": float("inf")})


def test_prompts_that_take_longer_than_the_slo_alone_are_refused() -> None:
    long = trace_of([(30000, 20)])
    with pytest.raises(
        SloError,
        match=r"5 % of the prompts compute 30000 tokens or more, .* base model alone .* raise --slo-ttft-s",
    ):
        checked_plan(load_inputs(long, "Mixtral-8x7B", rate_per_s=1.0, slo_ttft_s=1.0), long)
