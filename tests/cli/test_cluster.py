# SPDX-License-Identifier: Apache-2.0
"""`moe-lora cluster`: certificates that roles on several hosts know each other by, and clusters on Ray."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from moe_lora.cli.main import main
from moe_lora.dist import launch
from moe_lora.dist.net.keys import AUTHORITY, AUTHORITY_KEY, MEMBER, Keys


def test_certificates_are_made_where_they_are_wanted_and_only_once(tmp_path):
    folder = tmp_path / "certificates"
    done = CliRunner().invoke(main, ["cluster", "init", "--folder", str(folder)])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in folder.iterdir()) == sorted((AUTHORITY, AUTHORITY_KEY, MEMBER))
    assert AUTHORITY in done.output
    assert Keys(folder).context(server=True).verify_mode
    again = CliRunner().invoke(main, ["cluster", "init", "--folder", str(folder)])
    assert again.exit_code == 1
    assert "has one authority" in again.output


def test_the_folder_of_the_file_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["cluster", "init"]).exit_code == 0
    assert (tmp_path / "certificates" / MEMBER).is_file()


@pytest.mark.parametrize("command", ["up FILE --on ray", "status", "scale instance 2", "down"])
def test_commands_on_ray_name_the_missing_package(command, tmp_path, monkeypatch):
    file = tmp_path / "cluster.yaml"
    file.write_text("model_dir: /models/base")
    monkeypatch.setitem(sys.modules, "ray", None)
    for module in ("ray_cluster", "ray_keeper"):
        monkeypatch.delitem(sys.modules, f"moe_lora.dist.launch.{module}", raising=False)
        monkeypatch.delattr(launch, module, raising=False)
    done = CliRunner().invoke(main, ["cluster", *command.replace("FILE", str(file)).split()])
    assert done.exit_code == 1
    assert "Ray is not installed; call on every host: pip install 'moe-lora[ray]'" in done.output
