# SPDX-License-Identifier: Apache-2.0
"""Dense deltas of a packed adapter, and those that peft itself merges into the base."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_lora.adapters.packed import PackedAdapter, PackedLayer, shard_layer
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from tests.families import LATER_MOE, load_model, targets_as_given, tiny_config

Deltas = dict[tuple[int, str, int], torch.Tensor]
"""(layer, module, expert) → [out_features, in_features] float64; absent where there is no delta."""


def packed_deltas(packed: PackedAdapter, shape: ModelShape) -> Deltas:
    """Each entry's delta, computed from data, table and scale alone."""
    deltas: Deltas = {}
    for number, layer in enumerate(packed.layers):
        for site in (*shape.sites, *(shape.outer_sites if number == shape.num_layers else ())):
            for module, name in enumerate(site.modules):
                for expert in range(max(1, site.num_experts)):
                    row = site.entry(module, expert)
                    a_offset, b_offset, rank = layer.table[row].tolist()
                    if not rank:
                        continue
                    out = site.out_features[module]
                    a = layer.data[a_offset : a_offset + rank * site.in_features].view(rank, -1).double()
                    b = layer.data[b_offset : b_offset + rank * out].view(rank, -1).double()
                    deltas[number, name, expert] = layer.scale[row].double() * (b.T @ a)
    return deltas


def peft_deltas(family: str, model_dir: Path, adapter: Path) -> Deltas:
    """merge_and_unload of peft in float64, minus the base, cut into modules and experts."""
    from peft import PeftModel

    base = load_model(model_dir).double()
    before = {key: value.clone() for key, value in base.state_dict().items()}
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    with targets_as_given(family, targets):
        model = PeftModel.from_pretrained(base, str(adapter))
    merged = model.double().merge_and_unload().state_dict()
    changed = {key: merged[key] - before[key] for key in before if not torch.equal(merged[key], before[key])}
    deltas: Deltas = {}
    before = {key.replace("language_model.", "", 1): value for key, value in before.items()}
    for key, delta in changed.items():
        _cut(family, key.replace("language_model.", "", 1), delta, deltas, before)
    return deltas


_LEAVES = {
    **{f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")},
    **{
        "qkv_proj": "qkv",
        "gate_up_proj": "gate_up",
        "Wqkv": "qkv",
        "out_proj": "o",
        "gate": "router",
        "router": "router",
        "layer": "router",
        "proj": "router",
    },
    "shared_expert_gate": "shared_expert_gate",
    **{"q_a_proj": "q_a", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a"},
    **{f"in_proj_{name}": f"delta_{name}" for name in ("qkvz", "ba", "qkv", "z", "b", "a")},
}


def _num_layers(before: dict[str, Any]) -> int:
    return 1 + max(int(key.split(".")[2]) for key in before if key.split(".")[1] in ("layers", "blocks"))


def _cut(family: str, key: str, delta: torch.Tensor, deltas: Deltas, before: dict[str, Any]) -> None:
    parts = key.split(".")
    if parts[-2] in ("lm_head", "embed_tokens", "wte"):
        is_head = parts[-2] == "lm_head"
        module = "lm_head" if is_head else "embed_tokens"
        deltas[_num_layers(before), module, 0] = delta if is_head else delta.T
        return
    layer = int(parts[2])
    if "shared_mlp" in parts:
        halves = (
            zip(("gate", "up"), delta.chunk(2), strict=True) if "input_linear" in parts else [("down", delta)]
        )
        deltas |= {(layer, f"shared_{name}", 0): half for name, half in halves}
        return
    leaf = parts[-2] if parts[-1] == "weight" else parts[-1]
    if leaf == "kv_b_proj":
        config = tiny_config(family)
        for head, rows in enumerate(delta.chunk(config.num_attention_heads)):
            deltas[layer, "latent_k", head] = rows[: config.qk_nope_head_dim].T
            deltas[layer, "latent_v", head] = rows[config.qk_nope_head_dim :]
        return
    if delta.ndim == 2 and leaf in _LEAVES:
        kind = ""
        if parts[-3:-1] == ["self_attn", "gate_proj"]:
            deltas[layer, "output_gate", 0] = delta
            return
        if leaf in ("gate_proj", "up_proj", "down_proj") and family in LATER_MOE:
            kind = "shared_" if "shared_" in key or family == "gemma4" else "dense_"
        if family == "gemma4" and "self_attn" in parts:
            kind = "global_" if tiny_config(family).layer_types[layer] == "full_attention" else ""
        module = "delta_out" if "linear_attn.out_proj" in key else kind + _LEAVES[leaf]
        deltas[layer, module, 0] = delta
        return
    if family == "dbrx":
        name = {"w1": "gate", "v1": "up", "w2": "down"}[leaf]
        for expert, rows in enumerate(delta.chunk(4)):
            deltas[layer, name, expert] = rows.T if name == "down" else rows
        return
    for expert, weight in enumerate(delta):
        matrix = weight.T if family == "gpt_oss" else weight
        if leaf == "down_proj":
            deltas[layer, "down", expert] = matrix
            continue
        gate, up = (matrix[0::2], matrix[1::2]) if family == "gpt_oss" else matrix.chunk(2)
        deltas[layer, "gate", expert], deltas[layer, "up", expert] = gate, up


def assert_same_deltas(found: Deltas, expected: Deltas) -> None:
    """Same keys, same values to float32 accuracy."""
    assert found.keys() == expected.keys()
    for key, delta in expected.items():
        assert found[key].shape == delta.shape, key
        torch.testing.assert_close(found[key], delta, rtol=1e-5, atol=1e-6, msg=f"{key}: ".__add__)


def shard_adapter(
    packed: PackedAdapter, shape: ModelShape, kept: Sequence[np.ndarray], shard: ModelShard | None = None
) -> PackedAdapter:
    """`packed` with only the entries kept[layer] ([X] bool) of each layer, in new memory.

    shard: see `shard_layer`.
    """
    layers = []
    for layer, mask in zip(packed.layers, kept, strict=True):
        part = shard_layer(layer, shape, mask, shard)
        data = layer.data.new_empty(part.num_elements)
        part.copy(layer.data, data)
        layers.append(PackedLayer(data=data, table=part.table, scale=part.scale))
    return replace(packed, layers=tuple(layers), nbytes=sum(layer.nbytes for layer in layers))
