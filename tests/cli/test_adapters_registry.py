# SPDX-License-Identifier: Apache-2.0
"""`moe-lora adapters` over a registry, with the demo's model and adapters."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_lora.adapters.registry.base_model import base_model_hash
from moe_lora.adapters.registry.registry import Registry
from moe_lora.cli.main import main
from tests.adapters.peft_folders import OTHER_BASE, alter, peft_folder

DEMO = Path(__file__).parents[2] / "demo"
MODEL, UPPER, ROT13 = DEMO / "model", DEMO / "adapters" / "upper", DEMO / "adapters" / "rot13-r2"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "registry"


def run(*words, fails: int = 0) -> str:
    result = CliRunner().invoke(main, ["adapters", *map(str, words)])
    assert result.exit_code == fails, result.output
    return result.output


def test_what_is_added_is_listed_shown_checked_and_removed(folder):
    added = run("add", UPPER, ROT13, "--registry", folder, "--model", MODEL, "--owner", "me")
    assert [line.split()[:3] for line in added.splitlines()] == [
        ["upper:", "version", "1,"],
        ["rot13-r2:", "version", "1,"],
    ]
    listed = run("list", "--registry", folder, "--model", MODEL).splitlines()
    assert [line.split()[0] for line in listed] == ["name", "rot13-r2", "upper"]
    assert listed[2].split()[4:] == ["ready", base_model_hash(MODEL)[:12], "me"]
    shown = run("show", "upper", "--registry", folder)
    assert "upper version 1: ready" in shown
    assert "rank        4\n" in shown
    assert base_model_hash(MODEL) in shown
    assert str(UPPER) in shown
    assert "upper: version 1: ok: 199,891 bytes" in run("check", "--registry", folder)
    assert run("remove", "upper", "--registry", folder) == "upper: version 1 removed\n"
    assert "upper" not in run("list", "--registry", folder)
    assert "upper version 1: removed" in run("show", "upper", "--registry", folder)
    assert "removed before" in run("remove", "upper", "--registry", folder, fails=1)


def test_all_adapters_of_a_folder_are_added(folder, tmp_path):
    for source in (UPPER, ROT13):
        shutil.copytree(source, tmp_path / "zoo" / source.name)
    run("add", tmp_path / "zoo", "--registry", folder, "--model", MODEL)
    assert len(run("list", "--registry", folder).splitlines()) == 3
    refused = run("add", tmp_path / "zoo", "--name", "x", "--registry", folder, "--model", MODEL, fails=2)
    assert "--name" in refused


def test_an_adapter_with_checkpoints_is_one_adapter(folder, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(UPPER, out)
    shutil.copytree(ROT13, out / "checkpoint-500")
    assert run("add", out, "--registry", folder, "--model", MODEL).startswith("out: version 1, ")
    assert [line.split()[0] for line in run("list", "--registry", folder).splitlines()] == ["name", "out"]
    assert [line.split()[0] for line in run("list", out, "--model", MODEL).splitlines()] == ["name", "out"]
    (out / "adapter_config.json").write_text("{}")
    assert "out: error: " in run("check", out, "--model", MODEL, fails=1)


def test_a_name_gets_versions(folder):
    for source in (UPPER, ROT13, ROT13):
        said = run("add", source, "--name", "x", "--registry", folder, "--model", MODEL)
    assert "x: version 2," in said
    assert "version 2: ready" in run("show", "x", "--version", 2, "--registry", folder)
    run("remove", "x", "--version", 2, "--registry", folder)
    assert run("list", "--registry", folder).splitlines()[1].split()[:2] == ["x", "1"]


def test_damage_is_said_with_the_file_and_the_way_out_and_exits_with_1(folder):
    run("add", UPPER, "--registry", folder, "--model", MODEL)
    with Registry(folder) as registry:
        path = Path(registry.get("upper").path) / "adapter_model.safetensors"
    alter(path)
    said = run("check", "--registry", folder, fails=1)
    assert f"upper: version 1: error: {path} was altered" in said
    assert "add it again from its source" in said
    assert run("list", "--registry", folder).splitlines()[1].split()[4] == "broken"
    run("add", UPPER, "--registry", folder, "--model", MODEL)
    run("check", "--registry", folder)


def test_linked_files_are_not_copied(folder):
    run("add", UPPER, "--registry", folder, "--model", MODEL, "--link")
    with Registry(folder) as registry:
        assert os.path.islink(Path(registry.get("upper").path) / "adapter_model.safetensors")
    run("check", "--registry", folder)


def test_list_with_a_model_leaves_out_other_bases(folder, tmp_path):
    run("add", UPPER, "--registry", folder, "--model", MODEL)
    with Registry(folder) as registry:
        registry.add("foreign", peft_folder(tmp_path / "x", 1), base_hash=OTHER_BASE)
    assert len(run("list", "--registry", folder).splitlines()) == 3
    assert len(run("list", "--registry", folder, "--model", MODEL).splitlines()) == 2


def test_what_the_base_could_not_serve_is_not_added(folder, tmp_path):
    said = run("add", peft_folder(tmp_path / "odd", 1), "--registry", folder, "--model", MODEL, fails=1)
    assert "base_model.model.q_proj.lora_A.weight" in said
    assert len(run("list", "--registry", folder).splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["check"], 2, "--registry"),
        (["list"], 2, "--registry"),
        (["check", UPPER], 2, "--model"),
        (["check", UPPER, "--model", MODEL, "--registry", "r"], 2, "not both"),
        (["check", "--registry", "r", "--model", MODEL], 2, "--model"),
        (["list", "--registry", "nowhere"], 1, "no registry at"),
        (["show", "x", "--registry", DEMO], 1, "not a registry"),
        (["remove", "x"], 2, "--registry"),
        (["remove", "x", "--version", "0", "--registry", "r"], 2, "--version"),
        (["add", UPPER, ROT13, "--name", "x", "--registry", "r", "--model", MODEL], 2, "--name"),
        (["add", UPPER, "--name", "a,b", "--registry", "r", "--model", MODEL], 1, "the name 'a,b'"),
        (["add", UPPER, "--registry", "r", "--model", UPPER], 1, "config.json"),
        (["add", "--registry", "r", "--model", MODEL], 2, "PATH"),
    ],
)
def test_what_can_not_be_is_refused_in_words(tmp_path, monkeypatch, words, code, named):
    monkeypatch.chdir(tmp_path)
    assert named in run(*words, fails=code)
