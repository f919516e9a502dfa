# SPDX-License-Identifier: Apache-2.0
"""Small models with a few changed values of config.json, and adapters of random forms, by a seed."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.families import (
    _MODULES,
    _PARAMETERS,
    ALL_FAMILIES,
    ALL_TARGETS,
    BESIDE_TARGETS,
    tiny_config,
)

FAMILIES = tuple(family for family in ALL_FAMILIES if family != "dbrx")
"""Families with peft's unmerged forward pass as the oracle."""
_KEPT = {
    *(
        "vocab_size",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "dtype",
        "initializer_range",
        "use_cache",
    ),
    *("output_router_logits", "router_aux_loss_coef", "output_attentions", "output_hidden_states"),
    *("return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "attention_dropout", "aux_loss_alpha"),
    *("router_jitter_noise", "input_jitter_noise", "max_position_embeddings", "pretraining_tp"),
}
"""Keys without effect on tokens, and sizes that prompts rely on."""


def random_config(rng: Random, family: str) -> dict[str, Any]:
    """One to four changed values; transformers or the server may refuse them."""
    usual = tiny_config(family).to_dict()
    keys = [
        key
        for key, value in usual.items()
        if key not in _KEPT
        and (isinstance(value, bool | int | float) or key in ("layer_types", "rope_parameters"))
    ]
    chosen = rng.sample(keys, min(len(keys), rng.randint(1, 4)))
    return {key: value for key in chosen if (value := _other(rng, usual[key], key)) is not None}


def _other(rng: Random, value: Any, key: str) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(0, rng.choice([value - 1, value + 1, 2 * value, value // 2, value + 2, 1]))
    if isinstance(value, float):
        return rng.choice([value * 1.5, value * 0.5, value + 0.1, 1.0])
    if key == "layer_types" and value:
        return rng.choices(value, k=len(value))
    if isinstance(value, dict) and not any(isinstance(one, dict) for one in value.values()):
        return _rope(rng, value)
    return None


def _rope(rng: Random, usual: dict[str, Any]) -> dict[str, Any]:
    kind = rng.choice(["default", "linear", "llama3", "yarn", "dynamic"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([100.0, 1e4, 5e5])}
    if kind != "default":
        rope["factor"] = rng.choice([1.0, 2.0, 4.0])
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = rng.choice([16, 64])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        further = {"truncate": rng.random() < 0.5, "beta_fast": 16.0, "attention_factor": 1.2, "mscale": 0.7}
        rope |= {key: value for key, value in further.items() if rng.random() < 0.4}
    if "partial_rotary_factor" in usual:
        rope["partial_rotary_factor"] = rng.choice([0.25, 0.5, 1.0])
    return rope


def random_adapter(rng: Random, family: str) -> dict[str, Any]:
    """Arguments of `make_adapter`; PEFT may refuse them."""
    modules, parameters = _MODULES[family], [one for held in _PARAMETERS[family].values() for one in held]
    inputs, output = list(dict.fromkeys(modules["qkv"])), modules["o"][0]
    targets = tuple(one for one in (*ALL_TARGETS, "router", *BESIDE_TARGETS) if rng.random() < 0.6)
    some = rng.sample(inputs, rng.randint(1, len(inputs)))
    whole: dict[str, Any] = {"target_modules": [output], "target_parameters": None}
    forms: list[dict[str, Any]] = [
        {"targets": targets or ("qkv",)},
        {"targets": targets or ("o",), "use_rslora": True},
        {"targets": ("qkv", "o"), "exclude_modules": [output]},
        {**whole, "target_modules": rf".*\.(?:{'|'.join(some)})"},
        {**whole, "target_modules": [*some, output], "layers_to_transform": [rng.randrange(2)]},
        {**whole, "target_modules": "all-linear"},
        {**whole, "target_modules": [output, "lm_head"]},
        {**whole, "target_modules": [output, "embed_tokens"]},
        {**whole, "target_modules": [*inputs, output], "use_dora": True},
        {**whole, "modules_to_save": ["lm_head"]},
        {**whole, "trainable_token_indices": [5, 7, 9]},
        {**whole, "lora_bias": True},
    ]
    if parameters:
        chosen = rng.sample(parameters, rng.randint(1, len(parameters)))
        forms.append({"target_modules": [], "target_parameters": chosen})
    config = {"lora_rank": rng.choice([1, 2, 3, 5, 8]), **rng.choice(forms)}
    if rng.random() < 0.4:
        config |= {"rank_pattern": {output: rng.choice([1, 4])}, "alpha_pattern": {inputs[0]: 0.5}}
    if rng.random() < 0.3:
        config["lora_alpha"] = rng.choice([0.5, -3, 11])
    return config
