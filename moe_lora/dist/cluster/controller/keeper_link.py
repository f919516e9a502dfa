# SPDX-License-Identifier: Apache-2.0
"""The link between a separate controller and the host's keeper of processes, for changes of layout.

The keeper starts and ends ranks of the LoRA Server.  The controller moves instances.
"""

from __future__ import annotations

import asyncio
import typing

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.address import Address
from moe_lora.core.errors import EngineDeadError, LoraServerError
from moe_lora.dist.net.codec import Decoder, Interface, Protocol, verb, verbs_of
from moe_lora.dist.net.connection import dial
from moe_lora.dist.net.peer import Asked, Peer
from moe_lora.dist.net.session import Handshake, stay_connected

from .cluster_controller import ControlledFleet


def keeper_socket(cluster: ClusterConfig) -> str:
    """Address of the keeper."""
    return f"{cluster.folder_of_sockets}/keeper"


class KeeperCalls(typing.Protocol):
    """Answered by the keeper."""

    def change_layout(self, layout: str, capacity: int, limit_s: float) -> str:
        """As `LayoutChange.to`."""


class LinkEnd:
    """Answers calls by verbs, in parallel; belongs to an event loop."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.answering: set[asyncio.Task[None]] = set()
        self._verbs = verbs_of(self)

    async def serve(self, peer: Peer) -> None:
        self.peer = peer
        try:
            async for asked in peer.messages():
                assert isinstance(asked, Asked)
                task = asyncio.create_task(asked.answer_by(self._verbs[asked.method], *asked.args))
                self.answering.add(task)
                task.add_done_callback(self.answering.discard)
        finally:
            if self.peer is peer:
                self.peer = None


class KeeperLink(LinkEnd):
    """The controller's end."""

    def __init__(self, cluster: ClusterConfig, controlled: ControlledFleet) -> None:
        super().__init__()
        provision = controlled.controller.provision
        assert provision is not None
        self._address, self._provision = Address(path=keeper_socket(cluster)), provision
        self._registry = controlled.instance_registry
        provision.relayout = self._change

    async def run(self) -> None:
        """Stay connected until cancelled."""
        await stay_connected("keeper", self._connect, self.serve)

    async def _connect(self) -> Peer:
        connection = await dial("keeper", self._address, None)
        peer, _ = await HANDSHAKE.open(connection, self._address, HANDSHAKE.hello("controller", None))
        return peer

    async def _change(self, layout: str, capacity: int, limit_s: float) -> str:
        if self.peer is None:
            raise LoraServerError("the keeper of processes is not connected yet; try again in a while")
        address: str = await self.peer.call("change_layout", layout, capacity, limit_s)
        return address

    @verb
    async def move_instance(self, name: str, address: str, layout: str, limit_s: float) -> None:
        """Move an instance to this LoRA Server.  Raises EngineDeadError for an absent instance."""
        for instance in self._registry.live:
            if instance.name == name:
                await instance.client.call("join_lora_server", address, layout, limit_s)
                return
        raise EngineDeadError(f"{name} does not serve now")

    @verb
    async def use_lora_server(self, address: str, is_changing: bool) -> None:
        self._provision.use_lora_server(address, is_changing)


_KEEPER, _CONTROLLER = Interface(KeeperCalls), Interface(verbs_of(KeeperLink))
HANDSHAKE = Handshake(
    "keeper of processes",
    version=1,
    payload=Decoder(None),
    dials=Protocol.of(answers=_CONTROLLER, asks=_KEEPER),
    listens=Protocol.of(answers=_KEEPER, asks=_CONTROLLER),
)
