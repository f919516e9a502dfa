# SPDX-License-Identifier: Apache-2.0
"""Experts' pairs with a dim of experts, as Tinker and Megatron-Bridge write them."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.reader import bare_layers, read_adapter
from moe_lora.core.errors import AdapterError
from tests.adapters.dense import assert_same_deltas, packed_deltas
from tests.families import MOE_FAMILIES, NUM_EXPERTS, PER_EXPERT_FAMILIES, make_adapter
from tests.grids import diagonal

STYLES = {"w": ("w1", "w3", "w2"), "proj": ("gate_proj", "up_proj", "down_proj")}
_EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.lora_([AB])\.weight")
_LEAVES = {leaf: number for style in STYLES.values() for number, leaf in enumerate(style)}


def rewritten(source, target, tensors, **config):
    """A copy of the folder with other tensors and config fields."""
    target.mkdir(parents=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, target / WEIGHTS_FILE)
    fields = json.loads((source / CONFIG_FILE).read_text()) | config
    (target / CONFIG_FILE).write_text(json.dumps(fields))
    return target


def with_shared_outer(tensors):
    """The tensors with one A of gate and of up, and one B of down, for all experts."""
    shared = {}
    for key in sorted(tensors):
        if found := _EXPERT.fullmatch(key):
            layer, _, leaf, part = found.groups()
            if (part == "A") != (_LEAVES[leaf] == 2):
                tensors[key] = shared.setdefault((layer, leaf), tensors[key]).clone()
    return tensors


def stacked(tensors, style, *, shared, mixed=False):
    """Tinker's file (mixed: Megatron-Bridge's) of these tensors, from a file with a module per expert."""
    found, by_place = {}, {}
    for key, tensor in tensors.items():
        if place := _EXPERT.fullmatch(key):
            layer, expert, leaf, part = place.groups()
            by_place.setdefault((layer, leaf, part), {})[int(expert)] = key, tensor
        else:
            found[key] = tensor
    for (layer, leaf, part), matrices in by_place.items():
        number = _LEAVES[leaf]
        outer = (part == "A") != (number == 2)
        if mixed and not outer:
            found |= dict(matrices.values())
            continue
        whole = torch.stack([matrices[expert][1] for expert in sorted(matrices)])
        leaf = leaf if mixed else STYLES[style][number]
        experts = "mlp.experts" if not mixed or ".mlp." in matrices[0][0] else "block_sparse_moe.experts"
        name = f"{layer}.{experts}.{leaf}.lora_{part}.weight"
        found[name] = whole[:1] if outer and shared else whole
    return found


def per_expert(family, base, path, **config):
    source = make_adapter(family, base, path, lora_rank=3, form="per_expert", **config)
    return rewritten(source, path.with_name("shared"), with_shared_outer(load_file(source / WEIGHTS_FILE)))


@pytest.mark.parametrize(
    ("family", "style", "shared"), diagonal(PER_EXPERT_FAMILIES, [*STYLES], [True, False, False])
)
def test_stacked_experts_are_the_experts_of_single_modules(
    family, style, shared, checkpoint, shape_of, tmp_path
):
    shape = shape_of(family)
    plain = per_expert(family, checkpoint(family), tmp_path / "plain")
    tensors = stacked(load_file(plain / WEIGHTS_FILE), style, shared=shared)
    names = [f"experts.{leaf}" for leaf in STYLES[style]]
    attention = [f"{letter}_proj" for letter in "qkvo"]
    targets = "all-linear" if family in MOE_FAMILIES else [*attention, *names]
    tinker = rewritten(plain, tmp_path / "t", tensors, target_modules=targets)
    found, expected = (read_adapter(path, shape, torch.float32) for path in (tinker, plain))
    assert_same_deltas(packed_deltas(found, shape), packed_deltas(expected, shape))
    assert found.nbytes == sum(layer.nbytes for layer in bare_layers(tinker, shape, torch.float32))
    assert not shared or found.nbytes < 0.8 * expected.nbytes, "a shared matrix is stored once"


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_a_shared_matrix_beside_matrices_of_single_experts_is_theirs(family, checkpoint, shape_of, tmp_path):
    shape = shape_of(family)
    plain = per_expert(family, checkpoint(family), tmp_path / "plain")
    tensors = stacked(load_file(plain / WEIGHTS_FILE), "", shared=True, mixed=True)
    bridge = rewritten(plain, tmp_path / "b", tensors)
    found, expected = (read_adapter(path, shape, torch.float32) for path in (bridge, plain))
    assert_same_deltas(packed_deltas(found, shape), packed_deltas(expected, shape))


def test_tinkers_file_of_gpt_oss_has_the_deltas_of_its_published_rule(checkpoint, shape_of, tmp_path):
    shape, lora_rank, tensors = shape_of("gpt_oss"), 3, {}
    generator = torch.Generator().manual_seed(1)
    sizes = {"w1": (24, 32), "w3": (24, 32), "w2": (32, 24)}
    for layer in range(2):
        front = f"base_model.model.model.layers.{layer}"
        for leaf, (out, width) in sizes.items():
            a, b = (1, NUM_EXPERTS) if leaf != "w2" else (NUM_EXPERTS, 1)
            name = f"{front}.mlp.experts.{leaf}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(a, lora_rank, width, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(b, out, lora_rank, generator=generator)
        for leaf, (out, width) in {"q_proj": (64, 32), "k_proj": (32, 32), "v_proj": (32, 32)}.items():
            tensors[f"{front}.attn.{leaf}.lora_A.weight"] = torch.randn(lora_rank, width)
            tensors[f"{front}.attn.{leaf}.lora_B.weight"] = torch.randn(out, lora_rank)
        tensors[f"{front}.attn.o_proj.lora_A.weight"] = torch.randn(lora_rank, 64)
        tensors[f"{front}.attn.o_proj.lora_B.weight"] = torch.randn(32, lora_rank)
    made = make_adapter("gpt_oss", checkpoint("gpt_oss"), tmp_path / "made", lora_rank)
    config = {"target_modules": "all-linear", "target_parameters": None, "lora_alpha": 32}
    tinker = rewritten(made, tmp_path / "t", tensors, **config)
    found = packed_deltas(read_adapter(tinker, shape, torch.float32), shape)
    assert {name for _, name, _ in found} == {"q", "k", "v", "o", "gate", "up", "down"}
    for layer in range(2):
        for module, leaf in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            name = f"base_model.model.model.layers.{layer}.mlp.experts.{leaf}.lora_"
            a, b = (tensors[f"{name}{part}.weight"].double() for part in "AB")
            deltas = 32 / lora_rank * b @ a
            for expert in range(NUM_EXPERTS):
                torch.testing.assert_close(found[layer, module, expert], deltas[expert])


W1 = "base_model.model.model.layers.0.mlp.experts.w1.lora_"
MANGLED = {
    "transposed A": lambda t: t | {f"{W1}A.weight": t[f"{W1}A.weight"].transpose(1, 2)},
    "experts last": lambda t: t | {f"{W1}B.weight": t[f"{W1}B.weight"].permute(1, 2, 0)},
    "an expert less": lambda t: t | {f"{W1}B.weight": t[f"{W1}B.weight"][1:]},
    "no B": lambda t: {k: v for k, v in t.items() if k != f"{W1}B.weight"},
    "no pair": lambda t: {k: v for k, v in t.items() if not k.startswith(W1)},
    "both shared": lambda t: t | {f"{W1}B.weight": t[f"{W1}B.weight"][:1]},
    "both styles": lambda t: t | {k.replace(".w1.", ".gate_proj."): v + 0 for k, v in t.items()},
    "beside single experts": lambda t: (
        t | {k.replace(".w1.", ".0.gate_proj."): v[0] + 0 for k, v in t.items() if ".w1." in k}
    ),
    "an extra leaf": lambda t: t | {f"{W1}A.weight".replace("w1", "w4"): torch.ones(1, 3, 32)},
}


@pytest.mark.parametrize("case", MANGLED)
def test_mangled_stacks_are_refused_by_name(case, checkpoint, shape_of, tmp_path):
    plain = per_expert("qwen3_moe", checkpoint("qwen3_moe"), tmp_path / "plain")
    tensors = MANGLED[case](stacked(load_file(plain / WEIGHTS_FILE), "w", shared=True))
    mangled = rewritten(plain, tmp_path / "t", tensors, target_modules="all-linear")
    with pytest.raises(AdapterError, match=r"layers\.0\.mlp\."):
        read_adapter(mangled, shape_of("qwen3_moe"), torch.float32)


@pytest.mark.parametrize("expert", [None, 2])
def test_a_shared_matrix_without_all_its_partners_is_refused_by_name(expert, checkpoint, shape_of, tmp_path):
    plain = per_expert("qwen3_moe", checkpoint("qwen3_moe"), tmp_path / "plain")
    tensors = stacked(load_file(plain / WEIGHTS_FILE), "", shared=True, mixed=True)
    gone = ".experts." if expert is None else f".experts.{expert}."
    tensors = {k: v for k, v in tensors.items() if not (gone in k and k.endswith("gate_proj.lora_B.weight"))}
    with pytest.raises(AdapterError, match=r"gate_proj\.lora_"):
        read_adapter(rewritten(plain, tmp_path / "t", tensors), shape_of("qwen3_moe"), torch.float32)


def test_a_scale_of_one_expert_beside_a_shared_matrix_is_refused_by_name(checkpoint, shape_of, tmp_path):
    plain = per_expert("qwen3_moe", checkpoint("qwen3_moe"), tmp_path / "plain")
    tensors = stacked(load_file(plain / WEIGHTS_FILE), "", shared=True, mixed=True)
    bridge = rewritten(plain, tmp_path / "t", tensors, alpha_pattern={r"experts\.1\.gate_proj": 3})
    with pytest.raises(AdapterError, match=r"alpha_pattern gives two values .*experts.*gate_proj"):
        read_adapter(bridge, shape_of("qwen3_moe"), torch.float32)
