# SPDX-License-Identifier: Apache-2.0
"""Another layout for the LoRA Server of a serving host.

Ranks of the next layout start beside the former ones and read the same store: a register sends no bytes.
Once they are ready, the instances' file names them, instances move one after the other, and the former ranks
end.  Meanwhile the host holds both arenas.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from contextlib import ExitStack
from dataclasses import replace

from anyio import fail_after, move_on_after

from moe_lora.config import LoraServerConfig
from moe_lora.config.cluster import ClusterConfig, read_cluster
from moe_lora.config.devices import LORA_SERVER, Devices
from moe_lora.core.errors import ConfigError, LoraServerError, MoeLoraError
from moe_lora.core.partition import Layout, Partition
from moe_lora.dist.cluster.controller.cluster_controller import ControlledFleet
from moe_lora.families import shape_of

from .cluster_file import cluster_file, placed, write_cluster
from .host_roles import HostRoles, server_roles
from .local import Generation, OwnServer, passed_on

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_numbers = itertools.count(1)


class LayoutChange:
    """One change.  file, instances: of the engines."""

    def __init__(self, own: OwnServer, file: int, instances: HostRoles, controlled: ControlledFleet) -> None:
        self._own, self._file = own, file
        self._instances, self._registry = instances, controlled.instance_registry

    async def to(self, text: str, capacity: int, limit_s: float) -> str:
        """Have this layout; returns the server's address.

        Raises ConfigError for an impossible layout, LoraServerError after limit_s, or the error of a failed
        start; then all is as before.
        """
        former = self._own.now
        assert former is not None
        cluster = self._following(former.cluster, text, capacity)
        server = _server_of(cluster)
        if server.layout == _server_of(former.cluster).layout:
            return _server_of(former.cluster).address
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        following = await self._started(cluster, limit_s)
        self._own.now = following
        ready_s = now_s() - began_s
        logger.info("ranks of %s are ready after %.1f s, and instances move", server.layout, ready_s)
        await self._move(server, limit_s)
        moved_s = now_s() - began_s
        await self._end(former)
        logger.info("the LoRA Server is %s; instances moved after %.1f s", server.layout, moved_s)
        return server.address

    def _following(self, now: ClusterConfig, text: str, capacity: int) -> ClusterConfig:
        given, engine = _server_of(now), now.engine
        if given.device_puts != "none":
            raise ConfigError(
                "lora_server.device_puts joins devices that start together, so the layout is fixed; start "
                "again with the other lora_server.layout, or leave device_puts out"
            )
        layout = Layout.parse(text)
        Partition(shape_of(engine.hf_config()), layout, engine.expert_parallel, sites=given.sites)
        address = os.path.join(os.path.dirname(given.address), f"layout-{next(_numbers)}")
        server = replace(given, layout=str(layout), address=address, capacity=capacity)
        devices = _without_server(now.devices, layout.num_ranks)
        return placed(replace(now, lora_server=server, devices=devices))

    async def _started(self, cluster: ClusterConfig, limit_s: float) -> Generation:
        """Ranks of the cluster, ready and named in the instances' file."""
        own, files = self._own, ExitStack()
        file = files.enter_context(cluster_file(replace(cluster, scaling=None)))
        server = _server_of(cluster)
        roles = server_roles(Layout.parse(server.layout).num_ranks, file, f"{server.layout} ")
        ranks = [replace(role, yields=not server.host_workers) for role in roles]
        generation = Generation(cluster, ranks, files)
        try:
            with fail_after(limit_s):
                await asyncio.gather(*(own.ranks.add(role) for role in ranks))
            files.enter_context(passed_on(own.passes_on, file, own.ranks))
            engines = read_cluster(f"/dev/fd/{self._file}")
            write_cluster(self._file, replace(engines, lora_server=server, devices=cluster.devices))
        except BaseException as error:
            await self._end(generation)
            if isinstance(error, TimeoutError):
                raise LoraServerError(
                    f"the ranks of {server.layout} did not start within limit_s={limit_s:g}, and the former "
                    "layout stays; the log says why, or give a longer limit_s"
                ) from None
            raise
        return generation

    async def _end(self, generation: Generation) -> None:
        await asyncio.gather(*(self._own.ranks.remove(role.name) for role in generation.roles))
        generation.files.close()

    async def _move(self, server: LoraServerConfig, limit_s: float) -> None:
        """Move each process of an instance; one that can't within limit_s starts again, by the new file."""
        moved: dict[str, str | None] = {}
        with move_on_after(limit_s):
            while names := self._left(moved):
                for one in [one for one in self._registry.live if one.name in names]:
                    incarnation = one.incarnation
                    try:
                        await one.client.call("join_lora_server", server.address, server.layout)
                        moved[one.name] = incarnation
                    except MoeLoraError as error:
                        logger.warning("%s does not move to %s yet: %s", one.name, server.layout, error)
                await asyncio.sleep(_LOOK_S)
        for name in self._left(moved):
            logger.error("%s is not at the LoRA Server of %s, and is started again", name, server.layout)
            self._instances.kill(name)

    def _left(self, moved: dict[str, str | None]) -> list[str]:
        """Instances with a process that may know the former server only."""
        at = {one.name for one in self._registry.live if moved.get(one.name, "") == one.incarnation}
        return sorted(set(self._instances.running) - at)


def _server_of(cluster: ClusterConfig) -> LoraServerConfig:
    assert cluster.lora_server is not None
    return cluster.lora_server


def _without_server(devices: Devices, num_ranks: int) -> Devices:
    """The devices, without the server's for another number of ranks."""
    return {name: one for name, one in devices.items() if name != LORA_SERVER or len(one) == num_ranks}
