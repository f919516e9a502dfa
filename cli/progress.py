"""The progress of a replay: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from moe_lora.report.replay import ReplayState

_LINE_PERIOD_S = 10.0


def describe(state: ReplayState) -> str:
    """sent 12/300, running 4, done 8, failed 0, 212 tokens/s"""
    running = state.sent - state.done - state.failed
    rate = state.output_tokens / state.elapsed_s if state.elapsed_s else 0.0
    return (
        f"sent {state.sent}/{state.total}, running {running}, done {state.done}, "
        f"failed {state.failed}, {rate:.0f} tokens/s"
    )


class PlainProgress:
    """One line every ten seconds, and one at the end."""

    def __init__(self) -> None:
        self._next_s = _LINE_PERIOD_S
        self._last: ReplayState | None = None
        self._written = ""

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._last is not None and kind is None:
            self._write(self._last)

    def __call__(self, state: ReplayState) -> None:
        self._last = state
        if state.elapsed_s >= self._next_s:
            self._next_s += _LINE_PERIOD_S
            self._write(state)

    def _write(self, state: ReplayState) -> None:
        line = f"{state.elapsed_s:5.0f} s: {describe(state)}"
        if line != self._written:
            click.echo(line, err=True)
        self._written = line


class BarProgress:
    """A rich bar on stderr, drawn only when the replay reports: a refresh thread would disturb the run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            BarColumn(bar_width=30),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> BarProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, state: ReplayState) -> None:
        finished = state.done + state.failed
        self._progress.update(
            self._task, total=state.total, completed=finished, description=describe(state), refresh=True
        )


def progress() -> AbstractContextManager[Callable[[ReplayState], None]]:
    """The display that fits stderr; use as a context manager, call with each state."""
    if sys.stderr.isatty():
        return BarProgress()
    return PlainProgress()
