# SPDX-License-Identifier: Apache-2.0
"""Joins a rank of an LLM instance to the LoRA Server, with leases."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import (
    CapacityError,
    ConfigError,
    LoraServerError,
    PeerUnreachableError,
    StorageError,
)
from moe_lora.core.shape import ModelShape
from moe_lora.dist.deltas.device_frames import DeviceFrames, PushedBackend
from moe_lora.dist.deltas.remote_backend import RemoteBackend, ServerPartition
from moe_lora.dist.deltas.session import ClientSession, FrameLayout
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.keys import keys_in
from moe_lora.dist.net.peer import Peer, PeerEndedError
from moe_lora.dist.net.session import stay_connected
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window
from moe_lora.dist.transport.device_puts import join_device_group
from moe_lora.lora.row_routing import Lease, Source
from moe_lora.policies.caching.caching import ANYBODY, Asker

from .content import num_blocks, send_blocks
from .control import REJOIN_S, Hear, Pings, ask, called, find_rank, ignore, join, network
from .messages import HANDSHAKE, AdapterFailed, DropOrder, Need
from .reach import agreed_facts, client_name, server_transport

logger = logging.getLogger(__name__)

_ANSWER_S = 30.0
_NUM_TRIES = 3
_GIVE_PAUSES_S = 0.2, 1.0, 3.0, 0.0
NUM_REGISTERS = 8
"""In flight at a rejoin: a longer backlog starves pings."""
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Pauses between registers of a rejected adapter."""


