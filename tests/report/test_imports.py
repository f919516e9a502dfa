# SPDX-License-Identifier: Apache-2.0
"""The torch-free rooms stay torch-free, and light ones light."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("moe_lora.workload", ["torch", "httpx", "matplotlib", "rich"]),
        ("moe_lora.report", ["torch", "httpx", "matplotlib", "rich"]),
        ("moe_lora.report.replay", ["torch", "matplotlib"]),
        ("moe_lora.report.html", ["torch", "httpx", "matplotlib.pyplot"]),
        ("moe_lora.cli.main", ["torch", "httpx", "matplotlib", "rich", "numpy", "transformers", "fastapi"]),
    ],
)
def test_import_pulls_in_no_heavy_library(module: str, absent: list[str]) -> None:
    program = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
