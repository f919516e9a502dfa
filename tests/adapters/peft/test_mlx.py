# SPDX-License-Identifier: Apache-2.0
"""Adapters of mlx-lm: deltas by its published rule, and refusals of what it can't mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_lora.adapters.peft.files import CONFIG_FILE, MLX_FILE, WEIGHTS_FILE, read_config
from moe_lora.adapters.peft.reader import bare_layers, read_adapter
from moe_lora.core.errors import AdapterError
from tests.adapters.dense import assert_same_deltas, packed_deltas
from tests.adapters.peft.mlx_files import TRAINING, as_mlx, written
from tests.adapters.peft.test_columns import column_adapter
from tests.adapters.peft.test_stacked import per_expert, stacked
from tests.families import NUM_EXPERTS, make_adapter

RANK = 3
CONTAINERS = {
    "gpt_oss": "mlp.experts",
    "gemma4": "experts.switch_glu",
    "granitemoe": "block_sparse_moe.switch_mlp",
    "phimoe": "block_sparse_moe.switch_mlp",
    "qwen3_next": "mlp.switch_mlp",
    "deepseek_v3": "mlp.switch_mlp",
    "qwen3_moe": "mlp.switch_mlp",
    "mixtral": "block_sparse_moe.switch_mlp",
}
OUTPUTS = {"o", "global_o"}
MODULES = ("gate_proj", "up_proj", "down_proj")


def config(**fields):
    parameters = {"rank": RANK, "scale": 20.0, "dropout": 0.0}
    return {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters, **TRAINING, **fields}


def tensors_of(family, shape, front="model.layers", layers=None):
    """Pairs of all experts' matrices and of the output projections."""
    generator, found = torch.Generator().manual_seed(1), {}

    def pair(module, a, b):
        found[f"{module}.lora_a"] = torch.randn(a, generator=generator)
        found[f"{module}.lora_b"] = torch.randn(b, generator=generator)

    hidden, sites = shape.hidden_size, shape.sites_by_name
    for layer in range(shape.num_layers) if layers is None else layers:
        if shape.has_site(layer, "down"):
            inner, experts = sites["down"].in_features, sites["down"].num_experts
            for leaf, (width, out) in zip(
                MODULES, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True
            ):
                name = f"{front}.{layer}.{CONTAINERS[family]}.{leaf}"
                pair(name, (experts, RANK, width), (experts, out, RANK))
        for site in OUTPUTS.intersection(sites):
            if shape.has_site(layer, site):
                module = f"{front}.{layer}.self_attn.o_proj"
                pair(module, (sites[site].in_features, RANK), (RANK, hidden))
    return found


@pytest.mark.parametrize("older", [False, True], ids=["by expert", "flat"])
@pytest.mark.parametrize("family", CONTAINERS)
def test_deltas_are_those_of_the_published_rule(family, older, shape_of, tmp_path):
    """y += scale · (x a) b; before October 2025 all experts' a were one matrix."""
    shape = shape_of(family)
    tensors = tensors_of(family, shape)
    flat = {
        key: value.flatten(0, 1) if older and value.dim() == 3 and key.endswith("lora_a") else value
        for key, value in tensors.items()
    }
    folder = written(tmp_path / "a", flat, config())
    packed = read_adapter(folder, shape, torch.float32)
    found = packed_deltas(packed, shape)
    assert packed.nbytes == sum(layer.nbytes for layer in bare_layers(folder, shape, torch.float32))
    expected = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_a"):
            continue
        b, layer = tensors[f"{key[:-1]}b"].double(), int(key.split(".")[2])
        leaf = key.split(".")[-2].removesuffix("_proj")
        if a.dim() == 2:
            leaf = next(
                one for one in OUTPUTS.intersection(shape.sites_by_name) if shape.has_site(layer, one)
            )
            expected[layer, leaf, 0] = 20 * (a.double() @ b).T
            continue
        for expert in range(len(a)):
            expected[layer, leaf, expert] = 20 * b[expert] @ a[expert].double()
    assert_same_deltas(found, expected)


