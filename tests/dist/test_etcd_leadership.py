# SPDX-License-Identifier: Apache-2.0
"""Two controllers whose lease three members of etcd keep: either and any member may end."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator

import pytest

from moe_lora.dist.cluster.leadership import LostLeaseError, StoreError
from moe_lora.dist.cluster.leadership.etcd_store import EtcdStore
from moe_lora.dist.net.keys import make_keys
from tests.patience import PATIENCE_S

from .cluster_jobs import Drive, local_answers, until
from .elected_cluster import TTL_S, ElectedCluster
from .etcd_members import Members, acquired
from .test_control_plane import FRONT_ENDS, REQUESTS, of_loaded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here; Debian: etcd-server"),
]


def test_a_lease_of_three_members(tmp_path):
    members = Members(tmp_path)
    try:
        a, b = (EtcdStore(members.clients, "moe_lora", TTL_S) for _ in "ab")
        other = EtcdStore(members.clients, "other", TTL_S)
        assert (first := acquired(a, "a"))[0] == "a"
        assert b.acquire("b") == first
        assert other.acquire("b")[0] == "b", "another key is another cluster"
        a.renew()
        a.release()
        with pytest.raises(LostLeaseError):
            a.renew()
        second = acquired(b, "b")
        assert second[0] == "b"
        assert second[1] > first[1]
        until(lambda: acquired(a, "a")[0] == "a", lambda: "a lease without renewals does not end")
        with pytest.raises(LostLeaseError):
            b.renew()
        members.kill(0)
        members.kill(1)
        with pytest.raises(StoreError, match="start a majority of its members"):
            a.renew()
    finally:
        members.stop()


def test_tls_by_the_cluster_s_certificates(tmp_path):
    keys = make_keys(tmp_path / "certificates")
    members = Members(tmp_path, 1, keys.folder)
    try:
        store = EtcdStore(members.clients, "moe_lora", TTL_S, keys.context(server=False))
        assert acquired(store, "a")[0] == "a"
        store.renew()
        with pytest.raises(StoreError):
            EtcdStore(members.clients, "moe_lora", TTL_S).renew()
    finally:
        members.stop()


@pytest.fixture(scope="module")
def members(tmp_path_factory) -> Iterator[Members]:
    found = Members(tmp_path_factory.mktemp("etcd"))
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def elected(tmp_path_factory, members) -> Iterator[ElectedCluster]:
    store = f"etcd://{','.join(members.clients)}"
    with ElectedCluster(tmp_path_factory.mktemp("elected"), store, local_answers(REQUESTS)) as elected:
        yield elected


def drives(elected: ElectedCluster) -> list[Drive]:
    return [elected.cluster.over(name, of_loaded(REQUESTS) * 3) for name in FRONT_ENDS]


def say(event: str, since_s: float) -> None:
    """For `pytest -s`; no test asserts a time."""
    print(f"{event}: {time.monotonic() - since_s:.1f} s")


def test_a_standby_decides_after_the_leader_is_killed(elected):
    elected.change()
    leader, standby = elected.parts()
    running, since_s = drives(elected), time.monotonic()
    before = elected.epoch("one")
    elected.controllers[leader].process.kill()
    elected.controllers[leader].process.wait(PATIENCE_S)
    elected.until_leads(standby, 1)
    elected.until_led(standby)
    say("kill -9 of the leader, until the next one has all front ends", since_s)
    elected.change()
    for drive in running:
        assert drive.answers() == elected.expected * 3
    assert elected.epoch("one") > before


def test_one_member_of_three_may_end(elected, members):
    for number in range(3):
        running = drives(elected)
        members.kill(number)
        for drive in running:
            assert drive.answers() == elected.expected * 3
        elected.until_led(elected.parts()[0])
        elected.change()
        members.start(number)
        acquired(EtcdStore([members.clients[number]], "moe_lora", TTL_S), "a test")
    elected.check_served()


def test_without_a_majority_nobody_leads_and_requests_go_on(elected, members):
    leader, standby = elected.parts()
    num_leads, since_s = elected.num_leads(standby), time.monotonic()
    members.kill(0)
    members.kill(1)
    assert elected.controllers[leader].process.wait(PATIENCE_S) == os.EX_TEMPFAIL
    say("kill -9 of two members, until the leader ends", since_s)
    assert elected.controllers[leader].count("leads no more: etcd does not answer") == 1
    elected.until_away()
    answer = elected.cluster.load("one", "other")
    assert answer.status_code == 503
    assert "no controller leads" in answer.json()["error"]["message"]
    elected.check_served()
    since_s = time.monotonic()
    members.start(0)
    members.start(1)
    elected.until_leads(standby, num_leads + 1)
    elected.until_led(standby)
    say("start of two members, until the next leader has all front ends", since_s)
    elected.change()


def test_a_leader_that_stood_still_decides_nothing(elected):
    leader, standby = elected.parts()
    num_leads, since_s = elected.num_leads(standby), time.monotonic()
    stopped = elected.controllers[leader].process
    os.kill(stopped.pid, signal.SIGSTOP)
    elected.until_leads(standby, num_leads + 1)
    elected.until_led(standby)
    say("SIGSTOP of the leader, until the next one has all front ends", since_s)
    elected.change()
    epoch = elected.epoch("one")
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(PATIENCE_S) == -signal.SIGALRM
    elected.change("two")
    assert [elected.epoch(name) for name in FRONT_ENDS] == [epoch, epoch]
    elected.check_served()


def test_a_leader_that_is_told_to_end_gives_the_lease_back(elected):
    leader, standby = elected.parts()
    num_leads, since_s = elected.num_leads(standby), time.monotonic()
    job = elected.controllers[standby]
    leads = job.count("leads .epoch .*\\n")
    os.kill(elected.controllers[leader].process.pid, signal.SIGTERM)
    job.wait_for("leads .epoch .*\\n", leads + 1)
    say("SIGTERM of the leader, until the next one leads", since_s)
    assert elected.controllers[leader].process.wait(PATIENCE_S) == 0
    elected.until_leads(standby, num_leads + 1)
    elected.until_led(standby)
    elected.change()
