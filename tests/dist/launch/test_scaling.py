# SPDX-License-Identifier: Apache-2.0
"""The number of instances by the load: settings, metrics, the rule, and its loop with stand-ins."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.config.cluster import cluster_of
from moe_lora.config.optional_parts import ScalingConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import EngineStats, FleetStats, InstanceStats
from moe_lora.dist.launch.cluster_file import check_instances
from moe_lora.dist.launch.host_roles import FRONT_END, Role
from moe_lora.dist.launch.ray_role import RoleActor
from moe_lora.dist.launch.scaling import (
    Fleet,
    FleetLoad,
    Scaler,
    ScalingRule,
    Snapshot,
    load_of,
    read_snapshot,
)
from moe_lora.dist.launch.topology import Part, roles_file
from moe_lora.serve.metrics import Metrics
from tests.dist.cluster_jobs import free_port
from tests.dist.launch.test_topology import CONTENT, HTTP, hosts
from tests.serve.test_placement import cluster_config
from tests.virtual_clock import VirtualClock

RULE = ScalingConfig(
    max_instances=4, waiting_high=4, ttft_ms=500, interval_s=10, add_pause_s=30, remove_pause_s=100
)
BUSY, IDLE = FleetLoad(waiting=20, running=8), FleetLoad(waiting=0, running=0)


class Cluster:
    """Instances of `full` running requests each, under a load; a new instance starts for `start_s`."""

    def __init__(self, config: ScalingConfig, number: int, full: int, start_s: int = 0) -> None:
        self.rule, self.clock = ScalingRule(config, max_num_seqs=64), VirtualClock()
        self.number, self.full, self.start_s = number, full, start_s
        self.changes: list[int] = []
        self.pauses_s: list[float] = []
        self._serving, self._changed_s = number, 0.0

    def run(self, num_requests: int, times: int = 1) -> list[int]:
        """Numbers of instances after each of so many intervals under so many requests at once."""
        found = []
        for _ in range(times):
            self.clock.advance(self.rule.config.interval_s)
            if self.clock.now_s() - self._changed_s >= self.start_s:
                self._serving = self.number
            serving = min(self._serving, self.number)
            running = min(num_requests, serving * self.full)
            load = FleetLoad(waiting=num_requests - running, running=running)
            starting = [f"instance-{number}" for number in range(serving, self.number)]
            wanted = self.rule.decide(self.clock.now_s(), load, Fleet(number=self.number, starting=starting))
            if wanted != self.number:
                assert not starting
                self.changes.append(wanted - self.number)
                self.pauses_s.append(self.clock.now_s() - self._changed_s)
                self._serving, self._changed_s = min(serving, wanted), self.clock.now_s()
                self.number = wanted
            found.append(wanted)
        return found


configs = st.builds(
    lambda least, more, **rest: ScalingConfig(min_instances=least, max_instances=least + more, **rest),
    st.integers(1, 4),
    st.integers(0, 8),
    waiting_high=st.integers(1, 10),
    interval_s=st.integers(1, 30),
    add_pause_s=st.integers(1, 120),
    remove_pause_s=st.integers(1, 600),
)


@given(configs, st.integers(1, 64), st.integers(0, 60), st.lists(st.integers(0, 900), max_size=30))
def test_the_number_keeps_bounds_and_pauses_and_falls_by_one(config, full, start_s, loads):
    cluster = Cluster(config, config.min_instances, full, start_s)
    for load in loads:
        [number] = cluster.run(load)
        assert config.min_instances <= number <= config.max_instances
    for change, pause_s in zip(cluster.changes, cluster.pauses_s, strict=True):
        assert change >= -1
        assert pause_s >= (config.add_pause_s if change > 0 else config.remove_pause_s)


@given(configs, st.integers(1, 64), st.integers(0, 60), st.integers(0, 900), st.data())
def test_no_instance_is_removed_after_an_addition_under_constant_load(config, full, start_s, load, data):
    number = data.draw(st.integers(config.min_instances, config.max_instances))
    cluster = Cluster(config, number, full, start_s)
    cluster.run(load, times=400)
    first = next((n for n, change in enumerate(cluster.changes) if change > 0), len(cluster.changes))
    assert all(change > 0 for change in cluster.changes[first:])


@given(configs, st.integers(1, 64), st.integers(0, 60), st.integers(0, 900))
def test_a_step_up_adds_what_suffices_and_a_step_down_removes_it(config, full, start_s, load):
    cluster = Cluster(config, config.min_instances, full, start_s)
    lack = load - config.min_instances * full > config.waiting_high * config.min_instances
    [number] = cluster.run(0)
    pause = math.ceil(config.add_pause_s / config.interval_s)
    numbers = cluster.run(load, times=pause + 1)
    suffices = math.ceil(load / (full + config.waiting_high))
    expected = min(config.max_instances, max(config.min_instances, suffices)) if lack else number
    assert numbers[-1] == expected
    for_one = math.ceil((start_s + config.remove_pause_s) / config.interval_s) + 1
    cluster.run(0, times=for_one * (expected - config.min_instances))
    assert cluster.number == config.min_instances


def decide(rule: ScalingRule, loads: Sequence[FleetLoad | None], **fleet: Any) -> list[int]:
    """Numbers wanted after each load, an interval apart."""
    return [rule.decide(10.0 * step, load, Fleet(**fleet)) for step, load in enumerate(loads)]


def test_a_load_is_divided_over_as_many_instances_as_it_needs():
    rule = ScalingRule(RULE, 8)
    assert decide(rule, [IDLE] * 4 + [BUSY], number=1) == [1, 1, 1, 1, 3]  # 28 by 8 running and 4 waiting
    assert rule.reason == "20 requests wait for room, 8 others: 3 are needed"


def test_waiting_up_to_the_limit_adds_nothing():
    assert decide(ScalingRule(RULE, 8), [FleetLoad(waiting=8, running=16)] * 20, number=2) == [2] * 20


def test_a_late_first_token_adds_one_instance():
    rule = ScalingRule(RULE, 8)
    late = FleetLoad(waiting=0, running=4, ttft_ms=501)
    assert decide(rule, [IDLE] * 4 + [late], number=2) == [2, 2, 2, 2, 3]
    assert "TTFT is 501 ms (P95)" in rule.reason
    assert (
        decide(ScalingRule(RULE, 8), [FleetLoad(waiting=0, running=4, ttft_ms=500)] * 5, number=2) == [2] * 5
    )


@pytest.mark.parametrize(
    ("load", "fleet", "reason"),
    [
        (None, {"number": 2}, "a front end has no metrics"),
        (BUSY, {"number": 2, "starting": ["instance-1"]}, "instance-1 does not serve yet"),
        (IDLE, {"number": 2, "starting": ["instance-1"]}, "instance-1 does not serve yet"),
        (BUSY, {"number": 2, "roomless": ["instance-1"]}, "no host has room for instance-1"),
        (BUSY, {"number": 2, "roomless": ["instance-0", "instance-1"]}, "no host has room for instance-0"),
        (BUSY, {"number": 4}, "max_instances is reached"),
        (IDLE, {"number": 1}, "1 suffice"),
    ],
)
def test_the_number_stays_for_a_reason(load, fleet, reason):
    rule = ScalingRule(RULE, 8)
    assert decide(rule, [load] * 50, **fleet) == [fleet["number"]] * 50
    assert rule.reason.endswith(reason)


def test_a_pause_begins_when_the_last_instance_serves():
    rule = ScalingRule(RULE, 8)
    starting = Fleet(number=2, starting=["instance-1"])
    assert [rule.decide(now_s, BUSY, starting) for now_s in (0, 100)] == [2, 2]
    assert rule.decide(129, BUSY, Fleet(number=2)) == 2
    assert rule.reason.endswith("the last change was less than 30 s ago")
    assert rule.decide(130, BUSY, Fleet(number=2)) > 2


@pytest.mark.parametrize("disturbance", [None, BUSY])
def test_a_removal_waits_for_a_whole_pause_without_disturbance(disturbance):
    rule = ScalingRule(RULE, 8)
    loads = [IDLE] * 9 + [disturbance] + [IDLE] * 11
    assert decide(rule, loads, number=4) == [4] * 19 + [3] * 2


def test_an_instance_without_room_is_given_up_once_it_is_not_needed():
    rule = ScalingRule(RULE, 8)
    loads = [BUSY] * 5 + [IDLE] * 11
    assert decide(rule, loads, number=2, roomless=["instance-1"])[-3:] == [2, 1, 1]


def test_the_number_of_a_user_is_where_the_rule_goes_on():
    rule = ScalingRule(RULE, 8)
    assert decide(rule, [IDLE] * 10, number=1) == [1] * 10
    assert [rule.decide(100.0 + 10 * step, IDLE, Fleet(number=4)) for step in (0, 9, 10)] == [4, 4, 3]


def snapshot(waiting: float = 0, running: float = 0, counts: Sequence[int] = (0, 0, 0)) -> Snapshot:
    return Snapshot(
        waiting=waiting, running=running, within=dict(zip((0.1, 1.0, math.inf), counts, strict=True))
    )


def test_each_front_end_reports_all_requests_and_its_own_ttft():
    before = {"a": snapshot(counts=(100, 100, 100)), "b": snapshot(counts=(0, 0, 0))}
    now = {"a": snapshot(3, 2, counts=(110, 110, 110)), "b": snapshot(4, 2, counts=(0, 10, 10))}
    # 19 of 20 requests: 9 of the 10 requests from 0.1 to 1 s
    assert load_of(before, now) == FleetLoad(waiting=4, running=2, ttft_ms=pytest.approx(910))
    assert load_of(now, {**now, "a": None}) is None
    assert load_of(now, {}) is None
    assert load_of({}, now) == load_of({"a": None, "b": None}, now) == FleetLoad(waiting=4, running=2)


def test_a_restarted_front_end_counts_anew_and_few_requests_have_no_percentile():
    before = {"a": snapshot(counts=(500, 500, 500))}
    assert load_of(before, {"a": snapshot(counts=(19, 19, 19))}) == IDLE
    found = load_of(before, {"a": snapshot(counts=(0, 0, 40))})
    assert found is not None
    assert found.ttft_ms == 1000  # above the last bound


def test_the_metrics_of_a_front_end_are_read():
    metrics = Metrics(cluster_config(), _Alone())
    assert read_snapshot(metrics.render().decode()) is None
    instances = tuple(InstanceStats(index=0, name=name, live=name == "b") for name in "ab")
    metrics.stats = FleetStats(num_running=3, num_waiting=7, num_deferred=2, instances=instances)
    metrics.histograms["ttft"].observe(0.3)
    found = read_snapshot(metrics.render().decode())
    assert found is not None
    assert (found.waiting, found.running, found.live) == (5, 5, ["b"])
    assert (found.within[0.25], found.within[0.5], found.within[math.inf]) == (0, 1, 1)


class _Alone:
    figures = link = None


class Keeper:
    """A cluster that stands in: its instances serve at once, as the load of `scaler` says."""

    def __init__(self, config: ScalingConfig, snapshots: Sequence[Snapshot | None]) -> None:
        self.clock, self.snapshots, self.number = VirtualClock(), list(snapshots), 1
        self.numbers: list[int] = []
        self.scaler = Scaler(ScalingRule(config, 8), self.look, self.change, self.clock)

    async def look(self) -> tuple[dict[str, Snapshot | None], Fleet]:
        self.clock.advance(10)
        return {"front-end-0": self.snapshots.pop(0)}, Fleet(number=self.number)

    async def change(self, number: int) -> None:
        self.number = number
        self.numbers.append(number)


def test_a_burst_adds_and_quiet_removes():
    busy, idle = snapshot(20, 8), snapshot()
    keeper = Keeper(RULE, [idle] * 4 + [busy, None] + [idle] * 23)

    async def run() -> None:
        while keeper.snapshots:
            await keeper.scaler.step()

    asyncio.run(run())
    assert keeper.numbers == [3, 2, 1]


def test_a_failed_change_and_a_change_of_a_user_stop_no_decisions(monkeypatch):
    keeper = Keeper(RULE, [snapshot()] * 4 + [snapshot(20, 8)] * 8)

    async def run() -> None:
        changing, slept, failed = asyncio.Lock(), asyncio.Event(), []

        async def sleep(interval_s: float) -> None:
            assert interval_s == RULE.interval_s
            assert not changing.locked()
            if not keeper.snapshots:
                slept.set()
                await asyncio.Event().wait()

        async def change(number: int) -> None:
            assert changing.locked()
            if not failed:
                failed.append(number)
                raise ConfigError("no")
            await Keeper.change(keeper, number)

        monkeypatch.setattr("moe_lora.dist.launch.scaling.asyncio.sleep", sleep)
        keeper.scaler = Scaler(ScalingRule(RULE, 8), keeper.look, change, keeper.clock)
        task = asyncio.create_task(keeper.scaler.run(changing))
        await slept.wait()
        task.cancel()
        assert failed == [3]

    asyncio.run(run())
    assert keeper.numbers[0] == 3


def test_an_actor_reads_metrics_by_a_key_of_its_own(monkeypatch):
    class Roles:
        problem, num_restarts, started = None, 0, ()

        def __init__(self, roles: Sequence[Role], **_: Any) -> None:
            [socket] = roles[0].fds
            self.listening = os.dup(socket)

        async def stop(self) -> None:
            pass

    monkeypatch.setattr("moe_lora.dist.launch.ray_role.HostRoles", Roles)
    metrics, keys = Metrics(cluster_config(), _Alone()), []
    metrics.stats = EngineStats(num_running=1)

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        [key] = re.findall("(?i)^authorization: Bearer (.*)\r$", head, re.MULTILINE)
        status = "200 OK" if head.startswith("GET /metrics ") and not keys else "403 Forbidden"
        keys.append(key)
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode() + metrics.render())
        writer.close()

    async def run() -> None:
        http = {**HTTP, "port": free_port(), "has_key": True}
        actor = RoleActor(Part(role=FRONT_END, count=1), 0, http, "127.0.0.1")
        await actor.start({"front_end": {"admin_key_digests": ["0" * 64]}}, 1, {})
        server = await asyncio.start_server(visit, sock=socket.socket(fileno=actor._roles.listening))
        found = await actor.snapshot()
        assert found is not None
        assert (found.running, await actor.snapshot()) == (1, None)
        digests = yaml.safe_load((actor.folder / "cluster.yaml").read_text())["front_end"][
            "admin_key_digests"
        ]
        assert digests == ["0" * 64, hashlib.sha256(keys[0].encode()).hexdigest()]
        server.close()
        await actor.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scaling": {}}, "scaling.max_instances is missing; give a whole number"),
        (
            {"scaling": {"max_instances": 4, "min_instances": 5}},
            "scaling.min_instances=5 is above scaling.max",
        ),
        ({"scaling": {"max_instances": 2}}, "3 instances are outside of scaling.min_instances=1 and"),
        ({"scaling": {"max_instances": 4, "target": 1}}, "scaling.target is not a setting; allowed are min"),
        ({"front_end": {"admin_address": "0.0.0.0:9000"}}, "scaling and front_end.admin_address do not go"),
        (
            {
                "lora_server": None,
                "front_end": {"prefill_instances": ["instance-0"]},
                "engine": {"num_instances": 3},
            },
            "scaling and front_end.prefill_instances do not go",
        ),
        ({"front_end": {"placement": "loraserve"}}, "a placement is over several instances"),
    ],
)
def test_a_file_without_a_meaning_is_refused(change, message):
    content = {**CONTENT, "scaling": {"max_instances": 4}, **change}
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        roles_file(content, hosts())


def test_the_bounds_hold_for_a_number_of_a_user_and_roles_know_no_scaling(tmp_path):
    scaled = {**CONTENT, "scaling": {"max_instances": 4}}
    cluster, file = roles_file(scaled, hosts())
    assert cluster.scaling == ScalingConfig(max_instances=4)
    assert file == roles_file(CONTENT, hosts())[1]
    check_instances(cluster)
    with pytest.raises(ConfigError, match="scaling is for moe-lora serve, cluster up and cluster manifests"):
        cluster_of(scaled, tmp_path)
