# SPDX-License-Identifier: Apache-2.0
"""The controller of adapter placement: demand -> placement -> routing table."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import cast

from moe_lora.config import RoutingConfig
from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.errors import EngineDeadError, LastProblem
from moe_lora.core.records import PlacementQuality
from moe_lora.core.request import AdapterInfo, FleetStats, InstanceStats
from moe_lora.dist.cluster.pool.pool import FleetPool
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.engine.client.client import EngineClient
from moe_lora.policies.routing.demand import DemandForecast, DemandMeter
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.provision.operating_points import read_operating_points
from moe_lora.provision.placement.burst_tolerance import DeviceMemory, place_and_preload
from moe_lora.provision.placement.placement import PLACEMENTS
from moe_lora.provision.placement.placement_problem import placement_quality

from .routes import show_preloaded

SETTLE_S = 1.0
"""Wait for instances that start together."""
_LOOK_S = 0.2

logger = logging.getLogger(__name__)


class PlacementController:
    """Every placement_interval_s: demand -> forecast -> placement -> the router's new table.

    The table decides the adapters on each device: loaded with the first request, ahead with burst_tolerance,
    and at once for an instance that joins between steps.  Every route is correct: every instance knows every
    adapter.  routes_by_table False: the table only lists preloads.  num_copies: adapters moved since the
    start.  num_problems: failed placements; the earlier table stays.  demand: tokens/s.
    """

    def __init__(
        self,
        config: RoutingConfig,
        client: FleetClient,
        router: PhiRouting,
        meter: DemandMeter,
        clock: Clock | None = None,
        pool: FleetPool | None = None,
        routes_by_table: bool = True,
    ) -> None:
        assert config.placement is not None
        self.latest: PlacementQuality | None = None
        self.num_copies = 0
        self.num_problems = 0
        self.demand: dict[str, float] = {}
        self._config = config
        self._place = PLACEMENTS[config.placement]
        points = config.operating_points
        self._points = None if points is None else read_operating_points(points)
        self._client = client
        self._pool = pool
        self._moving = nullcontext if pool is None else pool.moving
        self._router = router
        self._routes_by_table = routes_by_table
        self._meter = meter
        self._clock = clock or WallClock()
        self._forecast = DemandForecast(config.demand_steps, config.demand_smoothing, config.demand_trend)
        self._step_s = self._clock.now_s()
        self._problem = LastProblem()
        self._preloaded: dict[int, list[str]] = {}
        self._told: dict[int, EngineClient] = {}

    @property
    def version(self) -> int:
        """Tables so far."""
        return self._router.version

    def resume(self, demand: Mapping[str, float]) -> None:
        """Continue from an earlier controller's table and forecast."""
        if self._pool is not None:
            self._pool.want(self._router.table)
        self.demand = dict(demand)
        self._forecast.observe(demand, 1.0)

    async def run(self) -> None:
        """Place without demand at the first instance, then every interval, until cancelled.

        A resumed table stays for a whole interval.
        """
        while not await self._client.is_alive():
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(self._config.placement_interval_s if self.version else SETTLE_S)
        loop = asyncio.get_running_loop()
        while True:
            await self.step()
            ends_s = loop.time() + self._config.placement_interval_s
            while (left_s := ends_s - loop.time()) > 0:
                await asyncio.sleep(min(left_s, _LOOK_S))
                await self._preload()

    async def step(self) -> None:
        """End the time step: place anew, and route by the result."""
        self._observe()
        try:
            await self._replace()
            self._problem.over()
        except (EngineDeadError, ValueError) as error:
            self._failed(f"adapters can't be placed anew: {error}")
        except Exception as error:  # the earlier table stays in use
            self._failed(repr(error), trace=True)

    def _observe(self) -> None:
        now_s = self._clock.now_s()
        tokens = self._meter.read()
        if now_s > self._step_s:
            self._forecast.observe(tokens, now_s - self._step_s)
            self._step_s = now_s

    async def _replace(self) -> None:
        infos, stats = await asyncio.gather(self._client.list_adapters(), self._client.stats())
        adapters = {info.name: info.lora_rank for info in infos}
        sizes = {info.name: float(info.nbytes) for info in infos}
        assert isinstance(stats, FleetStats)
        instances = _placed_on(stats)
        live = [one.index for one in instances]
        if not adapters:
            self._router.swap({})
            return
        points = self._points or dict.fromkeys(adapters.values(), 1.0)
        demand = {name: rate for name, rate in self._forecast.read().items() if name in adapters}
        self.demand = demand
        before = self._router.table
        if self._config.placement == "burst_tolerance":
            memory = await self._memory(infos, instances)
            found, preloaded = await asyncio.to_thread(place_and_preload, adapters, demand, memory)
            self._preloaded = cast("dict[int, list[str]]", preloaded)
            self._told.clear()
        else:
            found = await asyncio.to_thread(self._place, adapters, live, points, demand, before)
        table = cast("dict[str, list[tuple[int, float]]]", found)
        self.latest = placement_quality(table, adapters, live, points, demand, before, sizes)
        self.num_copies += self.latest.num_copies
        async with self._moving(table):
            await self._preload()
            if self._routes_by_table:
                self._router.swap(table)
            else:
                brought = set().union(*self._preloaded.values())
                show_preloaded({name: table[name] for name in brought}, self._router, self._client.instances)
        if self.latest.num_copies:
            logger.info(
                "placement %d: %d adapters on %d instances, %d moves",
                self.version,
                len(adapters),
                len(live),
                self.latest.num_copies,
            )

    async def _memory(self, infos: list[AdapterInfo], instances: list[InstanceStats]) -> DeviceMemory:
        """Free memory of these instances; every device has pinned adapters."""
        slots = (await self._client.model_info()).max_loras
        pinned = [info for info in infos if info.pinned]
        taken = sum(info.device_bytes for info in pinned)
        return DeviceMemory(
            free_bytes={one.index: float(max(0, one.device_bytes - taken)) for one in instances},
            adapter_bytes={info.name: 0.0 if info.pinned else float(info.device_bytes) for info in infos},
            max_adapters=slots,
        )

    async def _preload(self) -> None:
        live = [one for one in self._client.instances if one.live and self._preloaded.get(one.index)]
        untold = [one for one in live if self._told.get(one.index) is not one.client]
        await asyncio.gather(*(self._preload_on(one.index, one.client) for one in untold))

    async def _preload_on(self, index: int, client: EngineClient) -> None:
        try:
            await client.call("preload_adapters", self._preloaded[index])
        except EngineDeadError:
            return  # sent again at the instance's return
        except Exception as error:  # adapters load with their first requests
            self._failed(f"instance {index} can't preload adapters: {error!r}")
        self._told[index] = client

    def _failed(self, problem: str, *, trace: bool = False) -> None:
        self.num_problems += 1
        if self._problem.is_new(problem):
            logger.warning(problem, exc_info=trace)


def _placed_on(stats: FleetStats) -> list[InstanceStats]:
    live = [one for one in stats.instances if one.live]
    return [one for one in live if not one.drained] or live
