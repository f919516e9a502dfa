# SPDX-License-Identifier: Apache-2.0
"""A controller's campaign and its end, over a store that does as it is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from moe_lora.dist.cluster.controller import ALIVE, READY
from moe_lora.dist.cluster.leadership import LostLeaseError, StoreError, leader
from moe_lora.dist.cluster.leadership.leader import Leader
from tests.dist.cluster_jobs import until
from tests.patience import PATIENCE_S

TTL_S = 0.5
"""Short, for the waits; no test needs a renewal in time."""


class Store:
    """problem: of each call.  others: holders before this one.  renewing: called by each renewal."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.others: list[str | Exception] = []
        self.renewing: Callable[[], object] = lambda: None
        self.released = 0

    def acquire(self, holder: str) -> tuple[str, int]:
        if not self.others:
            return holder, 9
        other = self.others.pop(0)
        if isinstance(other, Exception):
            raise other
        return other, 8

    def renew(self) -> None:
        self.renewing()
        if self.problem is not None:
            raise self.problem

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


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Of leases; waits keep the real one."""
    found = SimpleNamespace(now_s=0.0)
    time = SimpleNamespace(monotonic=lambda: found.now_s, sleep=leader.time.sleep)
    monkeypatch.setattr(leader, "time", time)
    return found


def test_a_controller_waits_for_the_lease_and_says_who_leads(ended, clock, caplog):
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
def test_a_leader_without_its_lease_ends(ended, clock, problem):
    store = Store()
    one = Leader("a", store, TTL_S)
    one.campaign()
    store.problem = problem
    until(lambda: one._problem is problem or ended["event"].is_set(), lambda: "no renewal")
    clock.now_s += TTL_S
    assert ended["event"].wait(PATIENCE_S)
    assert ended["error"] is problem
    num_alarms = len(ended["alarms"])
    one._thread.join(PATIENCE_S)
    assert len(ended["alarms"]) == num_alarms, "the kernel ends a process that does not"


def test_a_leader_whose_renewal_hangs_ends_with_a_word(ended, clock):
    store, goes_on = Store(), threading.Event()
    one = Leader("a", store, TTL_S)
    one.campaign()
    hangs = threading.Event()
    store.renewing = lambda: (hangs.set(), goes_on.wait(PATIENCE_S))
    assert hangs.wait(PATIENCE_S)
    clock.now_s += TTL_S
    assert ended["event"].wait(PATIENCE_S)
    assert "the store does not answer the renewal in time" in str(ended["error"])
    goes_on.set()
    one._thread.join(PATIENCE_S)


def test_a_campaign_goes_on_after_a_renewal_that_took_too_long(ended, clock, caplog):
    store = Store()

    def hang() -> None:
        clock.now_s += TTL_S
        store.renewing = lambda: None

    store.renewing = hang
    one = Leader("a", store, TTL_S)
    assert one.campaign() == 9
    one.release()
    assert "a can't lead: the store does not answer the renewal in time; trying on" in caplog.text
    assert ended["alarms"] == [pytest.approx(0.9 * TTL_S), 0]


def test_a_standby_sets_the_time_of_the_probe_s_file(ended, clock, monkeypatch, tmp_path):
    file, seen = tmp_path / "alive", []
    monkeypatch.setenv(ALIVE, str(file))
    monkeypatch.setattr(leader.time, "sleep", lambda pause_s: seen.append(file.exists()))
    store = Store()
    store.others = ["b 1f"]
    one = Leader("a", store, TTL_S)
    one.campaign()
    one.release()
    assert seen == [True]


def test_a_controller_is_ready_once_the_store_answers(ended, clock, monkeypatch, tmp_path):
    files, seen = {ALIVE: tmp_path / "alive", READY: tmp_path / "ready"}, []
    for name, file in files.items():
        monkeypatch.setenv(name, str(file))
    monkeypatch.setattr(
        leader.time, "sleep", lambda pause_s: seen.append([file.exists() for file in files.values()])
    )
    store = Store()
    store.others = [StoreError("403"), "b 1f"]
    one = Leader("a", store, TTL_S)
    one.campaign()
    one.release()
    assert seen == [[True, False], [True, True]]


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
        "Leader._watch = lambda self: None  # as in a process that holds the interpreter\n"
        "store = Store(); one = Leader('a', store, TTL_S); one.campaign()\n"
        "store.renew = lambda: time.sleep(1000)\n"
        "time.sleep(1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in renew" in done.stderr or "in <lambda>" in done.stderr


def test_a_leader_whose_event_loop_hangs_ends(ended, clock):
    store = Store()
    one = Leader("a", store, TTL_S)
    one.campaign()

    async def hang() -> None:
        one.loop = asyncio.get_running_loop()
        until(lambda: "event loop" in str(one._problem), lambda: "no check of the event loop")
        clock.now_s += TTL_S
        ended["event"].wait(PATIENCE_S)

    asyncio.run(hang())
    one._thread.join(PATIENCE_S)
    assert "event loop of this process does not get on" in str(ended["error"])
