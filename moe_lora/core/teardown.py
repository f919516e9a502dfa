# SPDX-License-Identifier: Apache-2.0
"""Quiet and quick ends of a process.  A separate file: every command imports this first."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress


def quiet_teardown() -> None:
    """Drop the stderr output of C++ libraries after this process's Python code ends.

    Triton's nanobind reports hundreds of false "leaks" there.  Call this first: exit functions run in
    reverse order.
    """
    atexit.register(_close_stderr)


def quick_teardown() -> None:
    """End this process without garbage collection, which takes half a second with torch."""
    atexit.register(gc.freeze)


def _close_stderr() -> None:
    with suppress(OSError, ValueError):
        sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)
