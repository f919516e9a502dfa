# SPDX-License-Identifier: Apache-2.0
"""What is said of something long where there is no terminal."""

from __future__ import annotations

import io
import sys

from moe_lora.core import progress


def test_a_line_every_ten_seconds_and_none_of_what_is_quick(monkeypatch):
    now_s, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.progress(lines.append) as show:
        for second in range(1, 26):
            now_s[0] = float(second)
            show(f"{second} of 25", second, 25)
    assert lines == ["10 of 25", "20 of 25"]
    assert sys.stderr.getvalue() == ""


def test_a_command_says_the_end_on_stderr_too(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.progress() as show:
        show("half", 1, 2)
        show("all", 2, 2)
    assert sys.stderr.getvalue().splitlines() == ["    0 s: all"]


def test_a_terminal_shows_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for bar in (True, False):
        lines = []
        monkeypatch.setattr(sys, "stderr", Terminal())
        with progress.progress(lines.append, bar=bar) as show:
            show("half of it", 1, 2)
        assert ("half of it" in sys.stderr.getvalue()) == bar
        assert not lines
