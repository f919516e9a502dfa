# SPDX-License-Identifier: Apache-2.0
"""Placements made while requests are served."""

from __future__ import annotations

import asyncio
import json

import pytest

from moe_lora.config import FrontEndConfig
from moe_lora.core.request import GenerateRequest, SamplingParams
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.cluster_controller import ClusterController
from moe_lora.dist.cluster.controller.placement_controller import PlacementController
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.provision.performance_models import FORMAT
from moe_lora.serve.metrics import Metrics
from tests.dist.cluster.fleet_parts import CountingEngine, cluster_config, fleet_client
from tests.virtual_clock import VirtualClock

NAMES = tuple("abcd")


class Cluster:
    """Two or more engines that count, and the controller of their table."""

    def __init__(self, num_engines: int = 2, placement: str = "loraserve", **settings) -> None:
        self.clock = VirtualClock()
        self.engines = [CountingEngine(adapters=dict.fromkeys(NAMES, "p")) for _ in range(num_engines)]
        self.config = FrontEndConfig(placement=placement, **settings)
        self.routes = make_routes(cluster_config(self.config))
        self.instance_registry = InstanceRegistry(self.engines, [(name, "p") for name in NAMES])
        meter = self.routes.meter
        self.fleet = fleet_client(
            self.instance_registry, self.routes.router, self.clock, meter, self.routes.ranks
        )
        assert isinstance(self.routes.router, PhiRouting)
        self.router = self.routes.router
        self.controller = PlacementController(self.config, self.fleet, self.router, meter, self.clock)

    async def ask(self, name: str, adapter: str, max_tokens: int = 8) -> list[int]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = GenerateRequest(
            request_id=name, prompt_token_ids=(0, 1), sampling=sampling, adapter=adapter
        )
        return [token async for output in self.fleet.generate(request) for token in output.token_ids]

    async def step(self, length_s: float = 10.0) -> None:
        self.clock.advance(length_s)
        await self.controller.step()


def test_the_first_table_spreads_adapters_and_requests_follow_it():
    async def run() -> None:
        cluster = Cluster()
        await cluster.controller.step()
        table = cluster.router.table
        assert sorted(index for row in table.values() for index, _ in row) == [0, 0, 1, 1]
        for name in NAMES:
            await cluster.ask(name, name)
        for index, engine in enumerate(cluster.engines):
            assert {one.adapter for one in engine.requests} == {
                name for name in NAMES if table[name] == [(index, 1.0)]
            }

    asyncio.run(run())


def test_tokens_that_are_asked_for_become_shares():
    async def run() -> None:
        cluster = Cluster(num_engines=3)
        await cluster.controller.step()
        for number in range(8):
            await cluster.ask(f"r{number}", "a")
        await cluster.ask("b", "b")
        await cluster.step()
        assert {index for index, _ in cluster.router.table["a"]} == {0, 1, 2}
        assert len(cluster.router.table["b"]) == 1
        assert cluster.controller.latest is not None
        assert cluster.controller.latest.target_utilisation == pytest.approx(9 * 10 / 10.0 / 3)
        copies = cluster.controller.num_copies
        assert copies >= 2
        for number in range(8):
            await cluster.ask(f"s{number}", "a")
        await cluster.ask("b2", "b")
        await cluster.step()
        assert cluster.controller.num_copies == copies  # the same demand: nothing moves
        assert cluster.controller.version == 3

    asyncio.run(run())


def test_an_instance_that_is_gone_is_not_placed_on():
    async def run() -> None:
        cluster = Cluster()
        await cluster.controller.step()
        cluster.engines[0].alive = False
        cluster.instance_registry.lose(cluster.instance_registry.instances[0], cluster.engines[0])
        assert await cluster.ask("r", "a") == list(range(2, 10))
        await cluster.step()
        assert {index for row in cluster.router.table.values() for index, _ in row} == {1}

    asyncio.run(run())


def test_a_drained_instance_is_placed_on_only_where_no_other_is_live():
    async def run() -> None:
        cluster = Cluster()
        registry = cluster.instance_registry
        registry.drains.order("0", drained=True)
        await cluster.controller.step()
        assert {index for row in cluster.router.table.values() for index, _ in row} == {1}
        cluster.engines[1].alive = False
        registry.lose(registry.instances[1], cluster.engines[1])
        await cluster.step()
        assert {index for row in cluster.router.table.values() for index, _ in row} == {0}

    asyncio.run(run())


def test_no_request_fails_while_tables_change():
    async def run() -> None:
        cluster = Cluster(num_engines=3, placement="random")
        answers: list[list[int]] = []

        async def client(number: int) -> None:
            for turn in range(20):
                answers.append(await cluster.ask(f"{number}-{turn}", NAMES[(number + turn) % 4]))

        async def swaps() -> None:
            for _ in range(60):
                await cluster.step(0.1)
                for name in NAMES:  # every adapter elsewhere
                    row = [((cluster.router.table[name][0][0] + 1) % 3, 1.0)]
                    cluster.router.swap({**cluster.router.table, name: row})
                await asyncio.sleep(0)

        await asyncio.gather(swaps(), *(client(number) for number in range(10)))
        assert answers == [list(range(2, 10))] * 200
        assert cluster.router.version > 200
        assert [one.load.num_requests for one in cluster.instance_registry.instances] == [0, 0, 0]

    asyncio.run(run())


