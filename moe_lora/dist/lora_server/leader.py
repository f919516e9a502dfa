"""The leader's desk: registers adapters, gives leases to instances, tells the ranks what to load.

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

from .admin import ServerState, serve_admin
from .content import receive_content, send_content
from .control import SILENCE_S, ControlConnection, Message
from .kept import shard_pages
from .lease_events import Grant, Load
from .leases import LeaseTable
from .partition import Partition
from .server_pages import ShardPages

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
        facts: Message,
        carry_out: Callable[[Message], None],
        *,
        lease_timeout_s: float,
    ) -> None:
        self._table = table
        self._store = store
        self._partition = partition
        self._page_bytes = page_bytes
        self._first_generation: int = facts["first_generation"]
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

    def serve_admin(self, connection: ControlConnection, hello: Message) -> None:
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
                self._tell_rank(server_rank, self._resize_command())
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

    def _resize_command(self) -> Message:
        """Slots are never taken back: a lease of before may be in any of them."""
        return {"kind": "resize", "num_slots": self._num_slots}

    # Clients that look for a rank

    def serve_find(self, connection: ControlConnection, hello: Message) -> None:
        connection.send("welcome", address=self._addresses.get(hello["server_rank"]))

    # The other ranks of the server

    def serve_rank(self, connection: ControlConnection, hello: Message) -> None:
        """A rank joins, or comes back: it is told what is resident, then what changes."""
        server_rank = hello["server_rank"]
        with self._lock:
            connection.send("welcome", **self._facts)
            self._ranks[server_rank] = connection
            self._addresses[server_rank] = connection.reachable(hello["address"])
            self._tell_rank(server_rank, self._resize_command())
            for adapter in self._table.residents():
                assert adapter.slot is not None
                load = Load(adapter.adapter_id, adapter.slot, adapter.generation, adapter.runs)
                self._tell_rank(server_rank, self._load_command(load, server_rank))
        logger.info("server rank %d joined from %s", server_rank, self._addresses[server_rank])
        try:
            while True:
                message = connection.receive(1.0, SILENCE_S)
                if message is not None and message["kind"] == "need":
                    self._supply(server_rank, message["adapter_id"])
        finally:
            with self._lock:
                if self._ranks.get(server_rank) is connection:
                    del self._ranks[server_rank]
                    self._addresses.pop(server_rank, None)  # clients wait until it has joined again
            logger.warning("server rank %d left", server_rank)

    # Instances

    def serve_leases(self, connection: ControlConnection, hello: Message) -> None:
        """An instance asks for leases; they end with this connection."""
        instance = hello["instance"]
        with self._lock:
            earlier = self._instances.get(instance)
            if earlier is not None:  # it came back before we noticed that it had gone
                earlier.close()
                self._forget(instance)
            self._instances[instance] = connection
            connection.send("welcome")
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
        kind, adapter_id = message["kind"], message.get("adapter_id", "")
        if kind == "content":
            receive_content(connection, self._store, message)
            self._regained(adapter_id)
            kind = "register"
        shares = None
        if kind == "register":
            if adapter_id not in self._store:
                connection.send("need", adapter_id=adapter_id)
                return
            try:
                packed = self._store.get(adapter_id, adapter_id)
                shares = shard_pages(packed, self._partition, self._page_bytes)
            except AdapterError as error:
                connection.send("rejected", adapter_id=adapter_id, error=str(error))
                return
        with self._lock:
            if self._instances.get(instance) is not connection:
                return  # it speaks through a later connection now
            if shares is not None:
                self._register(instance, connection, adapter_id, shares)
            else:
                self._decide(instance, connection, kind, message)
            self._dispatch()

    def _register(
        self, instance: str, connection: ControlConnection, adapter_id: str, shares: ShardPages
    ) -> None:
        try:
            self._table.register(adapter_id, shares)
        except ValueError as error:
            connection.send("rejected", adapter_id=adapter_id, error=str(error))
        else:
            self._registered_by.setdefault(adapter_id, set()).add(instance)
            connection.send("registered", adapter_id=adapter_id)

    def _decide(self, instance: str, connection: ControlConnection, kind: str, message: Message) -> None:
        adapter_id, now_s = message.get("adapter_id", ""), time.monotonic()
        if kind == "unregister":
            self._unregister(instance, adapter_id, now_s)
        elif kind == "acquire":
            self._acquires[instance, adapter_id] = message["number"]
            self._acquire(instance, adapter_id, now_s)
        elif kind == "release":
            # An acquire that crossed this release on its way is given up with it.
            self._table.cancel(instance, adapter_id, now_s)
            self._table.release(instance, adapter_id, now_s)
            self._acquires.pop((instance, adapter_id), None)
        elif kind == "stats":
            connection.send("stats", request=message["request"], stats=asdict(self._table.stats()))
        else:
            logger.error("instance %s sent %r, which means nothing here", instance, kind)

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
                if isinstance(event, Load):
                    command = self._load_command(event, server_rank)
                else:
                    command = {
                        "kind": "evict",
                        "slot": event.slot,
                        "generation": self._first_generation + event.generation,
                    }
                self._tell_rank(server_rank, command)

    def _load_command(self, event: Load, server_rank: int) -> Message:
        """Runs as [layer, first page, number of pages]: JSON has no integer keys."""
        runs = event.runs.get(server_rank, {})
        return {
            "kind": "load",
            "adapter_id": event.adapter_id,
            "slot": event.slot,
            "generation": self._first_generation + event.generation,
            "runs": [[layer, *run] for layer, run in runs.items()],
        }

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
                    self._instances[instance].send("need", adapter_id=adapter_id)
                    return

    def _regained(self, adapter_id: str) -> None:
        with self._lock:
            for then in self._awaited.pop(adapter_id, []):
                with suppress(KeyError, OSError):  # a rank that has left asks again when it is back
                    then()

    def _tell_rank(self, server_rank: int, command: Message) -> None:
        if server_rank == LEADER:
            if command["kind"] == "load" and command["adapter_id"] not in self._store:
                self._await(command["adapter_id"], lambda: self._tell_rank(server_rank, command))
                return
            try:
                self._carry_out(command)
            except Exception:  # what was decided after it must be carried out all the same
                logger.exception("the leader's own rank can't %s", command["kind"])
            return
        connection = self._ranks.get(server_rank)
        if connection is None:
            return  # it is told what is resident when it comes back
        try:
            connection.send(**command)
        except OSError:
            logger.warning("server rank %d can't be told to %s", server_rank, command["kind"])

    def _grant(self, event: Grant) -> None:
        connection = self._instances.get(event.instance)
        if connection is None:
            return
        lease = {"slot": event.slot, "generation": self._first_generation + event.generation}
        number = self._acquires[event.instance, event.adapter_id]
        try:
            connection.send("granted", adapter_id=event.adapter_id, number=number, **lease)
        except OSError:
            logger.warning("instance %s can't be told of its lease", event.instance)
