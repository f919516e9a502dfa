# SPDX-License-Identifier: Apache-2.0
"""Calls beside an event loop that may hang."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from moe_lora.dist.net.thread import in_daemon_thread

READING = """
import asyncio, sys
from moe_lora.dist.net.thread import in_daemon_thread

async def main():
    reading = asyncio.ensure_future(in_daemon_thread(lambda: open(sys.argv[1]).read()))
    done, _ = await asyncio.wait([reading], timeout=0.2)
    print(len(done))

asyncio.run(main())
"""


def test_what_it_returns_and_raises_is_the_functions():
    assert asyncio.run(in_daemon_thread(lambda: 3)) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(in_daemon_thread(int, "x"))


def test_a_process_ends_while_a_file_hangs(tmp_path):
    os.mkfifo(tmp_path / "file")  # nobody writes to it
    command = [sys.executable, "-c", READING, str(tmp_path / "file")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")
