# SPDX-License-Identifier: Apache-2.0
"""Configs of models with heads of two sizes: spellings, defaults, refused values, and the released sizes."""

from __future__ import annotations

import re

import pytest
import torch

from moe_lora.core.errors import ConfigError
from moe_lora.families import cut_to, model_spec, shape_of
from moe_lora.kernels.operands import KvLayout, with_full_layers
from moe_lora.models.causal_lm import CausalLM
from tests.families import tiny_config

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
SIZES = {"head_dim": 20, "num_key_value_heads": 3}
GEMMA_4_26B = {
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262144,
}


def config_of(**changes):
    return {**tiny_config("gemma4").to_dict(), **changes}


def test_the_released_model_has_25_billion_weights_and_220_kib_of_kv_a_token():
    spec = model_spec({"model_type": "gemma4", "dtype": "bfloat16", "text_config": GEMMA_4_26B})
    with torch.device("meta"):
        model = CausalLM(spec)
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e9, 1) == 25.2
    assert spec.window == (1024, 1024, 1024, 1024, 1024, 0) * 5
    sliding, full = 25 * 2 * 8 * 256 * 2, 5 * 2 * 2 * 512 * 2
    assert spec.shape.kv_bytes_per_token() == sliding + full == 220 * 1024
    layout = KvLayout(num_layers=30, num_kv_heads=8, head_dim=256, block_size=16, dtype=torch.bfloat16)
    first, behind = with_full_layers(layout, spec.shape.global_heads)
    assert first.page_bytes == behind.page_bytes == 16 * 220 * 1024
    assert layout.page_bytes / first.page_bytes == pytest.approx(12 / 11)


def test_both_spellings_of_the_full_layers_sizes_are_read_alike():
    new = config_of()
    assert new["per_layer_config"]
    old = {**new, "global_head_dim": 20, "num_global_key_value_heads": 3}
    del old["per_layer_config"]
    assert model_spec(old) == model_spec(new)
    named = {int(layer): sizes for layer, sizes in new["per_layer_config"].items()}
    assert model_spec({**new, "per_layer_config": named}) == model_spec(new)


def test_numbers_of_layers_are_read_with_leading_zeros():
    """As transformers writes models of more than ten layers."""
    config = config_of(num_hidden_layers=12, layer_types=([SLIDING] * 5 + [FULL]) * 2)
    spec = model_spec(config | {"per_layer_config": {"05": SIZES, "11": SIZES}})
    sizes = spec.shape.global_heads
    assert (sizes.layers, sizes.head_dim, sizes.num_kv_heads) == ((5, 11), 20, 3)
    assert model_spec(config | {"per_layer_config": {5: SIZES, "11": SIZES}}) == spec


def test_a_config_without_optional_keys_has_the_defaults_of_transformers():
    config = config_of(num_hidden_layers=8)
    for key in (
        "per_layer_config",
        "layer_types",
        "rope_parameters",
        "sliding_window",
        "tie_word_embeddings",
    ):
        del config[key]
    spec = model_spec(config)
    assert spec.window == (512, 512, 512, 512, 512, 0, 512, 0)
    assert spec.tie_word_embeddings
    sizes = spec.shape.global_heads
    assert (sizes.layers, sizes.head_dim, sizes.num_kv_heads) == ((5, 7), 512, 2)
    found = spec.rope.inverse_frequencies
    assert found[8] == 1.0
    assert found[9] == pytest.approx(1e6 ** (-2 / 512))
    assert (len(found), found.count(0.0)) == (8 + 256, 192)


def test_the_first_layers_keep_their_heads():
    cut = shape_of(cut_to(config_of(), 1))
    assert cut.global_heads.layers == (0,)
    assert not cut.has_site(0, "qkv")
    assert cut.has_site(0, "global_qk")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": False}, "enable_moe_block=False, which is not supported"),
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=8, which is not supported"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input=256, which is not supported"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0"),
        ({"layer_types": [FULL, FULL, SLIDING]}, "must have full_attention in the last layer"),
        ({"layer_types": [FULL, "chunked_attention", FULL]}, "layer_types="),
        ({"per_layer_config": {"0": SIZES}}, "must state the same sizes for all full layers alone"),
        ({"per_layer_config": {"0": SIZES, "1": SIZES, "2": SIZES}}, "for all full layers alone"),
        ({"per_layer_config": {"0": {**SIZES, "x": 1}, "2": {**SIZES, "x": 1}}}, "per_layer_config with x"),
        ({"per_layer_config": {"0": 3}}, "must have an object for each layer"),
        ({"per_layer_config": {"0": SIZES, "x": SIZES}}, "must have numbers of layers as keys"),
        ({"per_layer_config": {"0": {"head_dim": 19}, "2": {"head_dim": 19}}}, "head_dim=19 must be even"),
        ({"per_layer_config": {"0": {"head_dim": "x"}, "2": {"head_dim": "x"}}}, "head_dim='x'"),
        (
            {"per_layer_config": {"0": {"num_key_value_heads": 4}, "2": {"num_key_value_heads": 4}}},
            "num_kv_heads=4 does not divide num_heads=6",
        ),
        ({"per_layer_config": None, "global_head_dim": 10**9}, "global_head_dim=1000000000"),
        ({"rope_parameters": {SLIDING: ROPE[SLIDING]}}, "full_attention.rope_theta"),
        (
            {"rope_parameters": {**ROPE, FULL: {**ROPE[FULL], "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor=1.5, which must turn 1 to 10 pairs",
        ),
        (
            {"rope_parameters": {**ROPE, SLIDING: {**ROPE[SLIDING], "rope_type": "yarn", "factor": 4.0}}},
            "rope_type='yarn', which is not supported per kind of layer",
        ),
        (
            {"rope_parameters": {**ROPE, FULL: {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}},
            "'factor': 4.0}, which is not supported: it scales attention",
        ),
    ],
)
def test_option_that_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_spec(config_of(**changes))
