"""One rank of the LoRA Server: control connections beside the data loop.

Rank 0 is the leader: it owns the leases, and its address is the one that all others are told.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.config import LoraServerConfig
from moe_lora.config.engine import StageTime
from moe_lora.core.address import Address, parse_address
from moe_lora.core.errors import PeerUnreachableError
from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server.protocol.control import SILENCE_S, ControlConnection, ControlServer, Handler
from moe_lora.dist.lora_server.protocol.control_messages import (
    AdminHello,
    DataHello,
    DataWelcome,
    FindHello,
    LeasesHello,
    RankHello,
    RankWelcome,
    Refused,
    ServerWelcome,
    TurnsHello,
)
from moe_lora.dist.lora_server.protocol.partition import Layout, Partition
from moe_lora.dist.lora_server.protocol.reach import server_transport
from moe_lora.dist.lora_server.protocol.session import PROTOCOL_VERSION, FrameLayout
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.keys import keys_in
from moe_lora.dist.transport.contract import RemoteWindow, Window

from .data_loop import DataLoop, ServerSession
from .leader import LEADER, Leader
from .leases import LeaseTable
from .membership import Membership, Orders, TurnsListener, find_rank
from .rank_memory import Memory, plan_memory
from .server_store import ServerAdapterStore

logger = logging.getLogger(__name__)

_PUT_TIMEOUT_S = 3.0
"""How long an instance that takes no answers may hold up the others' before it counts as gone."""


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What a server rank is started with.

    expert_parallel: ranks of each instance.  adapters: (name, directory) pairs that the leader puts into the
    store at the start and sizes the arenas by.  lora_kernel: how deltas are computed (`kernels.lora`).
    lora_time: of one layer, on the device that this rank emulates; None = none.
    """

    server: LoraServerConfig
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    server_rank: int
    expert_parallel: int = 1
    starvation_s: float = 5.0
    lora_kernel: str = "sgmv"
    adapters: tuple[tuple[str, str], ...] = ()
    lora_time: StageTime | None = None


def agreed_facts(
    shape: ModelShape, dtype: torch.dtype, server: LoraServerConfig, expert_parallel: int
) -> dict[str, Any]:
    """What all processes around one LoRA Server must agree on."""
    return {
        "protocol": PROTOCOL_VERSION,
        "dtype": str(dtype),
        "layout": str(Layout.parse(server.layout)),
        "transport": server.transport,
        "sites": server.sites,
        "expert_parallel": expert_parallel,
        **asdict(shape),
    }


class ServerRank:
    """One rank, built and ready to `run`.

    Raises ConfigError for settings that can't work, LoraServerError if the leader refuses or is not there.
    """

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        server = config.server
        self._partition = Partition(
            config.shape, Layout.parse(server.layout), config.expert_parallel, sites=server.sites
        )
        self._agreed = agreed_facts(config.shape, config.dtype, server, config.expert_parallel)
        self._keys = keys_in(server.certificates)
        self._store = HostStore(server.store_dir)
        self._name = f"lora-server-{config.server_rank}"
        self._transport = server_transport(server, self._name, put_timeout_s=_PUT_TIMEOUT_S)
        self._session_numbers = itertools.count()
        self._threads: list[Membership | TurnsListener] = []
        if config.server_rank == LEADER:
            self._lead()
        else:
            self._follow()
        self._hear_turns()
        arena_gb = self.loop.server_store.arena.numel() / 1e9
        logger.info("LoRA Server %s, %s ready: %.3f GB", server.layout, self._name, arena_gb)

    def run(self) -> None:
        """Serve until `stop`."""
        try:
            self.loop.run()
        finally:
            for thread in self._threads:
                thread.stop()
            self._control.close()
            self.loop.server_store.stop()
            self._transport.close()

    def stop(self) -> None:
        self.loop.stop()

    def _lead(self) -> None:
        config = self._config
        # An instance that serves a bad one says so; here it would keep the whole server from starting again.
        contents = AdapterContents(config.shape, config.dtype, self._store, owned=False)
        packed = [adapter for adapter, _ in contents.read_all(config.adapters, {}, leave_out_bad=True)]
        memory = plan_memory(config.server, self._partition, config.dtype, packed)
        self.loop = self._data_loop(memory)
        orders = Orders(self.loop.server_store, self._store)
        # Later incarnations count from later: a generation of an earlier leader is always lower.
        first_generation = time.time_ns() // 1_000_000 << 20
        orders.start_over(first_generation)
        table = LeaseTable(
            memory.capacity,
            memory.num_pages,
            memory.page_bytes,
            starvation_s=config.starvation_s,
        )
        facts = RankWelcome(
            capacity=memory.capacity,
            num_pages=tuple(memory.num_pages),
            page_bytes=memory.page_bytes,
            first_generation=first_generation,
        )
        leader = Leader(
            table,
            self._store,
            self._partition,
            memory.page_bytes,
            facts,
            orders.carry_out,
            lease_timeout_s=config.server.lease_timeout_s,
        )
        handlers: dict[type[Message], Handler] = {
            FindHello: leader.serve_find,
            RankHello: leader.serve_rank,
            LeasesHello: leader.serve_leases,
            DataHello: self._serve_data,
            TurnsHello: self._serve_turns,
            AdminHello: leader.serve_admin,
        }
        address = parse_address("lora_server.address", config.server.address)
        self._control = ControlServer(address, self._keys, self._agreed, handlers)
        leader.set_address(LEADER, self._control.address)

    def _follow(self) -> None:
        config = self._config
        address = config.server.address
        own = Address("0.0.0.0")
        if address.startswith("/"):
            own = Address(path=f"{address}.{config.server_rank}")
        built = threading.Event()

        def once_built(serve: Handler) -> Handler:
            def run(connection: ControlConnection, hello: Message) -> None:
                built.wait()
                serve(connection, hello)

            return run

        handlers: dict[type[Message], Handler] = {
            DataHello: once_built(self._serve_data),
            TurnsHello: once_built(self._serve_turns),
        }
        self._control = ControlServer(own, self._keys, self._agreed, handlers)
        hello = RankHello(
            name=self._name,
            agreed=self._agreed,
            server_rank=config.server_rank,
            address=self._control.address,
        )
        membership = Membership(address, self._keys, hello, self.stop)
        facts = membership.welcome
        memory = Memory(facts.capacity, facts.num_pages, facts.page_bytes)
        self.loop = self._data_loop(memory)
        built.set()
        membership.begin(Orders(self.loop.server_store, self._store))
        self._threads.append(membership)

    def _data_loop(self, memory: Memory) -> DataLoop:
        config = self._config
        return DataLoop(
            config.shape,
            self._shelf_maker(memory),
            self._transport,
            config.lora_time,
            lora_kernel=config.lora_kernel,
        )

    def _shelf_maker(self, memory: Memory) -> Callable[[Callable[[], None]], ServerAdapterStore]:
        config = self._config
        rate = config.server.load_gb_per_s

        def make(wake: Callable[[], None]) -> ServerAdapterStore:
            return ServerAdapterStore(
                config.shape,
                self._partition,
                config.server_rank,
                capacity=memory.capacity,
                num_pages=memory.num_pages[config.server_rank],
                page_bytes=memory.page_bytes,
                device=config.device,
                on_progress=wake,
                load_bytes_per_s=None if rate is None else rate * 1e9,
                layer_wise=config.server.layer_wise,
            )

        return make

    # Clients

    def _serve_data(self, connection: ControlConnection, hello: DataHello) -> None:
        """A client rank's session, as long as its connection lasts."""
        try:
            layout = FrameLayout(self._config.shape, self._config.dtype, hello.max_rows)
            answers = self._transport.attach(hello.answers)
        except (PeerUnreachableError, ValueError) as error:
            connection.send(Refused(f"its answer buffers can't be used: {error}"))
            return
        try:
            self._serve_session(connection, hello, layout, answers)
        finally:
            self._transport.detach(answers)

    def _serve_session(
        self, connection: ControlConnection, hello: DataHello, layout: FrameLayout, answers: RemoteWindow
    ) -> None:
        depth = hello.depth
        label = f"requests-{next(self._session_numbers)}"
        requests = self._transport.alloc(label, depth * layout.request_bytes, 1)
        try:
            session = ServerSession(
                hello.name, hello.instance, self._transport, requests, answers, layout, depth
            )
            self._converse(connection, session, requests)
        finally:
            requests.free()

    def _converse(self, connection: ControlConnection, session: ServerSession, requests: Window) -> None:
        self.loop.add(session)
        try:
            connection.send(DataWelcome(requests.descriptor()))
            while not session.closed:
                connection.receive(0.2, SILENCE_S)
        finally:
            self.loop.remove(session)
            session.left.wait()

    # Turns within a stage

    def _serve_turns(self, connection: ControlConnection, hello: TurnsHello) -> None:
        turns = self._transport.attach(hello.turns)
        try:
            connection.send(ServerWelcome())
            self.loop.tell(turns, hello.seen)
            while turns.alive():
                connection.receive(1.0, SILENCE_S)
        finally:
            self.loop.tell_no_more(turns)
            self._transport.detach(turns)

    def _hear_turns(self) -> None:
        config = self._config
        leader = self._partition.stage_leader(config.server_rank // self._partition.layout.ranks_per_stage)
        if config.server_rank == leader:
            return

        def find() -> str:
            return find_rank(config.server.address, self._keys, self._agreed, leader)

        hello = TurnsHello(
            name=self._name,
            agreed=self._agreed,
            server_rank=config.server_rank,
            turns=self.loop.turns.descriptor(),
            seen=0,
        )
        listener = TurnsListener(find, self._keys, hello, lambda: self.loop.turns_seen)
        listener.start()
        self._threads.append(listener)
