# SPDX-License-Identifier: Apache-2.0
"""Configs as the released models have them, in the spelling of their time, built without memory."""

from __future__ import annotations

import math

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
_LATENT = {
    "attention_bias": False,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V3 = {
    **_LATENT,
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = {
    **_LATENT,
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        pytest.param(MIXTRAL_8X7B, 46_702_792_704, id="mixtral-8x7b"),
        pytest.param(QWEN3_30B_A3B, 30_532_122_624, id="qwen3-30b-a3b"),
        pytest.param(GPT_OSS_20B, 20_914_757_184, id="gpt-oss-20b"),
        pytest.param(DBRX, 131_596_523_520, id="dbrx"),
        pytest.param(LLAMA_3_1_8B, 8_030_261_248, id="llama-3.1-8b"),
        pytest.param(DEEPSEEK_V3, 671_026_419_200, id="deepseek-v3"),
        pytest.param(DEEPSEEK_V2_LITE, 15_706_484_224, id="deepseek-v2-lite"),
    ],
)
def test_released_model_has_the_published_number_of_parameters(config, num_parameters):
    with torch.device("meta"):
        model = CausalLM(model_spec(config))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_deepseek_v3_caches_576_numbers_per_token_and_layer():
    spec = model_spec(DEEPSEEK_V3)
    assert spec.shape.kv_bytes_per_token() == 61 * 576 * 2
    assert spec.attention_multiplier == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert spec.rope.attention_factor == 1
    assert model_spec({**DEEPSEEK_V3, "model_type": "kimi_k2"}) == spec


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
