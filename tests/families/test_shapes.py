# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.families import shape_of

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
DBRX = {
    "model_type": "dbrx",
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "max_seq_len": 32768,
    "vocab_size": 100352,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    "torch_dtype": "bfloat16",
}
QWEN = {
    **MIXTRAL,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
del QWEN["num_local_experts"]
SCALED_MOE = {**MIXTRAL, "num_hidden_layers": 18, "num_local_experts": 32, "num_experts_per_tok": 4}
GPT_OSS = {
    **MIXTRAL,
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "head_dim": 64,
    "num_local_experts": 32,
    "experts_per_token": 4,
}
del GPT_OSS["num_experts_per_tok"]


def test_entries_of_all_sites_fill_the_offset_table_without_overlap():
    for config in (MIXTRAL, DBRX, QWEN, SCALED_MOE, GPT_OSS):
        shape = shape_of(config)
        rows = [
            site.entry(module, expert)
            for site in shape.sites
            for expert in range(max(1, site.num_experts))
            for module in range(len(site.modules))
        ]
        assert rows == list(range(shape.num_entries))


def test_sites_of_a_mixtral_layer():
    shape = shape_of(MIXTRAL)
    assert [site.name for site in shape.sites] == ["qkv", "o", "router", "gate_up", "down"]
    qkv, gate_up = shape.site("qkv"), shape.site("gate_up")
    assert qkv.columns == (0, 4096, 5120)
    assert qkv.total_out_features == 6144
    assert gate_up.num_experts == 8
    assert gate_up.columns == (0, 14336)
    assert gate_up.entry(1, 3) == 5 + 3 * 2 + 1
    assert shape.num_entries == 3 + 1 + 1 + 16 + 8


def test_dbrx_has_one_fused_qkv_module():
    shape = shape_of(DBRX)
    assert shape.site("qkv").modules == ("qkv",)
    assert shape.site("qkv").out_features == (48 * 128 + 2 * 8 * 128,)
    assert (shape.num_experts, shape.num_experts_per_token, shape.head_dim) == (16, 4, 128)


def test_old_and_new_key_spellings_give_the_same_shape():
    renamed = {("dtype" if k == "torch_dtype" else k): v for k, v in MIXTRAL.items()}
    renamed["num_experts"] = renamed.pop("num_local_experts")
    assert shape_of(renamed) == shape_of(MIXTRAL)
    assert shape_of({**MIXTRAL, "head_dim": None}).head_dim == 128


def test_kv_and_adapter_bytes_by_hand():
    shape = shape_of(QWEN)
    assert shape.kv_bytes_per_token() == 2 * 48 * 4 * 128 * 2
    per_expert = 2 * (2048 + 768) * 32 * 2 + (768 + 2048) * 32 * 2
    assert shape.adapter_bytes(32, targets=("gate_up", "down")) == 48 * 128 * per_expert
    shared = per_expert - 2048 * 32 * 2
    assert shape.adapter_bytes(32, ("gate_up", "down"), shared_gate_up_a=True) == 48 * 128 * shared
    odd = shape_of({**MIXTRAL, "torch_dtype": "float32"})
    assert odd.adapter_bytes(1, targets=("router",)) == 32 * (4096 * 4 + 64)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "phi"}, "model_type='phi'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5"),
        ({"num_experts_per_tok": 9}, "num_experts_per_token=9"),
        ({"torch_dtype": "int8"}, "dtype='int8'"),
        ({"num_local_experts": 0}, "num_local_experts=0"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"model_type": ["llama"]}, "model_type=['llama']"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ],
)
def test_unsupported_config_is_refused_by_name(changes, named):
    with pytest.raises(ValueError) as caught:
        shape_of({**MIXTRAL, **changes})
    assert named in str(caught.value)


def test_partly_dense_qwen_is_refused():
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        shape_of({**QWEN, "mlp_only_layers": [0]})


def test_shape_needs_no_torch():
    code = (
        "import json, sys; from moe_lora.families import shape_of; "
        f"shape_of(json.loads({json.dumps(MIXTRAL)!r})).sites; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
