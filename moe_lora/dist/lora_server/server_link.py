# SPDX-License-Identifier: Apache-2.0
"""A client rank's session with one server rank, with reconnection."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import LoraServerError, PeerUnreachableError
from moe_lora.dist.deltas.session import ClientSession, FrameLayout
from moe_lora.dist.net.peer import Peer
from moe_lora.dist.net.session import stay_connected
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window

from .control import REJOIN_S, called

logger = logging.getLogger(__name__)

_SLICE_S = 0.05
_LOOK_S = 0.2
_GRACE_S = 0.3
_NEVER = 2**64 - 1


@asynccontextmanager
async def attended(transport: Transport, window: Window) -> AsyncIterator[None]:
    """Wait for signals in a thread meanwhile: over NIXL a peer attaches only to a waiting target."""
    done = threading.Event()

    def attend() -> None:
        while not done.is_set():
            transport.wait_any([(window, 0, _NEVER)], _SLICE_S)

    thread = threading.Thread(target=attend, name="attend", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        await asyncio.to_thread(thread.join)


class ServerLink:
    """A client rank's session with one server rank, with reconnection.

    join: connects to the rank within a timeout; raises LoraServerError.
    `session`: None without one; deltas are then computed locally.
    """

    def __init__(
        self,
        name: str,
        join: Callable[[float], Awaitable[Peer]],
        instance: str,
        settings: LoraServerConfig,
        transport: Transport,
        layout: FrameLayout,
    ) -> None:
        self._name = name
        self._join = join
        self._instance = instance
        self._settings = settings
        self._transport = transport
        self._layout = layout
        self._numbers = itertools.count()
        self._buffers: tuple[RemoteWindow, Window] | None = None
        self._joined: asyncio.Task[None] | None = None
        self.session: ClientSession | None = None

    async def start(self, timeout_s: float) -> None:
        """Make the first session, then watch and renew.  Raises LoraServerError."""
        first = await self._connect(timeout_s)
        self._joined = asyncio.create_task(stay_connected(self._name, self._connect, self._watch, first))

    async def stop(self) -> None:
        if self._joined is not None:
            self._joined.cancel()
            await asyncio.wait([self._joined])

    async def _connect(self, timeout_s: float = REJOIN_S) -> Peer:
        peer = await self._join(timeout_s)
        try:
            await self._open(peer)
        except BaseException:
            peer.end()
            raise
        return peer

    async def _open(self, peer: Peer) -> None:
        settings, transport, layout = self._settings, self._transport, self._layout
        label = f"answers, {self._name}, {next(self._numbers)}"
        answers = transport.alloc(label, settings.depth * layout.answer_bytes, 1)
        try:
            async with attended(transport, answers):
                arguments = self._instance, answers.descriptor(), layout.max_rows, settings.depth
                descriptor = await called(peer, "open_session", *arguments)
            requests = await asyncio.to_thread(transport.attach, descriptor)
        except BaseException as error:
            answers.free()
            if isinstance(error, (PeerUnreachableError, ValueError)):
                raise LoraServerError(f"the LoRA Server's buffers can't be reached: {error}") from error
            raise
        self._buffers = requests, answers
        self.session = ClientSession(
            transport, requests, answers, layout, settings.depth, settings.answer_timeout_s
        )

    async def _watch(self, peer: Peer) -> None:
        session = self.session
        assert session is not None
        ended = asyncio.create_task(peer.ended.wait())
        try:
            while not session.broken and not ended.done():
                await asyncio.wait([ended], timeout=_LOOK_S)
        finally:
            ended.cancel()
            self.session = None
            session.break_off()
            peer.end()
        logger.warning("lost the LoRA Server at %s: %s", peer.name, peer.problem)
        await asyncio.sleep(_GRACE_S)
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            await asyncio.to_thread(self._transport.detach, buffers[0])
            buffers[1].free()
