# SPDX-License-Identifier: Apache-2.0
"""Tiny seeded checkpoints and PEFT adapters of the model families, made with transformers and peft.

Weights are drawn wide enough that logits and gate choices are well apart, unlike a fresh
initialisation. Everything is reproducible from (family, seed).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from moe_lora.core.shard import ModelShard
from moe_lora.core.wrong_files import read_config
from moe_lora.families import shape_of
from tests.grids import with_quick

from .wrapped import auto_class, wrapped_config

FAMILIES = ("llama", "mixtral", "qwen3_moe", "gpt_oss", "dbrx")
"""Families that cover all pieces of the layers."""
BESIDE_FAMILIES = ("qwen2_moe", "glm4_moe", "afmoe")
"""Families that cover the pieces beside experts: shared experts, dense layers, corrected gates; and of AFMoE
the output gate, norms of outputs, and layers without rotation."""
RECURRENT_MOE = ("qwen3_next", "qwen3_5_moe")
RECURRENT_FAMILIES = (*RECURRENT_MOE, "qwen3_5")
"""Families with Gated DeltaNet layers."""
LATENT_FAMILIES = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite")
"""Families with Multi-head Latent Attention."""
NEWER_SHARED = ("dots1", "granitemoeshared")
NEWER_DENSE = ("ministral3", "seed_oss", "smollm3", "ernie4_5", "glm4", "olmo2", "olmo3", "exaone4", "gemma3")
NEWER_MOE = ("ernie4_5_moe", *NEWER_SHARED, "qwen3_vl_moe", "flex_olmo")
NEWER = (*NEWER_DENSE, *NEWER_MOE)
"""Families of known pieces in other orders."""
LATER_MOE = (*BESIDE_FAMILIES, "ernie4_5_moe", *RECURRENT_MOE, *LATENT_FAMILIES, "gemma4", *NEWER_SHARED)
FURTHER_MOE = ("olmoe", "granitemoe", "phimoe", "minimax_m2")
FURTHER = ("qwen3", "mistral", "qwen2", "granite", "phi3", *FURTHER_MOE)
"""Families of other pieces: norms over all heads, multipliers, biases, fused matrices."""
LATER_FAMILIES = (*FURTHER, *LATER_MOE, "qwen3_5", *NEWER_DENSE, "qwen3_vl_moe", "flex_olmo")
ALL_FAMILIES = (*FAMILIES, *LATER_FAMILIES)
MOE_FAMILIES = FAMILIES[1:]
DENSE_FAMILIES = ("llama", "qwen3", "mistral", "qwen2", "granite", "phi3", "qwen3_5", *NEWER_DENSE)
PER_EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "olmoe", "minimax_m2", "afmoe")
"""Families with old adapters of one module per expert that peft converts: not Qwen2-MoE."""
ALL_TARGETS = ("qkv", "o", "gate_up", "down")
BESIDE_TARGETS = ("shared_gate", "delta_qkvz", "delta_ba", "delta_out")
"""Targets beside attention and experts that no other target includes."""
VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS = 96, 2, 4

_ATTENTION = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",)}
_DENSE = {**_ATTENTION, "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_DELTA_MODULES = {
    "delta_qkvz": ("in_proj_qkv", "in_proj_z"),
    "delta_ba": ("in_proj_b", "in_proj_a"),
    "delta_out": ("linear_attn.out_proj",),
}
_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(DENSE_FAMILIES, _DENSE),
    "phi3": {
        "qkv": ("qkv_proj",),
        "o": ("o_proj",),
        "gate_up": ("gate_up_proj",),
        "down": ("down_proj",),
    },
    "glm4": {**_ATTENTION, "gate_up": ("gate_up_proj",), "down": ("down_proj",)},
    "mixtral": _ATTENTION,
    "flex_olmo": _ATTENTION,
    "dots1": _DENSE,
    "granitemoeshared": {
        **_ATTENTION,
        "gate_up": ("shared_mlp.input_linear",),
        "down": ("shared_mlp.output_linear",),
    },
    "qwen3_moe": _ATTENTION,
    "qwen3_vl_moe": _ATTENTION,
    "olmoe": _ATTENTION,
    "phimoe": _ATTENTION,
    "granitemoe": _ATTENTION,
    "minimax_m2": _ATTENTION,
    "gpt_oss": _ATTENTION,
    "glm4_moe": _DENSE,
    "ernie4_5_moe": _DENSE,
    "qwen2_moe": {**_DENSE, "shared_gate": ("shared_expert_gate",)},
    "afmoe": {
        "qkv": (*_ATTENTION["qkv"], "self_attn.gate_proj"),
        "o": _ATTENTION["o"],
        "gate_up": ("shared_experts.gate_proj", "mlp.gate_proj", "up_proj"),
        "down": ("down_proj",),
        "router": ("router.gate",),
    },
    "qwen3_next": {
        **_DENSE,
        "shared_gate": ("shared_expert_gate",),
        "delta_qkvz": ("in_proj_qkvz",),
        "delta_ba": ("in_proj_ba",),
        "delta_out": ("linear_attn.out_proj",),
    },
    "qwen3_5_moe": {**_DENSE, "shared_gate": ("shared_expert_gate",), **_DELTA_MODULES},
    "qwen3_5": {**_DENSE, **_DELTA_MODULES},
    **{
        family: {**_DENSE, "qkv": ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")}
        for family in LATENT_FAMILIES
    },
    "gemma4": {**_DENSE, "router": ("router.proj",)},
    "dbrx": {"qkv": ("Wqkv",), "o": ("out_proj",), "router": ("router.layer",)},
}
_FUSED: dict[str, tuple[str, ...]] = {"gate_up": ("experts.gate_up_proj",), "down": ("experts.down_proj",)}
_PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    **{family: {} for family in DENSE_FAMILIES},
    "mixtral": {**_FUSED, "router": ("mlp.gate.weight",)},
    "qwen3_moe": {**_FUSED, "router": ("mlp.gate.weight",)},
    "qwen3_vl_moe": {**_FUSED, "router": ("mlp.gate.weight",)},
    "qwen2_moe": {**_FUSED, "router": ("mlp.gate.weight",)},
    "qwen3_next": {**_FUSED, "router": ("mlp.gate.weight",)},
    "qwen3_5_moe": {**_FUSED, "router": ("mlp.gate.weight",)},
    **{family: {**_FUSED, "router": ("mlp.gate.weight",)} for family in LATENT_FAMILIES},
    "glm4_moe": {**_FUSED, "router": ("mlp.gate.weight",)},
    "ernie4_5_moe": {**_FUSED, "router": ("mlp.gate.weight",)},
    "olmoe": {**_FUSED, "router": ("mlp.gate.weight",)},
    "minimax_m2": {**_FUSED, "router": ("mlp.gate.weight",)},
    "afmoe": _FUSED,
    "gemma4": _FUSED,
    "phimoe": {**_FUSED, "router": ("mlp.router.weight",)},
    "granitemoe": {**_FUSED, "router": ("block_sparse_moe.router.weight",)},
    "granitemoeshared": {**_FUSED, "router": ("block_sparse_moe.router.weight",)},
    "dots1": {**_FUSED, "router": ("mlp.gate.weight",)},
    "flex_olmo": {**_FUSED, "router": ("mlp.gate.weight",)},
    "gpt_oss": {**_FUSED, "router": ("mlp.router.weight",)},
    "dbrx": {"gate_up": ("mlp.w1", "mlp.v1"), "down": ("mlp.w2",)},
}
# Per-expert form: container below the layer, and the leaf of gate, up, down, in the old module names.
_QWEN_LEAVES = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",), "router": ("gate",)}
_MIXTRAL_LEAVES = {"gate_up": ("w1", "w3"), "down": ("w2",), "router": ("gate",)}
_PER_EXPERT = {
    "mixtral": ("block_sparse_moe", _MIXTRAL_LEAVES),
    "minimax_m2": ("block_sparse_moe", _MIXTRAL_LEAVES),
    "afmoe": ("mlp", {**_QWEN_LEAVES, "router": ("router.gate",)}),
    "qwen3_moe": ("mlp", _QWEN_LEAVES),
    "glm4_moe": ("mlp", _QWEN_LEAVES),
    "qwen2_moe": ("mlp", _QWEN_LEAVES),
    "ernie4_5_moe": ("mlp", _QWEN_LEAVES),
    "olmoe": ("mlp", _QWEN_LEAVES),
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def tiny_config(family: str, **changes: Any) -> Any:
    """transformers config of a 2-layer model: hidden 32, 4 query and 2 KV heads of 16, 4 experts top-2.

    DBRX, OLMoE and Phi-MoE have heads of 8; elsewhere q_size (64) differs from hidden (32) and the expert
    width (24), so that a transposed matrix never fits by chance. changes: config fields to override.
    """
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    moe = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    if family == "llama":
        return transformers.LlamaConfig(**{**common, **changes})
    if family == "qwen3":
        return transformers.Qwen3Config(**{**common, **changes})
    if family == "mistral":
        return transformers.MistralConfig(**{**common, "sliding_window": 16, **changes})
    if family == "qwen2":
        return transformers.Qwen2Config(**{**common, **changes})
    if family == "mixtral":
        return transformers.MixtralConfig(**{**common, **moe, **changes})
    if family == "qwen3_moe":
        moe = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return transformers.Qwen3MoeConfig(**{**common, **moe, "norm_topk_prob": True, **changes})
    if family == "qwen2_moe":
        moe = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        beside = {"shared_expert_intermediate_size": 20, "intermediate_size": 28, "mlp_only_layers": [1]}
        fields = {**common, **moe, **beside, "num_hidden_layers": 3}
        return transformers.Qwen2MoeConfig(**{**fields, **changes})
    if family in NEWER_DENSE or family in NEWER_SHARED or family == "flex_olmo":
        made, fields = _newer(family, common)
        return made(**{**fields, **changes})
    if family == "qwen3_vl_moe":
        moe = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return wrapped_config(family, {**common, **moe, **changes})
    if family == "qwen3_5":
        kinds = {"full_attention_interval": 2, "num_hidden_layers": 3, "partial_rotary_factor": 0.25}
        return transformers.Qwen3_5TextConfig(**{**common, **kinds, **_DELTA, **changes})
    if family in RECURRENT_FAMILIES:
        moe = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        kinds = {"full_attention_interval": 2, "num_hidden_layers": 3, "partial_rotary_factor": 0.25}
        fields = {**common, **moe, **kinds, **_DELTA, "shared_expert_intermediate_size": 20}
        if family == "qwen3_next":
            beside = {"intermediate_size": 28, "mlp_only_layers": [1]}
            return transformers.Qwen3NextConfig(**{**fields, **beside, **changes})
        del fields["intermediate_size"]
        return transformers.Qwen3_5MoeTextConfig(**{**fields, **changes})
    if family == "ernie4_5_moe":
        moe = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "intermediate_size": 28}
        fields = {**common, **moe, "num_hidden_layers": 3}
        del fields["head_dim"]
        return transformers.Ernie4_5_MoeConfig(**{**fields, **changes})
    if family == "glm4_moe":
        moe = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        gate = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}
        beside = {"intermediate_size": 28, "attention_bias": True, "num_hidden_layers": 3}
        fields = {**common, **moe, **gate, **beside, "rms_norm_eps": 1e-5}
        return transformers.Glm4MoeConfig(**{**fields, **changes})
    if family == "deepseek_v3":
        heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "rope_parameters": dict(_LATENT_YARN)}
        return transformers.DeepseekV3Config(**{**_latent_fields(common), **heads, **changes})
    if family == "deepseek_v2":
        fields = {**_latent_fields(common), "q_lora_rank": None, "n_shared_experts": 2}
        fields["topk_method"] = "group_limited_greedy"
        return transformers.DeepseekV2Config(**{**fields, **changes})
    if family == "glm4_moe_lite":
        fields = _latent_fields(common)
        del fields["first_k_dense_replace"]
        fields |= {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True}
        return transformers.Glm4MoeLiteConfig(**{**fields, "rope_interleave": False, **changes})
    if family == "granite":
        return transformers.GraniteConfig(**{**common, **MULTIPLIERS, **changes})
    if family == "granitemoe":
        return transformers.GraniteMoeConfig(**{**common, **moe, **MULTIPLIERS, **changes})
    if family == "phi3":
        return transformers.Phi3Config(**{**common, "pad_token_id": 0, **changes})
    if family == "phimoe":
        fields = {**_without_head_dim(common), **moe, "lm_head_bias": True, "attention_bias": True}
        return transformers.PhimoeConfig(**{**fields, "router_jitter_noise": 0.2, **changes})
    if family == "olmoe":
        moe = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
        return transformers.OlmoeConfig(**{**_without_head_dim(common), **moe, **changes})
    if family == "minimax_m2":
        return transformers.MiniMaxM2Config(**{**common, **moe, "rotary_dim": 8, **changes})
    if family == "afmoe":
        moe = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        windows = {"global_attn_every_n_layers": 2, "sliding_window": 16, "num_hidden_layers": 3}
        fields = {**common, **moe, **windows, "intermediate_size": 28, "mup_enabled": True}
        return transformers.AfmoeConfig(**{**fields, "route_scale": 1.7, **changes})
    if family == "gemma4":
        moe = {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24, "enable_moe_block": True}
        heads = {"num_attention_heads": 6, "global_head_dim": 20, "num_global_key_value_heads": 3}
        by_layer = ["full_attention", "sliding_attention", "full_attention"]
        layers = {
            "num_hidden_layers": 3,
            "layer_types": by_layer,
            "sliding_window": 16,
            "attention_k_eq_v": True,
        }
        fields = {**common, **moe, **heads, **layers, "tie_word_embeddings": True, "intermediate_size": 28}
        fields |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0}
        return transformers.Gemma4TextConfig(**{**fields, **changes})
    if family == "gpt_oss":
        return transformers.GptOssConfig(
            **{**common, **moe, "sliding_window": 16, "rope_parameters": dict(_YARN), **changes}
        )
    if family == "dbrx":
        return transformers.DbrxConfig(**{**_dbrx_fields(), **changes})
    raise ValueError(f"family={family!r} is unknown; choose one of {', '.join(ALL_FAMILIES)}")


def _newer(family: str, common: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """transformers' class of the config, and its fields."""
    import transformers

    by_layer = {"num_hidden_layers": 3, "sliding_window": 16}
    no_heads, moe = _without_head_dim(common), {"num_experts_per_tok": 2}
    scaled = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 128, "truncate": True}
    return {
        "ministral3": (transformers.Ministral3Config, {**common, "rope_parameters": {**_YARN, **scaled}}),
        "seed_oss": (transformers.SeedOssConfig, common),
        "smollm3": (
            transformers.SmolLM3Config,
            {
                **no_heads,
                **by_layer,
                "no_rope_layer_interval": 2,
                "use_sliding_window": True,
                "pad_token_id": 0,
            },
        ),
        "ernie4_5": (transformers.Ernie4_5Config, {**common, "use_bias": True}),
        "glm4": (transformers.Glm4Config, {**common, "pad_token_id": 0}),
        "olmo2": (transformers.Olmo2Config, no_heads),
        "olmo3": (
            transformers.Olmo3Config,
            {
                **{**no_heads, **by_layer, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                    "full_attention": {**_YARN, "truncate": True},
                },
            },
        ),
        "gemma3": (
            transformers.Gemma3TextConfig,
            {
                **{**common, **by_layer, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
                **{"query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0, "pad_token_id": 0},
            },
        ),
        "exaone4": (transformers.Exaone4Config, {**common, **by_layer, "sliding_window_pattern": 2}),
        "dots1": (
            transformers.Dots1Config,
            {
                **{**common, **by_layer, **moe, "max_window_layers": 2, "moe_intermediate_size": 24},
                **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
                **{"n_shared_experts": 2, "first_k_dense_replace": 1, "intermediate_size": 28},
                "routed_scaling_factor": 1.7,
            },
        ),
        "granitemoeshared": (
            transformers.GraniteMoeSharedConfig,
            {
                **no_heads,
                **moe,
                **MULTIPLIERS,
                "num_local_experts": NUM_EXPERTS,
                "shared_intermediate_size": 20,
            },
        ),
        "flex_olmo": (
            transformers.FlexOlmoConfig,
            {**no_heads, **moe, "num_experts": NUM_EXPERTS, "pad_token_id": 0},
        ),
    }[family]


def _latent_fields(common: dict[str, Any]) -> dict[str, Any]:
    """Heads of 12 + 6 for q and k and of 10 for v, over latents of 20 and 14."""
    fields = {**_without_head_dim(common), "num_attention_heads": 4, "num_key_value_heads": 4}
    latent = {"q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6}
    moe = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "v_head_dim": 10}
    gate = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
    return {**fields, **latent, **moe, **gate, "intermediate_size": 28, "num_hidden_layers": 3}


def _without_head_dim(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "head_dim"}


def _dbrx_fields() -> dict[str, Any]:
    return {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": NUM_LAYERS,
        "max_seq_len": 256,
        "vocab_size": VOCAB_SIZE,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": NUM_EXPERTS, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def later(*quick: str, families: tuple[str, ...] = FURTHER) -> list[Any]:
    """Further families as parameters of a test of one feature.

    quick: families of the default run; together such lists cover pieces and features.
    """
    return with_quick(families, quick)


def shard_of(model_dir: Path | str, **numbers: int) -> ModelShard:
    """What a rank holds of a checkpoint's model.  numbers: fields of `ModelShard`."""
    return ModelShard(shape_of(read_config(Path(model_dir))), **numbers)


def make_checkpoint(
    family: str, path: Path | str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write a random checkpoint (config.json, safetensors) as transformers saves it; returns the folder."""
    return save_random(family, tiny_config(family, **changes), path, seed, dtype)


def save_random(
    family: str, config: Any, path: Path | str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """As `make_checkpoint`, of a given transformers config."""
    model = auto_class(config).from_config(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        named = dict(model.named_parameters())
        named |= {
            name: held
            for name, held in model.named_buffers()
            if name.endswith(("correction_bias", "layer_scalar"))
        }
        for name, weight in sorted(named.items()):
            weight.copy_(_random_weight(name, weight, generator))
            if family in RECURRENT_FAMILIES and "norm" in name and "linear_attn" not in name:
                weight.sub_(1)  # norms multiply by 1 + weight
            if family == "gemma4" and "embed" in name:
                weight.mul_(0.05)  # else the tied head repeats the last token
    model.save_pretrained(str(path))
    return Path(path)


def _random_weight(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    if name.endswith(("layer_scalar", "per_expert_scale")):
        return 1 + 0.2 * noise
    if name.endswith("router.scale"):
        return 6 + noise  # the gate divides its input by sqrt(hidden)
    if "norm" in name and name.endswith("weight") and weight.ndim == 1:
        return 1 + 0.2 * noise
    if "embed" in name or "wte" in name:
        return noise
    if weight.ndim == 1 or "bias" in name:
        return 0.3 * noise
    return 1.5 * noise / math.sqrt(32)


def load_model(model_dir: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as a transformers model in eval mode: the oracle."""
    files = [(file.name, file.stat()) for file in sorted(Path(model_dir).iterdir()) if file.is_file()]
    facts = tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in files)
    return copy.deepcopy(_loaded(str(model_dir), dtype, facts))


@lru_cache(maxsize=32)
def _loaded(model_dir: str, dtype: torch.dtype, files: tuple[tuple[Any, ...], ...]) -> Any:
    """The checkpoint's model; a copy of a loaded model takes a fraction of another load."""
    from transformers import AutoConfig

    return (
        auto_class(AutoConfig.from_pretrained(model_dir))
        .from_pretrained(model_dir, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
        .eval()
    )


def make_adapter(
    family: str,
    model_dir: Path | str,
    path: Path | str,
    lora_rank: int = 4,
    targets: tuple[str, ...] = ALL_TARGETS,
    seed: int = 0,
    form: str = "fused",
    scale: float = 1.0,
    **config: Any,
) -> Path:
    """Write a PEFT adapter with random A and B for the checkpoint in model_dir; returns its folder.

    targets: site names (qkv, o, router, gate_up, down). form: "fused" (`target_parameters`, saved by
    peft itself) or "per_expert" (Mixtral and Qwen3-MoE: one module per expert, written by hand, as
    older peft did). scale: how large a delta is beside the base's. config: further LoraConfig fields.
    """
    if form == "per_expert":
        return _write_per_expert(family, Path(model_dir), Path(path), lora_rank, targets, seed, scale, config)
    if form != "fused":
        raise ValueError(f"form={form!r} is unknown; choose fused or per_expert")
    from peft import LoraConfig, PeftModel, get_peft_model

    fields = {
        "r": lora_rank,
        "lora_alpha": 2 * lora_rank,
        "target_modules": [m for t in targets for m in _MODULES[family].get(t, ())],
        "target_parameters": [p for t in targets for p in _PARAMETERS[family].get(t, ())] or None,
        **config,
    }
    with targets_as_given(family):
        model = get_peft_model(load_model(model_dir), LoraConfig(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "lora_magnitude_vector" in name:
                weight.mul_(1 + 0.3 * scale * torch.randn(weight.shape, generator=generator))
            elif ".lora_" in name:
                weight.copy_(_random_lora(name, weight.shape, generator, scale))
            elif "trainable_tokens_delta" in name or ".modules_to_save." in name:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale * 0.3)
    # A quarter of the time here would go into README.md.
    with targets_as_given(family), patch.object(PeftModel, "create_or_update_model_card"):
        model.save_pretrained(str(path))
    return Path(path)


@contextmanager
def targets_as_given(model_type: str, targets: Any = ()) -> Iterator[None]:
    """peft without its renaming of targets, which leaves shared experts and dense layers unadapted.

    targets: of the per-expert form need the renaming.
    """
    from peft.utils import transformers_weight_conversion as conversion

    with patch.dict(conversion._MODEL_TO_CONVERSION_PATTERN):
        if model_type.removesuffix("_text") in LATER_MOE and not any(
            name.startswith("experts.") for name in targets
        ):
            conversion._MODEL_TO_CONVERSION_PATTERN.pop(model_type, None)
        yield


def _random_lora(
    name: str, shape: tuple[int, ...], generator: torch.Generator, scale: float = 1.0
) -> torch.Tensor:
    noise = torch.randn(tuple(shape), generator=generator)
    return noise / math.sqrt(32) if "lora_A" in name else noise * scale * 0.3


def per_expert_shapes(family: str, targets: tuple[str, ...] = ALL_TARGETS) -> dict[str, tuple[int, int]]:
    """(out, in) of each targeted module path of the tiny model in the per-expert form."""
    config = tiny_config(family)
    shape = shape_of(config.to_dict())
    hidden, inner, head = 32, 24, shape.head_dim
    dims = {"q_proj": (4 * head, hidden), "o_proj": (hidden, 4 * head)}
    dims |= {"k_proj": (2 * head, hidden), "v_proj": (2 * head, hidden)}
    container, leaves = _PER_EXPERT[family]
    shapes: dict[str, tuple[int, int]] = {}
    dense, num_experts = shape.dense_layers, shape.num_experts
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for target in targets:
            for leaf in _ATTENTION.get(target, ()):
                shapes[f"{prefix}.self_attn.{leaf}"] = dims[leaf]
            for leaf in leaves.get(target, ()) if layer not in dense else ():
                if target == "router":
                    shapes[f"{prefix}.{container}.{leaf}"] = (num_experts, hidden)
                    continue
                size = (hidden, inner) if target == "down" else (inner, hidden)
                shapes |= {f"{prefix}.{container}.experts.{e}.{leaf}": size for e in range(num_experts)}
    return shapes


def _write_per_expert(
    family: str,
    model_dir: Path,
    path: Path,
    lora_rank: int,
    targets: tuple[str, ...],
    seed: int,
    scale: float,
    config: dict[str, Any],
) -> Path:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, (out_features, in_features) in per_expert_shapes(family, targets).items():
        for part, shape in (("lora_A", (lora_rank, in_features)), ("lora_B", (out_features, lora_rank))):
            key = f"base_model.model.{module}.{part}.weight"
            tensors[key] = _random_lora(key, shape, generator, scale)
    leaves = {**_ATTENTION, **_PER_EXPERT[family][1]}
    if family in LATER_MOE:  # bare names would target shared experts, which peft's conversion leaves out
        num_experts = shape_of(tiny_config(family).to_dict()).num_experts
        for site in ("gate_up", "down"):
            names = leaves[site]
            leaves[site] = tuple(f"experts.{e}.{leaf}" for e in range(num_experts) for leaf in names)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": lora_rank,
        "lora_alpha": 2 * lora_rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": [leaf for target in targets for leaf in leaves.get(target, ())],
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path
