# SPDX-License-Identifier: Apache-2.0
"""Four hosts with slow links, three members of etcd and two controllers: hosts end as a whole."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest

from moe_lora.dist.cluster.leadership.etcd_store import EtcdStore
from tests.forked_children import children_start_anew

from .cluster_jobs import Drive, Host, local_answers, until
from .elected_cluster import TTL_S, ElectedCluster
from .etcd_members import Members, acquired
from .namespaces import Network, Unavailable
from .test_control_plane import FRONT_ENDS, REQUESTS, of_loaded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here; Debian: etcd-server"),
]
PLACES = {
    "h1": ("a", "one"),
    "h2": ("b", "two"),
    "h3": ("instance-1",),
    "h4": ("instance-2",),
    "client": ("front-end", "lora-server"),
}
"""Roles by host; the first three have a member of etcd each.  The client is no host of the cluster."""
HOST = {role: host for host, roles in PLACES.items() for role in roles}
RATE, DELAY = "50mbit", "5ms"
ANNOUNCED = {500, 502, 503}


class Hosts:
    """The cluster on its hosts."""

    def __init__(self, network: Network, members: Members, elected: ElectedCluster) -> None:
        self.network, self.members, self.elected = network, members, elected

    def drive(self, front_end: str, times: int) -> Drive:
        """Requests, of which some have tokens."""
        cluster, name = self.elected.cluster, "vllm:generation_tokens_total"
        before = cluster.metric(front_end, name)
        running = cluster.over(front_end, of_loaded(REQUESTS) * times)
        until(lambda: cluster.metric(front_end, name) > before, lambda: "no token")
        return running

    def check(self, what: str, drive: Drive, times: int) -> None:
        """Each answer is right, or an announced error."""
        done = drive.done()
        errors = [(status, answer) for status, answer in done if status != httpx.codes.OK]
        for (status, answer), tokens in zip(done, self.elected.expected * times, strict=True):
            assert answer == tokens if status == httpx.codes.OK else status in ANNOUNCED, (status, answer)
        print(f"{what}: {len(done)} requests, {len(errors)} errors {errors[:2]}")

    def kill(self, host: str) -> None:
        """End a host with all of its processes."""
        self.network.kill(host)
        until(lambda: not self.network.pids(host), lambda: f"{host} ends")
        for number, name in enumerate(PLACES):
            if name == host and number in self.members.processes:
                self.members.kill(number)

    def start(self, host: str) -> None:
        """Start the processes of a host again."""
        cluster = self.elected.cluster
        if (number := list(PLACES).index(host)) < len(self.members.clients):
            self.members.start(number)
            acquired(EtcdStore([self.members.clients[number]], "moe_lora", TTL_S), "a test")
        for role in PLACES[host]:
            if role in FRONT_ENDS:
                cluster.front_end_named(role)
            elif role.startswith("instance"):
                cluster.plain_instance(role)
            else:
                self.elected.start(role)

    def until_whole(self) -> None:
        """Until each front end has a leader and both instances."""

        def whole() -> bool:
            return all(map(self._is_whole, FRONT_ENDS))

        until(whole, lambda: "no full capacity")
        self.elected.check_served()

    def _is_whole(self, name: str) -> bool:
        try:
            text = httpx.get(f"{self.elected.cluster.urls[name]}/metrics", trust_env=False).text
        except httpx.TransportError:
            return False
        ups = [line for line in text.splitlines() if line.startswith("moe_lora:instance_up{")]
        led = [line for line in text.splitlines() if line.startswith("moe_lora:controller_up")]
        return len(ups) == 2 and all(line.endswith(" 1.0") for line in (*ups, *led))


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    expected = local_answers(REQUESTS)
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(tuple(PLACES), tmp_path))
            say(f"links: {network.limit_rate(RATE, DELAY)}")
        except Unavailable as error:
            pytest.skip(f"this machine can't make such a network: {error}")
        # A process that forks would stay on the client's host.
        stack.enter_context(children_start_anew())
        stack.enter_context(network.entered("client"))
        folders = {role: tmp_path / role for role in HOST}
        places: dict[str, Host] = {
            role: replace(network.hosts[host], name=role, folder=folders[role]) for role, host in HOST.items()
        }
        since_s = time.monotonic()
        (tmp_path / "etcd").mkdir()
        members = Members(tmp_path / "etcd", hosts=[network.hosts[name] for name in ("h1", "h2", "h3")])
        stack.callback(members.stop)
        store = f"etcd://{','.join(members.clients)}"
        elected = stack.enter_context(ElectedCluster(tmp_path, store, expected, hosts=places))
        found = Hosts(network, members, elected)
        elected.change()
        found.drive("one", 1).answers()
        say("start, until the first answers", since_s)
        yield found


def say(event: str, since_s: float | None = None) -> None:
    """For `pytest -s`; no test asserts a time."""
    print(event if since_s is None else f"{event}: {time.monotonic() - since_s:.1f} s")


def test_hosts_and_members_end_and_every_answer_is_right_or_an_announced_error(hosts: Hosts) -> None:
    elected, members = hosts.elected, hosts.members
    hosts.until_whole()

    running = hosts.drive("one", 8)
    hosts.kill("h4")
    hosts.check("end of an instance's host", running, 8)
    since_s = time.monotonic()
    hosts.start("h4")
    hosts.until_whole()
    say("start of the instance's host, until full capacity", since_s)

    leader, standby = elected.parts()
    lost, other = HOST[leader], HOST[standby]
    num_leads = elected.num_leads(standby)
    running, since_s = hosts.drive(PLACES[other][1], 8), time.monotonic()
    hosts.kill(lost)
    elected.until_leads(standby, num_leads + 1)
    say("end of the leading controller's host, until another leads", since_s)
    hosts.check("end of the leading controller's host", running, 8)
    since_s = time.monotonic()
    hosts.start(lost)
    hosts.until_whole()
    say("start of the controller's host, until full capacity", since_s)
    elected.change()

    running, since_s = hosts.drive("two", 8), time.monotonic()
    members.kill(0)
    members.kill(2)
    elected.until_away()
    say("end of two members, until nobody leads", since_s)
    assert elected.cluster.load("one", "other").status_code == 503
    hosts.check("end of two members", running, 8)
    elected.check_served()
    since_s = time.monotonic()
    members.start(0)
    members.start(2)
    elected.parts()
    hosts.until_whole()
    say("start of two members, until full capacity", since_s)
    elected.change()

    elected.cluster.stop()
    members.stop()
    assert not [pid for name in PLACES if name != "client" for pid in hosts.network.pids(name)]
