# SPDX-License-Identifier: Apache-2.0
"""The registry under several processes at once, and under processes killed at any moment."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_lora.adapters.registry.registry import DATABASE_FILE, Registry
from moe_lora.core import processes
from tests.adapters.peft_folders import BASE, peft_folder
from tests.patience import PATIENCE_S

from .registry_worker import NUM_CONTENTS

ROOT = Path(__file__).parents[3]
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for content in range(NUM_CONTENTS):
        peft_folder(folder / str(content), content)
    return folder


def start(what: str, folder: Path, sources: Path, number: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.adapters.registry.registry_worker", what, folder, sources, number]
    return processes.subprocess.Popen(  # may fork, see `tests.forked_children`
        [str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def check_consistent(folder: Path) -> None:
    """Every version has its files, and after a check there are no others."""
    database = sqlite3.connect(folder / DATABASE_FILE)
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
    with Registry(folder) as registry:
        found = registry.check()
        assert all(problem is None for _, problem in found)
        for name in {one.name for one, _ in found}:
            versions = [one.version for one in registry.versions(name)]
            assert versions == list(range(1, len(versions) + 1))
    in_store = {place.name for place in (folder / "store").iterdir()} - {".lock"}
    assert in_store == {one.content_hash for one, _ in found}


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_step_a_process_is_killed_at_changes_are_whole(tmp_path, sources, stride):
    allowed = [["ready"], ["ready", "ready"], ["removed", "ready"], ["removed", "removed"]]
    output, errors = start("kill", tmp_path, sources, stride).communicate(timeout=PATIENCE_S)
    codes = [int(line) for line in output.split()]
    assert codes == [KILLED] * (len(codes) - 1) + [0], errors.decode()
    seen = []
    for step in range(0, stride * len(codes), stride):
        check_consistent(tmp_path / str(step))
        with Registry(tmp_path / str(step)) as registry:
            seen.append(allowed.index([one.state for one in registry.versions("x")]))
            assert registry.resolve("other", BASE).version == 1
            assert registry.add("x", sources / "3", base_hash=BASE).state == "ready", "work goes on"
    assert seen == sorted(seen), "a later kill, more is done"
    assert set(seen) == {0, 1, 2, 3}


def test_processes_that_write_at_once_lose_nothing(tmp_path, sources):
    workers = [start("mix", tmp_path / "registry", sources, seed) for seed in range(3)]
    for worker in workers:
        _, errors = worker.communicate(timeout=PATIENCE_S)
        assert worker.returncode == 0, errors.decode()
    check_consistent(tmp_path / "registry")
    with Registry(tmp_path / "registry") as registry:
        assert {one.owner for one in registry.adapters()} <= {str(worker.pid) for worker in workers}


def test_processes_killed_among_others_leave_a_registry_that_works(tmp_path, sources):
    rng = random.Random(0)
    folder = tmp_path / "registry"
    Registry(folder, create=True).close()
    for turn in range(2):
        workers = [start("mix", folder, sources, 10 * turn + seed) for seed in range(3)]
        time.sleep(0.3 + 0.5 * rng.random())
        for worker in workers[:2]:
            worker.kill()
        for worker in workers:
            _, errors = worker.communicate(timeout=PATIENCE_S)
            assert worker.returncode in (0, KILLED), errors.decode()
        assert workers[2].returncode == 0
        check_consistent(folder)
