# SPDX-License-Identifier: Apache-2.0
"""A controller's campaign and its end, over a store that does as it is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from moe_lora.dist.cluster.leadership import LostLeaseError, StoreError, leader
from moe_lora.dist.cluster.leadership.leader import Leader
from tests.patience import PATIENCE_S

TTL_S = 0.5
"""Short, for the waits; no test needs a renewal in time."""


class Store:
    """problem: of each call.  others: holders before this one.  renewed: set by each renewal."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.others: list[str | Exception] = []
        self.renewed = threading.Event()
        self.released = 0

    def acquire(self, holder: str) -> tuple[str, int]:
        if not self.others:
            return holder, 9
        other = self.others.pop(0)
        if isinstance(other, Exception):
            raise other
        return other, 8

    def renew(self) -> None:
        if self.problem is not None:
            raise self.problem
        self.renewed.set()

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def ended(monkeypatch) -> dict[str, object]:
    """Why the process would have ended; and the alarms that were set."""
    found: dict[str, object] = {"event": threading.Event(), "alarms": []}

    def end(self: Leader, error: Exception) -> None:
        found["error"] = error
        found["event"].set()
        self._over.set()

    alarms = SimpleNamespace(ITIMER_REAL=0, SIGALRM=0, SIG_DFL=0, signal=lambda *_: None)
    alarms.setitimer = lambda timer, left_s: found["alarms"].append(left_s)
    monkeypatch.setattr(leader, "signal", alarms)
    monkeypatch.setattr(Leader, "_end", end)
    return found


def test_a_controller_waits_for_the_lease_and_says_who_leads(ended, caplog):
    caplog.set_level("INFO", logger="moe_lora")
    store = Store()
    store.others = [StoreError("no etcd"), StoreError("no etcd"), "b 1f", "b 1f", "c 2f"]
    one = Leader("a", store, TTL_S)
    assert (one.section, one.campaign()) == ("controllers.a", 9)
    one.release()
    one.release()
    assert store.released == 1
    assert [record.getMessage() for record in caplog.records] == [
        "controller a can't lead: no etcd; trying on",
        "controller b leads (epoch 8); a stands by",
        "controller c leads (epoch 8); a stands by",
        "controller a leads (epoch 9)",
        "controller a leads no more",
    ]
    assert ended["alarms"][-1] == 0
    assert all(0 < left_s <= 0.9 * TTL_S for left_s in ended["alarms"][:-1])


@pytest.mark.parametrize("problem", [StoreError("no etcd"), LostLeaseError("taken")])
def test_a_leader_without_its_lease_ends(ended, problem):
    store = Store()
    one = Leader("a", store, TTL_S)
    one.campaign()
    store.problem = problem
    assert ended["event"].wait(PATIENCE_S)
    assert ended["error"] is problem
    num_alarms = len(ended["alarms"])
    one._thread.join(PATIENCE_S)
    assert len(ended["alarms"]) == num_alarms, "the kernel ends a process that does not"


@pytest.mark.parametrize(("others", "released"), [([], 1), (["another 7"], 0)])
def test_a_campaign_that_a_signal_ends_leaves_no_lease(ended, monkeypatch, caplog, others, released):
    caplog.set_level("INFO", logger="moe_lora")
    store = Store()
    store.others, store.problem = others, SystemExit(0)
    monkeypatch.setattr(leader.time, "sleep", lambda pause_s: sys.exit(0))
    candidate = Leader("a", store, TTL_S)
    with pytest.raises(SystemExit):
        candidate.campaign()
    candidate.release()
    candidate.release()
    assert store.released == released
    assert "leads no more" not in caplog.text


def test_process_1_of_a_container_ends_though_the_kernel_spares_it():
    code = (
        "import os, time; os.getpid = lambda: 1\n"
        "from tests.dist.cluster.leadership.test_leader import Leader, Store, TTL_S\n"
        "store = Store(); one = Leader('a', store, TTL_S); one.campaign()\n"
        "store.renew = lambda: time.sleep(1000)\n"
        "time.sleep(1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in renew" in done.stderr or "in <lambda>" in done.stderr


def test_a_leader_whose_event_loop_hangs_ends(ended):
    store = Store()
    one = Leader("a", store, TTL_S)
    one.campaign()

    async def hang() -> None:
        one.loop = asyncio.get_running_loop()
        ended["event"].wait(PATIENCE_S)

    asyncio.run(hang())
    assert "event loop of this process does not get on" in str(ended["error"])
