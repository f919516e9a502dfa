# SPDX-License-Identifier: Apache-2.0
"""Two controllers whose lease is in etcd or in Kubernetes: either and the store may end or stand still."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from moe_lora.dist.cluster.leadership import LostLeaseError, StoreError
from moe_lora.dist.cluster.leadership.etcd_store import EtcdStore
from moe_lora.dist.net.keys import make_keys
from tests.patience import PATIENCE_S

from .api_server import ApiServer
from .cluster_jobs import Drive, Host, local_answers, until
from .elected_cluster import CONTROLLERS, TTL_S, ElectedCluster
from .etcd_members import Members, acquired
from .test_control_plane import FRONT_ENDS, REQUESTS, of_loaded

pytestmark = pytest.mark.slow
needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here; Debian: etcd-server")


@needs_etcd
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


@needs_etcd
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


class Etcd:
    """Three members of etcd.  away: problem of a leader without the store."""

    away = "etcd does not answer"

    def __init__(self, folder: Path) -> None:
        self.members = Members(folder)
        self.store = f"etcd://{','.join(self.members.clients)}"
        self.hosts: Mapping[str, Host] = {}

    def end(self) -> None:
        self.members.kill(0)
        self.members.kill(1)

    def start(self) -> None:
        self.members.start(0)
        self.members.start(1)

    def stop(self) -> None:
        self.members.stop()


class Kubernetes:
    """An API server, and the places of the controllers' pods: each has its service account at its path."""

    away = "the API server does not answer"
    store, lease = "kubernetes://default/leader", "leader"
    _account = "/run/secrets/kubernetes.io/serviceaccount"
    _mount = 'mount -t tmpfs tmpfs /run && mkdir -p "$1" && cp "$0"/* "$1" && shift && exec "$@"'

    def __init__(self, folder: Path) -> None:
        self.api = ApiServer(folder / "api")
        self.start, self.end, self.stop = self.api.start, self.api.stop, self.api.stop
        self.start()
        variables = [f"{name}={value}" for name, value in self.api.environment.items()]
        own = ("env", *variables, "unshare", "--mount", "sh", "-c", self._mount)
        self.hosts = {
            name: Host(name, "127.0.0.1", folder / name, (*own, str(self.api.account(name)), self._account))
            for name in CONTROLLERS
        }
        if subprocess.run([*self.hosts["a"].prefix, "true"], check=False).returncode:
            self.stop()
            pytest.skip("mounts of a process can't be made here")


@pytest.fixture(scope="module", params=[pytest.param(Etcd, marks=needs_etcd), Kubernetes])
def store(request, tmp_path_factory) -> Iterator[Etcd | Kubernetes]:
    found = request.param(tmp_path_factory.mktemp("store"))
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def elected(tmp_path_factory, store) -> Iterator[ElectedCluster]:
    folder, expected = tmp_path_factory.mktemp("elected"), local_answers(REQUESTS)
    with ElectedCluster(folder, store.store, expected, hosts=store.hosts) as elected:
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


def test_one_member_of_three_may_end(elected, store):
    if not isinstance(store, Etcd):
        pytest.skip("the members are Kubernetes' own")
    members = store.members
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


def test_without_the_store_nobody_leads_and_requests_go_on(elected, store):
    leader, standby = elected.parts()
    num_leads, since_s = elected.num_leads(standby), time.monotonic()
    store.end()
    assert elected.controllers[leader].process.wait(PATIENCE_S) == os.EX_TEMPFAIL
    say("end of the store or most of its members, until the leader ends", since_s)
    assert elected.controllers[leader].count(f"leads no more: {store.away}") == 1
    elected.until_away()
    answer = elected.cluster.load("one", "other")
    assert answer.status_code == 503
    assert "no controller leads" in answer.json()["error"]["message"]
    elected.check_served()
    since_s = time.monotonic()
    store.start()
    elected.until_leads(standby, num_leads + 1)
    elected.until_led(standby)
    say("start of the store, until the next leader has all front ends", since_s)
    elected.change()


def test_a_leader_that_is_cut_off_ends_though_no_other_leads(elected, store):
    if isinstance(store, Etcd):
        pytest.skip("tests/dist/test_etcd_namespaces.py cuts hosts off")
    leader, standby = elected.parts()
    num_leads, before = elected.num_leads(standby), elected.epoch("one")
    store.api.cut |= {leader, standby}
    job = elected.controllers[leader]
    assert job.process.wait(PATIENCE_S) == os.EX_TEMPFAIL
    assert job.count(f"leads no more: {store.away}") >= 1
    assert elected.num_leads(standby) == num_leads
    store.api.cut -= {standby}
    elected.until_leads(standby, num_leads + 1)
    elected.until_led(standby)
    assert elected.epoch("one") > before
    elected.change()
    store.api.cut.clear()


def test_a_leader_whose_deleted_lease_has_another_ends(elected, store):
    if isinstance(store, Etcd):
        pytest.skip("the default run has etcd's deleted key")
    leader, standby = elected.parts()
    num_leads, before = elected.num_leads(standby), elected.epoch("one")
    store.api.cut |= {leader}  # else the leader may be first to make the Lease again
    store.api.delete(store.lease)
    elected.until_leads(standby, num_leads + 1)
    store.api.cut.clear()
    assert elected.controllers[leader].process.wait(PATIENCE_S) == os.EX_TEMPFAIL
    elected.until_led(standby)
    assert elected.epoch("one") > before
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
