# SPDX-License-Identifier: Apache-2.0
"""Engines of models with heads of two sizes: what pages hold, what answers, what is refused."""

from __future__ import annotations

import pytest
import torch

from moe_lora import LLM
from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.ranks.rank import check_layers
from moe_lora.families import shape_of
from moe_lora.kernels.operands import KvLayout, with_full_layers
from tests.families import make_adapter, make_checkpoint
from tests.grids import with_quick
from tests.models.conftest import RANKS, Served, served  # noqa: F401  (the fixture)
from tests.models.generated_code import captured_graphs

from .test_recurrent import answers_as_peft

SLIDING, FULL = "sliding_attention", "full_attention"
ODD = {
    "k_of_its_own": {"attention_k_eq_v": False, "num_global_key_value_heads": None},
    "larger_sliding_heads": {
        "head_dim": 28,
        "num_key_value_heads": 3,
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "layer_types": [SLIDING, SLIDING, FULL],
    },
    "equal_heads": {"head_dim": 16, "global_head_dim": 16, "num_global_key_value_heads": 2},
    "full_layers_alone": {"layer_types": [FULL] * 3, "final_logit_softcapping": None},
    "half_rotated": {
        "rope_parameters": {
            SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 2e4},
        },
        "hidden_size": 24,
        "num_experts": 5,
        "sliding_window": 3,
    },
}
SEEDS = {"larger_sliding_heads": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint("gemma4", tmp_path_factory.mktemp("sized") / "base", seed=1)


def test_compiled_steps_answer_as_peft_does(served):  # noqa: F811
    with captured_graphs():
        answers_as_peft(served("gemma4"), eager=False, decode_buckets=(8,))


@pytest.mark.slow
def test_generated_code_answers_as_peft_does(served):  # noqa: F811
    answers_as_peft(served("gemma4"), eager=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"async_scheduling": "on"},
        {"expert_parallel": 2, "max_num_seqs": 8, "max_num_batched_tokens": 9},
    ],
    ids=["ahead", "expert_parallel"],
)
def test_each_way_answers_as_peft_does(settings, served):  # noqa: F811
    answers_as_peft(served("gemma4"), eager=True, **settings)


def test_merged_weights_answer_as_peft_does(served):  # noqa: F811
    stats = answers_as_peft(served("gemma4"), eager=True, batching="merged")
    assert stats.steps_merged > 0


@pytest.mark.parametrize("name", with_quick(ODD, ("larger_sliding_heads", "half_rotated")))
def test_odd_shapes_answer_as_peft_does(name, tmp_path):
    seed = SEEDS.get(name, 0)
    odd = make_checkpoint("gemma4", tmp_path / "base", seed=seed, **ODD[name])
    targets = ("qkv", "o", "gate_up", "down", "router")
    adapters = tuple(
        make_adapter("gemma4", odd, tmp_path / f"rank{rank}", rank, targets, seed=rank, scale=2 / rank**0.5)
        for rank in RANKS[::2]
    )
    answers_as_peft(Served("gemma4", odd, 2 * adapters), eager=True, max_num_batched_tokens=9, max_num_seqs=8)


def test_a_page_holds_both_sizes_without_padding(base):
    shape = shape_of(read_config(base))
    numbers = 2 * (1 * 2 * 16 + 2 * 3 * 20)
    assert shape.kv_bytes_per_token() == numbers * 4
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)
    first, full = with_full_layers(layout, shape.global_heads)
    assert first.page_bytes == full.page_bytes
    gap = first.page_bytes - 16 * shape.kv_bytes_per_token()
    assert 0 <= gap < full.layer_bytes
    with LLM(base, dtype="float32", eager=True, block_size=16) as llm:
        assert llm.client.core.adapters.page_bytes == first.page_bytes


def test_tensor_parallelism_is_refused_at_the_start(base):
    with pytest.raises(ConfigError, match="tensor_parallel=2 and layers with heads of two sizes do not go"):
        LLM(base, dtype="float32", eager=True, tensor_parallel=2)


def test_a_device_without_a_kernel_is_refused(base):
    with pytest.raises(ConfigError, match="device='cuda' has no kernel of layers with heads of two sizes"):
        check_layers(EngineConfig(model_dir=str(base)), shape_of(read_config(base)), "cuda")
