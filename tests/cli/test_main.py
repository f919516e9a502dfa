# SPDX-License-Identifier: Apache-2.0
"""The group, its lazy commands, and arguments of several values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_lora.cli.main import COMMANDS, main
from moe_lora.cli.options import expand


def test_help_lists_every_command_without_importing_one() -> None:
    program = (
        "import sys\nfrom moe_lora.cli.main import COMMANDS, main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "loaded = [n for n in COMMANDS if 'moe_lora.cli.' + n.replace('-', '_') in sys.modules]\n"
        "print('loaded', loaded, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "loaded [] False" in done.stdout
    for name, told in COMMANDS.items():
        assert name in done.stdout
        assert told in done.stdout


def test_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["sevre"])
    assert result.exit_code == 2
    assert result.output.startswith("Usage: moe-lora "), "in any way of starting"
    assert "No such command 'sevre'" in result.output


def test_env_is_shown_as_lines_and_as_json() -> None:
    assert "python" in CliRunner().invoke(main, ["env"]).output
    found = json.loads(CliRunner().invoke(main, ["env", "--json"]).output)
    assert {"cpu_model", "cpu_cores", "memory_bytes", "git_commit", "packages"} <= set(found)


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        (["--m", "a", "b", "c"], ["--m", "a", "--m", "b", "--m", "c"]),
        (["x", "--m", "a", "b", "--n", "1", "y"], ["x", "--m", "a", "--m", "b", "--n", "1", "y"]),
        (["--m", "a", "--m", "b"], ["--m", "a", "--m", "b"]),
        (["--n", "1", "2"], ["--n", "1", "2"]),
        (["--m=a", "b"], ["--m=a", "b"]),
    ],
)
def test_several_values_become_repeated_options(given: list[str], expanded: list[str]) -> None:
    assert expand(given, ["--m"]) == expanded


def test_report_refuses_a_file_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    result = CliRunner().invoke(main, ["report", str(tmp_path / "x.json"), "--out", str(tmp_path / "r.html")])
    assert result.exit_code == 1
    assert "no 'label' in it" in result.output
