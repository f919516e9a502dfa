# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(marked):
    """The tests of this folder that use a device; Triton reads the variable when it is first imported."""
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    names = (
        "exchange",
        "experts",
        "lora",
        "quantised_linear",
        "sampling",
        "segments",
        "signals",
        "stability",
        "triton_attention",
    )
    files = [folder / f"test_{name}.py" for name in names]
    of_engine = ("host_reads", "launches", "pushed", "step_graphs", "step_pieces", "graphs_of_ranks")
    files += [folder.parents[1] / f"engine/test_{name}.py" for name in of_engine]
    files.append(folder.parents[1] / "dist/transport/test_device_puts.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = folder.parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
