"""The leader: registers adapters, gives leases to instances, tells the ranks what to load.

Runs in the server's first rank.  A decision is made and passed on under one lock, so that every peer hears
of decisions in the order in which they were made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import AdapterError, AdapterNotFoundError, CapacityError
from moe_lora.dist.lora_server.protocol.content import receive_content, send_content
from moe_lora.dist.lora_server.protocol.control import SILENCE_S, ControlConnection, serve_admin
from moe_lora.dist.lora_server.protocol.control_messages import (
    Acquire,
    AdminHello,
    Content,
    EvictOrder,
    FindHello,
    FindWelcome,
    Granted,
    LeasesHello,
    LoadOrder,
    Need,
    Order,
    RankHello,
    RankWelcome,
    Register,
    Registered,
    Release,
    ResizeOrder,
    ServerRejected,
    ServerState,
    ServerWelcome,
    Stats,
    StatsAsked,
    Unregister,
)
from moe_lora.dist.lora_server.protocol.partition import Partition
from moe_lora.dist.net.codec import Message

from .leases import LeaseTable
from .rank_memory import shard_pages
from .residency import Grant, Load, ShardPages

logger = logging.getLogger(__name__)

LEADER = 0


class Leader:
    """Serves the roles "leases" (first rank of each instance), "rank" (other server ranks) and "find".

    facts: what a rank that joins is told; its first_generation is the leader's incarnation, and generations
    on the wire are above it, so that those of an earlier leader are stale.  carry_out: does a load or an
    eviction on the leader's own rank.  lease_timeout_s: an instance silent for longer loses its leases.
    """

    def __init__(
        self,
        table: LeaseTable,
        store: HostStore,
        partition: Partition,
        page_bytes: int,
        facts: RankWelcome,
        carry_out: Callable[[Order], None],
        *,
        lease_timeout_s: float,
    ) -> None:
        self._table = table
        self._store = store
        self._partition = partition
        self._page_bytes = page_bytes
        self._first_generation: int = facts.first_generation
        self._facts = facts
        self._carry_out = carry_out
        self._lease_timeout_s = lease_timeout_s
        self._num_slots = table.capacity
        self._lock = threading.RLock()
        self._instances: dict[str, ControlConnection] = {}
        self._registered_by: dict[str, set[str]] = {}
        self._acquires: dict[tuple[str, str], int] = {}
        self._ranks: dict[int, ControlConnection] = {}
        self._awaited: dict[str, list[Callable[[], None]]] = {}
        self._addresses: dict[int, str] = {}

    def set_address(self, server_rank: int, address: str) -> None:
        """Where clients find this rank."""
        self._addresses[server_rank] = address

    # The admin

    def serve_admin(self, connection: ControlConnection, hello: AdminHello) -> None:
        serve_admin(self, connection, hello)

    def state(self) -> ServerState:
        """Counts for metrics, and what could be changed."""
        with self._lock:
            table = self._table
            return ServerState(
                capacity=table.capacity, max_capacity=table.max_capacity(), **asdict(table.stats())
            )

    def resize(self, capacity: int) -> None:
        """Change the number of adapters resident at once, here and on all ranks; see `LeaseTable.resize`.

        Raises ConfigError below 1, CapacityError for more than before if the ranks' memory can't hold them.
        """
        with self._lock:
            before = self._table.capacity
            if capacity > before:
                self._check_memory(capacity)
            self._table.resize(capacity, time.monotonic())
            self._num_slots = max(self._num_slots, capacity)
            for server_rank in range(self._partition.layout.num_ranks):
                self._tell_rank(server_rank, self._resize_order())
            self._dispatch()
        logger.info("capacity of the LoRA Server: %d adapters, before %d", capacity, before)

    def _check_memory(self, capacity: int) -> None:
        limit = self._table.max_capacity()
        if limit is None:
            raise CapacityError(
                f"capacity={capacity}: no adapter is registered, so it is not known how many fit; load one "
                "first"
            )
        if capacity > limit:
            raise CapacityError(
                f"capacity={capacity} is more than the memory of the LoRA Server's ranks holds, which is "
                f"{limit} of the largest adapters; choose at most that, or start it with more "
                "lora_server.memory_gb"
            )

    def _resize_order(self) -> ResizeOrder:
        """Slots are never taken back: a lease of before may be in any of them."""
        return ResizeOrder(self._num_slots)

    # Clients that look for a rank

    def serve_find(self, connection: ControlConnection, hello: FindHello) -> None:
        connection.send(FindWelcome(self._addresses.get(hello.server_rank)))

    # The other ranks of the server

    def serve_rank(self, connection: ControlConnection, hello: RankHello) -> None:
        """A rank joins, or comes back: it is told what is resident, then what changes."""
        server_rank = hello.server_rank
        with self._lock:
            connection.send(self._facts)
            self._ranks[server_rank] = connection
            # What listens everywhere is reached where it dialled from.
            self._addresses[server_rank] = hello.address.replace("0.0.0.0:", f"{connection.host}:")
            self._tell_rank(server_rank, self._resize_order())
            for adapter in self._table.residents():
                assert adapter.slot is not None
                load = Load(adapter.adapter_id, adapter.slot, adapter.generation, adapter.runs)
                self._tell_rank(server_rank, self._load_order(load, server_rank))
        logger.info("server rank %d joined from %s", server_rank, self._addresses[server_rank])
        try:
            while True:
                message = connection.receive(1.0, SILENCE_S)
                if isinstance(message, Need):
                    self._supply(server_rank, message.adapter_id)
        finally:
            with self._lock:
                if self._ranks.get(server_rank) is connection:
                    del self._ranks[server_rank]
                    self._addresses.pop(server_rank, None)  # clients wait until it has joined again
            logger.warning("server rank %d left", server_rank)

    # Instances

    def serve_leases(self, connection: ControlConnection, hello: LeasesHello) -> None:
        """An instance asks for leases; they end with this connection."""
        instance = hello.instance
        with self._lock:
            earlier = self._instances.get(instance)
            if earlier is not None:  # it came back before we noticed that it had gone
                earlier.close()
                self._forget(instance)
            self._instances[instance] = connection
            connection.send(ServerWelcome())
        logger.info("instance %s joined", instance)
        try:
            while True:
                message = connection.receive(1.0, self._lease_timeout_s)
                if message is not None:
                    self._answer(instance, connection, message)
        finally:
            with self._lock:
                if self._instances.get(instance) is connection:
                    del self._instances[instance]
                    self._forget(instance)
                    logger.warning("instance %s left; its leases ended", instance)

    def _forget(self, instance: str) -> None:
        """End the leases of an instance that has gone.  What it registered stays known."""
        for instances in self._registered_by.values():
            instances.discard(instance)
        self._table.drop_instance(instance, time.monotonic())
        self._acquires = {pair: number for pair, number in self._acquires.items() if pair[0] != instance}
        self._dispatch()

    def _answer(self, instance: str, connection: ControlConnection, message: Message) -> None:
        if isinstance(message, Content):
            receive_content(connection, self._store, message)
            self._regained(message.adapter_id)
            message = Register(message.adapter_id)
        shares = None
        if isinstance(message, Register):
            adapter_id = message.adapter_id
            if adapter_id not in self._store:
                connection.send(Need(adapter_id))
                return
            try:
                packed = self._store.get(adapter_id, adapter_id)
                shares = shard_pages(packed, self._partition, self._page_bytes)
            except AdapterError as error:
                connection.send(ServerRejected(adapter_id, str(error)))
                return
        with self._lock:
            if self._instances.get(instance) is not connection:
                return  # it speaks through a later connection now
            if shares is not None:
                self._register(instance, connection, adapter_id, shares)
            else:
                self._decide(instance, connection, message)
            self._dispatch()

    def _register(
        self, instance: str, connection: ControlConnection, adapter_id: str, shares: ShardPages
    ) -> None:
        try:
            self._table.register(adapter_id, shares)
        except ValueError as error:
            connection.send(ServerRejected(adapter_id, str(error)))
        else:
            self._registered_by.setdefault(adapter_id, set()).add(instance)
            connection.send(Registered(adapter_id))

    def _decide(self, instance: str, connection: ControlConnection, message: Message) -> None:
        now_s = time.monotonic()
        if isinstance(message, Unregister):
            self._unregister(instance, message.adapter_id, now_s)
        elif isinstance(message, Acquire):
            self._acquires[instance, message.adapter_id] = message.number
            self._acquire(instance, message.adapter_id, now_s)
        elif isinstance(message, Release):
            # An acquire that crossed this release on its way is given up with it.
            self._table.cancel(instance, message.adapter_id, now_s)
            self._table.release(instance, message.adapter_id, now_s)
            self._acquires.pop((instance, message.adapter_id), None)
        elif isinstance(message, StatsAsked):
            connection.send(Stats(message.request, self._table.stats()))
        else:
            logger.error("instance %s sent %s, which means nothing here", instance, type(message).__name__)

    def _unregister(self, instance: str, adapter_id: str, now_s: float) -> None:
        """The adapter goes when no instance has it registered any more."""
        instances = self._registered_by.get(adapter_id)
        if instances is None:
            return
        instances.discard(instance)
        if not instances:
            del self._registered_by[adapter_id]
            self._table.unregister(adapter_id, now_s)

    def _acquire(self, instance: str, adapter_id: str, now_s: float) -> None:
        try:
            self._table.acquire(instance, adapter_id, now_s)
        except AdapterNotFoundError:
            # Its content is still on the way; the instance asks again once it is registered.
            logger.info("instance %s asks for adapter %s, which is not here yet", instance, adapter_id)

    # Decisions, passed on

    def _dispatch(self) -> None:
        """Carry out what the table decided, in its order."""
        for event in self._table.take_events():
            if isinstance(event, Grant):
                self._grant(event)
                continue
            for server_rank in range(self._partition.layout.num_ranks):
                order: Order
                if isinstance(event, Load):
                    order = self._load_order(event, server_rank)
                else:
                    order = EvictOrder(event.slot, self._first_generation + event.generation)
                self._tell_rank(server_rank, order)

    def _load_order(self, event: Load, server_rank: int) -> LoadOrder:
        runs = dict(event.runs.get(server_rank, {}))
        return LoadOrder(event.adapter_id, event.slot, self._first_generation + event.generation, runs)

    # Content that the store has lost

    def _supply(self, server_rank: int, adapter_id: str) -> None:
        """Send content to a rank, at once or when an instance has given it."""
        with self._lock:
            if adapter_id in self._store:
                send_content(self._ranks[server_rank], self._store, adapter_id)
            else:
                self._await(adapter_id, lambda: self._supply(server_rank, adapter_id))

    def _await(self, adapter_id: str, then: Callable[[], None]) -> None:
        """Ask an instance that has registered the adapter for its content; the caller holds the lock."""
        waiting = self._awaited.setdefault(adapter_id, [])
        waiting.append(then)
        if len(waiting) == 1:
            logger.warning("the content of adapter %s was lost; it is fetched again", adapter_id)
        for instance in sorted(self._registered_by.get(adapter_id, ())):
            if instance in self._instances:
                with suppress(OSError):
                    self._instances[instance].send(Need(adapter_id))
                    return

    def _regained(self, adapter_id: str) -> None:
        with self._lock:
            for then in self._awaited.pop(adapter_id, []):
                with suppress(KeyError, OSError):  # a rank that has left asks again when it is back
                    then()

    def _tell_rank(self, server_rank: int, order: Order) -> None:
        if server_rank == LEADER:
            if isinstance(order, LoadOrder) and order.adapter_id not in self._store:
                self._await(order.adapter_id, lambda: self._tell_rank(server_rank, order))
                return
            try:
                self._carry_out(order)
            except Exception:  # what was decided after it must be carried out all the same
                logger.exception("the leader's own rank can't carry out %s", order)
            return
        connection = self._ranks.get(server_rank)
        if connection is None:
            return  # it is told what is resident when it comes back
        try:
            connection.send(order)
        except OSError:
            logger.warning("server rank %d can't be told %s", server_rank, type(order).__name__)

    def _grant(self, event: Grant) -> None:
        connection = self._instances.get(event.instance)
        if connection is None:
            return
        number = self._acquires[event.instance, event.adapter_id]
        generation = self._first_generation + event.generation
        try:
            connection.send(Granted(event.adapter_id, number, event.slot, generation))
        except OSError:
            logger.warning("instance %s can't be told of its lease", event.instance)
