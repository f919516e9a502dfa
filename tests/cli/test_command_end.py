# SPDX-License-Identifier: Apache-2.0
"""Processes of `moe-lora` end quietly."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moe_lora.adapters.registry.registry import Registry
from moe_lora.cli.errors import OUTPUT_CLOSED
from tests.adapters.peft_folders import BASE, peft_folder
from tests.grids import with_quick
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PIPE_BYTES = 65_536


def ended(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


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


COMMAND = "from moe_lora.cli.main import run; run()"
PRINTING = {
    "env": ["env"],
    "help": ["--help"],
    "h": ["-h"],
    "version": ["--version"],
    "serve help": ["serve", "--help"],
    "adapters help": ["adapters", "--help"],
    "adapters add help": ["adapters", "add", "--help"],
    "adapters list": ["adapters", "list", "demo/adapters", "--model", "demo/model"],
    "adapters check": ["adapters", "check", "demo/adapters", "--model", "demo/model"],
}
QUICK = ("version", "serve help")


@pytest.mark.parametrize("name", with_quick(PRINTING, QUICK))
def test_a_command_whose_reader_is_gone_ends_quietly(name):
    """Its reader closes before the command writes."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", COMMAND, *PRINTING[name]]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert done.returncode == OUTPUT_CLOSED
    assert "Broken pipe" not in done.stderr
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr


def test_show_of_many_versions_ends_quietly_at_head(tmp_path):
    """`moe-lora adapters show … | head -1`: more text than a pipe holds, and a reader of one line."""
    folder, source = tmp_path / "registry", peft_folder(tmp_path / "a", 1)
    with Registry(folder, create=True) as registry:
        for content in range(200):
            registry.add("a", peft_folder(source, content), base_hash=BASE)
    words = [sys.executable, "-c", COMMAND, "adapters", "show", "a", "--registry", str(folder)]
    whole = subprocess.run(words, capture_output=True, cwd=ROOT, check=True).stdout
    assert len(whole) > PIPE_BYTES
    show = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert show.stdout is not None
    assert show.stderr is not None
    first = subprocess.run(["head", "-1"], stdin=show.stdout, capture_output=True, check=True)
    show.stdout.close()
    assert first.stdout == b"a version 1: ready\n"
    assert (show.wait(PATIENCE_S), show.stderr.read()) == (OUTPUT_CLOSED, b"")
    show.stderr.close()


def test_what_print_leaves_for_the_end_is_dropped_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    code = """
        from moe_lora.cli import main as command
        command.main = lambda: print("late")
        command.run()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_broken_pipe_of_another_kind_is_an_error():
    done = ended("""
        import click
        from moe_lora.cli import main as command
        from moe_lora.cli.errors import user_errors
        @click.command()
        @user_errors
        def broken():
            raise BrokenPipeError(32, "Broken pipe")
        command.main = broken
        command.run()
    """)
    assert done.returncode == 1
    assert "Error: [Errno 32] Broken pipe" in done.stderr
