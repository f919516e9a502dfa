"""How far a command is: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

_LINE_PERIOD_S = 10.0
Show = Callable[[str, int, int], None]
"""Called with what is said, what is done and how much there is to do."""


@contextmanager
def progress() -> Iterator[Show]:
    """The display that fits stderr.  Drawn only when it is called: a refresh thread would disturb the run."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda said, done, total: bar.update(
            task, total=total, completed=done, description=said, refresh=True
        )


def _lines() -> Show:
    """A line on stderr every ten seconds, and when all is done."""
    begun_s = time.monotonic()
    next_s = _LINE_PERIOD_S
    written = ""

    def show(said: str, done: int, total: int) -> None:
        nonlocal next_s, written
        passed_s = time.monotonic() - begun_s
        if (passed_s < next_s and done < total) or said == written:
            return
        next_s, written = passed_s + _LINE_PERIOD_S, said
        click.echo(f"{passed_s:5.0f} s: {said}", err=True)

    return show
