"""Where front ends dial the controller."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from websockets.asyncio.connection import Connection

from moe_lora.core.address import Address
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.connection import OPEN_S, listen
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.net.peer import Asked, Peer, PeerEndedError
from moe_lora.provision.online import DemandWindow, Visit

from .cluster_state import CONTROLLER_SIDE, PINGS, PROTOCOL_VERSION, Admitted, FrontEndHello, VisitEvent

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """A front end that is connected.  taken: number of the state that it routes by.  visits: requests of its
    that are under way.
    """

    name: str
    peer: Peer
    taken: int = 0
    visits: dict[int, Visit] = field(default_factory=dict)

    def see(self, window: DemandWindow, event: VisitEvent) -> None:
        """Bring what a request did into the window of the load."""
        if event.kind == "begin":
            assert event.adapter is not None
            self.visits[event.number] = window.begin(event.adapter)
            return
        visit = self.visits.get(event.number)
        if visit is None:  # it began before this controller
            return
        if event.kind == "start":
            visit.start()
            return
        del self.visits[event.number]
        if event.kind == "refuse":
            visit.refuse()
        else:
            visit.end(event.timing)


class Host(Protocol):
    """Whom the listener tells what front ends do."""

    def joined(self, session: Session, hello: FrontEndHello) -> None: ...

    def received(self, session: Session, message: Message | Asked) -> None: ...

    def left(self, session: Session) -> None: ...


@asynccontextmanager
async def front_end_listener(
    setting: str, address: Address, keys: Keys | None, told: Host
) -> AsyncIterator[Address]:
    """Listen for front ends until the context ends.  Raises ConfigError if the address can't be had."""

    async def visit(connection: Connection, host: str) -> None:
        peer = Peer(connection, CONTROLLER_SIDE, f"a front end from {host}")
        try:
            hello = await peer.receive(OPEN_S)
        except PeerEndedError as error:
            logger.warning("what dialled the controller from %s was turned away: %s", host, error)
            return
        problem = _refusal(hello)
        peer.send(Admitted(problem))
        if problem is not None:
            logger.warning("what dialled the controller from %s was refused: %s", host, problem)
            peer.end()
            await peer.closed()
            return
        assert isinstance(hello, FrontEndHello)
        session = Session(hello.name, peer)
        told.joined(session, hello)
        try:
            async for message in peer.messages():
                told.received(session, message)
        finally:
            logger.warning("lost front end %s: %s", session.name, peer.problem)
            told.left(session)

    async with listen(setting, address, keys, visit, PINGS) as place:
        yield place


def _refusal(hello: Message | Asked) -> str | None:
    if isinstance(hello, FrontEndHello) and hello.protocol == PROTOCOL_VERSION:
        return None
    there = getattr(hello, "protocol", None)
    return f"protocol {there} there and {PROTOCOL_VERSION} at the controller; install the same version"