class LeaseClient:
    """Keeps an instance's leases, by adapters' content hash.

    The engine's thread states needs and reads grants.  The event loop calls on_change after changes of leases
    or leader, and on_failure with a failed adapter.  former: leases at another server, with needs to ask
    for.  Raises LoraServerError without a leader.
    """

    def __init__(
        self,
        join_leader: Callable[[float, Hear | None], Awaitable[Peer]],
        store: HostStore,
        on_change: Callable[[], None],
        timeout_s: float,
        on_failure: Callable[[str, Exception], None] = lambda adapter_id, error: None,
        former: LeaseClient | None = None,
    ) -> None:
        self._join_leader = join_leader
        self._store = store
        self._on_change = on_change
        self.on_failure = on_failure
        self._registered: set[str] = set() if former is None else former._registered.copy()
        self._unknown = self._registered.copy()
        """Not yet registered after a move."""
        self._rejected: dict[str, Exception] = {}
        # Acquire number and askers, in order of calls.  Of the engine's thread.
        self._wanted: dict[str, tuple[int, tuple[Asker, ...]]] = (
            {} if former is None else former._wanted.copy()
        )
        self._numbers: Iterator[int] = itertools.count(1) if former is None else former._numbers
        self._granted: dict[str, tuple[int, Lease]] = {}
        """With the acquire's number: grants for abandoned acquires are void."""
        self._turn_to_give = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._peer: Peer | None = None
        self._joined = network().run(self._start(timeout_s))

    @property
    def connected(self) -> bool:
        return self._peer is not None

    def knows(self, adapter_id: str) -> bool:
        """True for a registered adapter without a failure."""
        return adapter_id in self._registered and adapter_id not in self._rejected

    def register(self, adapter_id: str) -> None:
        """Register an adapter of the host store.  Raises CapacityError for a too large adapter."""
        network().run(self._register(adapter_id))

    def unregister(self, adapter_id: str) -> None:
        self._registered.discard(adapter_id)
        network().loop.call_soon_threadsafe(self._unregister, adapter_id)

    def drop(self, adapter_id: str, *, only_unused: bool = False) -> None:
        """Have files deleted on all hosts after the last registration; nothing without a leader.

        only_unused: a registered adapter's files stay.
        """
        network().loop.call_soon_threadsafe(self._tell, "drop", adapter_id, only_unused)

    def acquire(self, adapter_id: str, asker: Asker = ANYBODY) -> bool:
        """Request a lease; False if the server is away or refused the adapter.

        `on_change` reports the lease.
        """
        number, askers = self._wanted.get(adapter_id) or (next(self._numbers), ())
        if asker not in askers and self.lease(adapter_id) is None:
            self._wanted[adapter_id] = number, (*askers, asker)
            network().loop.call_soon_threadsafe(self._acquire, adapter_id, number, (asker,))
        return self.connected and adapter_id not in self._rejected

    def lease(self, adapter_id: str) -> Lease | None:
        """The valid lease of an acquired adapter."""
        number, lease = self._granted.get(adapter_id, (0, None))
        return lease if number == self._wanted.get(adapter_id, (0,))[0] else None

    def release(self, adapter_id: str) -> None:
        """Return the lease, or cancel the wait."""
        if self._wanted.pop(adapter_id, None) is not None:
            network().loop.call_soon_threadsafe(self._tell, "release", adapter_id)

    @property
    def settled(self) -> bool:
        """True if no answer and no lease is waited for."""
        if not self.connected or self._unknown:
            return not self.connected
        return all(self.lease(one) or one in self._rejected for one in self._wanted.copy())

    def check_connected(self) -> None:
        if not self.connected:
            raise LoraServerError("the next LoRA Server is away")

    def check(self, former: LeaseClient) -> None:
        """Raise LoraServerError without a leader, CapacityError for an adapter refused here alone."""
        self.check_connected()
        for adapter_id, error in self._rejected.copy().items():
            if _is_final(error) and adapter_id not in former._rejected:
                raise CapacityError(f"the next LoRA Server refuses adapter {adapter_id}: {error}") from error

    def succeed(self, former: LeaseClient) -> None:
        """Take over what `former` needs now; an adapter that is refused is computed by the instance."""
        for adapter_id in former._registered - self._registered:
            self._registered.add(adapter_id)
            if (peer := self._peer) is not None:  # else a rejoin registers
                known = self._make_known_again(peer, adapter_id, asyncio.Semaphore())
                asyncio.run_coroutine_threadsafe(known, network().loop)
        for adapter_id in self._registered - former._registered:
            self.unregister(adapter_id)
        for adapter_id, (_, askers) in former._wanted.items():
            for asker in askers:
                self.acquire(adapter_id, asker)
        for adapter_id in self._wanted.keys() - former._wanted.keys():
            self.release(adapter_id)

    def covers(self, former: LeaseClient) -> bool:
        """True if adapters with a lease of `former` have one here, or none can come."""
        leased = (one for one in former._wanted if former.lease(one))
        return not self.connected or all(self.lease(one) or one in self._rejected for one in leased)

    def stop(self) -> None:
        self._joined.get_loop().call_soon_threadsafe(self._joined.cancel)
        network().run(self._ended())

    async def _start(self, timeout_s: float) -> asyncio.Task[None]:
        first = self._peer = await self._join(timeout_s)
        return asyncio.create_task(stay_connected("leases", self._join, self._serve, first))

    async def _ended(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait([self._joined, *self._tasks])
        if self._peer is not None:
            await self._peer.closed()

    async def _join(self, timeout_s: float = REJOIN_S) -> Peer:
        return await self._join_leader(timeout_s, self._hear)

    async def _serve(self, peer: Peer) -> None:
        self._peer = peer
        turns = asyncio.Semaphore(NUM_REGISTERS)
        known = [
            asyncio.create_task(self._make_known_again(peer, adapter_id, turns))
            for adapter_id in dict.fromkeys((*self._wanted.copy(), *self._registered))
        ]
        try:
            await peer.ended.wait()
        finally:
            for one in known:
                one.cancel()
        await asyncio.gather(*known, return_exceptions=True)
        logger.warning("lost the leader of the LoRA Server, and all leases with it: %s", peer.problem)
        self._peer = None
        self._granted.clear()
        self._rejected.clear()
        self._on_change()

    def _tell(self, method: str, *args: Any) -> None:
        """Sends nothing without a leader: the next gets all needs."""
        if self._peer is not None:
            self._peer.call(method, *args)

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _register(self, adapter_id: str) -> None:
        self._registered.add(adapter_id)
        self._rejected.pop(adapter_id, None)
        if (peer := self._peer) is not None:
            known = self._start_task(self._make_known(peer, adapter_id))
            if not (await asyncio.wait([known], timeout=_ANSWER_S))[0]:
                again = self._make_known_again(peer, adapter_id, asyncio.Semaphore(), known)
                self._start_task(again)
        error = self._rejected.pop(adapter_id, None)
        if error is not None:
            self._registered.discard(adapter_id)
            raise error if isinstance(error, CapacityError) else CapacityError(str(error)) from error

    async def _make_known_again(
        self,
        peer: Peer,
        adapter_id: str,
        turns: asyncio.Semaphore,
        first: asyncio.Task[None] | None = None,
    ) -> None:
        """Register at a rejoin, or after the `first` try; repeats after passing errors."""
        pause_s, error = FIRST_RETRY_S, None
        while adapter_id in self._registered and self._rejected.get(adapter_id) is error:
            async with turns:
                if adapter_id in self._registered:
                    await (first or self._make_known(peer, adapter_id))
                    first = None
            error = self._rejected.get(adapter_id)
            if error is None or _is_final(error) or peer.ended.is_set():
                return
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_RETRY_S, 2 * pause_s)

    async def _make_known(self, peer: Peer, adapter_id: str) -> None:
        try:
            for _ in range(_NUM_TRIES):  # a drop may delete the file meanwhile
                if adapter_id not in self._registered:
                    return
                if await peer.call("register", adapter_id):
                    break
                with suppress(FileNotFoundError):
                    await self._give_repeatedly(peer, adapter_id)
                if adapter_id not in self._registered:  # the unload came before the content
                    self._tell("drop", adapter_id, True)
                    return
            else:
                raise LoraServerError("the LoRA Server can't read the content that it was sent")
        except PeerEndedError:
            return
        except Exception as error:
            if peer.ended.is_set():  # else the next leader gets no register
                return
            self._rejected[adapter_id] = error
            self._unknown.discard(adapter_id)
            logger.warning("the LoRA Server does not take adapter %s: %s", adapter_id, error)
            self._on_change()
            return
        self._rejected.pop(adapter_id, None)
        self._unknown.discard(adapter_id)
        wanted = self._wanted.get(adapter_id)
        if wanted is not None and self.lease(adapter_id) is None:
            self._acquire(adapter_id, *wanted)  # earlier acquires were refused

    def _unregister(self, adapter_id: str) -> None:
        self._registered.discard(adapter_id)
        self._unknown.discard(adapter_id)
        self._rejected.pop(adapter_id, None)
        self._granted.pop(adapter_id, None)
        self._tell("unregister", adapter_id)

    def _acquire(self, adapter_id: str, number: int, askers: tuple[Asker, ...]) -> None:
        if self._peer is not None:
            for asker in askers:
                answer = self._peer.call("acquire", adapter_id, *asker)
                answer.add_done_callback(partial(self._take, adapter_id, number))

    def _take(self, adapter_id: str, number: int, answer: asyncio.Future[tuple[int, int]]) -> None:
        if answer.exception() is None:
            if self._wanted.get(adapter_id, (0,))[0] == number:
                self._granted[adapter_id] = number, Lease(*answer.result())
            self._on_change()

    async def _hear(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Need):
            self._start_task(self._give_needed(peer, message.adapter_id))
        elif isinstance(message, DropOrder):
            if message.adapter_id not in self._registered:
                self._store.remove(message.adapter_id)
        elif isinstance(message, AdapterFailed):
            self._fail(message.adapter_id, LoraServerError(message.reason))

    def _fail(self, adapter_id: str, error: Exception) -> None:
        self._rejected[adapter_id] = error
        self._granted.pop(adapter_id, None)
        try:
            self.on_failure(adapter_id, error)
        except Exception:
            logger.exception("the failure of adapter %s can't be reported", adapter_id)
        self._on_change()

    async def _give_needed(self, peer: Peer, adapter_id: str) -> None:
        try:
            await self._give_repeatedly(peer, adapter_id)
        except Exception as error:
            logger.error("adapter %s can't be given to the LoRA Server: %s", adapter_id, error)
            peer.call("fail_content", adapter_id, str(error))

    async def _give_repeatedly(self, peer: Peer, adapter_id: str) -> None:
        """`_give`, again after a cut while the leader is there.  Raises LoraServerError."""
        for pause_s in _GIVE_PAUSES_S:
            try:
                await self._give(adapter_id)
                return
            except PeerEndedError as error:
                await asyncio.sleep(pause_s)
                if peer.ended.is_set() or pause_s == _GIVE_PAUSES_S[-1]:
                    raise LoraServerError(f"the content's transfer was cut: {error}") from error

    async def _give(self, adapter_id: str) -> None:
        """Send the content over a connection of its own, which delays no lease; in turn."""
        async with self._turn_to_give:
            if not await asyncio.to_thread(self._store.restore, adapter_id):
                raise LoraServerError("it is not in the store")
            number = num_blocks(self._store, adapter_id)
            peer = await self._join_leader(_ANSWER_S, None)
            try:
                answer = peer.call("give", adapter_id, number)
                send_blocks(peer, self._store, adapter_id, number)
                await answer
            finally:
                peer.end()


