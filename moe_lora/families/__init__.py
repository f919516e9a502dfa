# SPDX-License-Identifier: Apache-2.0
"""Model families: a file each, data alone; here the table of names in config.json.

See docs/guides/families.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe_lora.core.errors import ConfigError

from .schema.config_json import text_config

if TYPE_CHECKING:
    from moe_lora.core.shape import ModelShape

    from .schema.family import Family, ModelSpec

_NAMES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen3_moe": (
        *("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        *("qwen3_omni_moe_text", "Qwen3OmniMoeForConditionalGeneration"),
    ),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "dbrx": ("dbrx", "DbrxForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "qwen3_vl", "qwen3_vl_text", "Qwen3VLForConditionalGeneration"),
    "mistral": ("mistral", "MistralForCausalLM", "mistral3", "Mistral3ForConditionalGeneration"),
    "qwen2": (
        *("qwen2", "Qwen2ForCausalLM", "qwen2_vl", "qwen2_vl_text", "Qwen2VLForConditionalGeneration"),
        *("qwen2_5_vl", "qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration"),
    ),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "glm4_moe": (
        *("glm4_moe", "Glm4MoeForCausalLM"),
        *("glm4v_moe", "glm4v_moe_text", "Glm4vMoeForConditionalGeneration"),
    ),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "phimoe": ("phimoe", "PhimoeForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "minimax_m2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "afmoe": ("afmoe", "AfmoeForCausalLM"),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "deepseek_v3": (
        *("deepseek_v3", "kimi_k2", "DeepseekV3ForCausalLM"),
        *("kimi_k25", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    ),
    "gemma4": ("gemma4", "gemma4_text", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5_moe": (
        *("qwen3_5_moe", "qwen3_5_moe_text"),
        *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ),
    "qwen3_5": (
        *("qwen3_5", "qwen3_5_text"),
        *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "olmo3": ("olmo3", "Olmo3ForCausalLM"),
    "gemma3": ("gemma3", "gemma3_text", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "dots1": ("dots1", "Dots1ForCausalLM"),
    "granitemoeshared": ("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    "flex_olmo": ("flex_olmo", "FlexOlmoForCausalLM"),
}
"""Module -> values of model_type, and of architectures."""
FAMILIES = tuple(_NAMES)
_SPARSE = ("deepseek_v32", "DeepseekV32ForCausalLM", "glm_moe_dsa", "GlmMoeDsaForCausalLM")
"""Models of DeepSeek Sparse Attention, refused by name."""


def family_named(name: str) -> Family:
    """Raises ConfigError for an unknown name."""
    if name not in _NAMES:
        raise ConfigError(f"family={name!r} is {_unsupported()}")
    family: Family = importlib.import_module(f"{__name__}.{name}").FAMILY
    return family


def family_of(config: Mapping[str, Any]) -> Family:
    """By model_type, else by architectures.  Raises ConfigError for an unknown family."""
    return family_named(_name_in(config))


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Sizes of a config.json's model.  Without a dtype, bfloat16 counts.

    Raises ConfigError, with the key, for an unsupported family or option, or a missing or impossible value.
    """
    name = _name_in(config)
    return family_named(name).shape(name, config)


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Raises ConfigError as `shape_of`."""
    return family_of(config).spec(shape_of(config), config)


def stored_dtype(config: Mapping[str, Any]) -> str:
    """The dtype's name; bfloat16 if unstated."""
    named = (one.get(key) for one in (config, text_config(config)) for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, named), "bfloat16")).removeprefix("torch.")


def cut_to(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config.json of the first layers only.  Raises ConfigError for too few."""
    return family_of(config).cut(config, num_layers)


def _name_in(config: Mapping[str, Any]) -> str:
    if not isinstance(config, Mapping):
        raise ConfigError(f"config.json must be a JSON object, found {type(config).__name__}")
    key = "architectures" if config.get("model_type") is None else "model_type"
    given = config.get(key)
    for value in given if key == "architectures" and isinstance(given, list) else [given]:
        found = next((name for name, known in _NAMES.items() if value in known), None)
        if found is not None:
            kind = text_config(config).get("model_type")
            return found if kind == config.get("model_type") else _name_in({"model_type": kind})
    if given is None:
        raise ConfigError(f"config.json has no model_type: its family is {_unsupported('unknown')}")
    shown = f"config.json has {key}={given!r}, which"
    if any(one in _SPARSE for one in (given if isinstance(given, list) else [given])):
        raise ConfigError(f"{shown} has DeepSeek Sparse Attention (DSA) and is {_unsupported()}")
    raise ConfigError(f"{shown} is {_unsupported()}")


def _unsupported(word: str = "not supported") -> str:
    return f"{word}; supported are {', '.join(_NAMES)}; docs/guides/families.md tells how to add a family"
