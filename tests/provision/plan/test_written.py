# SPDX-License-Identifier: Apache-2.0
"""Written cluster files: the engine has the plan's KV, adapters and ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_lora.cli.provision_result import plan_yaml
from moe_lora.config import EngineConfig
from moe_lora.config.cluster import read_cluster
from moe_lora.core.errors import ConfigError, SloError
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.engine.arena_size import ArenaSize, arena_size
from moe_lora.families import shape_of
from moe_lora.kernels.operands import KvLayout, kv_layout
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.coupled import Coupled
from moe_lora.provision.plan.coupled_search import coupled_plan
from moe_lora.provision.plan.inputs import PlanInputs
from moe_lora.provision.plan.memory import KNOWN_MODELS, AdapterMix
from moe_lora.provision.plan.plan import Plan, make_plan

from .plans import inputs, prompt_load
from .test_bound import load_inputs, trace_of

TRACE = trace_of([(2000, 30), (500, 60)])
DENSE = shape_of(
    {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
)


def coupled(given: PlanInputs, slots: int = 2) -> Plan:
    place = Coupled(Cluster(given)).places(16)[0]
    return coupled_plan(Cluster(given), replace(place, slots=min(slots, place.slots)))


def written(
    plan: Plan, shape: ModelShape, folder: Path
) -> tuple[EngineConfig, ModelShard, KvLayout, ArenaSize]:
    """Settings, rank 0, pages and arena of an instance with the plan's file."""
    (folder / "plan.yaml").write_text(plan_yaml(plan, None))
    read = read_cluster(folder / "plan.yaml")
    config = replace(read.engine, device="cuda")
    rank = ModelShard(shape, config.tensor_parallel, config.expert_parallel)
    assert config.num_ranks == plan.instance_gpus
    layout = kv_layout(rank.shape, config.block_size, torch.bfloat16)
    local = [site.name for site in shape.sites if not (read.lora_server and site.num_experts)]
    size = arena_size(config, rank.shape, layout, [], torch.device("cuda"), int(90e9), local)
    return config, rank, layout, size


@pytest.mark.parametrize("kind", ["coupled", "lora_server"])
@pytest.mark.parametrize("model", [known.name for known in KNOWN_MODELS])
def test_ranks_of_the_written_file_hold_the_planned_kv(tmp_path: Path, model: str, kind: str) -> None:
    given = load_inputs(TRACE, model, rate_per_s=20.0) if kind == "coupled" else inputs(model)
    plan = coupled(given) if kind == "coupled" else make_plan(given)
    requests = (
        Coupled(Cluster(given)).kv_requests(plan.slots) if kind == "coupled" else Cluster(given).kv_requests
    )
    size = written(plan, given.shape, tmp_path)[-1]
    assert size.max_kv_pages * 16 >= 0.998 * requests * given.context_tokens
    assert size.max_kv_pages >= size.request_pages


def test_kv_below_the_models_length_has_a_limit_of_length(tmp_path: Path) -> None:
    shape = replace(KNOWN_MODELS[0].shape, max_position=10**7)
    given = replace(load_inputs(TRACE, "GPT-OSS-20B", rate_per_s=20.0), shape=shape)
    config, *_, size = written(coupled(given), shape, tmp_path)
    assert config.max_model_len == size.max_kv_pages * 16
    assert given.prompts is not None
    assert config.max_model_len >= given.prompts.longest


def test_a_longest_request_fits_the_rounded_kv() -> None:
    longest = replace(load_inputs(TRACE, "GPT-OSS-20B", rate_per_s=20.0).prompts, longest=130_001)
    given = load_inputs(
        TRACE, "GPT-OSS-20B", rate_per_s=0.01, prompts=longest, probabilities=inputs().probabilities
    )
    plan = coupled(given, slots=10**6)
    assert plan.slots < len(given.probabilities)
    assert (plan.max_model_len or 10**6) >= 130_001


def test_a_longest_request_fits_the_rounded_kv_beside_a_lora_server_or_is_refused() -> None:
    given = load_inputs(TRACE, "GPT-OSS-20B", rate_per_s=0.01)
    given = replace(given, shape=replace(given.shape, max_position=10**8))

    def of_length(longest: int) -> PlanInputs:
        assert given.prompts is not None
        return replace(given, prompts=replace(given.prompts, longest=longest))

    held = int(Cluster(given).kv_requests * given.context_tokens)
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan(of_length(held))
    longest = int((held - 16) / 1.002)
    assert (make_plan(of_length(longest)).max_model_len or 0) >= longest


def test_a_trace_beyond_the_models_length_is_refused() -> None:
    prompts = prompt_load(trace_of([(40_000, 30)]).requests)
    with pytest.raises(ConfigError, match=r"longest request has 40030 tokens.* max_position=32768"):
        load_inputs(TRACE, "Mixtral-8x7B", prompts=prompts)


@pytest.mark.parametrize("lora_rank", [4, 8, 64])
def test_layers_of_the_planned_adapters_fit_in_whole_pages(tmp_path: Path, lora_rank: int) -> None:
    mix = AdapterMix(ranks=((lora_rank, 1.0),))
    given = load_inputs(TRACE, "Mixtral-8x7B", rate_per_s=20.0, mix=mix)
    plan = coupled(given, slots=10)
    config, rank, layout, _ = written(plan, given.shape, tmp_path)
    layer_bytes = rank.shape.adapter_bytes(lora_rank, ("gate_up", "down"), False, 2) / given.shape.num_layers
    pages = given.shape.num_layers * math.ceil(layer_bytes / layout.page_bytes)
    assert config.lora_memory_gb is not None
    assert config.lora_memory_gb * 1e9 >= plan.slots * pages * layout.page_bytes


def dense(**changes: Any) -> PlanInputs:
    mix = AdapterMix(ranks=((16, 1.0),))
    return replace(load_inputs(TRACE, "Mixtral-8x7B", rate_per_s=20.0), shape=DENSE, mix=mix, **changes)


def test_a_dense_model_is_divided_and_has_no_lora_server(tmp_path: Path) -> None:
    config, rank, *_ = written(coupled(dense()), DENSE, tmp_path)
    assert (config.tensor_parallel, config.expert_parallel) == (2, 1)
    assert config.lora_memory_gb is not None
    assert config.lora_memory_gb * 1e9 >= coupled(dense()).slots * rank.shape.adapter_bytes(16)
    with pytest.raises(SloError, match="a plan times whole sites at a LoRA Server, and the 2 GPUs"):
        make_plan(dense())
    with pytest.raises(ConfigError, match="tensor_parallel=3 does not divide num_heads=32"):
        dense(instance_gpus=3)


def test_heads_that_ranks_cannot_divide_count_as_whole() -> None:
    known = next(known for known in KNOWN_MODELS if known.name == "Mixtral-8x7B")
    given = replace(inputs(), shape=replace(known.shape, num_heads=31, num_kv_heads=31))
    assert (given.shard.tensor_parallel, given.shard.expert_parallel) == (1, 2)
    assert given.kv_token_bytes == 2 * given.shape.kv_bytes_per_token()
    alone = replace(given, instance_gpus=1)
    assert Cluster(given).stages.attention_stage.per_row_s == Cluster(alone).stages.attention_stage.per_row_s
