# SPDX-License-Identifier: Apache-2.0
"""Layout of packed layers, sharing of matrices, state dicts, and round trips over random ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moe_lora.adapters.peft.reader import pack_state_dict, read_adapter
from moe_lora.adapters.registry.base_model import model_shape
from moe_lora.core.errors import AdapterError
from moe_lora.families import shape_of
from tests.adapters.dense import assert_same_deltas, packed_deltas, peft_deltas
from tests.families import (
    FAMILIES,
    MOE_FAMILIES,
    load_model,
    make_adapter,
    make_checkpoint,
    per_expert_shapes,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def read_parts(adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    return load_file(adapter / "adapter_model.safetensors"), config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_aligned_disjoint_and_fill_the_data(family, dtype, checkpoint, shape_of, tmp_path):
    shape = shape_of(family)
    adapter = make_adapter(family, checkpoint(family), tmp_path / "a", lora_rank=3)
    packed = read_adapter(adapter, shape, dtype)
    align = 64 // dtype.itemsize
    for layer in packed.layers:
        assert layer.data.dtype == dtype
        assert layer.table.dtype == torch.int64
        assert layer.table.shape == (shape.num_entries, 3)
        assert layer.scale.dtype == torch.float32
        spans = set()
        for site in shape.sites:
            for row in range(site.entry_base, site.entry_base + site.num_entries):
                a, b, rank = layer.table[row].tolist()
                if rank:
                    out = site.out_features[(row - site.entry_base) % len(site.modules)]
                    spans |= {(a, a + rank * site.in_features), (b, b + rank * out)}
        ordered = sorted(spans)
        assert ordered[0][0] == 0
        for (_, end), (start, _) in itertools.pairwise(ordered):
            assert start % align == 0
            assert 0 <= start - end < align
        assert 0 <= layer.data.numel() - ordered[-1][1] < align
    assert packed.nbytes == sum(layer.data.numel() * dtype.itemsize for layer in packed.layers)


def test_fused_gate_and_up_share_one_a_per_expert(checkpoint, shape_of, tmp_path):
    shape = shape_of("mixtral")
    packed = read_adapter(
        make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a"), shape, torch.float32
    )
    site = shape.site("gate_up")
    for layer in packed.layers:
        offsets = [[int(layer.table[site.entry(m, e), 0]) for m in (0, 1)] for e in range(4)]
        assert all(gate == up for gate, up in offsets)
        assert len({gate for gate, _ in offsets}) == 4
    assert packed.nbytes == shape.adapter_bytes(4, shared_gate_up_a=True)
    separate = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "b", form="per_expert")
    assert read_adapter(separate, shape, torch.float32).nbytes == shape.adapter_bytes(4)


def test_dbrx_stores_the_side_that_all_experts_share_once(checkpoint, shape_of, tmp_path):
    shape = shape_of("dbrx")
    adapter = make_adapter("dbrx", checkpoint("dbrx"), tmp_path / "a", targets=("gate_up", "down"))
    packed = read_adapter(adapter, shape, torch.float32)
    gate_up, down = shape.site("gate_up"), shape.site("down")
    table = packed.layers[0].table
    for module in (0, 1):
        assert len({int(table[gate_up.entry(module, e), 0]) for e in range(4)}) == 1
        assert len({int(table[gate_up.entry(module, e), 1]) for e in range(4)}) == 4
    assert len({int(table[down.entry(0, e), 0]) for e in range(4)}) == 4
    assert len({int(table[down.entry(0, e), 1]) for e in range(4)}) == 1


@pytest.mark.parametrize("family", MOE_FAMILIES[:3])
def test_layout_with_a_and_b_exchanged_gives_the_same_delta(family, checkpoint, shape_of, tmp_path):
    """Versions that swapped a 3-D parameter's axes wrote A of the output's width and B of the input's."""
    shape, experts, rank = shape_of(family), 4, 3
    adapter = make_adapter(
        family, checkpoint(family), tmp_path / "a", lora_rank=rank, targets=("gate_up", "down")
    )
    tensors, config = read_parts(adapter)
    expected = packed_deltas(pack_state_dict(tensors, config, shape, torch.float32, "a"), shape)
    swapped = {}
    for key in [key for key in tensors if "lora_A" in key]:
        key_b = key.replace("lora_A", "lora_B")
        a, b = tensors[key], tensors[key_b]
        by_expert = b.view(b.shape[0], rank, experts).permute(2, 1, 0)
        swapped[key] = by_expert.reshape(experts * rank, b.shape[0])
        swapped[key_b] = a.view(experts, rank, a.shape[1]).permute(2, 1, 0).reshape(a.shape[1], -1)
    packed = pack_state_dict(swapped, config, shape, torch.float32, "swapped")
    assert_same_deltas(packed_deltas(packed, shape), expected)


