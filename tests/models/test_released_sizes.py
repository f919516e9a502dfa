# SPDX-License-Identifier: Apache-2.0
"""Configs as the released models have them, in the spelling of their time, built without memory."""

from __future__ import annotations

import pytest
import torch

from bench.harness.released_models import GPT_OSS_20B, MIXTRAL_8X7B, QWEN3_30B_A3B
from moe_lora.families import model_spec
from moe_lora.models.causal_lm import CausalLM

DBRX = {
    "model_type": "dbrx",
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "d_model": 6144,
    "ffn_config": {
        "ffn_hidden_size": 10752,
        "model_type": "",
        "moe_jitter_eps": 0.01,
        "moe_loss_weight": 0.05,
        "moe_num_experts": 16,
        "moe_top_k": 4,
    },
    "max_seq_len": 32768,
    "n_heads": 48,
    "n_layers": 40,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
LLAMA_3_1_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        pytest.param(MIXTRAL_8X7B, 46_702_792_704, id="mixtral-8x7b"),
        pytest.param(QWEN3_30B_A3B, 30_532_122_624, id="qwen3-30b-a3b"),
        pytest.param(GPT_OSS_20B, 20_914_757_184, id="gpt-oss-20b"),
        pytest.param(DBRX, 131_596_523_520, id="dbrx"),
        pytest.param(LLAMA_3_1_8B, 8_030_261_248, id="llama-3.1-8b"),
    ],
)
def test_released_model_has_the_published_number_of_parameters(config, num_parameters):
    with torch.device("meta"):
        model = CausalLM(model_spec(config))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_dbrx_keeps_the_base_of_its_attention_section():
    spec = model_spec(DBRX)
    assert spec.rope.inverse_frequencies[1] == pytest.approx(500000 ** (-2 / 128))
    assert spec.clip_qkv == 8


def test_gpt_oss_keeps_its_rope_and_windows():
    spec = model_spec(GPT_OSS_20B)
    assert spec.rope.attention_factor == pytest.approx(1.3465735902799727)  # 0.1 ln 32 + 1
    assert spec.rope.inverse_frequencies[0] == 1.0
    assert spec.rope.inverse_frequencies[-1] == pytest.approx(150000 ** (-62 / 64) / 32)
    assert spec.window == (128, 0) * 12
