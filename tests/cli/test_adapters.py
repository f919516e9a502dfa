# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from moe_lora.cli.adapters import adapters
from tests.families import make_adapter, make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, and a folder with two good adapters and one of unknown kind."""
    root = tmp_path_factory.mktemp("cli")
    model = make_checkpoint("mixtral", root / "model")
    zoo = root / "zoo"
    make_adapter("mixtral", model, zoo / "attention", lora_rank=2, targets=("qkv", "o"))
    make_adapter("mixtral", model, zoo / "experts", lora_rank=6, form="per_expert")
    (zoo / "odd").mkdir()
    (zoo / "odd" / "adapter_config.json").write_text(json.dumps({"peft_type": "VERA"}))
    return model, zoo


def run(*args):
    return CliRunner().invoke(adapters, [str(arg) for arg in args])


def test_check_prints_rank_targets_and_bytes_of_a_good_adapter(folders):
    model, zoo = folders
    result = run("check", zoo / "attention", "--model", model)
    assert result.exit_code == 0, result.output
    assert "attention: ok: rank 2" in result.output
    assert "targets q k v o," in result.output


@pytest.mark.parametrize(("lora_rank", "refused"), [(512, ""), (513, " (refuses this adapter)")])
def test_check_prints_the_rank_limit_of_each_backend(folders, tmp_path, lora_rank, refused):
    model, _ = folders
    make_adapter("mixtral", model, tmp_path / "a", lora_rank=lora_rank, targets=("o",))
    result = run("check", tmp_path / "a", "--model", model)
    assert result.exit_code == 0, result.output
    assert f"; cpu: any rank, cuda: ranks up to 512{refused};" in result.output


def test_check_says_which_names_match_nothing(folders, tmp_path):
    model, _ = folders
    names = ["q_proj", "gate_proj", "up_proj"]
    make_adapter("mixtral", model, tmp_path / "a", target_modules=names, target_parameters=None)
    result = run("check", tmp_path / "a", "--model", model)
    assert result.exit_code == 0
    warning, ok = result.output.splitlines()
    assert warning.startswith("a: warning: ")
    assert "'gate_proj', 'up_proj' match nothing" in warning
    assert ok.startswith("a: ok: rank 4")


def test_check_says_what_becomes_of_a_chat_template_beside_an_adapter(folders, tmp_path):
    model, _ = folders
    make_adapter("mixtral", model, tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    result = run("check", tmp_path / "a", "--model", model)
    assert result.exit_code == 0
    ok, note = result.output.splitlines()
    assert ok.startswith("a: ok: ")
    assert note.startswith("a: note: its folder has a chat template: ignored without --adapter-chat-template")


def test_check_of_a_folder_names_each_refusal_and_exits_with_1(folders):
    model, zoo = folders
    result = run("check", zoo, "--model", model)
    assert result.exit_code == 1
    assert "experts: ok: rank 6" in result.output
    assert "odd: error:" in result.output
    assert "peft_type='VERA'" in result.output


def test_list_prints_one_row_per_adapter(folders):
    model, zoo = folders
    result = run("list", zoo, "--model", model)
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.output.splitlines()]
    assert names == ["name", "attention", "experts", "odd"]


def test_model_folder_without_config_is_refused(folders):
    _, zoo = folders
    result = run("check", zoo, "--model", zoo)
    assert result.exit_code == 1
    assert "config.json" in result.output


def test_command_definition_imports_no_torch():
    code = "import sys, moe_lora.cli.adapters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
