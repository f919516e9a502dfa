# SPDX-License-Identifier: Apache-2.0
"""The leader: registers adapters, grants leases to instances, orders loads on ranks.

Runs in the first rank, on the control connections' event loop: every peer hears decisions in their order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from moe_lora.adapters.host_store import HostStore
from moe_lora.cache.leases.leases import Grant, LeaseTable
from moe_lora.cache.leases.residency import Load, ShardPages
from moe_lora.core.address import Address, is_any_host, parse_address
from moe_lora.core.errors import (
    AdapterError,
    AdapterNotFoundError,
    CapacityError,
    LoraServerError,
    StorageError,
)
from moe_lora.core.partition import Partition
from moe_lora.policies.caching.caching import Asker

from .content import LostContent, num_blocks, receive_blocks, send_blocks
from .control import Answer, Visitor
from .messages import (
    AdapterFailed,
    Content,
    DropOrder,
    EvictOrder,
    LoadOrder,
    Memory,
    Need,
    Order,
    ResizeOrder,
    RestartOrder,
    ServerState,
)
from .rank_memory import shard_pages
from .reach import client_name, instance_of

logger = logging.getLogger(__name__)

LEADER = 0
RESTART_S = 0.1
"""From a restart's reply to the leader's end."""
LOOK_AGAIN_S = 1.0
"""Period of checks while instances wait."""


@dataclass(frozen=True)
class OwnRank:
    """Calls from the leader to its own rank."""

    order: Callable[[Order], None]
    regained: Callable[[str], None]
    restart: Callable[[], None]


class Leader:
    """Answers the calls of instances, server ranks and the front end.

    first_generation: lower generations on the wire are stale.
    """

    def __init__(
        self,
        table: LeaseTable,
        store: HostStore,
        partition: Partition,
        memory: Memory,
        first_generation: int,
        own: OwnRank,
    ) -> None:
        self._own = own
        self._table = table
        self._store = store
        self._partition = partition
        self._memory = memory
        self._first_generation = first_generation
        self._num_slots = table.capacity
        self._instances: dict[str, Visitor] = {}
        self._ranks: dict[int, Visitor] = {}
        self._linked: dict[int, frozenset[str]] = {}
        """Client ranks with a session, by server rank."""
        self._num_joins: Counter[int] = Counter()
        self._registered_by: dict[str, set[str]] = {}
        self._known_shares: dict[str, ShardPages] = {}
        """By content hash, of registered adapters."""
        self._to_drop: set[str] = set()
        """Contents to delete after their last registration."""
        self._acquires: dict[tuple[str, str], asyncio.Future[tuple[int, int]]] = {}
        self._looks_again = False
        self._gives_out = False
        """True if `_give_out` is scheduled or has failed."""
        self._lost = LostContent(self._call_for_content, self._fail)
        self.addresses: dict[int, str] = {}

    @property
    def answers(self) -> Mapping[str, Answer]:
        """By method."""
        names = (
            "find memory join_rank linked need fail_load join_instance register give fail_content unregister "
            "drop acquire release state resize restart"
        )
        return {name: getattr(self, name) for name in names.split()}

    async def state(self, visitor: Visitor) -> ServerState:
        self._give_out()
        table = self._table
        others = range(1, self._partition.layout.num_ranks)
        return ServerState(
            capacity=table.capacity,
            max_capacity=table.max_capacity(),
            num_instances=len(self._instances),
            incarnation=self._first_generation,
            ranks=(1, *(self._num_joins[one] if one in self._ranks else 0 for one in others)),
            unlinked=tuple(len(self._unlinked(one)) for one in (LEADER, *others)),
            **asdict(table.stats()),
        )

    def _unlinked(self, server_rank: int) -> set[str]:
        clients = self._partition.clients_of_server(server_rank)
        expected = {client_name(instance, client) for instance in self._instances for client in clients}
        return expected - self._linked.get(server_rank, frozenset())

    async def restart(self, visitor: Visitor, server_rank: int) -> None:
        if server_rank == LEADER:
            # After the reply: connections end with the process.
            asyncio.get_running_loop().call_later(RESTART_S, self._own.restart)
        elif server_rank in self._ranks:
            self._ranks[server_rank].peer.send(RestartOrder())
        else:
            raise LoraServerError(
                f"rank {server_rank} of the LoRA Server is not there, so it can't be told to end"
            )

    async def resize(self, visitor: Visitor, capacity: int) -> ServerState:
        before = self._table.capacity
        if capacity > before:
            self._check_memory(capacity)
        self._table.resize(capacity)
        # Slots never shrink: an earlier lease may be in any slot.
        self._num_slots = max(self._num_slots, capacity)
        for server_rank in range(self._partition.layout.num_ranks):
            self._tell_rank(server_rank, ResizeOrder(self._num_slots))
        self._dispatch()
        logger.info("capacity of the LoRA Server: %d adapters, before %d", capacity, before)
        return await self.state(visitor)

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
                f"{limit} adapters of the mean size of those registered; choose at most that, or start the "
                "LoRA Server with more lora_server.memory_gb"
            )

    async def find(self, visitor: Visitor, server_rank: int) -> str | None:
        return self.addresses.get(server_rank)

    async def memory(self, visitor: Visitor) -> tuple[Memory, int]:
        return self._memory, self._first_generation

    async def join_rank(self, visitor: Visitor, server_rank: int, address: str) -> None:
        """Send a new rank resident adapters, then changes."""
        visitor.server_rank = server_rank
        visitor.left.callback(self._lose_rank, visitor)
        self._ranks[server_rank] = visitor
        self._num_joins[server_rank] += 1
        place = parse_address("its address", address)
        if is_any_host(place.host):  # the rank is reached at the peer's host
            place = Address(visitor.host, place.port)
        self.addresses[server_rank] = str(place)
        self._tell_rank(server_rank, ResizeOrder(self._num_slots))
        for adapter in self._table.residents():
            assert adapter.slot is not None
            load = Load(adapter.adapter_id, adapter.slot, adapter.generation, adapter.runs)
            self._tell_rank(server_rank, self._load_order(load, server_rank))
        logger.info("server rank %d joined from %s", server_rank, self.addresses[server_rank])

    async def linked(self, visitor: Visitor, clients: tuple[str, ...]) -> None:
        if self._ranks.get(visitor.server_rank) is visitor:
            self.hear_links(visitor.server_rank, clients)

    def hear_links(self, server_rank: int, clients: Iterable[str]) -> None:
        """Set the client ranks linked to a rank."""
        self._linked[server_rank] = frozenset(clients)

    def _lose_rank(self, visitor: Visitor) -> None:
        if self._ranks.get(visitor.server_rank) is visitor:
            del self._ranks[visitor.server_rank]
            self._linked.pop(visitor.server_rank, None)
            self.addresses.pop(visitor.server_rank, None)
        logger.warning("server rank %d left", visitor.server_rank)

    async def join_instance(self, visitor: Visitor, instance: str) -> None:
        """Register an instance for leases until this connection's end."""
        earlier = self._instances.pop(instance, None)
        if earlier is not None:  # reconnected before its loss was noticed
            earlier.peer.abort("the instance has joined again")
            self._forget(instance)
        visitor.instance = instance
        visitor.left.push_async_callback(self._lose_instance, visitor)
        self._instances[instance] = visitor
        logger.info("instance %s joined", instance)
        await self._drop_unused(visitor)

    async def _lose_instance(self, visitor: Visitor) -> None:
        if self._instances.get(visitor.instance) is visitor:
            del self._instances[visitor.instance]
            self._forget(visitor.instance)
            logger.warning("instance %s left; its leases ended", visitor.instance)
            await self._drop_unused(visitor)

    async def _drop_unused(self, visitor: Visitor) -> None:
        """Carry out the drops that waited for an instance that has left."""
        while unused := [one for one in self._to_drop if not self._registered_by.get(one)]:
            await self.unregister(visitor, unused[0])

    def _forget(self, instance: str) -> None:
        for instances in self._registered_by.values():
            instances.discard(instance)
        self._table.drop_instance(instance, time.monotonic())
        for pair in [pair for pair in self._acquires if pair[0] == instance]:
            del self._acquires[pair]
        self._lost.drop_instance(instance)
        self._dispatch()

    async def register(self, visitor: Visitor, adapter_id: str) -> bool:
        if adapter_id not in self._store:
            return False
        try:
            shares = self._known_shares.get(adapter_id)
            if shares is None:
                shares = await asyncio.to_thread(self._shares, adapter_id)
        except AdapterError as error:
            if isinstance(error.__cause__, OSError) and adapter_id in self._store:
                raise
            logger.warning("adapter %s is fetched again: %s", adapter_id, error)
            await asyncio.to_thread(self._store.remove, adapter_id)
            return False
        if self._instances.get(visitor.instance) is visitor:  # else a later connection has replaced this
            self._table.register(adapter_id, shares)
            self._registered_by.setdefault(adapter_id, set()).add(visitor.instance)
            self._to_drop.discard(adapter_id)
            self._known_shares[adapter_id] = shares
        return True

    def _shares(self, adapter_id: str) -> ShardPages:
        packed = self._store.get(adapter_id, adapter_id)
        return shard_pages(packed, self._partition, self._memory.page_bytes)

    async def give(self, visitor: Visitor, adapter_id: str, number: int) -> None:
        try:
            await receive_blocks(visitor.peer, self._store, adapter_id, number)
        except StorageError as error:
            self._lost.fail(instance_of(visitor.peer.name), adapter_id, str(error))
            raise
        for server_rank in self._lost.pop(adapter_id):
            self.supply(server_rank, adapter_id)

    async def unregister(self, visitor: Visitor, adapter_id: str) -> None:
        instances = self._registered_by.get(adapter_id, set())
        instances.discard(visitor.instance)
        if adapter_id in self._registered_by and not instances:
            del self._registered_by[adapter_id]
            self._known_shares.pop(adapter_id, None)
            self._table.unregister(adapter_id)
            self._dispatch()
        if adapter_id in self._to_drop and not instances:
            await self._drop(adapter_id)

    async def drop(self, visitor: Visitor, adapter_id: str, only_unused: bool = False) -> None:
        if self._registered_by.get(adapter_id):
            if not only_unused:
                self._to_drop.add(adapter_id)
        else:
            await self._drop(adapter_id)

    async def _drop(self, adapter_id: str) -> None:
        self._to_drop.discard(adapter_id)
        for other in (*self._ranks.values(), *self._instances.values()):
            other.peer.send(DropOrder(adapter_id))
        await asyncio.to_thread(self._store.remove, adapter_id)

    async def acquire(
        self, visitor: Visitor, adapter_id: str, tenant: str, share: float
    ) -> asyncio.Future[tuple[int, int]]:
        instance = visitor.instance
        try:
            lease = self._table.acquire(instance, adapter_id, time.monotonic(), Asker(tenant, share))
        except AdapterNotFoundError:
            # Its content is on the way; the instance calls again.
            logger.info("instance %s asks for adapter %s, which is not here yet", instance, adapter_id)
            raise
        # A repeated call for another tenant gets an answer too.
        asked = self._acquires.setdefault((instance, adapter_id), asyncio.get_running_loop().create_future())
        self._dispatch()
        if lease is not None:
            self._grant(lease)
        return asked

    async def release(self, visitor: Visitor, adapter_id: str) -> None:
        """Also cancels a crossing acquire."""
        self._table.cancel(visitor.instance, adapter_id)
        self._table.release(visitor.instance, adapter_id, time.monotonic())
        self._refuse(visitor.instance, adapter_id, "the acquire was released")
        self._dispatch()

    def _dispatch(self) -> None:
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
        loop = asyncio.get_running_loop()
        if self._table.is_due and not self._gives_out:
            self._gives_out = True
            loop.call_soon(self._give_out)
        if (self._table.is_due or self._table.num_waiting) and not self._looks_again:
            self._looks_again = True
            loop.call_later(LOOK_AGAIN_S, self._look_again)

    def _give_out(self) -> None:
        self._look(self._table.grant_due)

    def _look_again(self) -> None:
        """Stops if no instance waits."""
        self._looks_again = False
        self._look(self._table.grant_waiting)

    def _look(self, look: Callable[[float], None]) -> None:
        """Carries out earlier decisions; `_look_again` does the rest, without a busy loop."""
        try:
            look(time.monotonic())
            self._gives_out = False
        finally:
            self._dispatch()

    def _load_order(self, event: Load, server_rank: int) -> LoadOrder:
        runs = dict(event.runs.get(server_rank, {}))
        return LoadOrder(event.adapter_id, event.slot, self._first_generation + event.generation, runs)

    def _tell_rank(self, server_rank: int, order: Order) -> None:
        if server_rank == LEADER:
            self._own.order(order)
        elif server_rank in self._ranks:
            self._ranks[server_rank].peer.send(order)

    def _grant(self, event: Grant) -> None:
        asked = self._acquires.pop((event.instance, event.adapter_id), None)
        if asked is not None:
            asked.set_result((event.slot, self._first_generation + event.generation))

    def _refuse(self, instance: str, adapter_id: str, reason: str) -> None:
        asked = self._acquires.pop((instance, adapter_id), None)
        if asked is not None:
            asked.set_exception(LoraServerError(reason))

    async def fail_load(self, visitor: Visitor, adapter_id: str, generation: int, reason: str) -> None:
        if self._ranks.get(visitor.server_rank) is visitor:
            self.hear_failure(visitor.server_rank, adapter_id, generation, reason)

    def hear_failure(self, server_rank: int, adapter_id: str, generation: int, reason: str) -> None:
        """Record a failed load, unless of an earlier generation."""
        if self._table.is_resident(adapter_id, generation - self._first_generation):
            self._fail(adapter_id, f"rank {server_rank} of the LoRA Server can't load it: {reason}")

    def _fail(self, adapter_id: str, reason: str) -> None:
        logger.error("adapter %s is given up: %s", adapter_id, reason)
        self._lost.pop(adapter_id)
        self._known_shares.pop(adapter_id, None)
        concerned = self._table.fail(adapter_id, time.monotonic()) | self._registered_by.pop(
            adapter_id, set()
        )
        self._dispatch()
        for instance in sorted(concerned):
            self._refuse(instance, adapter_id, reason)
            if instance in self._instances:
                self._instances[instance].peer.send(AdapterFailed(adapter_id, reason))

    async def need(self, visitor: Visitor, adapter_id: str) -> None:
        self.supply(visitor.server_rank, adapter_id)

    def supply(self, server_rank: int, adapter_id: str) -> None:
        """Send content to a rank, at once or on arrival."""
        try:
            if adapter_id not in self._store:
                self._lost.await_content(server_rank, adapter_id)
            elif server_rank == LEADER:
                self._own.regained(adapter_id)
            elif server_rank in self._ranks:
                peer, number = self._ranks[server_rank].peer, num_blocks(self._store, adapter_id)
                peer.send(Content(adapter_id, number))
                send_blocks(peer, self._store, adapter_id, number)
        except OSError as error:
            logger.warning("the content of adapter %s can't be read: %s", adapter_id, error)
            self._lost.await_content(server_rank, adapter_id)

    def _call_for_content(self, adapter_id: str, failed: set[str]) -> str | None:
        for instance in sorted(self._registered_by.get(adapter_id, set()) - failed):
            if instance in self._instances:
                self._instances[instance].peer.send(Need(adapter_id))
                return instance
        return None

    async def fail_content(self, visitor: Visitor, adapter_id: str, reason: str) -> None:
        self._lost.fail(visitor.instance, adapter_id, reason)
