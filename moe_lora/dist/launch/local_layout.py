# SPDX-License-Identifier: Apache-2.0
"""Another layout for the LoRA Server of a serving host.

Ranks of the next layout start beside the former ranks and read the same store: a register sends no bytes.
Then the instances' file names the next ranks, instances move, and the former ranks end.  Meanwhile the host
has both arenas.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from anyio import CancelScope, current_time, fail_after, move_on_after

from moe_lora.config import LoraServerConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.devices import LORA_SERVER, Devices, instance_names
from moe_lora.core.address import Address
from moe_lora.core.errors import (
    CapacityError,
    ConfigError,
    ControllerAwayError,
    EngineDeadError,
    LastProblem,
    LoraServerError,
)
from moe_lora.core.partition import Layout
from moe_lora.dist.cluster.controller.keeper_link import HANDSHAKE, LinkEnd, keeper_socket
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.net.codec import verb
from moe_lora.dist.net.connection import listen
from moe_lora.dist.net.peer import Peer
from moe_lora.dist.net.session import Dialler
from moe_lora.families import shape_of

from .cluster_file import cluster_file, cluster_in, placed, write_cluster
from .host_roles import HostRoles, server_roles
from .local import Generation, OwnServer, passed_on
from .server_role import checked_partition

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_RETURN_S = 30.0
"""Limit for instances to use the former ranks again; then they start again."""
_numbers = itertools.count(1)


@dataclass(frozen=True)
class ControlledInstances:
    """Instances of this process's controller.  apart: without the LoRA Server."""

    roles: HostRoles
    registry: InstanceRegistry
    apart: Collection[str] = ()

    @property
    def running(self) -> Mapping[str, int]:
        return {name: pid for name, pid in self.roles.running.items() if name not in self.apart}

    @property
    def serving(self) -> Collection[str]:
        return {one.name for one in self.registry.live if one.name not in self.apart}

    def kill(self, name: str) -> None:
        self.roles.kill(name)

    async def move(self, name: str, server: LoraServerConfig, limit_s: float) -> None:
        [instance] = (one for one in self.registry.live if one.name == name)
        await instance.client.call("join_lora_server", server.address, server.layout, limit_s)


class LayoutChange:
    """One change.  file: of the instances."""

    def __init__(self, own: OwnServer, file: int, instances: ControlledInstances | LayoutKeeper) -> None:
        self._own, self._file, self._instances = own, file, instances
        self._refusal: CapacityError | None = None
        self._unanswered: set[str] = set()
        """Instances that may still move, after a call without an answer."""

    async def to(self, text: str, capacity: int, limit_s: float) -> str:
        """Have this layout; returns the server's address.

        Raises ConfigError for an impossible layout, LoraServerError after limit_s, or the error of a failed
        start or move; then the former layout stays.
        """
        former = self._own.now
        assert former is not None
        cluster = self._following(former, text, capacity)
        server = _server_of(cluster)
        if server.layout == _server_of(former.cluster).layout:
            return _server_of(former.cluster).address
        began_s = current_time()
        following, before = await self._started(cluster, limit_s)
        moving = dict(self._instances.running)  # later processes read the file
        logger.info("ranks of %s are ready after %.1f s", server.layout, current_time() - began_s)
        await self._move_all(moving, server, began_s + limit_s)
        if (left := self._left(moving)) and all(name in left for name in self._instances.serving):
            self._write(before)
            later = self._instances.running.keys() - left  # read the file with ranks that end
            silent = {name: moving[name] for name in left if name in self._unanswered}
            await self._move_all(silent, _server_of(former.cluster), current_time() + _RETURN_S)
            for name in (*later, *self._left(silent)):
                self._instances.kill(name)
            await self._end(following)
            raise self._refusal or LoraServerError(
                f"no instance moved to {server.layout} within limit_s={limit_s:g}, and the former layout "
                "stays; the log says why"
            )
        self._own.now = following
        for name in left:
            await self._start_again(name, limit_s)
        logger.info("the LoRA Server is %s after %.1f s", server.layout, current_time() - began_s)
        await self._end(former)
        return server.address

    def _following(self, former: Generation, text: str, capacity: int) -> ClusterConfig:
        now = replace(former.cluster, front_end=cluster_in(former.roles[0].fds[0]).front_end)
        given, engine = _server_of(now), now.engine
        if given.device_puts != "none":
            raise ConfigError(
                "lora_server.device_puts joins devices that start together, so the layout is fixed; start "
                "again with the other lora_server.layout, or leave device_puts out"
            )
        layout = Layout.parse(text)
        address = os.path.join(os.path.dirname(given.address), f"layout-{next(_numbers)}")
        server = replace(given, layout=str(layout), address=address, capacity=capacity)
        checked_partition(engine, shape_of(engine.hf_config()), server)
        devices = _without_server(now.devices, layout.num_ranks)
        return placed(replace(now, lora_server=server, devices=devices))

    async def _started(self, cluster: ClusterConfig, limit_s: float) -> tuple[Generation, ClusterConfig]:
        """Ranks of the cluster, ready, and the former content of the instances' file."""
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
            return generation, self._write(cluster)
        except BaseException as error:
            await self._end(generation)
            if isinstance(error, TimeoutError):
                raise LoraServerError(
                    f"the ranks of {server.layout} did not start within limit_s={limit_s:g}, and the former "
                    "layout stays; the log says why, or give a longer limit_s"
                ) from None
            raise

    async def _end(self, generation: Generation) -> None:
        await asyncio.gather(*(self._own.ranks.remove(role.name) for role in generation.roles))
        generation.files.close()

    def _write(self, cluster: ClusterConfig) -> ClusterConfig:
        """Name the cluster's server in the instances' file; returns the former content."""
        before = cluster_in(self._file)
        write_cluster(self._file, replace(before, lora_server=cluster.lora_server, devices=cluster.devices))
        return before

    async def _move_all(self, moving: dict[str, int], server: LoraServerConfig, end_s: float) -> None:
        with CancelScope(deadline=end_s):
            await asyncio.gather(*(self._move(name, moving, server, end_s) for name in tuple(moving)))

    async def _move(self, name: str, moving: dict[str, int], server: LoraServerConfig, end_s: float) -> None:
        """Move an instance, and remove its process from `moving`; returns at a refusal or an end too."""
        problem = LastProblem()
        while name in self._left(moving):
            if name in self._instances.serving:
                try:
                    self._unanswered.add(name)
                    await self._instances.move(name, server, end_s - current_time())
                    del moving[name]
                except Exception as error:
                    if not isinstance(error, EngineDeadError | ConnectionError):
                        self._unanswered.discard(name)
                    if problem.is_new(str(error)):
                        logger.warning("%s does not move to %s: %s", name, server.layout, error)
                    if isinstance(error, CapacityError):
                        self._refusal = error
                        return
            await asyncio.sleep(_LOOK_S)

    def _left(self, moving: dict[str, int]) -> list[str]:
        """Instances with a process of the former server."""
        return [name for name, process in moving.items() if self._instances.running.get(name) == process]

    async def _start_again(self, name: str, limit_s: float) -> None:
        """Restart by the new file; returns after limit_s at most."""
        logger.error("%s did not move to the next LoRA Server, and is started again", name)
        former = self._instances.running.get(name)
        self._instances.kill(name)
        with move_on_after(limit_s):
            while self._instances.running.get(name) in (None, former) or name not in self._instances.serving:
                await asyncio.sleep(_LOOK_S)


