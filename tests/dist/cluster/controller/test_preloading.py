# SPDX-License-Identifier: Apache-2.0
"""Adapters that are on devices before their first request: real instances, dLoRA's proactive placement."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_lora.config import EngineConfig, FrontEndConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import PoolConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import EngineStats, GenerateRequest, SamplingParams
from moe_lora.dist.cluster.controller.cluster_state import ClusterState, take_table
from moe_lora.dist.cluster.controller.placement_controller import PlacementController
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.launch.local import local_instances, local_lora_server
from moe_lora.policies.routing.model_routing import ShortestPendingTime
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.provision.performance_models import FORMAT
from tests.dist.cluster.fleet_parts import CountingEngine, cluster_config, fleet_client
from tests.dist.cluster.test_migration import CONFIG, DEMO
from tests.virtual_clock import VirtualClock

NAMES = tuple(json.loads((DEMO / "adapters" / "index.json").read_text()))[:4]
ADAPTERS = tuple((name, str(DEMO / "adapters" / name)) for name in NAMES)
ENGINE = EngineConfig(
    **{"model_dir": CONFIG.model_dir, "adapters": ADAPTERS, "dtype": "float32", "eager": True},
    num_instances=2,
)


def ask(name: str, adapter: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    return GenerateRequest(
        request_id=name, prompt_token_ids=tuple(range(20, 40)), sampling=sampling, adapter=adapter
    )


def figures(cluster: ClusterConfig, num_preloaded: int | None = None) -> tuple[list[set[str]], EngineStats]:
    """What each instance has on its device before the first request; after one of each adapter: the sums.

    num_preloaded: by all instances, which is waited for; None: until all adapters are on devices.
    """

    async def run() -> tuple[list[set[str]], EngineStats]:
        async with local_lora_server(cluster) as joined, local_instances(joined) as controlled:
            fleet, controller = controlled.fleet, controlled.controller
            running = asyncio.create_task(controller.run())
            placed = cluster.front_end.placement is not None
            for _ in range(3000):
                stats = await fleet.stats()
                if num_preloaded is not None:
                    there = controller.figures.num_tables and stats.adapters_preloaded >= num_preloaded
                else:
                    there = set(stats.resident_adapters) == set(NAMES)
                if there or not placed:
                    break
                await asyncio.sleep(0.01)
            resident = [set(one.latest.resident_adapters) for one in fleet.instances]
            assert (stats.adapter_hits, stats.adapter_misses) == (0, 0)
            for name in NAMES:
                async for _ in fleet.generate(ask(name, name)):
                    pass
            running.cancel()
            if controller.placement is not None:
                assert controller.placement.num_problems == 0
            return resident, await fleet.stats()

    return asyncio.run(run())


def test_an_adapter_is_on_the_device_before_its_first_request_which_is_a_hit():
    front_end = FrontEndConfig(placement="burst_tolerance", placement_interval_s=30.0)
    cluster = ClusterConfig(engine=ENGINE, served_model_name="demo", front_end=front_end)
    resident, stats = figures(cluster)
    assert resident[0] | resident[1] == set(NAMES)
    assert stats.adapter_hits == len(NAMES)
    assert stats.adapter_misses == 0
    nowhere, stats = figures(replace(cluster, front_end=FrontEndConfig()))
    assert nowhere == [set(), set()]
    assert stats.adapter_misses > 0


@pytest.mark.parametrize(
    "settings", [{"pool": PoolConfig(replicas=1)}, {"num_instances": 1, "expert_parallel": 2}]
)
def test_adapters_of_a_pool_and_of_several_ranks_are_preloaded_too(settings):
    front_end = FrontEndConfig(placement="burst_tolerance", placement_interval_s=30.0)
    engine = replace(ENGINE, **settings)
    resident, stats = figures(ClusterConfig(engine=engine, served_model_name="demo", front_end=front_end))
    assert set().union(*resident) == set(NAMES)
    assert (stats.adapter_hits, stats.adapter_misses) == (len(NAMES), 0)


@pytest.mark.parametrize(
    ("sites", "num_preloaded"), [("experts", len(NAMES)), pytest.param("all", 0, marks=pytest.mark.slow)]
)
def test_with_a_lora_server_what_instances_compute_themselves_is_preloaded(sites, num_preloaded):
    """Each once, as all have equal loads; of what the server computes nothing belongs on their devices."""
    front_end = FrontEndConfig(placement="burst_tolerance", placement_interval_s=30.0)
    server = LoraServerConfig(capacity=len(NAMES), sites=sites)
    cluster = ClusterConfig(engine=ENGINE, served_model_name="demo", front_end=front_end, lora_server=server)
    _, stats = figures(cluster, num_preloaded)
    assert stats.adapters_preloaded == num_preloaded
    assert (stats.device_adapter_bytes > 0) == (num_preloaded > 0)
    assert stats.lora_rows_leased > 0
    assert (stats.lora_rows_local > 0) == (num_preloaded > 0)


def steps_file(folder: Path) -> str:
    path = folder / "steps.json"
    model = {"kernel": "sgmv", "form": "full", "expert_share": 1.0, "prefill_s": {}}
    path.write_text(json.dumps({"format": FORMAT, "models": [{**model, "decode_s": {"step": 1e-3}}]}))
    return str(path)


def test_the_shortest_pending_time_is_where_the_adapter_was_preloaded(tmp_path):
    front_end = FrontEndConfig(
        placement="burst_tolerance",
        routing="shortest_pending_time",
        performance_model=steps_file(tmp_path),
        adapter_load_s_per_rank=0.01,
    )
    engine = replace(ENGINE, max_loras=2)  # so that no instance has room for all
    cluster = ClusterConfig(engine=engine, served_model_name="demo", front_end=front_end)
    assert isinstance(make_routes(cluster).router, ShortestPendingTime)
    resident, stats = figures(cluster)
    assert [len(names) for names in resident] == [2, 2]
    assert resident[0] | resident[1] == set(NAMES)
    assert (stats.adapter_hits, stats.adapter_misses) == (len(NAMES), 0)


def test_front_ends_hear_what_was_preloaded(tmp_path):
    config = FrontEndConfig(
        placement="burst_tolerance",
        routing="shortest_pending_time",
        performance_model=steps_file(tmp_path),
        adapter_load_s_per_rank=0.01,
    )
    routes = make_routes(cluster_config(config))
    routes.ranks.update(a=8, b=8)
    registry = InstanceRegistry([CountingEngine(), CountingEngine()], ())
    table = {"a": (("1", 1.0),), "b": (("0", 0.5), ("1", 0.5))}
    take_table(ClusterState(number=1, table=table, table_version=3), routes, registry)
    assert routes.table_version == 3
    assert [one.load.has("a") for one in registry.instances] == [False, True]
    assert [one.load.has("b") for one in registry.instances] == [True, True]
    chosen = routes.router.choose(ask("r", "a"), registry.instances)
    assert chosen is registry.instances[1]


def test_only_the_pair_of_the_paper_is_allowed():
    with pytest.raises(ConfigError, match="choose routing='shortest_pending_time', or leave one of them out"):
        FrontEndConfig(placement="burst_tolerance", routing="round_robin")
    with pytest.raises(ConfigError, match="routes by its own table, not by routing='shortest_pending_time'"):
        FrontEndConfig(placement="loraserve", routing="shortest_pending_time")
    pair = cluster_config(FrontEndConfig(placement="burst_tolerance", routing="shortest_pending_time"))
    with pytest.raises(ConfigError, match=r"give --set front_end\.performance_model=FILE"):
        make_routes(pair)


class Small(CountingEngine):
    """One whose device has room for so many bytes; an adapter takes 100."""

    def __init__(self, device_bytes: int) -> None:
        super().__init__(adapters=dict.fromkeys("abc", "p"))
        self.stats_now = EngineStats(device_bytes=device_bytes)

    def _info(self, name: str):
        return replace(super()._info(name), device_bytes=100)

    @property
    def preloaded(self) -> list[tuple[str, ...]]:
        return [call[1:] for call in self.calls if call[0] == "preload"]


def test_what_is_preloaded_follows_the_devices_memory_and_the_load():
    async def run() -> None:
        engines = [Small(150), Small(320)]
        clock = VirtualClock()
        config = FrontEndConfig(placement="burst_tolerance")
        routes = make_routes(cluster_config(config))
        registry = InstanceRegistry(engines, [(name, "p") for name in "abc"])
        fleet = fleet_client(registry, routes.router, clock, routes.meter, routes.ranks)
        assert isinstance(routes.router, PhiRouting)
        controller = PlacementController(config, fleet, routes.router, routes.meter, clock)
        await controller.step()
        assert [engine.preloaded for engine in engines] == [[("c",)], [("a", "b")]]
        clock.advance(10.0)
        routes.meter.add({"c": 100})
        await controller.step()  # only c has load: it goes where there is most room, then everywhere
        assert [engine.preloaded[1:] for engine in engines] == [[("c",)], [("c",)]]
        engines[1] = again = Small(320)
        registry.instances[1].client = again
        await controller._preload()
        assert again.preloaded == [("c",)]  # at once, not with the next placement
        assert [len(engine.preloaded) for engine in engines] == [2, 1]
        assert controller.num_problems == 0

    asyncio.run(run())
