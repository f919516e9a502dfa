# SPDX-License-Identifier: Apache-2.0
"""Requests that the controller has moved: real instances, all requests sent to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.dist.cluster.controller.migration_controller import MigrationController, request_of
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.launch.local import local_instances
from moe_lora.engine.client.messages import MoveOrder, RequestLoad
from moe_lora.policies.routing.routing import InstanceView
from tests.dist.cluster.fleet_parts import CountingEngine
from tests.dist.cluster.test_migration import ADAPTERS, CONFIG
from tests.virtual_clock import VirtualClock


class First:
    """A router that is as wrong as one can be."""

    def choose(self, request: GenerateRequest, candidates: Sequence[InstanceView]) -> InstanceView:
        return candidates[0]


ENGINE = EngineConfig(
    **{"model_dir": CONFIG.model_dir, "adapters": ADAPTERS, "dtype": "float32", "eager": True},
    max_num_seqs=2,
    num_threads=1,
    num_instances=2,
)


def cluster_of(**front_end) -> ClusterConfig:
    return ClusterConfig(
        engine=ENGINE, served_model_name="demo", front_end=FrontEndConfig(migration="dlora", **front_end)
    )


def ask(number: int) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=150, ignore_eos=True, temperature=float(number % 2), seed=number, logprobs=0
    )
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(range(20 + number, 40 + number)),
        sampling=sampling,
        adapter=[None, "upper"][number // 2 % 2],
    )


async def tokens_of(fleet: FleetClient, request: GenerateRequest) -> list[int]:
    return [token async for output in fleet.generate(request) for token in output.token_ids]


def test_requests_leave_an_instance_where_they_queue():
    cluster = cluster_of(migration_interval_s=0.1, migration_queue_s=0.05)
    requests = [ask(number) for number in range(4)]

    async def run() -> None:
        async with local_instances(cluster, router=First()) as controlled:
            fleet, migration = controlled.fleet, controlled.controller.migration
            assert isinstance(migration, MigrationController)
            unmoved = [replace(one, request_id=f"unmoved {one.request_id}") for one in requests]
            expected = await asyncio.gather(*(tokens_of(fleet, one) for one in unmoved))
            running = asyncio.create_task(controlled.controller.run())
            moved = await asyncio.gather(*(tokens_of(fleet, one) for one in requests))
            running.cancel()
            assert moved == expected
            assert migration.policy.num_plans > 0
            assert migration.num_orders > 0
            assert sum(fleet.mover.num_moved.values()) > 0
            stats = await fleet.stats()
            assert [one.outstanding_tokens for one in stats.instances] == [0, 0]

    asyncio.run(run())


class ReportingEngine(CountingEngine):
    """One that has these requests, and notes what it is to pass on."""

    def __init__(self, requests: list[RequestLoad]) -> None:
        super().__init__(adapters={"a": "p"})
        self.loads, self.orders = requests, list[MoveOrder]()
        self.stats_now = replace(self.stats_now, device_bytes=1 << 30)

    async def call(self, method: str, *args):
        if method == "request_loads":
            return self.loads
        assert method == "pass_on"
        self.orders += args[0]
        return len(args[0])


def load(name: str, waited_s: float | None, adapter: str | None = "a", held: bool = False) -> RequestLoad:
    return RequestLoad(
        name=name,
        adapter=adapter,
        num_tokens=20,
        num_generated=4 if waited_s is None else 0,
        num_left=96,
        num_bytes=4096,
        waited_s=waited_s,
        held=held,
    )


@pytest.mark.parametrize("same_layout", [True, False])
def test_orders_go_to_the_source_those_that_wait_first_and_by_tokens(same_layout):
    async def run() -> None:
        busy = ReportingEngine([load(f"run{i}", None) for i in range(6)] + [load("wait", 1.0)])
        idle = ReportingEngine([])
        config = FrontEndConfig(migration="dlora", migration_queue_s=0.5)
        registry = InstanceRegistry([busy, idle], [("a", "p")])
        controller = MigrationController(
            config, registry, max_num_seqs=64, ranks={}, same_layout=same_layout, clock=VirtualClock()
        )
        assert await controller.step() == len(busy.orders) >= 2
        assert (busy.orders[0].name, busy.orders[0].kind) == ("wait", "tokens")
        assert {one.kind for one in busy.orders[1:]} == {"kv" if same_layout else "tokens"}
        assert {one.target for one in busy.orders} == {"1"}
        assert not idle.orders
        assert controller.num_orders == len(busy.orders)

    asyncio.run(run())


def test_no_more_move_than_there_are_seats():
    async def run() -> None:
        busy = ReportingEngine([load(f"run{i}", None) for i in range(5)] + [load("w0", 1.0), load("w1", 1.0)])
        other = ReportingEngine([load("own0", None), load("own1", None), load("own2", 0.0)])
        registry = InstanceRegistry([busy, other], [("a", "p")])
        config = FrontEndConfig(migration="dlora", migration_interval_s=0.1)
        for max_num_seqs, num_orders in ((3, 0), (4, 1)):
            controller = MigrationController(config, registry, max_num_seqs=max_num_seqs, ranks={})
            assert await controller.step() == num_orders
        assert [order.name for order in busy.orders] in (["w0"], ["w1"])

    asyncio.run(run())


def test_nothing_moves_while_nobody_waits_and_there_is_room():
    async def run() -> None:
        busy = ReportingEngine([load(f"run{i}", None) for i in range(6)])
        registry = InstanceRegistry([busy, ReportingEngine([])], [("a", "p")])
        controller = MigrationController(
            FrontEndConfig(migration="dlora"), registry, max_num_seqs=64, ranks={}
        )
        assert await controller.step() == 0
        assert not busy.orders
        assert controller.policy.num_plans == 0

    asyncio.run(run())


def test_no_plan_is_made_while_moves_of_the_last_one_are_under_way():
    async def run() -> None:
        clock = VirtualClock()
        busy = ReportingEngine([load(f"run{i}", None) for i in range(8)] + [load("wait", 1.0)])
        idle = ReportingEngine([])
        config = FrontEndConfig(migration="dlora", migration_queue_s=0.5, migration_interval_s=0.1)
        registry = InstanceRegistry([busy, idle], [("a", "p")])
        controller = MigrationController(config, registry, max_num_seqs=64, ranks={}, clock=clock)

        async def look() -> int:
            clock.advance(1.0)
            return await controller.step()

        assert await look() >= 2
        first, later = busy.orders[0].name, [order.name for order in busy.orders[1:]]
        assert await look() == 0  # the front end has not begun
        idle.loads = [load(f"{first}~1", None, held=True)]
        for _ in range(4):  # it computes its prompt at the target, and others wait for their turn
            assert await look() == 0
        busy.loads = [one for one in busy.loads if one.name != first] + [load("late", 1.0)]
        idle.loads = [load(f"{first}~1", None)]
        assert await look() == 0
        assert controller.policy.num_plans == 1
        busy.loads = [one for one in busy.loads if one.name not in later]
        busy.orders.clear()
        assert await look() > 0  # the last one has left
        assert controller.policy.num_plans == 2
        failed = {order.name for order in busy.orders}
        busy.orders.clear()
        for _ in range(3):
            clock.advance(1.0)
            assert controller.policy.num_plans == 2
            await controller.step()
        assert controller.policy.num_plans == 3  # nothing came of the orders
        assert not failed & {order.name for order in busy.orders}

    asyncio.run(run())


def test_requests_are_told_apart_by_ids_that_clients_chose():
    """What a client sends as X-Request-Id may hold what marks attempts."""

    async def run() -> None:
        running = [load(f"cmpl-run~{i}-0~1", None) for i in range(6)]
        busy = ReportingEngine([load("cmpl-run~9-0", 1.0), *running])
        registry = InstanceRegistry([busy, ReportingEngine([])], [("a", "p")])
        controller = MigrationController(
            FrontEndConfig(migration="dlora"), registry, max_num_seqs=64, ranks={}
        )
        assert await controller.step() > 1
        assert busy.orders[0].name == "cmpl-run~9-0"
        busy.loads = running[1:]
        before = controller._lengths.left("a", 0, 1000)
        await controller.step()
        assert controller._lengths.left("a", 0, 1000) < before, "two have ended"

    asyncio.run(run())


def test_lengths_of_answers_go_with_their_adapter():
    async def run() -> None:
        busy = ReportingEngine([load("run", None), load("gone", None, "unloaded"), load("base", None, None)])
        registry = InstanceRegistry([busy, ReportingEngine([])], [("a", "p")])
        controller = MigrationController(
            FrontEndConfig(migration="dlora"), registry, max_num_seqs=64, ranks={}
        )
        await controller.step()
        busy.loads = []
        await controller.step()
        assert set(controller._lengths._num) == set(controller._lengths._tokens) == {"a", None}

    asyncio.run(run())


@pytest.mark.parametrize("name", ["r", "r~1", "r~12 (3)"])
def test_attempts_of_a_request_have_one_name(name):
    assert request_of(name) == "r"
