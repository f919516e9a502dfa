# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of multimodal models around a language model, with a vision part of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_DEEP = {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_SOUND = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "output_dim": 32,
    "num_mel_bins": 8,
    "downsample_hidden_size": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


def auto_class(config: Any) -> Any:
    """The transformers class for a config with or without a vision part."""
    import transformers

    if config.model_type == "qwen3_omni_moe_thinker":
        return _Thinker
    wrapped = getattr(config, "vision_config", None) is not None
    return transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM


class _Thinker:
    """Qwen3-Omni's thinker, without an auto class of its own."""

    @staticmethod
    def from_config(config: Any) -> Any:
        import transformers

        return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)

    @staticmethod
    def from_pretrained(path: Any, **how: Any) -> Any:
        import transformers

        return transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(path, **how)


def wrapped_config(kind: str, text: Mapping[str, Any]) -> Any:
    """The config of a multimodal model.  kind: its model_type.  text: fields of the language model."""
    import transformers
    from transformers import Qwen3OmniMoeThinkerConfig

    section = {"rope_parameters": dict(_ROPE), **text}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    kinds: dict[str, tuple[Any, Mapping[str, Any]]] = {
        "qwen3_vl": (transformers.Qwen3VLConfig, _DEEP),
        "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, _DEEP),
        "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, _QWEN),
        "glm4v_moe": (transformers.Glm4vMoeConfig, {**_QWEN, "image_size": 8}),
        "mistral3": (
            transformers.Mistral3Config,
            {**_TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 8},
        ),
        "kimi_k25": (transformers.Kimi_K25Config, _TOWER),
        "gemma3": (transformers.Gemma3Config, {**_TOWER, "image_size": 8}),
        "qwen3_omni_moe": (Qwen3OmniMoeThinkerConfig, _DEEP),
    }
    made, vision = kinds[kind]
    if kind == "qwen3_omni_moe":
        tied = {"audio_config": dict(_SOUND)}
    if kind == "kimi_k25":
        tied["projection_hidden_size"] = 16
    return made(text_config=section, vision_config=dict(vision), **tied)


LANGUAGE_MODELS = {
    "qwen3_vl": "qwen3",
    "qwen2_5_vl": "qwen2",
    "glm4v_moe": "glm4_moe",
    "mistral3": "mistral",
    "kimi_k25": "deepseek_v3",
    "qwen3_omni_moe": "qwen3_moe",
}
"""Family of the language model of a multimodal model_type."""
_TYPED = ("mistral3", "kimi_k25")
"""Wrappers of any language model, by its own model_type."""


def wrapped_language_model(kind: str, text: Mapping[str, Any]) -> Any:
    """The multimodal config around a language model's config, as a dict."""
    own = ("architectures", "dtype", "layer_types", "transformers_version")
    fields = {key: value for key, value in text.items() if key not in own}
    if kind in _TYPED:
        return wrapped_config(kind, fields)
    fields |= {"rope_parameters": dict(_ROPE), "use_qk_norm": False}
    if kind == "glm4v_moe":
        fields["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    if "num_local_experts" in fields:
        fields["num_experts"] = fields.pop("num_local_experts")
    if kind == "qwen2_5_vl":
        fields["rope_parameters"]["mrope_section"] = [2, 1, 1]
    dropped = ("model_type", *(("head_dim",) if kind == "qwen2_5_vl" else ()))
    return wrapped_config(kind, {key: value for key, value in fields.items() if key not in dropped})
