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
        "attention/test_triton_attention",
        "linear/test_experts",
        "linear/test_quantised_linear",
        "lora/test_segments",
        "test_exchange",
        "test_lora",
        "test_sampling",
        "test_signals",
        "test_stability",
    )
    files = [folder / f"{name}.py" for name in names]
    of_engine = (
        "step/test_step_graphs",
        "step/test_step_pieces",
        "test_graphs_of_ranks",
        "test_host_reads",
        "test_launches",
        "test_pushed",
    )
    files += [folder.parents[1] / f"engine/{name}.py" for name in of_engine]
    files.append(folder.parents[1] / "dist/transport/test_device_puts.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *map(str, files)]
    # The interpreter multiplies by numpy, whose AVX-512 kernels sum a small matrix in another order.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Haswell"}
    root = folder.parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
