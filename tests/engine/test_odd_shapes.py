# SPDX-License-Identifier: Apache-2.0
"""Unusual sizes with unusual adapters, against transformers and peft.

Five heads over one KV head, heads of another size than hidden / heads, an odd number of experts, one or three
experts a token, 101 words, tied embeddings.  Ranks 1, 3 and 5, patterns by regex, rsLoRA, some layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from moe_lora import LLM, SamplingParams
from tests.adapter_forms import problem
from tests.families import _MODULES, _PARAMETERS, ALL_TARGETS, BESIDE_TARGETS, make_adapter, make_checkpoint
from tests.grids import with_quick
from tests.models.test_oracle import make_prompts
from tests.oracle import greedy_reference

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
ONE_KV = {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40, "vocab_size": 101}
THREE_LAYERS = {**ONE_KV, "num_hidden_layers": 3, "tie_word_embeddings": True}
SHORT_HEADS = {**THREE_LAYERS, "head_dim": 12}
WIDE = {"moe_intermediate_size": 40}
THREE_OF_FIVE = {"num_experts": 5, "num_experts_per_tok": 3}
ONE_OF_FIVE = {"num_experts": 5, "num_experts_per_tok": 1}
_LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 40}
_DELTA = {
    **{"head_dim": 20, "num_hidden_layers": 5, "full_attention_interval": 3, "linear_conv_kernel_dim": 4},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 14, "num_attention_heads": 4, "partial_rotary_factor": 0.5},
}
_LATENT = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4},
    **{"v_head_dim": 14, "q_lora_rank": 7, "vocab_size": 101, "hidden_size": 40},
}
ODD: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen3", "qwen2", "mistral"), SHORT_HEADS),
    "granite": THREE_LAYERS,
    "qwen3_moe": {**SHORT_HEADS, **THREE_OF_FIVE, **WIDE, "norm_topk_prob": False},
    "qwen2_moe": {**SHORT_HEADS, **THREE_OF_FIVE, **WIDE, "mlp_only_layers": [], "decoder_sparse_step": 2},
    "olmoe": {**THREE_LAYERS, **THREE_OF_FIVE, "norm_topk_prob": True, "clip_qkv": 0.8},
    "mixtral": {**SHORT_HEADS, **_LOCAL, "num_experts_per_tok": 1, "sliding_window": 5},
    "granitemoe": {**THREE_LAYERS, **_LOCAL},
    "minimax_m2": {**SHORT_HEADS, **_LOCAL, "rotary_dim": 6},
    "gpt_oss": {**SHORT_HEADS, **_LOCAL},
    "phimoe": {
        **THREE_LAYERS,
        "tie_word_embeddings": False,
        **_LOCAL,
        "num_experts_per_tok": 2,
        "lm_head_bias": False,
    },
    "glm4_moe": {
        **{**SHORT_HEADS, **WIDE, "n_routed_experts": 9, "n_group": 3, "topk_group": 1},
        **{"first_k_dense_replace": 2, "n_shared_experts": 2, "norm_topk_prob": False},
    },
    "afmoe": {**SHORT_HEADS, **ONE_OF_FIVE, **WIDE, "num_dense_layers": 2, "sliding_window": 5},
    "ernie4_5_moe": {**THREE_LAYERS, **WIDE, "moe_num_experts": 5, "moe_k": 3, "moe_layer_start_index": 2},
    "qwen3_next": {**THREE_LAYERS, **ONE_OF_FIVE, **WIDE, **_DELTA, "mlp_only_layers": []},
    "qwen3_5_moe": {**THREE_LAYERS, **ONE_OF_FIVE, **WIDE, **_DELTA},
    "deepseek_v3": {**_LATENT, "n_routed_experts": 9, "n_group": 3, "topk_group": 1, "n_shared_experts": 2},
    "deepseek_v2": {**_LATENT, "n_routed_experts": 9, "n_group": 3, "topk_method": "greedy"},
    "glm4_moe_lite": {**_LATENT, "n_routed_experts": 5, "n_group": 1, "topk_group": 1},
    "gemma4": {
        **{**ONE_KV, **WIDE, "num_experts": 5, "top_k_experts": 1, "num_attention_heads": 3, "head_dim": 12},
        **{"global_head_dim": 28, "num_global_key_value_heads": 1, "sliding_window": 5},
    },
}
ODD["gpt_oss"] |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
QUICK = ("glm4_moe",)


def _adapters(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    modules, everywhere = _MODULES[family], (*ALL_TARGETS, "router", *BESIDE_TARGETS)
    (first, *_), (output, *_) = modules["qkv"], modules["o"]
    experts = _PARAMETERS[family].get("down")
    yield "rsLoRA of rank 1", {"lora_rank": 1, "targets": everywhere, "use_rslora": True}
    ranks = {first: 1, rf".*\.0\..*{output}": 3, "gate_up_proj": 2}
    alphas = {"down_proj": 7.5, rf"layers\.0\..*\.{first}": 0.3, "experts": 2.0}
    yield "patterns", {"lora_rank": 5, "targets": everywhere, "rank_pattern": ranks, "alpha_pattern": alphas}
    some = {
        "target_modules": [*modules["qkv"], output],
        "target_parameters": None,
        "layers_to_transform": [2],
    }
    yield "one layer", {"lora_rank": 3, **some}
    if experts:
        yield "one matrix", {"lora_rank": 3, "target_modules": [], "target_parameters": list(experts)}
    outer = {"target_modules": [first, "lm_head"], "target_parameters": None, "rank_pattern": {"lm_head": 1}}
    yield "the head", {"lora_rank": 3, **outer}


@pytest.mark.parametrize("family", with_quick(ODD, QUICK))
def test_odd_sizes_with_odd_adapters_continue_as_peft_does(family, tmp_path):
    base, prompt = make_checkpoint(family, tmp_path / "base", **ODD[family]), make_prompts()[0]
    prompt = [*prompt, *range(5, 16)]
    made = {
        name: make_adapter(family, base, tmp_path / name.replace(" ", "_"), scale=0.5, **config)
        for name, config in _adapters(family)
    }
    assert {name: problem(path, base) for name, path in made.items()} == dict.fromkeys(made)
    adapters = {name: str(path) for name, path in made.items()}
    with LLM(base, adapters=adapters, dtype="float32", eager=True) as llm:
        found = llm.generate([prompt] * (1 + len(made)), [None, *made], GREEDY)
    for name, completion in zip([None, *made], found, strict=True):
        expected = greedy_reference(base, made.get(name), [prompt], NUM_TOKENS, [completion.token_ids])
        expected.check_margins()
        assert completion.token_ids == expected.tokens[0], name