class LayoutKeeper(LinkEnd):
    """Changes the layout for a separate controller.

    A change outlives the controller: the next controller moves the remaining instances.  file: of the
    instances.  roles: set at the start of roles.
    """

    roles: HostRoles

    def __init__(self, own: OwnServer, file: int) -> None:
        super().__init__()
        self._own, self._file, self._changing = own, file, asyncio.Lock()
        cluster = cluster_in(file)
        apart = set(cluster.front_end.prefill_instances)
        self._names = set(instance_names(cluster.engine.num_instances)) - apart
        self._address = Address(path=keeper_socket(cluster))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listen for the controller until the context ends."""
        visit = partial(HANDSHAKE.receive, lambda caller: None, self._welcome)
        async with listen("keeper", self._address, None, visit):
            try:
                yield
            finally:
                for task in self.answering:
                    task.cancel()
                await asyncio.gather(*self.answering, return_exceptions=True)

    @property
    def running(self) -> Mapping[str, int]:
        return {name: pid for name, pid in self.roles.running.items() if name in self._names}

    @property
    def serving(self) -> Collection[str]:
        return self.roles.started & self._names

    def kill(self, name: str) -> None:
        self.roles.kill(name)

    async def move(self, name: str, server: LoraServerConfig, limit_s: float) -> None:
        """Through the controller.  Raises ControllerAwayError, or PeerEndedError."""
        if self.peer is None:
            raise ControllerAwayError("the controller is away")
        await self.peer.call("move_instance", name, server.address, server.layout, limit_s)

    @verb
    async def change_layout(self, layout: str, capacity: int, limit_s: float) -> str:
        try:
            async with self._changing:
                return await LayoutChange(self._own, self._file, self).to(layout, capacity, limit_s)
        finally:
            logger.info("the change ends: the LoRA Server is %s", self._server.layout)
            if self.peer is not None:  # the controller may be the next one
                self.peer.call("use_lora_server", self._server.address, self._changing.locked())

    async def _welcome(self, peer: Peer, caller: Dialler) -> None:
        peer.call("use_lora_server", self._server.address, self._changing.locked())
        await self.serve(peer)

    @property
    def _server(self) -> LoraServerConfig:
        assert self._own.now is not None
        return _server_of(self._own.now.cluster)


def _server_of(cluster: ClusterConfig) -> LoraServerConfig:
    assert cluster.lora_server is not None
    return cluster.lora_server


def _without_server(devices: Devices, num_ranks: int) -> Devices:
    """The devices, without the server's for another number of ranks."""
    return {name: one for name, one in devices.items() if name != LORA_SERVER or len(one) == num_ranks}