def test_a_placement_that_can_not_be_made_leaves_the_table(caplog):
    def refuse(*_: object) -> None:
        raise ValueError("no place for 'a'")

    async def run() -> None:
        cluster = Cluster()
        cluster.controller._place = refuse
        for _ in range(2):
            await cluster.step()
        assert (cluster.controller.num_problems, cluster.controller.version) == (2, 0)
        assert await cluster.ask("r", "a") == list(range(2, 10))

    asyncio.run(run())
    assert caplog.text.count("adapters can't be placed anew: no place for 'a'") == 1


def test_ranks_are_known_to_the_routers_that_need_them(tmp_path):
    path = tmp_path / "steps.json"
    model = {
        "kernel": "bgmv",
        "form": "full",
        "expert_share": 1.0,
        "decode_s": {"step": 1e-3},
        "prefill_s": {},
    }
    path.write_text(json.dumps({"format": FORMAT, "models": [model]}))
    routes = make_routes(
        cluster_config(FrontEndConfig(routing="rank_aware", performance_model=str(path)), lora_kernel="bgmv")
    )
    engines = [CountingEngine(adapters={"a": "p"}) for _ in range(2)]
    fleet = fleet_client(InstanceRegistry(engines, [("a", "p")]), routes.router, ranks=routes.ranks)
    asyncio.run(fleet.model_info())
    assert routes.ranks == {"a": 1}
    asyncio.run(fleet.call("load_adapter", "b", "q"))
    assert routes.ranks == {"a": 1, "b": 1}
    assert routes.placement(fleet) is None


def test_metrics_tell_what_rank_aware_learns_and_where_no_instance_keeps_the_slo(tmp_path):
    path = tmp_path / "steps.json"
    model = {
        "kernel": "sgmv",
        "form": "full",
        "expert_share": 1.0,
        "decode_s": {"tokens": 0.01},
        "prefill_s": {},
    }
    path.write_text(json.dumps({"format": FORMAT, "models": [model]}))
    front_end = FrontEndConfig(routing="rank_aware", performance_model=str(path), slo_tpot_s=0.015)
    config = cluster_config(front_end)
    routes = make_routes(config)
    registry = InstanceRegistry([CountingEngine(adapters={"a": "p"})], [("a", "p")])
    fleet = fleet_client(registry, routes.router, ranks=routes.ranks)
    metrics = Metrics(config, ClusterController(FleetAdapters(registry)))
    assert "rank_aware" not in metrics.render().decode()

    async def ask(name: str, max_tokens: int) -> int:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = GenerateRequest(request_id=name, prompt_token_ids=(0, 1), sampling=sampling, adapter="a")
        return sum([len(output.token_ids) async for output in fleet.generate(request)])

    async def run() -> None:
        await ask("alone", 8)
        await asyncio.gather(ask("one", 8), ask("other", 8))  # two tokens are a step of 20 ms
        metrics.stats = await fleet.stats()

    asyncio.run(run())
    text = metrics.render().decode()
    assert 'moe_lora:rank_aware_choices_total{cost="finite",model_name="base"} 2.0' in text
    assert 'moe_lora:rank_aware_choices_total{cost="infinite",model_name="base"} 1.0' in text
    assert 'moe_lora:rank_aware_infinite_share{model_name="base"} 0.333' in text
    mean = (8 * 128 + 3 * 8) / 11
    assert f'moe_lora:rank_aware_mean_output_tokens{{model_name="base"}} {mean:.6f}' in text


def test_metrics_tell_of_tables_moves_and_load(tmp_path):
    points = tmp_path / "points.json"
    points.write_text(json.dumps({"1": 100.0, "8": 50.0}))
    cluster = Cluster(operating_points=str(points))
    controller = ClusterController(FleetAdapters(cluster.instance_registry), placement=cluster.controller)
    metrics = Metrics(cluster_config(cluster.config), controller)
    assert "moe_lora:placement_adapters_held{" not in metrics.render().decode()

    async def run() -> None:
        await cluster.controller.step()
        await cluster.ask("r", "a", max_tokens=18)
        await cluster.step(1.0)

    asyncio.run(run())
    text = metrics.render().decode()
    assert 'moe_lora:placement_tables_total{model_name="base"} 2.0' in text
    assert 'moe_lora:placement_max_utilisation{model_name="base"} 0.1' in text  # 20 tokens/s on two of 100
    assert 'moe_lora:placement_problems_total{model_name="base"} 0.0' in text


def test_demand_counts_when_requests_come_and_not_without_a_placement():
    async def run() -> None:
        cluster = Cluster()
        await cluster.controller.step()
        request = GenerateRequest(
            request_id="long",
            prompt_token_ids=(0, 1),
            sampling=SamplingParams(max_tokens=40, temperature=0.0),
            adapter="a",
        )
        stream = cluster.fleet.generate(request)
        await anext(stream)
        await cluster.step()
        assert cluster.controller.demand["a"] == pytest.approx((2 + 40) / 10.0)
        await stream.aclose()

    asyncio.run(run())
    assert make_routes(cluster_config(FrontEndConfig())).meter is None
