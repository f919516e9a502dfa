# SPDX-License-Identifier: Apache-2.0
"""Joins one rank of an LLM instance to the LoRA Server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import LoraServerError, PeerUnreachableError
from moe_lora.core.partition import Layout, Partition
from moe_lora.core.shape import ModelShape
from moe_lora.dist.deltas.device_frames import DeviceFrames, PushedBackend
from moe_lora.dist.deltas.remote_backend import RemoteBackend, ServerPartition
from moe_lora.dist.deltas.session import ClientSession, FrameLayout
from moe_lora.dist.net.keys import keys_in
from moe_lora.dist.net.peer import Peer
from moe_lora.dist.net.session import stay_connected
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window
from moe_lora.dist.transport.device_puts import join_device_group
from moe_lora.lora.row_routing import Source

from .control import REJOIN_S, Hear, ask, called, find_rank, join, network, pings_of
from .lease_client import LeaseClient
from .messages import HANDSHAKE
from .reach import agreed_facts, client_name, server_transport

CONNECT_TIMEOUT_S = 120.0
CPU = torch.device("cpu")
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


class LoraServerClient:
    """One client rank's connections: links to its server ranks, and their backend.

    device: the rank's.  pushed: the backend over device puts, if configured and in time.
    Raises ConfigError for a layout that does not fit the model, LoraServerError for an absent server.
    """

    def __init__(
        self,
        server: LoraServerConfig,
        shape: ModelShape,
        dtype: torch.dtype,
        instance: str,
        *,
        client_rank: int = 0,
        client_ranks: int = 1,
        device: torch.device = CPU,
    ) -> None:
        self.pushed: PushedBackend | None = None
        self._server = server
        self._instance = instance
        self._keys = keys_in(server.certificates)
        name = client_name(instance, client_rank)
        self._hello = HANDSHAKE.hello(name, agreed_facts(shape, dtype, server, client_ranks))
        layout = FrameLayout(shape, dtype, server.max_rows)
        self.store = HostStore(server.store_dir)
        self.partition = partition = Partition(
            shape, Layout.parse(server.layout), client_ranks, sites=server.sites
        )
        self._transport = server_transport(server, name)
        self.links = {
            server_rank: ServerLink(
                f"link to server rank {server_rank}",
                partial(self._join_rank, server_rank),
                *(instance, server, self._transport, layout),
            )
            for server_rank in range(partition.layout.num_ranks)
            if client_rank in partition.clients_of_server(server_rank)
        }
        try:
            for link in self.links.values():
                network().run(link.start(CONNECT_TIMEOUT_S))
        except BaseException:
            self.close()
            raise
        division = ServerPartition(partition, client_rank)
        self.backend = RemoteBackend(shape, Source.LEASED, division, self.links, layout, self.store)
        if server.device_puts != "none":
            self._meet_devices(shape, dtype, device)

    def _meet_devices(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        server = self._server
        leader = server.address, self._keys, self._hello, CONNECT_TIMEOUT_S
        try:
            place = network().run(ask(*leader, "join_devices", self._instance))
            address, client, num_clients, max_rows = place
            frames = DeviceFrames(shape, self.partition, dtype, max_rows, num_clients)
            logger.info("waiting for all devices that put to each other: %d", frames.size)
            member = frames.member(client)
            group = join_device_group(server.device_puts, address, member, frames.size, device)
            self.pushed = PushedBackend(group, frames, client, server.answer_timeout_s)
        except LoraServerError as error:
            logger.warning("%s; rows go over lora_server.transport", error)

    async def _join_rank(self, server_rank: int, timeout_s: float) -> Peer:
        leader = self._server.address, self._keys, self._hello
        address = await find_rank(*leader, server_rank, timeout_s)
        return await join(address, self._keys, self._hello, timeout_s)

    def leases(
        self,
        on_change: Callable[[], None],
        on_failure: Callable[[str, Exception], None] = lambda adapter_id, error: None,
    ) -> LeaseClient:
        """The instance's leases, on its first rank."""
        return LeaseClient(self._join_leader, self.store, on_change, CONNECT_TIMEOUT_S, on_failure)

    async def _join_leader(self, timeout_s: float, hear: Hear) -> Peer:
        leader, begin = (self._server.address, self._keys, self._hello), ("join_instance", self._instance)
        return await join(*leader, timeout_s, *begin, hear=hear, pings=pings_of(self._server.lease_timeout_s))

    def close(self) -> None:
        if self.pushed is not None:
            self.pushed.close()
        for link in self.links.values():
            network().run(link.stop())
        self._transport.close()
