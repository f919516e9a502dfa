# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINE_PERIOD_S = 10.0
Show = Callable[[str, int, int], None]
"""Called with a text, the amount done and the total."""


@contextmanager
def progress(write: Callable[[str], object] | None = None, *, bar: bool = True) -> Iterator[Show]:
    """The display, drawn during calls only: a refresh thread would disturb the run.

    write: gets the lines; None: stderr, with a last line.  bar: False: lines on a terminal too.
    """
    if not (bar and sys.stderr.isatty()):
        yield _lines(write)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, auto_refresh=False, transient=write is not None) as drawn:
        task = drawn.add_task("starting", total=None)
        yield lambda said, done, total: drawn.update(
            task, total=total, completed=done, description=said, refresh=True
        )


def _lines(write: Callable[[str], object] | None) -> Show:
    begun_s = time.monotonic()
    next_s = _LINE_PERIOD_S
    written = ""

    def show(said: str, done: int, total: int) -> None:
        nonlocal next_s, written
        passed_s = time.monotonic() - begun_s
        if (passed_s < next_s and (done < total or write is not None)) or said == written:
            return
        next_s, written = passed_s + _LINE_PERIOD_S, said
        if write is not None:
            write(said)
        else:
            sys.stderr.write(f"{passed_s:5.0f} s: {said}\n")

    return show


def silent(said: str, done: int, total: int) -> None:
    """Show nothing."""
