# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a fork of this process: its imports, changes and output stay there."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path

from tests.patience import PATIENCE_S


def output_of_fork(work: Callable[[], object], file: Path) -> str:
    """Output of `work`.  SystemExit(0) counts as success."""

    def run() -> None:
        with file.open("w") as out, contextlib.redirect_stdout(out):
            work()

    fork = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    fork.start()
    fork.join(PATIENCE_S)
    if fork.is_alive():
        fork.kill()
    assert fork.exitcode == 0
    return file.read_text()
