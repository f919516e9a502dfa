# SPDX-License-Identifier: Apache-2.0
"""Options of config.json: those that are supported compute what transformers does, others are refused."""

from __future__ import annotations

import copy
import inspect
import json
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss

from moe_lora.core.errors import ConfigError
from moe_lora.families import cut_to, model_spec, shape_of
from moe_lora.families.schema.config_json import ConfigJson
from moe_lora.families.schema.family import stepped_experts
from moe_lora.models import loader
from moe_lora.models.causal_lm import CausalLM
from tests.families import (
    ALL_FAMILIES,
    LATENT_FAMILIES,
    MULTIPLIERS,
    load_model,
    make_checkpoint,
    save_random,
    tiny_config,
)
from tests.families.wrapped import LANGUAGE_MODELS, wrapped_language_model
from tests.models.harness import Harness
from tests.oracle import reference_logits

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
PHI_MOE_ROPE = {
    **LONGROPE,
    "short_factor": [1.0, 1.2, 1.4, 1.7],
    "long_factor": [2.0] * 4,
    "short_mscale": 1.24,
    "long_mscale": 1.3,
}
PHI_3 = {"head_dim": 8, "original_max_position_embeddings": 128}
PHI_3_ROPE = {key: value for key, value in PHI_MOE_ROPE.items() if "mscale" not in key}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DBRX_FFN = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
DBRX_ATTENTION = {"kv_n_heads": 2, "rope_theta": 10000.0}
VARIANTS = {
    "deepseek_v3-halves": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "deepseek_v3-odd-sizes": ("deepseek_v3", {"kv_lora_rank": 13, "qk_nope_head_dim": 7, "v_head_dim": 3}),
    "deepseek_v3-no-groups": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek_v3-linear-rope": (
        "deepseek_v3",
        {"rope_parameters": {**PLAIN_ROPE, "rope_type": "linear", "factor": 3.0, "mscale_all_dim": 0.6}},
    ),
    "deepseek_v3-plain-queries": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "deepseek_v2-greedy": ("deepseek_v2", {"topk_method": "greedy", "first_k_dense_replace": 0}),
    "deepseek_v2-latent-queries": ("deepseek_v2", {"q_lora_rank": 9, "rope_parameters": YARN}),
    "glm4_moe_lite-neighbours": (
        "glm4_moe_lite",
        {"rope_interleave": True, "attention_bias": False, "mlp_layer_types": None},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn-truncated": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "llama-yarn-attention-factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "llama-yarn-of-the-whole-context": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn-context-outside": (
        "llama",
        {"rope_parameters": {**YARN, "factor": 8.0}, "original_max_position_embeddings": 32},
    ),
    "llama-dynamic-rope": ("llama", {"rope_parameters": DYNAMIC}),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}),
    "mistral-longrope-factor": (
        "mistral",
        {"rope_parameters": {**LONGROPE, "factor": 4.0}, "sliding_window": None},
    ),
    "mistral-llama3-rope": ("mistral", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2-yarn-and-windows": (
        "qwen2",
        {
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen2-tied-and-window-unused": ("qwen2", {"tie_word_embeddings": True, "sliding_window": 8}),
    "mixtral-window": ("mixtral", {"sliding_window": 8}),
    "mixtral-top-3": ("mixtral", {"num_experts_per_tok": 3}),
    "qwen3-gate-not-normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    "qwen3-biases": ("qwen3_moe", {"attention_bias": True}),
    "olmoe-clip-biases-and-normalised-gate": (
        "olmoe",
        {"clip_qkv": 0.8, "attention_bias": True, "norm_topk_prob": True},
    ),
    "granite-biases-and-tied": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "granite-multipliers-of-one": ("granite", dict.fromkeys(MULTIPLIERS, 1.0)),
    "granite-moe-tied-and-biases": (
        "granitemoe",
        {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 3},
    ),
    "phi-moe-longrope": ("phimoe", {"rope_parameters": PHI_MOE_ROPE, "lm_head_bias": False}),
    "phi-moe-small-jitter-and-window": (
        "phimoe",
        {"router_jitter_noise": 0.01, "sliding_window": 8, "attention_bias": False},
    ),
    "phi-3-half-of-each-head-rotated": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi-3-longrope-and-window": ("phi3", {"rope_parameters": PHI_3_ROPE, "sliding_window": 8, **PHI_3}),
    **{
        f"{family}-window-of-null": (
            family,
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        )
        for family in ("qwen2", "qwen3", "qwen3_moe")
    },
    "phi-3-longrope-of-4096": ("phi3", {"rope_parameters": PHI_3_ROPE, "head_dim": 8}),
    "phi-3-longrope-without-a-context": (
        "phi3",
        {
            "rope_parameters": {k: v for k, v in PHI_3_ROPE.items() if not k.startswith("original")},
            "max_position_embeddings": 8192,
            "head_dim": 8,
        },
    ),
    "gpt-oss-without-biases": ("gpt_oss", {"attention_bias": False}),
    "gpt-oss-layer-types": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}),
    "gpt-oss-tight-limit": ("gpt_oss", {"swiglu_limit": 0.5}),
    "dense-qwen3-window-of-late-layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "dense-qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "smollm3-windows-of-layer-types": (
        "smollm3",
        {"use_sliding_window": False, "layer_types": [*["full_attention"] * 2, "sliding_attention"]},
    ),
    "dense-qwen3-biases-and-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen2-moe-steps-and-windows": (
        "qwen2_moe",
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
        },
    ),
    "qwen2-moe-all-sparse-normalised": (
        "qwen2_moe",
        {"mlp_only_layers": [], "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen2-moe-odd-widths": (
        "qwen2_moe",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "moe_intermediate_size": 7,
            "shared_expert_intermediate_size": 13,
            "intermediate_size": 9,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ),
    "glm-no-groups-no-norms": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": False},
    ),
    "glm-not-normalised-two-shared-two-dense": (
        "glm4_moe",
        {"norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 2},
    ),
    "glm-no-shared-experts": ("glm4_moe", {"n_shared_experts": 0}),
    "deepseek_v2-no-shared-experts": ("deepseek_v2", {"n_shared_experts": 0}),
    "afmoe-no-shared-experts": ("afmoe", {"num_shared_experts": 0}),
    "glm-no-dense-layer-whole-rotation": (
        "glm4_moe",
        {"first_k_dense_replace": 0, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 1.0}},
    ),
    "glm-quarter-rotation-odd-widths": (
        "glm4_moe",
        {
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 24,
            "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.25},
            "moe_intermediate_size": 11,
            "intermediate_size": 17,
            "n_routed_experts": 9,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "glm-yarn-of-half-the-head": (
        "glm4_moe",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "afmoe-layer-types-no-dense-one-shared-tied": (
        "afmoe",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 5,
            "num_dense_layers": 0,
            "num_shared_experts": 1,
            "mup_enabled": False,
            "tie_word_embeddings": True,
        },
    ),
    "afmoe-biases-yarn-odd-widths": (
        "afmoe",
        {
            "attention_bias": True,
            "rope_parameters": YARN,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "moe_intermediate_size": 7,
            "intermediate_size": 9,
            "num_experts": 5,
            "num_dense_layers": 2,
        },
    ),
    "ernie-every-other-layer-no-shared-tied": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 5,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 3,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": True,
        },
    ),
    "ernie-all-sparse-odd-widths": (
        "ernie4_5_moe",
        {
            "moe_layer_start_index": 0,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 30,
            "moe_intermediate_size": 7,
            "moe_num_experts": 5,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
        },
    ),
    "ernie-interval": ("ernie4_5_moe", {"num_hidden_layers": 4, "moe_layer_interval": 2}),
    "minimax-quarter-rotation-odd-widths": (
        "minimax_m2",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rotary_dim": 6,
            "intermediate_size": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ),
    "minimax-whole-rotation-one-expert": ("minimax_m2", {"rotary_dim": None, "num_experts_per_tok": 1}),
    "minimax-yarn-of-half-the-head": (
        "minimax_m2",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}, "rotary_dim": None},
    ),
    "dbrx-longrope": ("dbrx", {"rope_parameters": PHI_3_ROPE}),
    "dbrx-tight-clip": ("dbrx", {"attn_config": {**DBRX_ATTENTION, "clip_qkv": 0.5}}),
    "dbrx-2-norm": ("dbrx", {"ffn_config": {**DBRX_FFN, "moe_normalize_expert_weights": 2.0}}),
    "dbrx-gate-not-normalised": ("dbrx", {"ffn_config": {**DBRX_FFN, "moe_normalize_expert_weights": None}}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_option_computes_what_transformers_does(name, tmp_path):
    family, changes = VARIANTS[name]
    if "swiglu_limit" in changes and "swiglu_limit" not in inspect.getsource(modeling_gpt_oss):
        pytest.skip("this transformers always clamps at 7")
    path = make_checkpoint(family, tmp_path, seed=1, **changes)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (80, 5)]
    _, found = Harness(path, max_sequences=2).prefill(prompts, (-1, -1))
    for prompt, logits in zip(prompts, found, strict=True):
        assert (logits - reference_logits(path, None, prompt)).abs().max() < 1e-4


