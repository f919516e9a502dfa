# SPDX-License-Identifier: Apache-2.0
"""The end of a process, for those who read its stderr.  Apart, as every command imports it first."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress


def quiet_teardown() -> None:
    """Drop what C++ libraries print on stderr after all Python code of this process is done.

    Triton, which torch.compile imports, has nanobind list hundreds of "leaks" there, none of them one.  Call
    it first: exit functions run in reverse order.
    """
    atexit.register(_close_stderr)


def quick_teardown() -> None:
    """End this process without collecting garbage first: with torch loaded, that takes half a second.

    Memory goes with the process.
    """
    atexit.register(gc.freeze)


def _close_stderr() -> None:
    with suppress(OSError, ValueError):
        sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)