@pytest.mark.parametrize("front", ["model.layers", "language_model.model.layers"])
def test_the_gate_and_projections_are_those_of_peft(front, checkpoint, shape_of, tmp_path):
    """The last layer alone; its keys are named."""
    plain = make_adapter(
        "mixtral", checkpoint("mixtral"), tmp_path / "p", RANK, targets=("qkv", "o", "router")
    )
    tensors = {key: one for key, one in load_file(plain / WEIGHTS_FILE).items() if ".layers.1." in key}
    mlx = as_mlx(plain, tmp_path / "m", "mixtral", tensors, num_layers=1)
    if front != "model.layers":
        renamed = {key.replace("model.layers", front): one for key, one in load_file(mlx / MLX_FILE).items()}
        mlx = written(tmp_path / "w", renamed, json.loads((mlx / CONFIG_FILE).read_text()))
    shape = shape_of("mixtral")
    found, whole = (packed_deltas(read_adapter(one, shape, torch.float32), shape) for one in (mlx, plain))
    assert_same_deltas(found, {key: delta for key, delta in whole.items() if key[0] == 1})


def test_magnitudes_of_dora_are_those_of_peft(checkpoint, shape_of, tmp_path):
    base, shape = checkpoint("llama"), shape_of("llama")
    plain = column_adapter("llama", base, tmp_path / "p", lora_rank=RANK, use_dora=True)
    mlx = as_mlx(plain, tmp_path / "m")
    found, expected = (read_adapter(path, shape, torch.float32, "a", base_dir=base) for path in (mlx, plain))
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(one.data, other.data)
        assert torch.equal(one.table, other.table)


LAYER = "model.layers.0."
UP = f"{LAYER}mlp.switch_mlp.up_proj.lora_"
O_PROJ = f"{LAYER}self_attn.o_proj.lora_"
MANGLED = {
    "an expert less": lambda t: t | {f"{UP}b": t[f"{UP}b"][1:]},
    "a flat matrix of fewer experts": lambda t: t | {f"{UP}a": t[f"{UP}a"].flatten(0, 1)[RANK:]},
    "experts as PEFT turns them": lambda t: t | {f"{UP}a": t[f"{UP}a"].transpose(1, 2)},
    "a matrix as PEFT turns it": lambda t: t | {f"{O_PROJ}a": t[f"{O_PROJ}a"].T},
    "no b": lambda t: {key: one for key, one in t.items() if key != f"{UP}b"},
    "no pair": lambda t: {key: one for key, one in t.items() if not key.startswith(UP)},
    "another rank": lambda t: t | {f"{O_PROJ}a": t[f"{O_PROJ}a"][:, 1:], f"{O_PROJ}b": t[f"{O_PROJ}b"][1:]},
    "a magnitude": lambda t: t | {f"{LAYER}self_attn.o_proj.m": torch.ones(32)},
    "a name of PEFT": lambda t: t | {f"base_model.model.{O_PROJ}A.weight": torch.ones(RANK, 32)},
    "two names of a place": lambda t: (
        t
        | {f"language_model.{O_PROJ}a": t[f"{O_PROJ}a"] + 0, f"language_model.{O_PROJ}b": t[f"{O_PROJ}b"] + 0}
    ),
    "the embedding": lambda t: (
        t
        | {
            "model.embed_tokens.lora_a": torch.ones(96, RANK),
            "model.embed_tokens.lora_b": torch.ones(RANK, 32),
        }
    ),
    "a layer too many": lambda t: t | {f"model.layers.7{O_PROJ[len(LAYER) - 1 :]}a": t[f"{O_PROJ}a"] + 0},
    "an unknown module": lambda t: t | {f"{LAYER}mlp.switch_mlp.w9.lora_a": t[f"{UP}a"] + 0},
    "a whole weight": lambda t: t | {f"{LAYER}input_layernorm.weight": torch.ones(32)},
}


@pytest.mark.parametrize("case", MANGLED)
def test_mangled_files_are_refused_by_name(case, shape_of, tmp_path):
    shape = shape_of("qwen3_moe")
    tensors = {key: one.contiguous() for key, one in MANGLED[case](tensors_of("qwen3_moe", shape)).items()}
    folder = written(tmp_path / "a", tensors, config())
    with pytest.raises(AdapterError) as refusal:
        read_adapter(folder, shape, torch.float32)
    assert MLX_FILE in str(refusal.value)
    assert "; " in str(refusal.value)


