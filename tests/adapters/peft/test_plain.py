# SPDX-License-Identifier: Apache-2.0
"""Adapters of each form, converted to PEFT's own, against the source and against peft."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.adapters.registry.base_model import model_shape
from moe_lora.cli.main import main
from tests.adapters.dense import assert_same_deltas, packed_deltas, peft_deltas
from tests.adapters.peft.test_outer_sites import change, outer_adapter
from tests.adapters.peft.test_stacked import per_expert, rewritten, stacked
from tests.families import (
    ALL_FAMILIES,
    ALL_TARGETS,
    MOE_FAMILIES,
    PER_EXPERT_FAMILIES,
    load_model,
    make_adapter,
    make_checkpoint,
)
from tests.grids import with_quick

pytestmark = pytest.mark.filterwarnings("ignore")


def converted(source, target, base):
    """`moe-lora adapters convert` of the folder."""
    result = CliRunner().invoke(main, ["adapters", "convert", str(source), str(target), "--model", str(base)])
    assert result.exit_code == 0, result.output
    return target


def assert_converts(family, base, source, target, shape, *, loads=False):
    """The new folder has the source's deltas, by our reader and peft.  loads: peft loads the source too."""
    converted(source, target, base)
    expected = packed_deltas(read_adapter(source, shape, torch.float32), shape)
    assert_same_deltas(packed_deltas(read_adapter(target, shape, torch.float32), shape), expected)
    nonzero = {key: delta for key, delta in expected.items() if delta.any()}
    expected = peft_deltas(family, base, source) if loads else nonzero
    assert_same_deltas(peft_deltas(family, base, target), expected)


QUICK = ("llama", "gpt_oss", "dbrx", "glm4_moe", "qwen3_5_moe", "deepseek_v3", "gemma4")
QUICK += ("qwen3_vl_moe", "granitemoeshared")


@pytest.mark.parametrize("family", with_quick(ALL_FAMILIES, QUICK))
def test_pefts_own_form_stays(family, checkpoint, shape_of, tmp_path):
    targets = ALL_TARGETS if family not in MOE_FAMILIES else ("router", *ALL_TARGETS)
    expert = {"dbrx": "mlp.w2", "llama": "down_proj", "qwen3": "down_proj"}.get(family, "experts.down_proj")
    patterns = {"rank_pattern": {expert: 6}, "alpha_pattern": {expert: 5, "o_proj": 1}, "use_rslora": True}
    source = make_adapter(family, checkpoint(family), tmp_path / "a", 4, targets=targets, **patterns)
    assert_converts(family, checkpoint(family), source, tmp_path / "b", shape_of(family), loads=True)


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_modules_of_single_experts_become_parameters(family, checkpoint, shape_of, tmp_path):
    leaf = "w3" if family in ("mixtral", "minimax_m2") else "up_proj"
    patterns = {"rank_pattern": {f"experts.1.{leaf}": 2}, "alpha_pattern": {f"experts.2.{leaf}": 3}}
    targets = ("router", *ALL_TARGETS)
    whole = make_adapter(family, checkpoint(family), tmp_path / "a", form="per_expert", targets=targets)
    tensors = load_file(whole / WEIGHTS_FILE)
    for key, tensor in tensors.items():
        if f"experts.1.{leaf}." in key:
            tensors[key] = tensor[:2] if "lora_A" in key else tensor[:, :2]
    source = rewritten(whole, tmp_path / "c", tensors, **patterns)
    assert_converts(family, checkpoint(family), source, tmp_path / "b", shape_of(family))


def test_a_converted_square_parameter_names_the_version_with_its_layout(tmp_path):
    base = make_checkpoint("mixtral", tmp_path / "base", intermediate_size=16)
    source = make_adapter("mixtral", base, tmp_path / "a", targets=("gate_up",))
    assert_converts("mixtral", base, source, tmp_path / "b", model_shape(base), loads=True)


@pytest.mark.parametrize("mixed", [False, True], ids=["tinker", "bridge"])
def test_stacked_experts_become_parameters(mixed, checkpoint, shape_of, tmp_path):
    base = checkpoint("qwen3_moe")
    plain = per_expert("qwen3_moe", base, tmp_path / "plain")
    tensors = stacked(load_file(plain / WEIGHTS_FILE), "w", shared=True, mixed=mixed)
    config = {} if mixed else {"target_modules": "all-linear"}
    source = rewritten(plain, tmp_path / "t", tensors, **config)
    assert_converts("qwen3_moe", base, source, tmp_path / "b", shape_of("qwen3_moe"))


def test_pairs_of_some_layers_and_outside_the_layers_stay(checkpoint, shape_of, tmp_path):
    base = checkpoint("mixtral")
    source = outer_adapter(
        "mixtral", base, tmp_path / "a", "lm_head", "embed_tokens", rank_pattern={r"1\.self_attn\.q_proj": 2}
    )
    assert_converts("mixtral", base, source, tmp_path / "b", shape_of("mixtral"))
    names = json.loads((tmp_path / "b" / CONFIG_FILE).read_text())["target_modules"]
    assert names == ["lm_head", "model.embed_tokens", "self_attn.o_proj", "self_attn.q_proj"]


def test_trained_embeddings_and_used_folders_are_refused(checkpoint, tmp_path):
    base = checkpoint("mixtral")
    source = outer_adapter("mixtral", base, tmp_path / "a", "lm_head")
    arguments = ["adapters", "convert", str(source), str(tmp_path / "b"), "--model", str(base)]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, "is not empty" in result.output) == (1, True)

    def alter(tensors):
        tensors["base_model.model.lm_head.base_layer.weight"] += 1
        return tensors

    change(source, alter)
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, "values other than the base" in result.output) == (1, True)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_an_initialisation_that_changes_the_base_converts_as_peft_converts_it(
    init, checkpoint, shape_of, tmp_path
):
    from peft import LoraConfig, get_peft_model

    base, shape = checkpoint("llama"), shape_of("llama")
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    model = get_peft_model(load_model(base), config)
    model.save_pretrained(str(tmp_path / "initial"))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(str(tmp_path / "a"))
    arguments = ["adapters", "convert", str(tmp_path / "a"), str(tmp_path / "b"), "--model", str(base)]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, "--initial INITIAL" in result.output) == (1, True)
    result = CliRunner().invoke(main, [*arguments, "--initial", str(tmp_path / "initial")])
    assert result.exit_code == 0, result.output
    merged, before = model.merge_and_unload().state_dict(), load_model(base).state_dict()
    found = packed_deltas(read_adapter(tmp_path / "b", shape, torch.float32), shape)
    assert len(found) == 4
    for (layer, module, _), delta in found.items():
        path = {"q": "self_attn.q_proj", "down": "mlp.down_proj"}[module]
        key = f"model.layers.{layer}.{path}.weight"
        torch.testing.assert_close(delta.float(), merged[key] - before[key], rtol=1e-3, atol=1e-5)
    other = make_adapter("llama", base, tmp_path / "other")
    arguments[3] = str(tmp_path / "c")
    result = CliRunner().invoke(main, [*arguments, "--initial", str(other)])
    assert (result.exit_code, "adapts other modules" in result.output) == (1, True)
