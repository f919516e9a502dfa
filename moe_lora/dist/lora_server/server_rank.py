# SPDX-License-Identifier: Apache-2.0
"""One rank of the LoRA Server: control connections beside the data loop.  Rank 0 leads."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.cache.leases.leases import LeaseTable
from moe_lora.config import EngineConfig
from moe_lora.core.address import Address, parse_address
from moe_lora.core.errors import ConfigError, LoraServerError, PeerUnreachableError
from moe_lora.core.shape import ModelShape
from moe_lora.dist.deltas.session import FrameLayout, PeerFrames
from moe_lora.dist.net.keys import Keys, keys_in
from moe_lora.dist.net.peer import Peer
from moe_lora.dist.net.session import Hello, stay_connected

from .control import (
    REJOIN_S,
    Answer,
    ControlServer,
    Pings,
    Visitor,
    ask,
    called,
    find_rank,
    join,
    joined,
    network,
)
from .data_loop import DataLoop, HostCompute, ServerSession
from .leader import LEADER, Leader, OwnRank
from .messages import HANDSHAKE, Memory
from .orders import Orders
from .rank_memory import check_share, memory_of_all
from .reach import DeviceMembers, agreed_facts, server_transport
from .server_store import ServerAdapterStore

if TYPE_CHECKING:
    from .device_loop import DeviceLoop

logger = logging.getLogger(__name__)

_PUT_TIMEOUT_S = 3.0
"""Limit of a put to a stuck instance."""
_LEADER_TIMEOUT_S = 120.0


def own_device(config: EngineConfig, local_rank: int) -> torch.device:
    """The only device with `device_shares`, else the device of LOCAL_RANK.

    Raises ConfigError for too few visible devices.
    """
    if config.device != "cuda":
        return torch.device(config.device)
    if config.device_shares:
        return torch.device("cuda", 0)
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise ConfigError(
            f"local rank {local_rank} of the LoRA Server has no device, torch finds {num_devices}; "
            "use fewer ranks, or list a device for each under devices.lora_server, where ranks may share one"
        )
    return torch.device("cuda", local_rank)


class ServerRank:
    """One rank, ready to `run`.

    config: of a served instance, resolved.  host: see `DataLoop`; closed here.  local_rank: among the host's
    ranks.  Raises ConfigError for impossible settings, LoraServerError for an absent or refusing leader.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelShape,
        server_rank: int,
        host: HostCompute | None = None,
        local_rank: int | None = None,
    ) -> None:
        self._host = host
        self.restarts = False
        self.on_restart: Callable[[], None] = lambda: None
        """Called when a restart begins."""
        assert config.lora_server is not None
        server = self._server = config.lora_server
        self._config, self._shape, self._server_rank = config, shape, server_rank
        self._dtype = getattr(torch, config.dtype)
        self._device = own_device(config, server_rank if local_rank is None else local_rank)
        self._partition = server.partition(shape, (config.expert_parallel, config.tensor_parallel))
        self._keys = keys_in(server.certificates)
        self._store = HostStore(server.store_dir)
        name = f"lora-server-{server_rank}"
        self._agreed = agreed_facts(self._partition, self._dtype, server)
        self._hello = HANDSHAKE.hello(name, self._agreed)
        self._transport = server_transport(server, name, put_timeout_s=_PUT_TIMEOUT_S)
        self._session_numbers = itertools.count()
        self._linked: Counter[str] = Counter()
        """Sessions by client rank; after a reconnection briefly two."""
        self._tell_links: Callable[[tuple[str, ...]], object] = lambda clients: None
        self._tasks: list[asyncio.Task[None]] = []
        if server_rank == LEADER:
            self._lead()
        else:
            self._follow()
        self.devices = self._serve_devices() if server.device_puts != "none" else None
        stage = server_rank // self._partition.layout.ranks_per_stage
        self._stage_leader = self._partition.stage_leader(stage)
        if server_rank != self._stage_leader:
            self._start(stay_connected("turns", self._join_stage, _until_ended))
        arena_gb = self.loop.server_store.arena.numel() / 1e9
        logger.info("LoRA Server %s, %s ready: %.3f GB", server.layout, name, arena_gb)

    def run(self) -> None:
        """Serve until `stop`."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self.loop.run()
        finally:
            if self.devices is not None:
                self.devices.stop()
            network().run(self._end_tasks())
            self._control.close()
            self.loop.server_store.stop()
            self._transport.close()
            if self._host is not None:
                self._host.close()

    def stop(self) -> None:
        self.loop.stop()

    def _restart(self) -> None:
        logger.info("rank %d ends, to be started again", self._server_rank)
        self.restarts = True
        self.on_restart()
        self.stop()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:

        async def start() -> None:
            self._tasks.append(asyncio.create_task(work))

        network().run(start())

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _build(self, memory: Memory) -> None:
        config = self._config
        if self._device.type == "cuda" and config.device_shares:
            num_bytes = memory.num_pages[self._server_rank] * memory.page_bytes
            _, total = torch.cuda.mem_get_info(self._device)
            check_share(self._server, num_bytes, total, config.device_shares[0].num_sharers)
        rate = self._server.load_gb_per_s
        server_store = ServerAdapterStore(
            self._shape,
            self._partition,
            self._server_rank,
            memory,
            self._device,
            load_bytes_per_s=None if rate is None else rate * 1e9,
            layer_wise=self._server.layer_wise,
        )
        self._memory = memory
        profile = config.emulation.step_profile
        lora_time = None if profile is None else profile.lora
        self.loop = DataLoop(
            *(self._shape, server_store, self._transport, lora_time),
            lora_kernel=config.lora_kernel,
            host=self._host,
        )
        if self._device.type == "cuda":
            layout = FrameLayout(self._partition.shape_of(0), self._dtype, self._server.max_rows)
            self.loop.warm_up(layout, filter(self._partition.serves, range(len(self._shape.sites))))

    def _listen(self, address: Address, answers: Mapping[str, Answer]) -> None:
        own: dict[str, Answer] = {"open_session": self._open_session, "tell_turns": self._tell_turns}
        pings = Pings.within(self._server.lease_timeout_s)
        self._control = ControlServer(address, self._keys, self._agreed, {**own, **answers}, pings)

    @staticmethod
    def _report_by(report: Callable[[str, int, str], None]) -> Callable[[str, int, Exception], None]:

        def failed(adapter_id: str, generation: int, error: Exception) -> None:
            reason = str(error) or type(error).__name__
            network().loop.call_soon_threadsafe(report, adapter_id, generation, reason)

        return failed

    def _lead(self) -> None:
        config = self._config
        memory = memory_of_all(config, self._partition, self._dtype, self._device, self._store)
        self._build(memory)
        steps: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        orders = Orders(
            self.loop.server_store, self._store, lambda adapter_id: leader.supply(LEADER, adapter_id)
        )
        # Time-based: later incarnations have higher generations.
        first_generation = time.time_ns() // 1_000_000 << 20
        orders.start_over(first_generation)
        leader = Leader(
            LeaseTable(
                memory.capacity, memory.num_pages, memory.page_bytes, starvation_s=config.starvation_s
            ),
            self._store,
            self._partition,
            memory,
            first_generation,
            OwnRank(
                order=lambda order: steps.put_nowait(partial(orders.hear, order)),
                regained=lambda adapter_id: steps.put_nowait(partial(orders.regained, adapter_id)),
                restart=self._restart,
            ),
        )
        self._start(_carry_out(steps))
        answers = dict(leader.answers)
        if self._server.device_puts != "none":
            self._members = DeviceMembers(config)
            answers["join_devices"] = self._members.join
        self.loop.server_store.on_failure = self._report_by(partial(leader.hear_failure, LEADER))
        self._listen(parse_address("lora_server.address", self._server.address), answers)
        leader.addresses[LEADER] = self._control.address
        self._tell_links = partial(leader.hear_links, LEADER)

    def _follow(self) -> None:
        address = self._server.address
        memory, own_host = network().run(_meet(address, self._keys, self._hello))
        self._build(memory)
        unix = Address(path=f"{address}.{self._server_rank}")
        own = Address("::" if ":" in own_host else "0.0.0.0") if own_host else unix
        self._listen(own, {})
        self._leader: Peer | None = None
        self._orders = Orders(self.loop.server_store, self._store, self._need)
        self.loop.server_store.on_failure = self._report_by(partial(self._call_leader, "fail_load"))
        self._start(stay_connected("membership", self._join_leader, self._obey))

    async def _join_leader(self) -> Peer:
        return await join(
            self._server.address,
            self._keys,
            self._hello,
            REJOIN_S,
            hear=partial(self._orders.hear_from, self._restart),
        )

    async def _obey(self, peer: Peer) -> None:
        """Follow a leader from scratch: the leader may be new."""
        memory, first_generation = await called(peer, "memory")
        if (memory.num_pages, memory.page_bytes) != (self._memory.num_pages, self._memory.page_bytes):
            logger.error("the new leader of the LoRA Server has other memory; this rank starts over")
            self._restart()
            return
        await asyncio.to_thread(self._orders.start_over, first_generation)
        self._leader = peer
        self._tell_links = partial(_tell_links, peer)
        try:
            await called(peer, "join_rank", self._server_rank, self._control.address)
            self._tell_links(tuple(self._linked))
            await peer.ended.wait()
            logger.warning("lost the leader of the LoRA Server: %s", peer.problem)
        finally:
            self._tell_links = lambda clients: None
            # Without a leader no loads; resident adapters stay served.
            self.loop.server_store.set_led(False)

    def _need(self, adapter_id: str) -> None:
        self._call_leader("need", adapter_id)

    def _call_leader(self, method: str, *args: Any) -> None:
        """Sends nothing without a leader: the next orders every load."""
        if self._leader is not None and not self._leader.ended.is_set():
            self._leader.call(method, *args)

    def _serve_devices(self) -> DeviceLoop:
        from .device_loop import device_loop

        leader = self._server.address, self._keys, self._hello, _LEADER_TIMEOUT_S
        meeting = network().run(ask(*leader, "join_devices", ""))
        return device_loop(self._config, self._partition, self._server_rank, self.loop.server_store, meeting)

    async def _open_session(
        self, visitor: Visitor, instance: str, answers: bytes, max_rows: int, depth: int, client_rank: int
    ) -> bytes:
        """Serve a client rank during its connection."""
        loop, peer = asyncio.get_running_loop(), visitor.peer
        if not 0 <= client_rank < self._partition.client_ranks:
            raise LoraServerError(
                f"client_rank={client_rank} of {instance} must be 0 to {self._partition.client_ranks - 1}"
            )

        def begin() -> ServerSession:
            layout = FrameLayout(self._partition.shape_of(client_rank), self._dtype, max_rows)
            try:
                there = self._transport.attach(answers)
            except (PeerUnreachableError, ValueError) as error:
                raise LoraServerError(f"its answer buffers can't be used: {error}") from error
            label = f"requests-{next(self._session_numbers)}"
            requests = self._transport.alloc(label, depth * layout.request_bytes, 1)
            frames = PeerFrames(self._transport, there, layout.answer_bytes, depth)
            session = ServerSession(peer.name, instance, requests, frames, layout, depth, client_rank)
            session.on_drop = partial(loop.call_soon_threadsafe, peer.end, "the session was given up")
            return session

        def end() -> None:
            self.loop.remove(session)
            session.left.wait()
            session.requests.free()
            self._transport.detach(session.answers.window)

        session = await asyncio.to_thread(begin)
        visitor.left.push_async_callback(asyncio.to_thread, end)
        self.loop.add(session)
        self._link(peer.name, 1)
        visitor.left.callback(self._link, peer.name, -1)
        return session.requests.descriptor()

    def _link(self, client: str, change: int) -> None:
        self._linked[client] += change
        self._linked += Counter()
        self._tell_links(tuple(self._linked))

    async def _tell_turns(self, visitor: Visitor, turns: bytes, num_seen: int) -> None:
        window = await asyncio.to_thread(self._transport.attach, turns)
        visitor.left.push_async_callback(asyncio.to_thread, self._transport.detach, window)
        visitor.left.callback(self.loop.tell_no_more, window)
        self.loop.tell(window, num_seen)

    async def _join_stage(self) -> Peer:
        """Let the stage's first rank announce turns."""
        leader = self._server.address, self._keys, self._hello
        address = await find_rank(*leader, self._stage_leader, REJOIN_S)
        begin = "tell_turns", self.loop.turns.descriptor(), self.loop.turns_seen
        return await join(address, self._keys, self._hello, REJOIN_S, *begin)


async def _meet(address: str, keys: Keys | None, hello: Hello) -> tuple[Memory, str]:
    """The leader's memory, and this end's address: other ranks dial its family."""
    async with joined(address, keys, hello, _LEADER_TIMEOUT_S) as leader:
        memory, _ = await called(leader, "memory")
        return memory, leader.own_host


def _tell_links(leader: Peer, clients: tuple[str, ...]) -> None:
    if not leader.ended.is_set():
        leader.call("linked", clients)


async def _until_ended(peer: Peer) -> None:
    await peer.ended.wait()


async def _carry_out(steps: asyncio.Queue[Callable[[], Awaitable[None]]]) -> None:
    while True:
        step = await steps.get()
        try:
            await step()
        except Exception:  # later decisions must still be carried out
            logger.exception("the leader's own rank can't carry out an order")
