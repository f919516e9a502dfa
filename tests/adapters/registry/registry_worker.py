# SPDX-License-Identifier: Apache-2.0
"""Processes that work on a registry, and are killed at a chosen step or by others.

python -m tests.adapters.registry.registry_worker kill FOLDER SOURCES STRIDE
python -m tests.adapters.registry.registry_worker mix FOLDER SOURCES SEED
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from moe_lora.adapters.registry.registry import Registry
from moe_lora.core.errors import AdapterNotFoundError
from tests.adapters.peft_folders import BASE

NUM_CONTENTS, NUM_NAMES, NUM_CHANGES = 6, 3, 30
MOST_STEPS = 300


class KillAt:
    """Kills this process before the step of this number; steps are system calls and SQL statements."""

    def __init__(self, step: int, registry: Registry) -> None:
        self.left = step
        for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, self.counted(getattr(os, name)))
        registry._database._connection.set_trace_callback(lambda _: self.count())

    def counted(self, function):
        def wrapped(*args, **keywords):
            self.count()
            return function(*args, **keywords)

        return wrapped

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def change(registry: Registry, sources: Path, step: int) -> None:
    """Every kind of change once: a new version, a repair, removal of one and of all."""
    KillAt(step, registry)
    registry.add("x", sources / "1", base_hash=BASE)
    registry.add("x", sources / "1", base_hash=BASE)
    registry.remove("x", 1)
    registry.remove("x")


def kill(folder: Path, sources: Path, stride: int) -> None:
    """For each step of the stride a registry and a process killed at that step, until one ends by itself.

    Prints how each ended.
    """
    for step in range(0, MOST_STEPS, stride):
        with Registry(folder / str(step), create=True) as registry:
            registry.add("x", sources / "0", base_hash=BASE)
            registry.add("other", sources / "2", base_hash=BASE)
        child = os.fork()
        if child == 0:
            with Registry(folder / str(step)) as registry:
                change(registry, sources, step)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)
        if code == 0:
            return


def mix(folder: Path, sources: Path, seed: int) -> None:
    """Changes in random order, of names and contents that other processes change too."""
    with Registry(folder, create=True) as registry:
        _mix(registry, sources, seed)


def _mix(registry: Registry, sources: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(NUM_CHANGES):
        name = f"name-{rng.randrange(NUM_NAMES)}"
        if rng.random() < 0.7:
            source = sources / str(rng.randrange(NUM_CONTENTS))
            registry.add(name, source, base_hash=BASE, owner=str(os.getpid()), link=rng.random() < 0.3)
        else:
            try:
                registry.remove(name)
            except AdapterNotFoundError:
                registry.check()


if __name__ == "__main__":
    what, folder, given_sources, number = sys.argv[1:]
    {"kill": kill, "mix": mix}[what](Path(folder), Path(given_sources), int(number))
