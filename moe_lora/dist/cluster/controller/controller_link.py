"""A front end's connection to the controller: it dials, and dials again when the connection ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from websockets.asyncio.connection import Connection

from moe_lora.core.address import Address
from moe_lora.core.errors import ControllerAwayError
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.connection import OPEN_S, dial, stay_connected
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.net.peer import Asked, Peer, PeerEndedError

from .cluster_state import (
    FRONT_END_SIDE,
    PINGS,
    Admitted,
    ClusterState,
    Figures,
    FrontEndHello,
    FrontEndReport,
    Taken,
)

logger = logging.getLogger(__name__)

REPORT_S = 0.25


class Follower(Protocol):
    """What of a front end hears of the controller, in its event loop."""

    def follow(self, state: ClusterState) -> None:
        """Do from now on as the controller says."""
        ...

    def show(self, figures: Figures) -> None: ...

    def report(self) -> FrontEndReport | None:
        """What happened since the last report; None: nothing."""
        ...


class ControllerLink:
    """Carries a front end's calls and reports to the controller, and its decisions back.

    Belongs to the event loop that runs `run`.  up: whether the controller is there.  state: the last that it
    sent; older ones that come later are ignored, so a front end goes on with the newest.  num_joins:
    connections so far.
    """

    def __init__(self, address: Address, keys: Keys | None, name: str) -> None:
        self._address, self._keys, self.name = address, keys, name
        self._peer: Peer | None = None
        self.state: ClusterState | None = None
        self.follower: Follower | None = None
        self.num_joins = 0

    @property
    def up(self) -> bool:
        return self._peer is not None

    async def call(self, method: str, *args: Any) -> Any:
        """What the controller answers.  Raises what it raised, ControllerAwayError if it is not there."""
        if self._peer is None:
            raise ControllerAwayError(
                f"the controller at {self._address} is away, and nothing can be changed without "
                "it; requests go on, send this again in a while"
            )
        try:
            return await self._peer.call(method, *args)
        except PeerEndedError as error:
            raise ControllerAwayError(
                "the controller was lost before it answered, so it is not known whether this was done; look "
                "what is there (GET /v1/adapters) once it is back, then send it again"
            ) from error

    async def run(self) -> None:
        """Keep the connection and report what happens, until cancelled."""
        dialling = asyncio.create_task(
            stay_connected(
                "the controller",
                lambda: dial("controller.address", self._address, self._keys, PINGS),
                self._serve,
            )
        )
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                # While nobody listens what was counted is dropped: no later time step is to have it.
                report = None if self.follower is None else self.follower.report()
                if self._peer is not None and report is not None:
                    self._peer.send(report)
        finally:
            dialling.cancel()
            if self._peer is not None:
                self._peer.end("the front end was stopped")
                await self._peer.closed()

    async def _serve(self, connection: Connection) -> str | None:
        """Do as the controller says until the connection ends; why it refused this front end."""
        peer = Peer(connection, FRONT_END_SIDE, "the controller")
        peer.send(FrontEndHello(name=self.name, state=self.state))
        admitted = await peer.receive(OPEN_S)
        if not isinstance(admitted, Admitted) or admitted.refusal is not None:
            peer.end()
            return admitted.refusal if isinstance(admitted, Admitted) else "it is no controller"
        logger.info("joined the controller at %s", self._address)
        self._peer = peer
        self.num_joins += 1
        try:
            async for message in peer.messages():
                self.receive(message)
        finally:
            self._peer = None
        logger.warning("lost the controller: %s; requests go on by what it said last", peer.problem)
        return None

    def receive(self, message: Message | Asked) -> None:
        """Do as a message of the controller says."""
        if isinstance(message, ClusterState):
            self._take(message)
        elif isinstance(message, Figures) and self.follower is not None:
            self.follower.show(message)

    def _take(self, state: ClusterState) -> None:
        if self.state is None or state.number > self.state.number:
            self.state = state
            if self.follower is not None:
                self.follower.follow(state)
        if self._peer is not None:
            self._peer.send(Taken(self.state.number))
