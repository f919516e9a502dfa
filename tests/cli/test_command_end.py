"""Processes of `moe-lora` end quietly."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ended(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "ImportError('initialization failed')"])
def test_an_interrupt_shows_no_traceback_whatever_it_came_out_as(raised):
    done = ended(f"""
        import os, signal
        from moe_lora.cli import main as command
        def main():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise {raised}
        command.main = main
        command.run()
    """)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_errors_of_other_causes_are_shown():
    done = ended("""
        from moe_lora.cli import main as command
        def main():
            raise ImportError("no such thing")
        command.main = main
        command.run()
    """)
    assert done.returncode == 1
    assert "no such thing" in done.stderr


def test_only_what_is_said_after_all_of_pythons_code_is_dropped():
    done = ended("""
        import atexit, ctypes, os
        from moe_lora.core.teardown import quiet_teardown
        atexit.register(lambda: os.write(2, b"too late"))
        quiet_teardown()
        atexit.register(lambda: os.write(2, b"in time"))
    """)
    assert (done.returncode, done.stderr) == (0, "in time")


def test_at_the_end_nothing_is_collected_any_more():
    done = ended("""
        import atexit, gc, os
        from moe_lora.core.teardown import quick_teardown
        atexit.register(lambda: os.write(2, b"held" if gc.get_freeze_count() else b""))
        quick_teardown()
    """)
    assert (done.returncode, done.stderr) == (0, "held")
