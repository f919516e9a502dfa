# SPDX-License-Identifier: Apache-2.0
"""Carries out the leader's orders on one server rank."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import AdapterError
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.peer import Peer

from .content import receive_blocks
from .messages import Content, DropOrder, EvictOrder, LoadOrder, Order, ResizeOrder, RestartOrder
from .server_store import NUM_TRIES, PASSING, PAUSE_S, ServerAdapterStore

logger = logging.getLogger(__name__)


class Orders:
    """Carries out orders in threads, since the store waits for its loader.  Belongs to one event loop.

    need: requests missing content; `regained` or `refused` follows.  Loads retry after transient errors, and
    then end in `ServerAdapterStore.give_up`.  `start_over` cancels earlier orders.
    """

    def __init__(
        self, server_store: ServerAdapterStore, store: HostStore, need: Callable[[str], None]
    ) -> None:
        self._server_store = server_store
        self._store = store
        store.used = lambda: [one.content_hash for _, one in [*server_store.contents.values()]]
        self._need = need
        self._awaiting: dict[str, list[tuple[LoadOrder, int]]] = {}
        """Loads that lack content, with their epoch."""
        self._num_failures: Counter[tuple[str, int]] = Counter()
        self._retries: set[asyncio.Task[None]] = set()

    def start_over(self, first_generation: int) -> None:
        """Empty all slots for a new leader."""
        self._awaiting.clear()
        self._num_failures.clear()
        self._server_store.start_over(first_generation)
        self._server_store.set_led(True)

    async def hear(self, order: Order) -> None:
        """Carry out an order; a load waits for its content."""
        epoch = self._server_store.epoch
        if isinstance(order, LoadOrder):
            await self._load(order, epoch)
            return
        if isinstance(order, EvictOrder):
            self._forget(order)
        try:
            await asyncio.to_thread(self.carry_out, order, epoch)
        except Exception:
            logger.exception("an order of the leader can't be carried out: %s", order)

    async def hear_from(self, restart: Callable[[], None], leader: Peer, message: Message) -> None:
        """Carry out a leader's message.  restart: ends this rank."""
        if isinstance(message, Content):
            await self._receive(leader, message)
        elif isinstance(message, RestartOrder):
            restart()
        else:
            assert isinstance(message, Order)
            await self.hear(message)

    async def _receive(self, leader: Peer, content: Content) -> None:
        try:
            await receive_blocks(leader, self._store, content.adapter_id, content.num_blocks)
        except ConnectionError:
            raise
        except Exception as error:
            await self.refused(content.adapter_id, error)
        else:
            await self.regained(content.adapter_id)

    async def regained(self, adapter_id: str) -> None:
        """Start the loads deferred for this content."""
        for awaiting in self._awaiting.pop(adapter_id, []):
            await self._load(*awaiting)

    async def refused(self, adapter_id: str, error: Exception) -> None:
        """The content can't be kept."""
        for awaiting in self._awaiting.pop(adapter_id, []):
            await self._fail(*awaiting, error)

    def carry_out(self, order: Order, epoch: int) -> None:
        """Start a load of stored content, evict, add slots, or delete content.

        epoch: of the order's arrival.  Raises AdapterError for damaged content, and the store's errors.
        """
        if isinstance(order, ResizeOrder):
            self._server_store.grow(order.num_slots)
        elif isinstance(order, EvictOrder):
            self._server_store.evict(order.slot, order.generation, epoch)
        elif isinstance(order, DropOrder):
            self._store.remove(order.adapter_id)
        else:
            packed = self._store.get(order.adapter_id, order.adapter_id)
            self._server_store.load(order.slot, order.generation, packed, order.runs, epoch)

    async def _load(self, order: LoadOrder, epoch: int) -> None:
        adapter_id = order.adapter_id
        try:
            if adapter_id in self._store:
                await asyncio.to_thread(self.carry_out, order, epoch)
                self._num_failures.pop((adapter_id, order.generation), None)
                return
            await asyncio.to_thread(self._server_store.await_content, order.slot, order.generation, epoch)
        except Exception as error:
            await self._fail(order, epoch, error)
            return
        self._awaiting.setdefault(adapter_id, []).append((order, epoch))
        self._need(adapter_id)

    async def _fail(self, order: LoadOrder, epoch: int, error: Exception) -> None:
        if epoch != self._server_store.epoch:
            return
        adapter_id, key = order.adapter_id, (order.adapter_id, order.generation)
        cause = error.__cause__ if isinstance(error, AdapterError) else error
        is_damaged = isinstance(error, AdapterError) and not isinstance(cause, PASSING)
        if is_damaged:
            await asyncio.to_thread(self._store.remove, adapter_id)
        self._num_failures[key] += 1
        if (is_damaged or isinstance(cause, PASSING)) and self._num_failures[key] < NUM_TRIES:
            logger.warning("adapter %s is tried again: %s", adapter_id, error)
            retry = asyncio.create_task(self._load_later(order, epoch))
            self._retries.add(retry)  # an event loop does not keep its tasks
            retry.add_done_callback(self._retries.discard)
            return
        del self._num_failures[key]
        logger.error("adapter %s can't be loaded", adapter_id, exc_info=error)
        give_up = self._server_store.give_up
        await asyncio.to_thread(give_up, adapter_id, order.slot, order.generation, error, epoch)

    async def _load_later(self, order: LoadOrder, epoch: int) -> None:
        await asyncio.sleep(PAUSE_S)
        if epoch == self._server_store.epoch and not self._server_store.has_left(
            order.slot, order.generation
        ):
            await self._load(order, epoch)

    def _forget(self, order: EvictOrder) -> None:
        for adapter_id, waiting in list(self._awaiting.items()):
            left = order.slot, order.generation
            kept = [one for one in waiting if (one[0].slot, one[0].generation) != left]
            if kept:
                self._awaiting[adapter_id] = kept
            else:
                del self._awaiting[adapter_id]
            for one in waiting:
                if one not in kept:
                    self._num_failures.pop((adapter_id, one[0].generation), None)
