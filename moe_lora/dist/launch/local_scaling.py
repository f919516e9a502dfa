# SPDX-License-Identifier: Apache-2.0
"""The number of a host's instances, within the section `scaling`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from anyio import fail_after

from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.devices import instance_names
from moe_lora.core.errors import ConfigError, EngineDeadError
from moe_lora.core.request import EngineStats, FleetStats
from moe_lora.dist.cluster.controller.cluster_controller import ControlledFleet

from .cluster_file import check_instances
from .host_roles import HostRoles, instance_roles
from .scaling import Fleet, Scaler, ScalingRule, Snapshots, read_snapshot

START_S = 300.0
"""Time for new instances of the rule."""
_LOOK_S = 0.1


def check_scaling(cluster: ClusterConfig) -> None:
    """Raises ConfigError for settings of a fixed number of instances."""
    assert cluster.scaling is not None
    server = cluster.lora_server
    others = {
        "front_end.prefill_instances": cluster.front_end.prefill_instances,
        "lora_server.device_puts": server is not None and server.device_puts != "none",
        "engine.host_cores": cluster.engine.host_cores,
    }
    for other, is_set in others.items():
        if is_set:
            raise ConfigError(
                f"scaling and {other} do not go together: {other} needs a fixed number of instances; leave "
                "one of them out"
            )
    _check_number(cluster, cluster.scaling.min_instances)


def _check_number(cluster: ClusterConfig, number: int) -> None:
    check_instances(replace(cluster, engine=replace(cluster.engine, num_instances=number)))


class LocalScaling:
    """Adds and ends instances, the last first.  file: of the cluster."""

    def __init__(
        self, cluster: ClusterConfig, file: int, roles: HostRoles, controlled: ControlledFleet
    ) -> None:
        control = controlled.controller.instances
        assert control is not None
        control.scale = self._scale
        self._cluster, self._file, self._roles = cluster, file, roles
        self._control, self._registry = control, controlled.instance_registry
        self._number = cluster.engine.num_instances

    async def _scale(self, number: int, limit_s: float) -> None:
        """See `scale_instances`.  A failed start leaves the former number."""
        _check_number(self._cluster, number)
        before = self._number
        if number < before:
            await self._control.check_leaving(leaving := instance_names(before)[number:])
            await self._remove(leaving)
        elif number > before:
            await self._add(number, limit_s)
        self._number = number

    async def _add(self, number: int, limit_s: float) -> None:
        roles = instance_roles(number, self._file)[self._number :]
        engine = self._cluster.engine
        yields = engine.num_ranks == 1 and not engine.host_workers  # children keep the priority for ever
        added = [replace(role, yields=yields, added=True) for role in roles]
        names = {role.name for role in added}
        for role in added:
            self._registry.number_of(role.name)
        try:
            with fail_after(limit_s):
                await asyncio.gather(*map(self._roles.add, added))
                while not names <= {one.name for one in self._registry.live}:
                    await asyncio.sleep(_LOOK_S)
        except Exception as error:
            await self._remove([role.name for role in added])
            if isinstance(error, TimeoutError):
                raise EngineDeadError(
                    f"{', '.join(sorted(names))} did not start within limit_s={limit_s:g}; there are "
                    f"{self._number} instances again"
                ) from None
            raise

    async def _remove(self, names: list[str]) -> None:
        async def end() -> None:
            await asyncio.gather(*map(self._roles.remove, names))

        await self._control.remove(names, end)


@asynccontextmanager
async def by_load(
    cluster: ClusterConfig, served: ControlledFleet, metrics: Callable[[EngineStats], str]
) -> AsyncIterator[None]:
    """Meanwhile the load changes the number.  metrics: Prometheus text."""
    assert cluster.scaling is not None
    control = served.controller.instances
    assert control is not None
    assert control.scale is not None
    scale = control.scale

    async def look() -> tuple[Snapshots, Fleet]:
        stats = await served.fleet.stats()
        assert isinstance(stats, FleetStats)
        starting = [one.name for one in stats.instances if not one.live]
        fleet = Fleet(number=len(stats.instances), starting=starting)
        return {"": read_snapshot(metrics(stats))}, fleet

    async def change(number: int) -> None:
        await scale(number, START_S)

    rule = ScalingRule(cluster.scaling, cluster.engine.max_num_seqs)
    deciding = asyncio.create_task(Scaler(rule, look, change).run(control.changing))
    try:
        yield
    finally:
        deciding.cancel()