def _square(family, tmp_path, **config):
    """(tensors, config, shape, deltas) of an adapter of a square parameter per layer, by peft."""
    sizes = {"intermediate_size": 32} if family == "gpt_oss" else {"intermediate_size": 16}
    base = make_checkpoint(family, tmp_path / "base", **sizes)
    target = "down" if family == "gpt_oss" else "gate_up"
    adapter = make_adapter(family, base, tmp_path / "a", lora_rank=3, targets=(target,))
    tensors, saved = read_parts(adapter)
    return tensors, {**saved, **config}, model_shape(base), peft_deltas(family, base, adapter)


@pytest.mark.parametrize("version", ["0.17.0", "0.18.1", "0.19.0", "0.20.1.dev0@1f2e", "1.0.0"])
def test_the_version_of_peft_tells_the_layout_of_square_parameters(version, tmp_path):
    """Before 0.19, A read the parameter's first dimension and B wrote the second."""
    tensors, config, shape, expected = _square("mixtral", tmp_path, peft_version=version)
    if version in ("0.17.0", "0.18.1"):
        for key in [key for key in tensors if "lora_A" in key]:
            key_b = key.replace("lora_A", "lora_B")
            a, b = tensors[key], tensors[key_b]
            tensors[key] = b.view(32, 3, 4).permute(2, 1, 0).reshape(12, 32)
            tensors[key_b] = a.view(4, 3, 32).permute(2, 1, 0).reshape(32, 12)
    packed = pack_state_dict(tensors, config, shape, torch.float32, "a")
    assert_same_deltas(packed_deltas(packed, shape), expected)


@pytest.mark.parametrize("version", [None, "", "dev", "0.18.2.dev0@1f2e", "0.18.0.dev0", 0.19, "9" * 5000])
def test_square_parameters_of_an_unknown_version_are_refused_with_a_way_out(version, tmp_path):
    tensors, config, shape, expected = _square("mixtral", tmp_path, peft_version=version)
    with pytest.raises(AdapterError, match=r'peft_version=.*lora_A.*add "peft_version".*0\.18\.1.*0\.19\.0'):
        pack_state_dict(tensors, config, shape, torch.float32, "a")
    marked = config | {"lora_B_layout": "rank_major"}
    packed = pack_state_dict(tensors, marked, shape, torch.float32, "a")
    assert_same_deltas(packed_deltas(packed, shape), expected)


@pytest.mark.parametrize("version", [None, "0.17.0", "0.19.0"])
def test_square_parameters_stored_transposed_had_one_layout_at_all_times(version, tmp_path):
    tensors, config, shape, expected = _square("gpt_oss", tmp_path, peft_version=version)
    packed = pack_state_dict(tensors, config, shape, torch.float32, "a")
    assert_same_deltas(packed_deltas(packed, shape), expected)


@pytest.mark.parametrize("family", ["llama", "mixtral", "dbrx"])
def test_state_dict_packs_like_the_file_with_and_without_prefix_and_adapter_name(
    family, checkpoint, shape_of, tmp_path
):
    shape = shape_of(family)
    adapter = make_adapter(family, checkpoint(family), tmp_path / "a")
    from_file = read_adapter(adapter, shape, torch.bfloat16, name="x")
    tensors, config = read_parts(adapter)
    bare = {key.removeprefix("base_model.model."): tensor for key, tensor in tensors.items()}
    named = {
        key.replace("_A.weight", "_A.default.weight").replace("_B.weight", "_B.default.weight"): tensor
        for key, tensor in tensors.items()
    }
    for state_dict in (tensors, bare, named):
        packed = pack_state_dict(state_dict, config, shape, torch.bfloat16, "x")
        assert packed.content_hash == from_file.content_hash
        assert (packed.name, packed.nbytes) == (from_file.name, from_file.nbytes)


