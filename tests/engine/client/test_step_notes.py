# SPDX-License-Identifier: Apache-2.0
"""Notes of an engine, read by another process after its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from moe_lora.engine.client.step_notes import NUM_BYTES, ReadNotes, StepNotes, host_of_processes

CHILD = """
import os, signal, sys
from moe_lora.engine.client.step_notes import StepNotes
notes = StepNotes()
notes.start_load("on its way")
notes.step({"one", "zwei \\u00fc"})
print(notes.place, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_notes_outlive_a_process_that_is_killed():
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    reader = ReadNotes(child.stdout.readline().strip())
    child.communicate("\n")
    assert child.returncode == -signal.SIGKILL
    assert reader.adapters() == {"on its way", "one", "zwei ü"}


def test_names_beyond_the_room_are_left_out():
    notes = StepNotes()
    notes.step({f"{number:04}{'x' * 250}" for number in range(1000)})
    found = ReadNotes(notes.place).adapters()
    assert 0 < len(found) <= NUM_BYTES // 255
    notes.step(set())
    assert ReadNotes(notes.place).adapters() == frozenset()


@pytest.mark.parametrize(
    "place",
    [
        "",
        "nonsense",
        "another-host 1 3",
        f"{host_of_processes()} {os.getpid()} 0",
        f"{host_of_processes()} x 0",
    ],
)
def test_a_place_that_is_no_engines_notes_reads_as_nothing(place):
    assert ReadNotes(place).adapters() == frozenset()
