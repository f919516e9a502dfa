# SPDX-License-Identifier: Apache-2.0
"""Programs of tests in forked processes: `python -c` imports torch anew, in seconds of CPU time."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from moe_lora.core import processes


def start_program(text: str, *words: str, **files: Any) -> subprocess.Popen[bytes]:
    """Run the text with these words as its arguments.  files: stdin, stdout, stderr."""
    command = [sys.executable, "-m", __name__, text, *words]
    started: subprocess.Popen[bytes] = processes.subprocess.Popen(command, **files)
    return started


if __name__ == "__main__":
    text = sys.argv.pop(1)
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
