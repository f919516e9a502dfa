# SPDX-License-Identifier: Apache-2.0
"""Ranks that divide heads and inner widths hold each weight once, and what they compute adds up."""

from __future__ import annotations

import pytest
import torch

from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import ConfigError
from moe_lora.core.shard import ModelShard
from moe_lora.families import shape_of
from moe_lora.models.loader import load_model, random_model
from moe_lora.models.quantised_weight import QuantisedWeight
from tests.adapters.dense import packed_deltas, shard_adapter
from tests.families import FAMILIES, make_checkpoint, shard_of, tiny_config

CPU = torch.device("cpu")


def whole_weights(parts: list[dict[str, torch.Tensor]], shards: list[ModelShard]) -> dict[str, torch.Tensor]:
    """What the ranks' parameters are together.  Raises unless what several hold is the same."""
    found = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts if name in part]
        site_name = name.split(".")[-2] if name.startswith("layers.") else name
        if name == "head" or name.endswith("sinks"):
            found[name] = torch.cat(tensors)
        elif site_name in ("o", "down") and name.endswith("weight"):
            found[name] = torch.cat(tensors, -1)
        elif site_name == "gate_up" or site_name == "qkv":
            dim = -2 if name.endswith("weight") else -1
            site = shards[0].whole.site(site_name)
            widths = [len(p) for parts_of in shards[0].outputs(site) for p in parts_of]
            modules = zip(*(tensor.split(widths, dim) for tensor in tensors), strict=True)
            found[name] = torch.cat([part for module in modules for part in module], dim)
        else:
            assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), name
            found[name] = tensors[0]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_every_weight_once(family, served):
    model_dir = served(family).model_dir
    shards = [shard_of(model_dir, tensor_parallel=2, dist_rank=rank) for rank in range(2)]
    expected = dict(load_model(model_dir, torch.float32, CPU).named_parameters())
    parts = [dict(load_model(model_dir, torch.float32, CPU, shard).named_parameters()) for shard in shards]
    found = whole_weights(parts, shards)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    only_first = parts[0].keys() - parts[1].keys()
    assert bool(only_first) == (family == "gpt_oss")
    assert all(name.endswith(("o.bias", "down.bias")) for name in only_first)


@pytest.mark.parametrize("family", FAMILIES)
def test_deltas_of_divided_adapters_add_up(family, served):
    """B is divided where outputs are, A where inputs are: side by side and summed they are the whole."""
    model = served(family)
    shards = [shard_of(model.model_dir, tensor_parallel=2, dist_rank=rank) for rank in range(2)]
    shape = shards[0].whole
    for path in model.adapters[:3]:
        packed = read_adapter(path, shape, torch.float32)
        all_of = [torch.ones(shape.num_entries, dtype=torch.bool).numpy()] * shape.num_layers
        parts = [shard_adapter(packed, shape, all_of, shard) for shard in shards]
        assert all(part.nbytes < packed.nbytes for part in parts)
        whole = packed_deltas(packed, shape)
        found = [packed_deltas(part, shard.shape) for part, shard in zip(parts, shards, strict=True)]
        assert whole.keys() == found[0].keys() == found[1].keys()
        for key, delta in whole.items():
            site = next(one for one in shape.sites if key[1] in one.modules)
            module = site.modules.index(key[1])
            for shard, part in zip(shards, found, strict=True):
                rows = [row for outputs in shard.outputs(site)[module] for row in outputs]
                torch.testing.assert_close(part[key], delta[rows][:, list(shard.inputs(site))])


def test_heads_that_are_fewer_than_ranks_are_held_by_several(tmp_path):
    config = tiny_config("llama", num_attention_heads=8, num_key_value_heads=2).to_dict()
    shape = shape_of(config)
    models = [random_model(config, torch.float32, CPU, ModelShard(shape, 4, 1, rank)) for rank in range(4)]
    keys = [model.layers[0].attention.qkv.weight[32:48] for model in models]
    assert models[0].spec.shape.num_kv_heads == 1
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[2], keys[3])
    assert not torch.equal(keys[1], keys[2])
    assert [len(model.head) for model in models] == [24] * 4


def test_a_tied_head_is_a_part_of_the_embedding(tmp_path):
    model_dir = make_checkpoint("llama", tmp_path, tie_word_embeddings=True, vocab_size=97)
    for rank, rows in ((0, slice(0, 49)), (1, slice(49, 97))):
        model = load_model(
            model_dir, torch.float32, CPU, shard_of(model_dir, tensor_parallel=2, dist_rank=rank)
        )
        assert torch.equal(model.head, model.embedding[rows])
        assert model.head.untyped_storage().data_ptr() == model.embedding.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("family", "numbers", "problem"),
    [
        ("llama", {"tensor_parallel": 3}, "tensor_parallel=3 does not divide num_heads=4"),
        ("mixtral", {"tensor_parallel": 16, "heads": 16}, "does not divide intermediate_size=24"),
        ("mixtral", {"tensor_parallel": 3, "heads": 6, "kv": 2}, "neither divides num_kv_heads=2 nor"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(family, numbers, problem):
    heads, kv = numbers.pop("heads", 4), numbers.pop("kv", 2)
    config = tiny_config(family, num_attention_heads=heads, num_key_value_heads=kv).to_dict()
    with pytest.raises(ConfigError, match=problem):
        ModelShard(shape_of(config), **numbers)


def test_mxfp4_groups_that_would_be_cut_are_refused():
    config = tiny_config("gpt_oss", intermediate_size=32).to_dict()
    config["quantization_config"] = {"quant_method": "mxfp4"}
    shape = shape_of(config)
    with pytest.raises(ConfigError, match="cut a group of 32; choose another tensor_parallel"):
        random_model(config, torch.float32, CPU, ModelShard(shape, 2))
    config["intermediate_size"] = 64
    shape = shape_of(config)
    whole, part = (
        random_model(config, torch.float32, CPU, shard).layers[1].mlp.down.weight
        for shard in (None, ModelShard(shape, 2, 1, 1))
    )
    assert isinstance(part, QuantisedWeight)
    assert torch.equal(part.dequantised(), whole.dequantised()[..., 32:])