def config_of(family, **changes):
    whole = tiny_config(family).to_dict()
    if "text_config" in whole:
        return {**whole, "text_config": {**whole["text_config"], **changes}}
    return {**whole, **changes}


def by_kind(sliding, full):
    return {"sliding_attention": sliding, "full_attention": full}


SU_ROPE = {**{key: value for key, value in LONGROPE.items() if key != "rope_type"}, "type": "su"}
REFUSED = [
    *((family, {"hidden_act": "gelu"}, "hidden_act='gelu'") for family in ALL_FAMILIES),
    ("mixtral", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"rope_parameters": {**YARN, "rope_type": "ntk"}}, "rope_type='ntk'"),
    ("llama", {"rope_parameters": {**DYNAMIC, "factor": None}}, "factor=None"),
    ("llama", {"rope_parameters": {**DYNAMIC, "alpha": 1000.0}}, "alpha=1000.0"),
    ("llama", {"rope_parameters": {**LONGROPE, "short_factor": [1.0]}}, "short_factor=[1.0]"),
    ("llama", {"rope_parameters": {**LONGROPE, "short_factor": [0.0] * 8}}, "short_factor=0.0"),
    (
        "llama",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 1}},
        "original_max_position_embeddings=1",
    ),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
    ("mistral", {"sliding_window": 2.5}, "sliding_window=2.5"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor=None"),
    ("llama", {"is_causal": False}, "is_causal=False"),
    ("llama", {"sliding_window": 8}, "sliding_window=8"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradicts rope_parameters"),
    ("qwen3", {"rope_scaling": {"rope_theta": 5.0}}, "contradicts rope_parameters"),
    ("llama", {"rope_parameters": LLAMA3, "rope_scaling": {"beta_fast": 8.0}}, "contradicts rope_parameters"),
    ("llama", {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}, "all of num_layers=3 layers are dense"),
    ("qwen2_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ("afmoe", {"score_func": "softmax"}, "score_func='softmax'"),
    ("afmoe", {"route_norm": False}, "route_norm=False"),
    ("afmoe", {"n_group": 2}, "n_group=2"),
    ("afmoe", {"num_dense_layers": 3}, "all of num_layers=3 layers are dense"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias=True"),
    ("ernie4_5_moe", {"moe_layer_start_index": 9}, "all of num_layers=3 layers are dense"),
    ("glm4_moe", {"first_k_dense_replace": 3}, "all of num_layers=3 layers are dense"),
    ("glm4_moe", {"n_group": 3}, "n_group=3, which must cut n_routed_experts=8 in equal groups"),
    ("glm4_moe", {"n_group": 8}, "n_group=8"),
    ("glm4_moe", {"topk_group": 5}, "topk_group=5, which must be at most n_group=4"),
    ("glm4_moe", {"topk_group": 1}, "hold num_experts_per_tok=3 experts"),
    ("glm4_moe", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers=1000000000"),
    ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor=0"),
    (
        "glm4_moe",
        {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.2}},
        "partial_rotary_factor=0.2",
    ),
    *((one, {"index_topk": 64}, "index_topk=64") for one in LATENT_FAMILIES),
    ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads=1, which must be num_attention_heads=5"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0"),
    ("deepseek_v3", {"kv_lora_rank": 70_000}, "kv_lora_rank=70000"),
    ("deepseek_v3", {"qk_rope_head_dim": 5}, "head_dim=5 must be even"),
    ("deepseek_v3", {"q_lora_rank": "20"}, "q_lora_rank='20'"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale_all_dim": "1"}}, "mscale_all_dim='1'"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=True"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types="),
    ("olmoe", {"clip_qkv": -1.0}, "clip_qkv=-1.0"),
    ("granite", {"residual_multiplier": "1"}, "residual_multiplier='1'"),
    ("granitemoe", {"logits_scaling": 0.0}, "logits_scaling=0.0"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3"),
    ("phimoe", {"rope_parameters": YARN}, "rope_type='yarn'"),
    ("phimoe", {"lm_head_bias": "yes"}, "lm_head_bias='yes'"),
    ("phi3", {"rope_parameters": LLAMA3}, "rope_type='llama3'"),
    ("phi3", {"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "rope_scaling.type='yarn'"),
    ("gemma3", {"rope_parameters": by_kind(PLAIN_ROPE, LONGROPE)}, "'longrope', which is not supported per"),
    ("olmo3", {"rope_parameters": by_kind(PLAIN_ROPE, PHI_3_ROPE)}, "'longrope', which is not supported per"),
    ("olmo3", {"rope_parameters": by_kind(PLAIN_ROPE, {**YARN, "truncate": False})}, "truncate=False"),
    ("gemma4", {"rope_parameters": by_kind(SU_ROPE, PLAIN_ROPE)}, "'su', which is not supported per kind"),
    ("gemma4", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling="),
    ("olmoe", {"norm_topk_prob": 2}, "norm_topk_prob=2"),
    ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list=(1, 0)"),
    ("minimax_m2", {"rotary_dim": 5, "rope_parameters": PLAIN_ROPE}, "5 of 16 dims are rotated"),
    ("minimax_m2", {"rotary_dim": "8"}, "rotary_dim='8'"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
    ("minimax_m2", {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5"),
    ("minimax_m2", {"sliding_window": 8}, "sliding_window=8"),
    ("minimax_m2", {"num_mtp_modules": -1}, "num_mtp_modules=-1"),
    ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
    ("dbrx", {"ffn_config": {**DBRX_FFN, "ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn"),
    ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ("llama", {"num_key_value_heads": 3}, "num_kv_heads=3"),
    ("llama", {"head_dim": 15}, "head_dim=15"),
    ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000"),
    ("llama", {"head_dim": 10**12}, "head_dim=1000000000000"),
    ("llama", {"hidden_size": 10**12, "head_dim": None}, "head_dim=250000000000"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ("llama", {"attention_bias": "no"}, "attention_bias='no'"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    ("llama", {"rope_parameters": "yarn"}, "rope_parameters='yarn'"),
    ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta=-1.0"),
    ("llama", {"rope_parameters": {**YARN, "factor": 0}}, "rope_parameters.factor=0"),
    ("llama", {"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta=1.0"),
    ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer"),
    ("mixtral", {"sliding_window": "all"}, "sliding_window='all'"),
    ("mixtral", {"sliding_window": -4}, "sliding_window=-4"),
    ("qwen3_moe", {"norm_topk_prob": None, "use_sliding_window": 3}, "use_sliding_window=3"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": 5}, "layer_types=5"),
    ("gpt_oss", {"layer_types": [["full_attention"], 3]}, "layer_types"),
    ("gpt_oss", {"swiglu_limit": -7.0}, "swiglu_limit=-7.0"),
    ("dbrx", {"attn_config": [8]}, "attn_config="),
    ("dbrx", {"attn_config": {**DBRX_ATTENTION, "clip_qkv": "8"}}, "attn_config.clip_qkv='8'"),
    ("dbrx", {"attention_bias": True}, "attention_bias=True"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_option_that_is_not_supported_is_refused_by_name(family, changes, message):
    config = config_of(family, **changes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_spec(config)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_config_without_a_key_is_read_as_transformers_reads_it(family):
    """Without two sizes no checkpoint fits."""
    config = tiny_config(family, **({"use_sliding_window": True} if family == "qwen3_moe" else {}))
    whole = config.to_dict()
    for key in whole.keys() - {"model_type", "head_dim", "num_key_value_heads", "attn_config"}:
        part = {name: value for name, value in whole.items() if name != key}
        try:
            expected = model_spec(type(config).from_dict(dict(part)).to_dict())
            assert model_spec(part) == expected, key
        except (ConfigError, ValueError, TypeError, StrictDataclassError):
            continue  # one of the two needs the key


@pytest.mark.parametrize("family", [one for one in ALL_FAMILIES if one not in (*LATENT_FAMILIES, "gemma4")])
def test_heads_of_a_config_without_their_keys_are_those_of_transformers(family):
    """Heads that each family's own number of KV heads divides."""
    name, hidden = ("n_heads", "d_model") if family == "dbrx" else ("num_attention_heads", "hidden_size")
    config = tiny_config(family, **{name: 64, hidden: 64 * 16})
    whole = config.to_dict()
    for key in ("attn_config",) if family == "dbrx" else ("head_dim", "num_key_value_heads"):
        part = {name: value for name, value in whole.items() if name != key}
        assert model_spec(part) == model_spec(type(config).from_dict(dict(part)).to_dict()), key


def inside(kind, **changes):
    """The whole config of a multimodal model, and its class."""
    if kind == "qwen3_vl_moe":
        config = tiny_config(kind, **changes)
        return config.to_dict(), type(config)
    known = "qwen2_5_vl" if kind == "qwen2_vl" else kind
    family = LANGUAGE_MODELS[known]
    config = wrapped_language_model(known, tiny_config(family, **changes).to_dict())
    whole = config.to_dict()
    if kind != "qwen2_vl":
        return whole, type(config)
    whole["text_config"]["model_type"] = "qwen2_vl_text"
    return {**whole, "model_type": "qwen2_vl"}, Qwen2VLConfig


@pytest.mark.parametrize("kind", ["mistral3", "kimi_k25"])
@pytest.mark.parametrize("text_ties", [False, True, None])
@pytest.mark.parametrize("whole_ties", [False, True])
def test_a_class_that_writes_true_ties_by_both_keys_or_without_a_head(kind, whole_ties, text_ties):
    whole, made = inside(kind)
    assert made().tie_word_embeddings is True
    text = {**whole["text_config"], "tie_word_embeddings": text_ties}
    config = {**whole, "tie_word_embeddings": whole_ties, "text_config": text}
    assert model_spec(config).tie_word_embeddings is (whole_ties and text_ties is not False)
    for head in ("lm_head.weight", "language_model.lm_head.weight_packed"):
        assert model_spec(config, [head]) == model_spec(config)
    assert model_spec(config, ["embed_tokens.weight"]).tie_word_embeddings is whole_ties


@pytest.mark.parametrize("ties", [(False, True), (True, False)])
def test_a_multimodal_head_is_tied_as_transformers_ties_it(ties, tmp_path):
    """The keys of the language model and of the whole differ."""
    whole = wrapped_language_model("mistral3", tiny_config("mistral", tie_word_embeddings=ties[0]).to_dict())
    whole.tie_word_embeddings = ties[1]
    base = save_random("mistral", whole, tmp_path / "base")
    fields = json.loads((base / "config.json").read_text())
    assert (fields["text_config"]["tie_word_embeddings"], fields["tie_word_embeddings"]) == ties
    theirs = load_model(base)
    found = loader.load_model(base, torch.float32, torch.device("cpu"))
    assert torch.equal(found.head, theirs.lm_head.weight)
    is_tied = theirs.lm_head.weight is theirs.get_input_embeddings().weight
    assert found.spec.tie_word_embeddings is is_tied is ties[1]


def test_a_head_that_was_untied_by_transformers_loads(tmp_path):
    """transformers saves the head without the front of the layers."""
    text = tiny_config("mistral", tie_word_embeddings=True).to_dict()
    tied = save_random("mistral", wrapped_language_model("mistral3", text), tmp_path / "tied")
    model = AutoModelForImageTextToText.from_pretrained(tied, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    model.save_pretrained(tmp_path / "untied")
    assert "lm_head.weight" in load_file(tmp_path / "untied" / "model.safetensors")
    found = loader.load_model(tmp_path / "untied", torch.float32, torch.device("cpu"))
    assert torch.equal(found.head, model.lm_head.weight)


@pytest.mark.parametrize("section", [YARN, PLAIN_ROPE], ids=["yarn", "plain"])
def test_rope_parameters_without_kinds_of_layers_are_of_olmo_3s_full_layers(section):
    """As transformers wrote OLMo 3 first; OLMo-core and vLLM scale full layers alone."""
    config = config_of("olmo3")
    del config["rope_parameters"]
    scaling = {key: value for key, value in section.items() if key != "rope_theta"}
    expected = model_spec({**config, "rope_theta": section["rope_theta"], "rope_scaling": scaling})
    assert model_spec({**config, "rope_parameters": section}) == expected
    with pytest.raises(ConfigError, match="rope_scaling"):
        model_spec({**config, "rope_parameters": section, "rope_scaling": LLAMA3})


def test_gemma_3_needs_rope_parameters_by_kind_of_layer():
    """transformers reads a flat section otherwise."""
    with pytest.raises(ConfigError, match=r"no rope_parameters\.sliding_attention\.rope_theta"):
        model_spec(config_of("gemma3", rope_parameters=YARN))


def test_a_flat_section_that_kinds_of_layers_contradict_is_refused(tmp_path):
    """transformers saves a flat OLMo 3 with plain kinds beside its scaling."""
    config = config_of("olmo3", rope_parameters=YARN)
    (tmp_path / "config.json").write_text(json.dumps(config))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["rope_parameters"]["full_attention"]["rope_type"] == "default"
    with pytest.raises(ConfigError, match="rope_type='yarn', which differs from full_attention"):
        model_spec(saved)
    for key in ("full_attention", "sliding_attention"):
        del saved["rope_parameters"][key]
    assert model_spec(saved) == model_spec(config)
    kinds = by_kind(PLAIN_ROPE, YARN)
    assert model_spec({**config, "rope_parameters": {**kinds, **YARN}}) == model_spec(
        {**config, "rope_parameters": kinds}
    )


def test_rope_parameters_of_one_kind_of_layer_alone_are_refused():
    parts = {"full_attention": PLAIN_ROPE}
    with pytest.raises(ConfigError, match=r"no rope_parameters.*rope_theta|no sliding_attention.rope_theta"):
        model_spec({**config_of("olmo3"), "rope_parameters": parts})


HEADS = {"num_attention_heads": 64, "hidden_size": 1024}


@pytest.mark.parametrize("kind", [*LANGUAGE_MODELS, "qwen2_vl", "qwen3_vl_moe"])
def test_a_text_config_without_a_key_is_read_as_transformers_reads_it(kind):
    whole, made = inside(kind, **({} if kind == "kimi_k25" else HEADS))
    if kind in ("qwen2_5_vl", "qwen2_vl"):
        whole["text_config"] |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    compared = set()
    for key in whole["text_config"]:
        text = {name: value for name, value in whole["text_config"].items() if name != key}
        part = {**whole, "text_config": text}
        try:
            expected = model_spec(made.from_dict(copy.deepcopy(part)).to_dict())
            found = model_spec(part)
        except (ConfigError, ValueError, TypeError, StrictDataclassError):
            continue  # one of the two needs the key
        assert found == expected, key
        compared.add(key)
    assert compared >= {"rms_norm_eps", "rope_parameters", "model_type"}


def test_each_spelling_of_a_multimodal_config_has_the_same_defaults():
    whole, _ = inside("qwen2_5_vl")
    text = whole.pop("text_config")
    for key in ("rms_norm_eps", "rope_parameters", "model_type"):
        del text[key]
    nested, flat = model_spec({**whole, "text_config": text}), model_spec({**whole, **text})
    assert flat == nested
    assert nested.norm_eps == 1e-5
    named = {"model_type": None, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    assert model_spec({**whole, **named, "text_config": text}) == nested
    assert (
        model_spec({"model_type": "mistral3", "text_config": {**text, "model_type": "qwen2"}}).norm_eps
        == 1e-6
    )
    thinker, _ = inside("qwen3_omni_moe")
    for key in ("norm_topk_prob", "rope_parameters"):
        del thinker["text_config"][key]
    assert model_spec({"model_type": "qwen3_omni_moe", "thinker_config": thinker}) == model_spec(thinker)
    assert model_spec(thinker).gate_norm == 1.0


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_vl", "glm4v_moe", "qwen3_vl"])
@pytest.mark.parametrize("ties", [(False, True), (True, False), (False, False), (None, True)])
def test_a_head_is_tied_by_the_key_that_counts_in_transformers(kind, ties):
    whole, made = inside(kind)
    for part, value in zip((whole, whole["text_config"]), ties, strict=True):
        part["tie_word_embeddings"] = value
    if ties[0] is None:
        del whole["tie_word_embeddings"]
    tied = made.from_dict(copy.deepcopy(whole)).tie_word_embeddings
    assert model_spec(whole).tie_word_embeddings == (tied or ties[0] is None)


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
def test_gemma_4_needs_the_sizes_of_its_heads(key):
    config = config_of("gemma4")
    del config[key]
    with pytest.raises(ConfigError, match=f"no {key}"):
        model_spec(config)


class Counted(int):
    """A number that counts its comparisons."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == int(other)


def test_many_dense_layers_are_looked_up_and_not_searched(monkeypatch):
    monkeypatch.setattr(ConfigJson, "numbers", lambda config, key: tuple(map(Counted, range(1000))))
    config = ConfigJson({"intermediate_size": 8})
    found = stepped_experts(config, 1000, 8)
    assert found["dense_layers"] == tuple(range(1000))
    assert Counted.compared < 10_000


def test_unknown_model_type_names_the_supported_ones():
    with pytest.raises(ConfigError, match=r"'gpt2'.*llama, mixtral, qwen3_moe, gpt_oss, dbrx, qwen3, "):
        model_spec({"model_type": "gpt2"})


def test_rope_in_the_old_spelling_is_read_alike():
    new = config_of("llama", rope_parameters=LLAMA3)
    old = {
        **new,
        "rope_theta": 10000.0,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
    }
    del old["rope_parameters"]
    assert model_spec(old).rope == model_spec(new).rope


def test_rotary_dim_of_released_minimax_files_is_read_as_the_share_of_transformers_5():
    new = config_of("minimax_m2")
    assert new["rope_parameters"]["partial_rotary_factor"] == 0.5
    old = {**new, "rope_theta": 5e6, "rotary_dim": 8}
    del old["rope_parameters"]
    assert model_spec(old).rope == model_spec(new).rope
    assert len(model_spec(old).rope.inverse_frequencies) == 4


def test_dbrx_base_is_read_from_its_attention_section():
    new = config_of("dbrx", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    old = {**new, "attn_config": {**DBRX_ATTENTION, "rope_theta": 500000.0}}
    del old["rope_parameters"]
    assert model_spec(old).rope == model_spec(new).rope


def test_dbrx_without_clip_is_as_one_that_never_clips(tmp_path):
    """transformers itself fails without a clip, so it can't be the oracle here."""
    path = make_checkpoint("dbrx", tmp_path, attn_config={**DBRX_ATTENTION, "clip_qkv": 1e6})
    _, never = Harness(path, max_sequences=1).prefill([[5, 9, 70]], [-1])
    config = json.loads((path / "config.json").read_text())
    config["attn_config"]["clip_qkv"] = None
    (path / "config.json").write_text(json.dumps(config))
    harness = Harness(path, max_sequences=1)
    assert harness.model.spec.clip_qkv is None
    assert torch.equal(harness.prefill([[5, 9, 70]], [-1])[1][0], never[0])


def test_gpt_oss_without_layer_types_alternates_from_a_sliding_layer():
    config = config_of("gpt_oss", layer_types=None, num_hidden_layers=4)
    assert model_spec(config).window == (16, 0, 16, 0)


def test_window_of_mistral_is_4096_unless_stated():
    config = config_of("mistral")
    del config["sliding_window"]
    assert model_spec(config).window == (4096, 4096)
    assert model_spec(config | {"sliding_window": None}).window == (0, 0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "dots1"])
def test_a_window_of_null_is_none_and_without_the_key_4096(family):
    config = config_of(family, use_sliding_window=True, max_window_layers=1)
    for name in ("layer_types", "sliding_window"):
        config.pop(name, None)
    assert 4096 in model_spec(config).window
    assert set(model_spec(config | {"sliding_window": None}).window) == {0}


@pytest.mark.parametrize("stated", [None, 64, 4096])
@pytest.mark.parametrize(
    ("family", "inside"),
    [
        ("phi3", False),
        ("phi3", True),
        ("phimoe", True),  # outside, transformers ignores it, with equal factors
    ],
)
def test_longrope_has_the_original_context_of_transformers(family, inside, stated):
    rope = {k: v for k, v in PHI_MOE_ROPE.items() if family == "phimoe" or "mscale" not in k}
    del rope["original_max_position_embeddings"], rope["rope_type"]
    config = {**config_of(family), "rope_theta": 1e4, "max_position_embeddings": 8192, "head_dim": 8}
    for name in ("rope_parameters", "original_max_position_embeddings"):
        config.pop(name, None)
    (rope if inside else config)["original_max_position_embeddings"] = stated
    config["rope_scaling"] = {key: value for key, value in rope.items() if value is not None} | {
        "type": "longrope"
    }
    config = {key: value for key, value in config.items() if value is not None}
    theirs = type(tiny_config(family)).from_dict(copy.deepcopy(config))
    found = model_spec(config)
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs)  # completes rope_parameters
    assert found.shape.max_position == theirs.rope_parameters["original_max_position_embeddings"]
    assert found.rope.inverse_frequencies == pytest.approx(frequencies.tolist())
    if family == "phi3":
        assert found.rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_ends_at_its_original_context(kind):
    config = config_of("llama", rope_parameters={**LONGROPE, "rope_type": kind})
    assert shape_of(config).max_position == 128
    assert shape_of(config | {"original_max_position_embeddings": 64}).max_position == 64
    assert shape_of(config_of("llama", rope_parameters=LLAMA3)).max_position == 256


def test_scaled_moe_is_a_mixtral_config():
    mixtral = {"model_type": "mixtral", "vocab_size": 32000, "max_position_embeddings": 32768}
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    depth = {"num_hidden_layers": 18, "num_local_experts": 32, "num_experts_per_tok": 4}
    config = {**mixtral, **sizes, **depth, "num_key_value_heads": 8, "rope_theta": 1e6}
    with torch.device("meta"):
        model = CausalLM(model_spec(config))
    assert len(model.layers) == 18
    assert model.layers[0].mlp.gate_up.weight.shape == (32, 2 * 14336, 4096)
    assert model.layers[0].mlp.top_k == 4


def test_a_stated_kind_of_each_layer_is_cut_with_the_layers():
    config = json.loads(tiny_config("glm4_moe_lite").to_json_string(use_diff=False))
    assert len(config["mlp_layer_types"]) == config["num_hidden_layers"]
    assert shape_of(cut_to(config, 1)).num_layers == 1
