# SPDX-License-Identifier: Apache-2.0
"""The tool and the form that `adapters check` names."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.cli.main import main
from tests.adapters.peft.test_outer_sites import outer_adapter
from tests.adapters.peft.test_stacked import per_expert, rewritten, stacked
from tests.families import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore")
BASE = "qwen3_moe"


def adapter_of(tool, base, path):
    """A folder as the tool writes one."""
    if tool == "PEFT":
        return make_adapter(BASE, base, path / "a")
    if tool == "Unsloth":
        source = make_adapter(BASE, base, path / "a")
        return rewritten(source, path / "u", load_file(source / WEIGHTS_FILE), lora_B_layout="rank_major")
    plain = per_expert(BASE, base, path / "p")
    if tool == "none":
        return plain
    mixed = tool == "Megatron-Bridge"
    tensors = stacked(load_file(plain / WEIGHTS_FILE), "w", shared=True, mixed=mixed)
    return rewritten(plain, path / "t", tensors, **({} if mixed else {"target_modules": "all-linear"}))


SAID = {
    "PEFT": "written by PEFT 0.21.2: linear layers, 3-D parameters of all experts",
    "Unsloth": "written by Unsloth: linear layers, 3-D parameters of all experts",
    "Tinker": "written by Tinker: linear layers, tensors with a dim of experts",
    "Megatron-Bridge": "written by Megatron-Bridge: linear layers, a matrix of all experts beside one per",
    "none": "written by a tool that the files do not name: linear layers, a module per expert",
}


@pytest.mark.parametrize("tool", SAID)
def test_the_check_names_tool_and_form(tool, checkpoint, tmp_path):
    base = checkpoint(BASE)
    adapter = adapter_of(tool, base, tmp_path)
    fields = json.loads((adapter / CONFIG_FILE).read_text())
    if tool == "PEFT":
        (adapter / CONFIG_FILE).write_text(
            json.dumps(fields | {"peft_version": "0.21.2", "lora_dropout": 0.1})
        )
    result = CliRunner().invoke(main, ["adapters", "check", str(adapter), "--model", str(base)])
    assert result.exit_code == 0, result.output
    assert SAID[tool] in result.output
    assert ("without effect: lora_dropout=0.1" in result.output) == (tool == "PEFT")


def test_the_check_names_pairs_outside_the_layers_and_base_weights_without_effect(checkpoint, tmp_path):
    base = checkpoint("llama")
    adapter = outer_adapter("llama", base, tmp_path / "a", "lm_head", "embed_tokens")
    result = CliRunner().invoke(main, ["adapters", "check", str(adapter), "--model", str(base)])
    assert result.exit_code == 0, result.output
    assert "linear layers, the vocabulary head, the embedding" in result.output
    assert "base_model.model.lm_head.base_layer.weight (the base's own weights)" in result.output
    assert "lm_head embed_tokens, sha256" in result.output
