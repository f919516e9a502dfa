from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_in_the_interpreter():
    """The tests of this folder that use a device; Triton reads the variable when it is first imported."""
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    files = [folder / name for name in ("test_lora.py", "test_segments.py", "test_stability.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = folder.parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
