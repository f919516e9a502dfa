# SPDX-License-Identifier: Apache-2.0
"""Packed adapters against the weights that peft merges, for every family and form."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.shape import ATTENTION_SITES
from tests.adapters.dense import assert_same_deltas, packed_deltas, peft_deltas
from tests.families import (
    ALL_FAMILIES,
    ALL_TARGETS,
    BESIDE_TARGETS,
    DENSE_FAMILIES,
    FAMILIES,
    FURTHER_MOE,
    LATER_MOE,
    MOE_FAMILIES,
    PER_EXPERT_FAMILIES,
    load_model,
    make_adapter,
)
from tests.grids import diagonal, with_quick

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow


def assert_packs_as_peft_merges(family, model_dir, adapter, shape):
    packed = read_adapter(adapter, shape, torch.float32)
    assert_same_deltas(packed_deltas(packed, shape), peft_deltas(family, model_dir, adapter))
    return packed


@pytest.mark.parametrize(
    ("targets", "family"),
    [
        pytest.param(targets, family, marks=() if family in quick else SLOW)
        for targets, quick in (
            (ALL_TARGETS, DENSE_FAMILIES),  # the next test has these sites of the others
            (("qkv", "o"), FAMILIES[::3]),
            (("gate_up",), FAMILIES[1::3]),
            (("down",), FAMILIES[2::3]),
        )
        for family in ALL_FAMILIES
    ],
)
def test_every_subset_of_sites_packs_as_peft_merges(family, targets, checkpoint, shape_of, tmp_path):
    adapter = make_adapter(family, checkpoint(family), tmp_path / "a", lora_rank=5, targets=targets, seed=3)
    packed = assert_packs_as_peft_merges(family, checkpoint(family), adapter, shape_of(family))
    shape = shape_of(family)
    kinds = ("", "shared_", "dense_", "global_")
    sites = [kind + target for target in targets for kind in kinds]
    sites += ["global_qk", *(site for site in ATTENTION_SITES if site != "o")] if "qkv" in targets else []
    assert packed.targets == tuple(m for s in shape.sites if s.name in sites for m in s.modules)
    assert packed.max_lora_rank == 5


@pytest.mark.parametrize("family", [*MOE_FAMILIES, *LATER_MOE, *FURTHER_MOE])
def test_router_and_experts_pack_as_peft_merges(family, checkpoint, shape_of, tmp_path):
    targets = ("router", *ALL_TARGETS, *BESIDE_TARGETS)
    adapter = make_adapter(family, checkpoint(family), tmp_path / "a", lora_rank=3, targets=targets)
    packed = assert_packs_as_peft_merges(family, checkpoint(family), adapter, shape_of(family))
    assert "router" in packed.targets


@pytest.mark.parametrize(
    ("family", "targets"), diagonal(PER_EXPERT_FAMILIES, [ALL_TARGETS, ("router", *ALL_TARGETS)])
)
def test_per_expert_form_packs_as_peft_merges(family, targets, checkpoint, shape_of, tmp_path):
    adapter = make_adapter(
        family, checkpoint(family), tmp_path / "a", lora_rank=4, targets=targets, form="per_expert"
    )
    assert_packs_as_peft_merges(family, checkpoint(family), adapter, shape_of(family))


@pytest.mark.parametrize(
    ("use_rslora", "family"),
    [
        pytest.param(use_rslora, family, marks=() if family in quick else SLOW)
        for use_rslora, quick in ((False, ("qwen2", "glm4_moe")), (True, FAMILIES))
        for family in ALL_FAMILIES
    ],
)
def test_patterns_and_rslora_pack_as_peft_merges(family, use_rslora, checkpoint, shape_of, tmp_path):
    first_layer = r"0\..*" if family != "dbrx" else r"blocks\.0\..*"
    expert = "mlp.w2" if family == "dbrx" else "experts.down_proj"
    expert = "down_proj" if family in DENSE_FAMILIES else expert
    adapter = make_adapter(
        family,
        checkpoint(family),
        tmp_path / "a",
        lora_rank=4,
        lora_alpha=7,
        rank_pattern={first_layer: 2, expert: 6},
        alpha_pattern={expert: 5, "o_proj": 1},
        use_rslora=use_rslora,
    )
    packed = assert_packs_as_peft_merges(family, checkpoint(family), adapter, shape_of(family))
    assert packed.max_lora_rank == 6


def test_one_expert_parameter_form_is_told_by_its_target_when_keys_are_the_same(
    checkpoint, shape_of, tmp_path
):
    gate_up = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "g", targets=("gate_up",))
    down = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "d", targets=("down",))
    shape = shape_of("mixtral")
    assert read_adapter(gate_up, shape, torch.float32).targets == ("gate", "up")
    assert read_adapter(down, shape, torch.float32).targets == ("down",)


@pytest.mark.parametrize("form", ["list", "regex", "flags", "layers", "paths", "all-linear", "exclude"])
def test_ways_to_name_targets_pack_as_peft_merges(form, checkpoint, shape_of, tmp_path):
    config = {
        "list": {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]},
        "regex": {"target_modules": r".*layers\.1\..*(k_proj|down_proj)"},
        "flags": {"target_modules": r"(?ix) .* \. Q_PROJ", "exclude_modules": r"(?i).*LAYERS\.0.*"},
        "layers": {
            "target_modules": ["v_proj", "up_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
        "paths": {
            "target_modules": ["v_proj", "model.layers.0.mlp.up_proj", "lm_head", "model.embed_tokens"],
            "layers_to_transform": 1,
        },
        "all-linear": {"target_modules": "all-linear"},
        "exclude": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*layers\.0.*o_proj"},
    }[form]
    adapter = make_adapter("llama", checkpoint("llama"), tmp_path / "a", **config)
    assert_packs_as_peft_merges("llama", checkpoint("llama"), adapter, shape_of("llama"))


def test_all_linear_by_hand_covers_attention_and_optionally_experts(checkpoint, shape_of, tmp_path):
    shape = shape_of("qwen3_moe")
    attention = make_adapter(
        "qwen3_moe",
        checkpoint("qwen3_moe"),
        tmp_path / "a",
        targets=("qkv", "o"),
        form="per_expert",
        target_modules="all-linear",
    )
    assert read_adapter(attention, shape, torch.float32).targets == ("q", "k", "v", "o")
    whole = make_adapter(
        "qwen3_moe",
        checkpoint("qwen3_moe"),
        tmp_path / "b",
        targets=("router", *ALL_TARGETS),
        form="per_expert",
        target_modules="all-linear",
    )
    assert "router" in read_adapter(whole, shape, torch.float32).targets


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_per_expert_adapter_that_peft_loaded_and_saved_again_is_the_same_adapter(
    family, checkpoint, shape_of, tmp_path
):
    """peft fuses gate and up at doubled rank, with rank_pattern and alpha_pattern to match."""
    from peft import PeftModel

    adapter = make_adapter(
        family,
        checkpoint(family),
        tmp_path / "old",
        targets=("router", *ALL_TARGETS),
        form="per_expert",
    )
    PeftModel.from_pretrained(load_model(checkpoint(family)), str(adapter)).save_pretrained(
        str(tmp_path / "new")
    )
    shape = shape_of(family)
    old = read_adapter(adapter, shape, torch.float32)
    new = read_adapter(tmp_path / "new", shape, torch.float32)
    assert (old.max_lora_rank, new.max_lora_rank) == (4, 8)
    assert_same_deltas(packed_deltas(new, shape), packed_deltas(old, shape))


@pytest.mark.parametrize("family", with_quick((*MOE_FAMILIES, *LATER_MOE), MOE_FAMILIES))
def test_all_linear_of_a_moe_family_packs_as_peft_merges(family, checkpoint, shape_of, tmp_path):
    adapter = make_adapter(
        family, checkpoint(family), tmp_path / "a", target_modules="all-linear", target_parameters=None
    )
    assert_packs_as_peft_merges(family, checkpoint(family), adapter, shape_of(family))


def test_granite_moe_adapter_with_older_names_is_the_same_adapter(checkpoint, shape_of, tmp_path):
    """transformers 4 had input_linear and output_linear, and a linear layer as gate."""
    targets = ("router", *ALL_TARGETS)
    newer = make_adapter("granitemoe", checkpoint("granitemoe"), tmp_path / "new", targets=targets)
    older = shutil.copytree(newer, tmp_path / "old")
    names = (
        ("experts.base_layer.lora", "input_linear.lora"),
        ("experts.lora", "output_linear.lora"),
        ("router.lora", "router.layer.lora"),
    )
    tensors = load_file(older / "adapter_model.safetensors")
    for new, old in names:
        tensors = {key.replace(new, old): tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, older / "adapter_model.safetensors")
    config = json.loads((older / "adapter_config.json").read_text())
    config["target_modules"].append("router.layer")
    config["target_parameters"] = ["input_linear.weight", "output_linear.weight"]
    (older / "adapter_config.json").write_text(json.dumps(config))
    shape = shape_of("granitemoe")
    found, expected = (read_adapter(path, shape, torch.float32) for path in (older, newer))
    assert_same_deltas(packed_deltas(found, shape), packed_deltas(expected, shape))


def test_phi_moe_adapter_of_linear_experts_is_read_as_one_of_mixtral(checkpoint, shape_of, tmp_path):
    """transformers 4 had the same names in both families."""
    targets = ("router", "gate_up", "down")
    adapter = make_adapter(
        "mixtral",
        checkpoint("mixtral"),
        tmp_path / "a",
        targets=targets,
        form="per_expert",
        base_model_name_or_path=None,
    )
    found, expected = (
        packed_deltas(read_adapter(adapter, shape_of(family), torch.float32), shape_of(family))
        for family in ("phimoe", "mixtral")
    )
    assert_same_deltas(found, expected)