ALPHA = {"rank": RANK, "scale": 1.0, "alpha": 16}
FIELDS = {
    "full": ({"fine_tune_type": "full"}, "fine_tune_type='full'"),
    "no rank": ({"lora_parameters": {"scale": 1.0}}, "a rank from 1 on"),
    "no object": ({"lora_parameters": 3}, "a rank from 1 on"),
    "a rank of text": ({"lora_parameters": {"rank": "3", "scale": 1.0}}, "a rank from 1 on"),
    "no number": ({"lora_parameters": {"rank": RANK, "scale": float("nan")}}, "a rank from 1 on"),
    "an alpha of early versions": (
        {"num_layers": None, "lora_layers": 2, "lora_parameters": ALPHA},
        "multiplied the scale",
    ),
    "no layers": ({"num_layers": None}, "lora_layers=None"),
    "fewer layers": ({"num_layers": 1}, "num_layers or lora_parameters.keys"),
    "other keys": (
        {"lora_parameters": {"rank": RANK, "scale": 1.0, "keys": ["self_attn.o_proj"]}},
        "num_layers or lora_parameters.keys",
    ),
    "more keys": (
        {
            "lora_parameters": {
                "rank": RANK,
                "scale": 1.0,
                "keys": [
                    "self_attn.o_proj",
                    "self_attn.q_proj",
                    *(f"mlp.switch_mlp.{one}" for one in MODULES),
                ],
            }
        },
        "q_proj",
    ),
    "keys of text": ({"lora_parameters": {"rank": RANK, "scale": 1.0, "keys": "o_proj"}}, "a list of names"),
    "another base": ({"model": "mixtral"}, "base_model_name_or_path"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_configs_without_one_meaning_are_refused(case, checkpoint, shape_of, tmp_path):
    fields, said = FIELDS[case]
    if "model" in fields:
        fields = {"model": str(checkpoint(fields["model"]))}
    shape = shape_of("qwen3_moe")
    made = {key: value for key, value in config(**fields).items() if value is not None}
    folder = written(tmp_path / "a", tensors_of("qwen3_moe", shape), made)
    with pytest.raises(AdapterError, match=said) as refusal:
        read_adapter(folder, shape, torch.float32)
    assert "; " in str(refusal.value)


def test_an_alpha_beside_num_layers_has_no_effect(shape_of, tmp_path):
    """mlx-lm reads scale alone since it writes num_layers."""
    shape, deltas = shape_of("qwen3_moe"), []
    for number, parameters in enumerate((ALPHA, {**ALPHA, "alpha": RANK})):
        tensors = tensors_of("qwen3_moe", shape)
        folder = written(tmp_path / str(number), tensors, config(lora_parameters=parameters))
        deltas.append(packed_deltas(read_adapter(folder, shape, torch.float32), shape))
    assert_same_deltas(*deltas)


def test_a_missing_file_and_a_registry_name_the_way_out(shape_of, tmp_path):
    shape = shape_of("qwen3_moe")
    folder = written(tmp_path / "a", tensors_of("qwen3_moe", shape), config())
    with pytest.raises(AdapterError, match="adapters convert SRC DST"):
        read_config(folder)
    Path(folder, MLX_FILE).unlink()
    with pytest.raises(AdapterError, match=rf"{MLX_FILE}: missing; copy"):
        read_adapter(folder, shape, torch.float32)


def test_per_expert_files_are_the_same_in_mlx_form(checkpoint, shape_of, tmp_path):
    shape = shape_of("minimax_m2")
    plain = per_expert("minimax_m2", checkpoint("minimax_m2"), tmp_path / "p")
    tensors = stacked(load_file(plain / WEIGHTS_FILE), "proj", shared=False)
    mlx = as_mlx(plain, tmp_path / "m", "minimax_m2", tensors)
    found, expected = (packed_deltas(read_adapter(one, shape, torch.float32), shape) for one in (mlx, plain))
    assert_same_deltas(found, expected)
    assert max(expert for _, _, expert in found) == NUM_EXPERTS - 1
