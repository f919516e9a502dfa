# SPDX-License-Identifier: Apache-2.0
"""Whole plans: their keys, their arithmetic, and the file that serves them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_lora.cli.provision_result import plan_lines, plan_yaml
from moe_lora.config import LoraServerConfig
from moe_lora.config.cluster import read_cluster
from moe_lora.core.errors import ConfigError, SloError
from moe_lora.core.partition import Layout, Partition
from moe_lora.dist.lora_server.rank_memory import plan_memory
from moe_lora.provision.admission.corrected import corrected_admissibility_rate
from moe_lora.provision.admission.iar import expected_active, immediate_admissibility_rate, min_capacity
from moe_lora.provision.device_profile import read_profile, with_rates
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.memory import KNOWN_MODELS, AdapterMix, known_model
from moe_lora.provision.plan.plan import assumptions, make_plan
from moe_lora.workload.popularity.popularity import Popularity

from .plans import inputs, planned, zipf


def test_plan_holds_the_named_keys_and_is_json() -> None:
    found = json.loads(json.dumps(asdict(planned())))
    assert {
        *("capacity", "iar", "iar_corrected", "expected_active", "lora_server_gpus", "layout", "instances"),
        *("bytes_per_adapter", "binding_constraint", "p95_ttft_s", "tpot_s", "assumptions", "inputs"),
    } <= set(found)


def test_plan_is_what_its_parts_say() -> None:
    plan, popularity = planned(num_adapters=128), zipf(128)
    load = plan.global_batch
    assert load == pytest.approx(25 * 230 * plan.tpot_s, rel=1e-4)  # Little's law
    assert plan.capacity_paper == min_capacity(popularity, load, 0.95)
    assert plan.capacity == plan.capacity_corrected
    assert plan.iar == immediate_admissibility_rate(popularity, load, plan.capacity)
    assert plan.iar_corrected == corrected_admissibility_rate(popularity, load, plan.capacity) >= 0.95
    assert corrected_admissibility_rate(popularity, load, plan.capacity - 1) < 0.95
    assert plan.expected_active == expected_active(popularity, load)
    assert plan.slots >= plan.capacity
    assert plan.total_gpus == plan.lora_server_gpus + 2 * plan.instances
    layer = plan.layer_ms
    assert layer["slo_layer"] == pytest.approx(100 / 32)
    assert layer["slo_ffn"] == pytest.approx(layer["slo_layer"] - layer["attention"])
    served = layer["receive"] + layer["compute"] + layer["send"]
    at_load_ms = 32 * (layer["attention"] + max(layer["experts"], served))
    assert plan.tpot_at_load_s * 1e3 == pytest.approx(at_load_ms)
    assert plan.tpot_s <= plan.tpot_at_load_s <= 0.1


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        *((known.name, None) for known in KNOWN_MODELS),
        ("Mixtral-8x7B", 16),
        *(
            pytest.param(known.name, 16, marks=pytest.mark.slow)
            for known in KNOWN_MODELS
            if known.name != "Mixtral-8x7B"
        ),
    ],
)
def test_plan_of_every_known_model_is_a_file_that_serve_takes(
    tmp_path: Path, model: str, gpus: int | None
) -> None:
    plan = planned(model, num_adapters=8, gpus=gpus)
    text = plan_yaml(plan, None)
    assert "placeholder" in text
    (tmp_path / "plan.yaml").write_text(text)
    read = read_cluster(tmp_path / "plan.yaml")
    assert read.lora_server == LoraServerConfig(
        layout=plan.layout, capacity=plan.slots, memory_gb=plan.memory_gb_per_rank
    )
    assert read.engine.num_instances == plan.instances
    assert read.engine.max_num_seqs >= plan.batch_per_instance
    if gpus is not None:
        assert plan.total_gpus <= gpus
        assert plan.serviceable_rate_per_s is not None
        assert plan.serviceable_rate_per_s >= 25


def test_yaml_with_a_folder_and_adapters_has_no_placeholder(tmp_path: Path) -> None:
    text = plan_yaml(planned(), str(tmp_path), [("upper", "adapters/upper")])
    assert "placeholder" not in text
    (tmp_path / "plan.yaml").write_text(text)
    assert [name for name, _ in read_cluster(tmp_path / "plan.yaml").engine.adapters] == ["upper"]


def test_serviceable_rate_is_where_the_budget_stops_holding_the_load() -> None:
    given = {"gpus": 16, "probabilities": zipf(16)}
    rate = make_plan(inputs(**given)).serviceable_rate_per_s
    assert rate is not None
    assert make_plan(inputs(**given, rate_per_s=rate * 0.999)).total_gpus <= 16
    with pytest.raises(SloError, match=r"--gpus 16 hold \S+ requests/s at best"):
        make_plan(inputs(**given, rate_per_s=rate * 1.01))


def test_given_instances_are_kept_or_refused() -> None:
    assert planned(instances=5).instances == 5
    with pytest.raises(SloError, match=r"--instances 1: .* more than the \d+ that .* give \d+ or more"):
        planned(instances=1, rate_per_s=200)


def test_instances_grow_until_their_batches_meet_the_equations() -> None:
    # 1.05 ms a layer: the base model manages batches whose LoRA round takes longer.
    given = inputs(slo_tpot_s=32 * 1.05e-3, global_batch=750)
    plan = make_plan(given)
    assert plan.instances > math.ceil(750 / Cluster(given).max_batch[0])
    assert plan.tpot_s <= 32 * 1.05e-3


def test_ttft_slo_shorter_than_one_step_is_refused_with_the_term() -> None:
    with pytest.raises(SloError, match=r"loading the first layer takes .* steps .* the steps are the longer"):
        planned(num_adapters=8, slo_ttft_s=0.01)


def test_first_layers_load_is_part_of_the_ttft() -> None:
    plan = planned()
    layer_bytes = plan.bytes_per_adapter / 32 / int(plan.layout[2])
    assert plan.p95_ttft_s is not None
    assert plan.p95_ttft_s - 2.95 * plan.tpot_s == pytest.approx(layer_bytes / 5e10, rel=0.01)


def test_printed_form_of_the_adapter_names_the_other_ones_bytes() -> None:
    said = " ".join(planned("Qwen3-30B-A3B", 8).assumptions)
    assert "3.32 GB" in said
    assert "2.52 GB" in said
    assert "24" in " ".join(planned("GPT-OSS-20B", 8).assumptions)


def test_assumptions_name_defaults_of_the_network_beside_a_server_alone() -> None:
    rates = {"load_bytes_per_s": 5e10, "net_bytes_per_s": 5e10}
    given = inputs(profile=with_rates(read_profile("h200"), rates), assumed=rates)
    said = "fixed_us.receive=0, fixed_us.send=0, fixed_us.sync_per_rank=0, efficiency.net=1"
    assert said in " ".join(assumptions(given, 10.0))
    assert said not in " ".join(assumptions(given, 10.0, coupled=True))
    assert "network times" not in " ".join(assumptions(inputs(), 10.0))


def test_metrics_are_table_1s() -> None:
    plan = planned(instances=4, global_batch=4 * 128)
    x, rows = int(plan.layout[2]), 128 * 2  # b * k
    assert plan.metrics is not None
    assert plan.metrics["sync_scope"] == x
    assert plan.metrics["compute_volume"] == pytest.approx(rows / x)
    assert plan.metrics["peer_volume"] == pytest.approx(rows / max(2, x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slo_ttft_s": -1.0}, "slo_ttft_s=-1.0 must be positive and finite"),
        ({"slo_tpot_s": math.nan}, "slo_tpot_s"),
        ({"target_iar": 1.5}, "target_iar"),
        ({"rate_per_s": None}, "give --request-rate or --global-batch"),
        ({"gpus": 8, "instances": 2}, "give one"),
        ({"rate_per_s": 0.0}, "rate_per_s=0.0 .* change --request-rate"),
        ({"gpus": 0}, "gpus=0 must be 1 or more"),
        ({"global_batch": True}, "global_batch=True"),
        ({"target_iar": True}, "target_iar=True"),
    ],
)
def test_bad_inputs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inputs(**changes)


@pytest.mark.parametrize("probabilities", [[0.5, -0.5, 1.0], [math.nan, 1.0], [0.5, 0.4], []])
def test_bad_popularity_is_refused(probabilities: list[float]) -> None:
    with pytest.raises(ValueError, match="popularity"):
        make_plan(inputs(probabilities=np.array(probabilities)))


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known are GPT-OSS-20B, Qwen3-30B-A3B"):
        known_model("Mixtral-9x9B")


def test_one_adapter_needs_one_slot() -> None:
    only = Popularity(("only",), (1.0,))
    plan = make_plan(inputs(probabilities=np.array(only.probabilities)))
    assert (plan.capacity, plan.iar, plan.slots) == (1, 1.0, 1)


def test_corrected_estimator_asks_for_more_room_and_both_are_published() -> None:
    paper, corrected = planned(estimator="paper"), planned()
    assert paper.iar_corrected == corrected_admissibility_rate(zipf(), paper.global_batch, paper.capacity)
    assert paper.iar_corrected < 0.95 <= paper.iar
    assert corrected.capacity > paper.capacity
    for plan in (paper, corrected):
        needed = plan.capacity_paper, plan.capacity_corrected
        assert needed == (paper.capacity, corrected.capacity)
    assert corrected.iar_corrected >= 0.95
    below = corrected_admissibility_rate(zipf(), corrected.global_batch, corrected.capacity - 1)
    assert below < 0.95


def test_instances_may_run_what_the_slo_allows_so_that_bursts_need_not_wait() -> None:
    given = inputs()
    plan, cluster = make_plan(given), Cluster(given)
    batch = plan.batch_per_instance
    assert plan.max_num_seqs > batch + 4 * math.sqrt(batch)
    layer_s = cluster.stages.layer_s(int(plan.layout[2]), plan.max_num_seqs)
    assert layer_s <= cluster.layer_budget_s
    tight = planned(context_tokens=40_000.0)
    assert tight.max_num_seqs <= plan.max_num_seqs
    assert tight.max_num_seqs >= tight.batch_per_instance


def test_no_tail_is_promised_where_requests_queue() -> None:
    # 95 % start at once by the paper's model only, on a server that is full.
    plan = planned(target_iar=0.9)
    assert (plan.p95_ttft_s is None) == (plan.slots_iar_corrected < 0.95)
    full = inputs(probabilities=zipf(150, 0.2), target_iar=0.5, global_batch=400)
    plan = make_plan(full)
    assert plan.slots_iar_corrected < 0.95
    assert plan.p95_ttft_s is None


def test_predicted_tpot_keeps_just_its_own_batch_running() -> None:
    given = inputs(load_margin=0.2)
    plan, cluster = make_plan(given), Cluster(given)
    batch = plan.running_per_instance
    assert batch == pytest.approx(25 * 230 * plan.tpot_s / plan.instances, rel=1e-4)
    assert plan.tpot_s == pytest.approx(32 * cluster.stages.layer_s(int(plan.layout[2]), batch), rel=1e-4)
    assert batch < plan.batch_per_instance
    assert plan.batch_per_instance == pytest.approx(1.2 * batch)
    fixed = planned(global_batch=500)
    assert fixed.tpot_s == fixed.tpot_at_load_s
    assert fixed.global_batch == 500


def test_instances_grow_until_the_first_token_is_in_time() -> None:
    room = {"rate_per_s": 320, "estimator": "corrected", "probabilities": zipf(24)}
    tight, loose = make_plan(inputs(**room, slo_ttft_s=0.08)), make_plan(inputs(**room, slo_ttft_s=1.0))
    assert tight.instances > loose.instances
    assert loose.p95_ttft_s is not None
    assert tight.p95_ttft_s is not None
    assert tight.p95_ttft_s <= 0.08 < loose.p95_ttft_s


def test_plan_with_fewer_slots_than_active_adapters_says_how_long_the_others_wait() -> None:
    crowded = make_plan(inputs(probabilities=zipf(64), global_batch=600))
    assert crowded.capacity < crowded.expected_active
    assert crowded.mean_wait_s > 0
    assert "who has to wait, waits" in "\n".join(plan_lines(crowded))
    assert "who has to wait" not in "\n".join(plan_lines(planned(num_adapters=128)))


def test_memory_of_the_written_file_holds_the_planned_adapters(tmp_path: Path) -> None:
    plan = planned(rate_per_s=60.0)
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan, None))
    written = read_cluster(tmp_path / "plan.yaml").lora_server
    assert written is not None
    server = replace(written, address="server:7500", store_dir=str(tmp_path))
    shape, layout = known_model("Mixtral-8x7B").shape, Layout.parse(plan.layout)
    memory = plan_memory(server, Partition(shape, layout, 2, sites="auto"), torch.bfloat16, [])
    on_rank = AdapterMix(ranks=((64, 1.0),)).bytes_on_rank(shape, layout)
    assert min(memory.num_pages) * memory.page_bytes >= plan.slots * on_rank * (1 - 1e-4)
    assert memory.capacity == plan.slots


def test_one_gpu_is_not_several() -> None:
    shown = "\n".join(plan_lines(planned("GPT-OSS-20B", rate_per_s=1.0, instance_gpus=1)))
    assert "1 GPU," in shown
    assert "1 GPUs" not in shown
