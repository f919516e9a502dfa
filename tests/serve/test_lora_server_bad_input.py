# SPDX-License-Identifier: Apache-2.0
"""What a user may type wrong about the LoRA Server: one line, at start, that names the setting."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from moe_lora.cli.main import main

from .demo_server import DEMO


def run(*words: str) -> str:
    """The one line that `moe-lora serve` ends with."""
    options = ["--port", "0", "--threads", "1", "--eager", "--lora-dir", str(DEMO / "adapters"), *words]
    result = CliRunner().invoke(main, ["serve", str(DEMO / "model"), *options])
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    [line] = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    return line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--lora-server", "EP3-PP1"],
            r"lora_server='EP3-PP1': 3 does not divide num_experts=8; choose 1, 2",
        ),
        (["--lora-server", "EPx"], r"lora_server='EPx' is no layout; choose EPx-PPy"),
        (["--lora-server", "EP0-PP1"], r"lora_server='EP0-PP1' is no layout"),
        (["--lora-server", "EP1-PP99"], r"lora_server='EP1-PP99': 99 stages are more than num_layers="),
        (
            ["--lora-server", "EP1-PP1", "--lora-capacity", "0"],
            r"--lora-capacity.*0 is not in the range x>=1",
        ),
        (
            ["--lora-server", "EP1-PP1", "--set", "lora_server.transport=pigeon"],
            r"lora_server.transport='pigeon' is not known; choose one of shm, gloo, nixl",
        ),
        (
            ["--lora-server", "EP1-PP1", "--lora-server-memory-gb", "0.000001"],
            r"lora_server.memory_gb=1e-06 is too small for adapter '.*' of .*; a rank .* at least 0\.0",
        ),
        (["--lora-server", "EP1-PP1", "--lora-server-memory-gb", "-1"], r"memory_gb=-1.0 must be positive"),
        (
            ["--lora-server", "EP1-PP1", "--set", "lora_server.load_gb_per_s=0"],
            r"load_gb_per_s=0.0 must be positive",
        ),
    ],
)
def test_setting_that_can_not_work_is_named_at_start(words, reason):
    assert re.search(reason, run(*words))
