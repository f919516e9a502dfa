# SPDX-License-Identifier: Apache-2.0
"""Which cores a process may use, and give to those that it starts."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_lora.core import processes
from moe_lora.core.processes import Child, allowed_core_numbers, set_priority, usable_core_numbers
from tests.patience import PATIENCE_S


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of threads")
def test_who_runs_on_one_core_may_give_others_away() -> None:
    allowed = allowed_core_numbers()

    def pinned() -> tuple[list[int], list[int], list[int]]:
        os.sched_setaffinity(0, allowed[:1])
        return usable_core_numbers(), allowed_core_numbers(), usable_core_numbers()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(pinned).result() == (allowed[:1], allowed, allowed[:1])


@pytest.mark.parametrize("may", [True, False])
def test_the_priority_of_a_child_changes_only_with_the_right_to_change_it_back(monkeypatch, may) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    may = may and processes._may_lower()
    monkeypatch.setattr(processes, "_may_lower", lambda: may)
    child = Child("-c", "import time; time.sleep(600)")
    try:
        for added in (processes.LOWEST, 0):
            set_priority(child.pid, added)
            expected = min(processes.LOWEST, own + added) if may else own
            assert os.getpriority(os.PRIO_PROCESS, child.pid) == expected
    finally:
        child.end(0)


def test_a_child_gets_no_place_in_a_job_of_the_shell(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MASTER_KEY", "k")
    code = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path / 'found')!r}, 'w'))"
    child = Child("-c", code, environment={"RANK": "1"})
    assert child.ended.result(PATIENCE_S) == 0
    child.socket.close()
    found = json.loads((tmp_path / "found").read_text())
    job = {name for name in found if name.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC"))}
    assert job == {"RANK", "MASTER_KEY"}
    assert found["RANK"] == "1"


def test_an_engine_process_gets_no_place_in_a_job_of_the_shell(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    started = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, env, **__: started.append(env))
    with pytest.raises(AttributeError):  # nothing was started
        processes.start_child("moe_lora.dist.host_workers.worker", num_threads=1)
    assert "RANK" not in started[0]
    assert started[0]["OMP_NUM_THREADS"] == "1"
