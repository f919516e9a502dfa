# SPDX-License-Identifier: Apache-2.0
"""LoRA sites of models with shared experts and dense layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard

SIZES = {
    "family": "m",
    "num_layers": 5,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position": 256,
    "dtype_bytes": 4,
}
BESIDE = {"shared_size": 20, "has_shared_gate": True, "dense_size": 28, "dense_layers": (0, 3)}
PLAIN, SHAPE = ModelShape(**SIZES), ModelShape(**SIZES, **BESIDE)


def test_new_sites_come_after_the_others_which_keep_their_numbers():
    names = [site.name for site in SHAPE.sites]
    assert names == [
        *("qkv", "o", "router", "gate_up", "down"),
        *("shared_gate_up", "shared_down", "shared_gate", "dense_gate_up", "dense_down"),
    ]
    assert SHAPE.sites[:5] == PLAIN.sites
    assert [site.total_out_features for site in SHAPE.sites[5:]] == [40, 32, 1, 56, 32]
    modules = [module for site in SHAPE.sites for module in site.modules]
    assert len(set(modules)) == len(modules)


def test_layers_have_the_sites_of_their_mlp():
    for layer in range(5):
        has = {site.name for site in SHAPE.sites if SHAPE.has_site(layer, site.name)}
        of_mlp = {name for name in has if name not in ("qkv", "o")}
        dense = {"dense_gate_up", "dense_down"}
        assert of_mlp == (dense if layer in (0, 3) else {one.name for one in SHAPE.sites[2:8]})
    assert all(PLAIN.has_site(0, site.name) for site in PLAIN.sites)
    assert not any(PLAIN.has_site(0, site.name) for site in SHAPE.sites[5:])


def test_adapters_take_bytes_in_layers_with_the_site_only():
    def of(shape: ModelShape, *targets: str) -> int:
        return shape.adapter_bytes(4, targets)

    assert of(SHAPE, "qkv", "o") == of(PLAIN, "qkv", "o")
    assert of(SHAPE, "gate_up", "down") * 5 == of(PLAIN, "gate_up", "down") * 3
    assert of(SHAPE, "dense_down") == 2 * (4 * 28 * 4 + 4 * 32 * 4)
    assert of(SHAPE, "shared_gate") == 3 * (4 * 32 * 4 + 64)  # a column of B, aligned


def test_a_model_of_dense_layers_alone_is_refused():
    with pytest.raises(ConfigError, match="all of num_layers=5 layers are dense"):
        ModelShape(**SIZES, dense_size=8, dense_layers=tuple(range(5)))


def test_tensor_parallelism_divides_each_width():
    held = ModelShard(SHAPE, tensor_parallel=2, dist_rank=1)
    assert (held.shape.shared_size, held.shape.dense_size) == (10, 14)
    assert held.inputs(SHAPE.site("dense_down")) == range(14, 28)
    assert held.outputs(SHAPE.site("shared_gate_up")) == ((range(10, 20),),) * 2
    assert held.outputs(SHAPE.site("shared_gate")) == ((range(1),),)
    assert held.is_summed(SHAPE.site("shared_down"))
    with pytest.raises(ConfigError, match="tensor_parallel=4 does not divide dense_size=30"):
        ModelShard(ModelShape(**SIZES, **{**BESIDE, "dense_size": 30}), tensor_parallel=4)


def test_whole_experts_leave_the_other_widths_whole():
    held = ModelShard(SHAPE, tensor_parallel=2, expert_parallel=2, dist_rank=1)
    assert (held.shape.shared_size, held.shape.dense_size) == (20, 28)
    assert not held.is_summed(SHAPE.site("shared_down"))


def test_plans_of_equal_layers_refuse_such_a_model():
    PLAIN.check_equal_layers("a plan")
    with pytest.raises(
        ConfigError, match=r"a plan counts equal layers .* 2 dense layers, shared_size=20 and"
    ):
        SHAPE.check_equal_layers("a plan")
    with pytest.raises(ConfigError, match="has_output_gate=True"):
        replace(PLAIN, has_output_gate=True).check_equal_layers("a plan")


def test_output_gate_is_a_site_of_all_layers_divided_by_heads():
    shape = replace(SHAPE, has_output_gate=True)
    assert all(shape.has_site(layer, "output_gate") for layer in range(shape.num_layers))
    assert not any(SHAPE.has_site(layer, "output_gate") for layer in range(SHAPE.num_layers))
    site, half = shape.site("output_gate"), shape.num_heads // 2 * shape.head_dim
    assert (site.in_features, site.out_features) == (shape.hidden_size, (2 * half,))
    held = ModelShard(shape, tensor_parallel=2, dist_rank=1)
    assert held.outputs(site) == ((range(half, 2 * half),),)
    assert not held.is_summed(site)
