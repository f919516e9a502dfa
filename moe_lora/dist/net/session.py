# SPDX-License-Identifier: Apache-2.0
"""Sessions of two processes: handshake and redial.

The dialling end sends a `Hello`; the listening end replies with a `Welcome` or a `Refusal`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from websockets.asyncio.connection import Connection

from moe_lora.core.errors import LastProblem, MoeLoraError

from .codec import Decoder, Message, Protocol, encode
from .connection import OPEN_S
from .peer import Peer

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.1, 1.0, 1.5
"""Growing pauses between dials, reset by a session without error."""


class Hello(Message, frozen=True):
    """The first message of a session, readable for all versions except the payload.

    name, epoch: of the dialling process and its incarnation.
    """

    listener: str
    version: int
    name: str
    epoch: str
    payload: msgspec.Raw


class Welcome(Message, frozen=True):
    """The reply to an admitted caller."""

    payload: msgspec.Raw


class Refusal(Message, frozen=True):
    """The reply to a refused caller."""

    reason: str
    way_out: str


_NOTHING = Decoder(None)
_AWAITS_HELLO, _AWAITS_REPLY = Protocol.of(Hello), Protocol.of(Welcome, Refusal)


class RefusedError(ConnectionError):
    """The listening end refuses.  way_out: advice for the user."""

    def __init__(self, reason: str, way_out: str) -> None:
        super().__init__(f"{reason}; {way_out}")
        self.reason, self.way_out = reason, way_out


@dataclass(frozen=True)
class Dialler:
    """The dialling end: its host, and its `Hello`."""

    host: str
    name: str
    epoch: str
    payload: Any


@dataclass(frozen=True)
class Handshake:
    """The handshake of a kind of session.

    version: must be equal at both ends.  payload, welcome: of `Hello` and `Welcome`.  dials, listens:
    messages of the two ends.
    """

    listener: str
    version: int
    payload: Decoder
    dials: Protocol
    listens: Protocol
    welcome: Decoder = _NOTHING

    def hello(self, name: str, payload: Any, epoch: str = "") -> Hello:
        """The first message of a process with this payload."""
        return Hello(self.listener, self.version, name, epoch, msgspec.Raw(encode(payload)))

    async def open(
        self, connection: Connection, address: object, hello: Hello, timeout_s: float = OPEN_S
    ) -> tuple[Peer, Any]:
        """The listening end, and its welcome's payload.

        Raises RefusedError, or PeerEndedError after timeout_s.
        """
        peer = Peer(connection, _AWAITS_REPLY, str(address))
        try:
            peer.send(hello)
            reply = await peer.receive(timeout_s)
            if isinstance(reply, Refusal):
                raise RefusedError(reply.reason, reply.way_out)
            assert isinstance(reply, Welcome)
            peer.protocol = self.dials
            return peer, self.welcome(reply.payload)
        except BaseException:
            peer.end()
            await peer.closed()
            raise

    async def receive(
        self,
        admit: Callable[[Dialler], Any],
        serve: Callable[[Peer, Dialler], Awaitable[None]],
        connection: Connection,
        host: str,
    ) -> None:
        """Serve a connection after its handshake.

        admit: returns the welcome's payload, or raises RefusedError.
        """
        peer = Peer(connection, _AWAITS_HELLO, "a caller")
        try:
            caller = await self._caller(peer, host)
            peer.send(Welcome(msgspec.Raw(encode(admit(caller)))))
            peer.protocol = self.listens
            await serve(peer, caller)
        except ConnectionError as error:
            logger.warning("the %s turned away %s from %s: %s", self.listener, peer.name, host, error)
            if isinstance(error, RefusedError):
                peer.send(Refusal(error.reason, error.way_out))
        except Exception:
            logger.exception("the session of %s at the %s failed", peer.name, self.listener)
        finally:
            peer.end()
            await peer.closed()

    async def _caller(self, peer: Peer, host: str) -> Dialler:
        hello = await peer.receive(OPEN_S)
        assert isinstance(hello, Hello)
        peer.name = hello.name
        if hello.listener != self.listener:
            raise RefusedError(
                f"this is a {self.listener}, and {hello.name} dials a {hello.listener}", "correct the address"
            )
        if hello.version != self.version:
            raise RefusedError(
                f"protocol {hello.version} at {hello.name} and {self.version} at the {self.listener}",
                "install the same version",
            )
        try:
            return Dialler(host, hello.name, hello.epoch, self.payload(hello.payload))
        except msgspec.DecodeError as error:
            reason = f"the {self.listener} can't read the facts of {hello.name} ({error})"
            raise RefusedError(reason, "install the same version") from error


async def stay_connected(
    name: str,
    connect: Callable[[], Awaitable[Peer]],
    serve: Callable[[Peer], Awaitable[None]],
    peer: Peer | None = None,
) -> None:
    """Connect and serve, again and again, until cancelled.  peer: an open first session."""
    said, pause_s = LastProblem(), FIRST_PAUSE_S
    while True:
        try:
            if peer is None:
                peer = await connect()
                logger.info("%s: joined %s", name, peer.name)
            await serve(peer)
            said.over()
            pause_s = FIRST_PAUSE_S
        except Exception as error:
            if said.is_new(str(error)):
                known = isinstance(error, ConnectionError | MoeLoraError)
                logger.warning("%s: %s; trying on", name, error, exc_info=not known)
        finally:
            if peer is not None:
                peer.end()
        peer = None
        await asyncio.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * PAUSE_GROWTH)