def _is_final(error: Exception) -> bool:
    return isinstance(error, CapacityError | ConfigError) and not isinstance(error, StorageError)


CONNECT_TIMEOUT_S = 120.0
MAX_PUT_S = 3.0
"""Limit of a put to a stuck rank, which stops the engine."""
logger = logging.getLogger(__name__)
_SLICE_S = 0.05
_LOOK_S = 0.2
_GRACE_S = 0.3
_NEVER = 2**64 - 1


@asynccontextmanager
async def attended(transport: Transport, window: Window) -> AsyncIterator[None]:
    """Wait for signals in a thread: NIXL attaches only to a waiting target."""
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

    `session` None: deltas are computed locally.
    """

    def __init__(
        self,
        name: str,
        join: Callable[[float], Awaitable[Peer]],
        instance: str,
        settings: LoraServerConfig,
        transport: Transport,
        layout: FrameLayout,
        client_rank: int = 0,
    ) -> None:
        self._name = name
        self._join = join
        self._instance = instance
        self._client_rank = client_rank
        self._settings = settings
        self._transport = transport
        self._layout = layout
        self._numbers = itertools.count()
        self._buffers: tuple[RemoteWindow, Window] | None = None
        self._joined: asyncio.Task[None] | None = None
        self.session: ClientSession | None = None

    async def start(self, timeout_s: float) -> None:
        """Make the first session, then renew.  Raises LoraServerError."""
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
                sizes = layout.max_rows, settings.depth
                arguments = self._instance, answers.descriptor(), *sizes, self._client_rank
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
    """One client rank's links to server ranks, and their backend.

    ranks: expert_parallel and tensor_parallel.  pushed: the backend over device puts, if any.  limit_s: for
    all first connections.  Raises ConfigError for an unfit layout, LoraServerError for an absent server.
    """

    def __init__(
        self,
        server: LoraServerConfig,
        shape: ModelShape,
        dtype: torch.dtype,
        instance: str,
        *,
        client_rank: int = 0,
        ranks: tuple[int, int] = (1, 1),
        limit_s: float = math.inf,
    ) -> None:
        self.pushed: PushedBackend | None = None
        self._end_s = time.monotonic() + limit_s
        self._server = server
        self._instance = instance
        self._keys = keys_in(server.certificates)
        name = client_name(instance, client_rank)
        self.partition = partition = server.partition(shape, ranks)
        self._hello = HANDSHAKE.hello(name, agreed_facts(partition, dtype, server))
        shard = partition.shards[client_rank] if partition.shards else None
        layout = FrameLayout(partition.shape_of(client_rank), dtype, server.max_rows, shard)
        self.store = HostStore(server.store_dir)
        put_timeout_s = min(server.answer_timeout_s, MAX_PUT_S)
        self._transport = server_transport(server, name, put_timeout_s=put_timeout_s)
        self.links = {
            server_rank: ServerLink(
                f"link to server rank {server_rank}",
                partial(self._join_rank, server_rank),
                *(instance, server, self._transport, layout, client_rank),
            )
            for server_rank in range(partition.layout.num_ranks)
            if client_rank in partition.clients_of_server(server_rank)
        }
        try:
            for link in self.links.values():
                network().run(link.start(self._connect_s))
        except BaseException:
            self.close()
            raise
        division = ServerPartition(partition, client_rank)
        self.backend = RemoteBackend(layout.shape, Source.LEASED, division, self.links, layout, self.store)

    def meet_devices(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        """Have this device put rows to the server's devices, if all of them meet."""
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

    @property
    def _connect_s(self) -> float:
        return max(0.0, min(CONNECT_TIMEOUT_S, self._end_s - time.monotonic()))

    async def _join_rank(self, server_rank: int, timeout_s: float) -> Peer:
        leader = self._server.address, self._keys, self._hello
        address = await find_rank(*leader, server_rank, timeout_s)
        return await join(address, self._keys, self._hello, timeout_s)

    def leases(
        self,
        on_change: Callable[[], None],
        on_failure: Callable[[str, Exception], None] = lambda adapter_id, error: None,
        former: LeaseClient | None = None,
    ) -> LeaseClient:
        """The instance's leases, on its first rank."""
        return LeaseClient(self._join_leader, self.store, on_change, self._connect_s, on_failure, former)

    def take_over(self, former: LoraServerClient) -> None:
        """Have the backend of `former`, between steps."""
        former.backend.follow(self.backend)
        self.backend = former.backend

    async def _join_leader(self, timeout_s: float, hear: Hear | None) -> Peer:
        """hear: of the connection with the leases; None: another connection."""
        leader, begin = (self._server.address, self._keys, self._hello), ("join_instance", self._instance)
        pings = Pings.within(self._server.lease_timeout_s)
        return await join(*leader, timeout_s, *(begin if hear else ()), hear=hear or ignore, pings=pings)

    def close(self) -> None:
        if self.pushed is not None:
            self.pushed.close()
        for link in self.links.values():
            network().run(link.stop())
        self._transport.close()