def test_live_peft_model_publishes_its_state_dict_and_config(checkpoint, shape_of):
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    model = get_peft_model(load_model(checkpoint("mixtral")), lora)
    packed = pack_state_dict(
        get_peft_model_state_dict(model), lora.to_dict(), shape_of("mixtral"), torch.float32, "live"
    )
    assert packed.targets == ("q", "down")
    before = packed.layers[0].data.clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(packed.layers[0].data, before)


def test_content_hash_tells_tensors_and_scale_but_not_the_name(checkpoint, shape_of, tmp_path):
    shape = shape_of("llama")
    tensors, config = read_parts(make_adapter("llama", checkpoint("llama"), tmp_path / "a"))
    first = pack_state_dict(tensors, config, shape, torch.float32, "a").content_hash
    assert pack_state_dict(tensors, config, shape, torch.float32, "b").content_hash == first
    other_scale = {**config, "lora_alpha": 9}
    assert pack_state_dict(tensors, other_scale, shape, torch.float32, "a").content_hash != first
    key = next(iter(tensors))
    other_tensor = {**tensors, key: tensors[key] + 1}
    assert pack_state_dict(other_tensor, config, shape, torch.float32, "a").content_hash != first


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "dtype": "float32",
}
MODULES = {
    module: shape
    for module, shape in per_expert_shapes("mixtral").items()
    if "experts" not in module or ".experts.1." in module
}


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.lists(st.integers(1, 70), min_size=len(MODULES), max_size=len(MODULES)),
    alpha=st.floats(-100, 100, allow_nan=False),
    use_rslora=st.booleans(),
    poisoned=st.none() | st.sampled_from([math.nan, math.inf, -math.inf]),
    seed=st.integers(0, 2**31),
)
def test_any_ranks_round_trip_through_the_packed_form(ranks, alpha, use_rslora, poisoned, seed):
    """Each module has its own rank; a NaN or infinity anywhere is caught."""
    shape = shape_of(MIXTRAL)
    generator = torch.Generator().manual_seed(seed)
    tensors, expected = {}, {}
    for (module, (out_features, in_features)), rank in zip(MODULES.items(), ranks, strict=True):
        a = torch.randn(rank, in_features, generator=generator)
        b = torch.randn(out_features, rank, generator=generator)
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        leaf = module.rsplit(".", 1)[1]
        name = {"w1": "gate", "w3": "up", "w2": "down"}.get(leaf, leaf.removesuffix("_proj"))
        scale = alpha / (math.sqrt(rank) if use_rslora else rank)
        key = (int(module.split(".")[2]), name, 1 if "experts" in module else 0)
        expected[key] = torch.tensor(scale, dtype=torch.float32).double() * (b.double() @ a.double())
    config = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "rank_pattern": {module.replace(".", r"\."): r for module, r in zip(MODULES, ranks, strict=True)},
        "target_modules": list(MODULES),
    }
    if poisoned is not None:
        chosen = tensors[sorted(tensors)[seed % len(tensors)]].view(-1)
        chosen[seed % chosen.numel()] = poisoned
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(AdapterError, match="NaN or infinite"):
                pack_state_dict(tensors, config, shape, dtype, "random")
        return
    packed = pack_state_dict(tensors, config, shape, torch.float32, "random")
    found = packed_deltas(packed, shape)
    assert found.keys() == expected.keys()
    for key, delta in expected.items():
        torch.testing.assert_close(found[key], delta, rtol=1e-6, atol=1e-9)
    assert packed.max_lora_rank == max(ranks)


def test_base_that_differs_only_in_vocabulary_or_dtype_is_the_same_base(checkpoint, shape_of, tmp_path):
    adapter = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a")
    shape = dataclasses.replace(shape_of("mixtral"), vocab_size=128, dtype_bytes=2)
    assert read_adapter(adapter, shape, torch.bfloat16).max_lora_rank == 4
