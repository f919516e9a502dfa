# SPDX-License-Identifier: Apache-2.0
"""The keeper's end of `keeper_link`: changes the layout for a separate controller.

A change outlives the controller: the next controller moves the remaining instances.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial

from moe_lora.config.devices import instance_names
from moe_lora.core.address import Address
from moe_lora.core.errors import ControllerAwayError, MoeLoraError
from moe_lora.dist.cluster.controller.keeper_link import HANDSHAKE, keeper_socket
from moe_lora.dist.net.connection import listen
from moe_lora.dist.net.peer import Asked, Peer
from moe_lora.dist.net.session import Dialler

from .cluster_file import cluster_in
from .host_roles import HostRoles
from .local import OwnServer
from .local_layout import LayoutChange

logger = logging.getLogger(__name__)


class LayoutKeeper:
    """Changes the layout beside `roles`, which are set at their start.  file: of the instances."""

    roles: HostRoles

    def __init__(self, own: OwnServer, file: int) -> None:
        self._own, self._file = own, file
        cluster = cluster_in(file)
        self._names = set(instance_names(cluster.engine.num_instances))
        self._address = Address(path=keeper_socket(cluster))
        self._changing = asyncio.Lock()
        self._peer: Peer | None = None
        self._answering: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listen for the controller until the context ends."""
        visit = partial(HANDSHAKE.receive, lambda caller: None, self._serve)
        async with listen("keeper", self._address, None, visit):
            try:
                yield
            finally:
                for task in self._answering:
                    task.cancel()
                await asyncio.gather(*self._answering, return_exceptions=True)

    @property
    def running(self) -> dict[str, int]:
        return {name: pid for name, pid in self.roles.running.items() if name in self._names}

    @property
    def serving(self) -> Collection[str]:
        return self.roles.started & self._names

    def kill(self, name: str) -> None:
        self.roles.kill(name)

    async def move(self, name: str, address: str, layout: str) -> None:
        """Through the controller.  Raises ControllerAwayError, or PeerEndedError."""
        if self._peer is None:
            raise ControllerAwayError("the controller is away")
        await self._peer.call("move_instance", name, address, layout)

    async def _serve(self, peer: Peer, caller: Dialler) -> None:
        self._peer = peer
        self._send_address()
        try:
            async for asked in peer.messages():
                assert isinstance(asked, Asked)
                task = asyncio.create_task(self._answer(asked))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
        finally:
            if self._peer is peer:
                self._peer = None

    async def _answer(self, asked: Asked) -> None:
        try:
            async with self._changing:
                address = await LayoutChange(self._own, self._file, self).to(*asked.args)
        except Exception as error:
            if not isinstance(error, MoeLoraError | OSError):
                logger.exception("the layout can't be changed")
            asked.fail(error)
        else:
            self._send_address()
            asked.answer(address)

    def _send_address(self) -> None:
        """A controller that started in the middle of a change has read the other address."""
        assert self._own.now is not None
        server = self._own.now.cluster.lora_server
        if self._peer is not None and server is not None:
            self._peer.call("use_lora_server", server.address)
