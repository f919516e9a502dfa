"""An engine's side of `door`: it dials every front end, serves them all, and dials again what it lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from websockets.asyncio.connection import Connection

from moe_lora.core.address import Address
from moe_lora.dist.net.connection import OPEN_S, dial, stay_connected
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.net.peer import Peer

from moe_lora.engine.client.heartbeat import Pulse
from moe_lora.engine.client.inbox import Inbox
from .lines import Lines
from moe_lora.engine.client.messages import ENGINE_SIDE, Dead, Event, Hello, Stop, Welcome

logger = logging.getLogger(__name__)


class FrontEndLinks:
    """A link to each door (by name), through which an engine loop is asked and answers.

    Belongs to the event loop in which it is made.  What the engine loop emits for a door that is not there is
    dropped: nobody waits for it.  keys: None where all doors are sockets of this host.
    """

    def __init__(
        self, doors: Mapping[str, Address], keys: Keys | None, inbox: Inbox, max_model_len: int
    ) -> None:
        self._doors = doors
        self._keys = keys
        self._inbox = inbox
        self._lines = Lines(inbox, max_model_len)
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._peers: set[Peer] = set()
        self.failed = False
        """Whether the engine itself ended the service."""

    def emit(self, event: Event) -> None:
        """Send an event to those it is for; called from the engine loop's threads."""
        self._in_loop(self._take, event)

    def stop(self) -> None:
        """End `run`, from any thread or a signal handler's."""
        self._in_loop(self._stopping.set)

    async def run(self, hello: Hello, pulse: Pulse) -> None:
        """Serve until `stop`; the engine loop is told to stop then.  pulse: of that loop."""
        links = [
            asyncio.create_task(self._link(name, address, hello, pulse))
            for name, address in self._doors.items()
        ]
        await self._stopping.wait()
        self._inbox.put(Stop())
        for peer in self._peers:
            peer.end("the engine was stopped")
        await asyncio.gather(*(peer.closed() for peer in list(self._peers)))
        for link in links:
            link.cancel()

    def _in_loop(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and all links with it
            self._loop.call_soon_threadsafe(function, *args)

    def _take(self, event: Event) -> None:
        self._lines.emit(event)
        if isinstance(event, Dead):
            self.failed = True
            self._stopping.set()

    async def _link(self, name: str, address: Address, hello: Hello, pulse: Pulse) -> None:
        async def session(connection: Connection) -> str | None:
            peer = Peer(connection, ENGINE_SIDE, name)
            self._peers.add(peer)
            try:
                return await self._serve(peer, address, hello, pulse)
            finally:
                self._peers.discard(peer)

        await stay_connected(name, lambda: dial(name, address, self._keys), session)

    async def _serve(self, peer: Peer, address: Address, hello: Hello, pulse: Pulse) -> str | None:
        """Take commands until the connection ends, then end what it had asked for; why it was refused."""
        peer.send(hello)
        welcome = await peer.receive(OPEN_S)
        if not isinstance(welcome, Welcome):
            peer.abort("no welcome came first")
            return "what answers there is no front end"
        if welcome.refusal is not None:
            peer.end()
            return welcome.refusal
        logger.info("joined %s at %s", peer.name, address)
        line = self._lines.open(peer)
        beats = asyncio.create_task(self._beat(peer, welcome.heartbeat_s, pulse))
        try:
            async for message in peer.messages():
                self._lines.put(line, message)
        finally:
            beats.cancel()
            self._lines.close(line)
        if not self._stopping.is_set():
            logger.warning("lost %s: %s; its requests end here", peer.name, peer.problem)
        return None

    async def _beat(self, peer: Peer, interval_s: float, pulse: Pulse) -> None:
        while True:
            peer.send(self._lines.elsewhere(peer, pulse.stuck_s()))
            await asyncio.sleep(interval_s)
