"""The controller that places adapters on instances: demand -> placement -> routing table."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import cast

from moe_lora.config import RoutingConfig
from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.errors import EngineDeadError
from moe_lora.core.problems import LastProblem
from moe_lora.core.request import FleetStats
from moe_lora.policies.token_meter import TokenMeter
from moe_lora.engine.client.client import EngineClient
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.policies.phi_routing import PhiRouting
from .demand_history import DemandHistory
from moe_lora.provision.performance.operating_points_file import read_operating_points
from moe_lora.provision.placement.placement_baselines import PLACEMENTS
from moe_lora.provision.placement.placement_quality import PlacementQuality, placement_quality

logger = logging.getLogger(__name__)


class PlacementController:
    """Every placement_interval_s: tokens of the time step -> forecast -> placement -> the router's new table.

    Instances that are live are placed on; all of them know all adapters, so a request is right wherever it
    goes, and the table decides what each brings to its device.  Belongs to one event loop; placements are
    found in another thread.
    latest: quality of the last placement under the demand that it was made for; None before the first one.
    num_copies: adapters times instances that were moved to, since the start.  num_problems: placements that
    could not be made; the table of before stays.  demand: tokens/s that was forecast last.
    """

    def __init__(
        self,
        config: RoutingConfig,
        client: EngineClient,
        router: PhiRouting,
        meter: TokenMeter,
        clock: Clock | None = None,
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
        self._pool = client.pool if isinstance(client, FleetClient) else None
        self._moving = nullcontext if self._pool is None else self._pool.moving
        self._router = router
        self._meter = meter
        self._clock = clock or WallClock()
        self._history = DemandHistory()
        self._step_s = self._clock.now_s()
        self._problem = LastProblem()

    @property
    def has_points(self) -> bool:
        """Whether loads are shares of a capacity, and not tokens/s."""
        return self._points is not None

    @property
    def version(self) -> int:
        """Tables so far."""
        return self._router.version

    @property
    def interval_s(self) -> float:
        return self._config.placement_interval_s

    def resume(self, demand: Mapping[str, float]) -> None:
        """Go on from the table that the router has, and what was forecast for it, of a controller before."""
        if self._pool is not None:
            self._pool.want(self._router.table)
        self.demand = dict(demand)
        self._history.observe(demand, 1.0)

    async def run(self) -> None:
        """Place now, without any demand yet, and then every interval, until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self._config.placement_interval_s)

    async def step(self) -> None:
        """End the time step: place anew, and route by that from the next request on."""
        self._observe()
        try:
            await self._replace()
            self._problem.over()
        except (EngineDeadError, ValueError) as error:
            self._failed(f"adapters can't be placed anew: {error}")
        except Exception as error:  # whatever it is, requests go on by the table of before
            self._failed(repr(error), trace=True)

    def _observe(self) -> None:
        now_s = self._clock.now_s()
        tokens = self._meter.take()
        if now_s > self._step_s:
            self._history.observe(tokens, now_s - self._step_s)
            self._step_s = now_s

    async def _replace(self) -> None:
        infos, stats = await asyncio.gather(self._client.list_adapters(), self._client.stats())
        adapters = {info.name: info.lora_rank for info in infos}
        sizes = {info.name: float(info.nbytes) for info in infos}
        live = [one.index for one in stats.instances if one.live] if isinstance(stats, FleetStats) else [0]
        if not adapters:
            self._router.swap({})
            return
        points = self._points or dict.fromkeys(adapters.values(), 1.0)
        demand = {name: rate for name, rate in self._history.forecast().items() if name in adapters}
        self.demand = demand
        before = self._router.table
        found = await asyncio.to_thread(self._place, adapters, live, points, demand, before)
        table = cast("dict[str, list[tuple[int, float]]]", found)
        self.latest = placement_quality(table, adapters, live, points, demand, before, sizes)
        self.num_copies += self.latest.num_copies
        async with self._moving(table):
            self._router.swap(table)
        if self.latest.num_copies:
            logger.info(
                "placement %d: %d adapters on %d instances, %d moves",
                self.version,
                len(adapters),
                len(live),
                self.latest.num_copies,
            )

    def _failed(self, problem: str, *, trace: bool = False) -> None:
        self.num_problems += 1
        if self._problem.is_new(problem):
            logger.warning(problem, exc_info=trace)
