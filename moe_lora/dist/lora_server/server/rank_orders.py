"""Carries out on one rank what the leader decided: loads and evictions, once the content is here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import AdapterError
from moe_lora.dist.lora_server.protocol.control_messages import EvictOrder, LoadOrder, Order, ResizeOrder

from .server_store import ServerAdapterStore

logger = logging.getLogger(__name__)


class Orders:
    """The leader's orders, turned into work of the server store: in threads, since it waits for its loader.

    need: asks for content that is not in the store; `regained` is called when it is.
    """

    def __init__(
        self, server_store: ServerAdapterStore, store: HostStore, need: Callable[[str], None]
    ) -> None:
        self._server_store = server_store
        self._store = store
        self._need = need
        self._awaiting: dict[str, list[LoadOrder]] = {}

    def start_over(self, first_generation: int) -> None:
        """A leader that knows nothing of what is here: all slots are empty from now on."""
        self._awaiting.clear()
        self._server_store.start_over(first_generation)
        self._server_store.set_led(True)

    async def hear(self, order: Order) -> None:
        """Obey, or keep a load until its content is here."""
        if isinstance(order, LoadOrder) and order.adapter_id not in self._store:
            self._awaiting.setdefault(order.adapter_id, []).append(order)
            self._need(order.adapter_id)
        else:
            await asyncio.to_thread(self.carry_out, order)

    async def regained(self, adapter_id: str) -> None:
        """Begin the loads that waited for this content."""
        for order in self._awaiting.pop(adapter_id, []):
            await asyncio.to_thread(self.carry_out, order)

    def carry_out(self, order: Order) -> None:
        """Begin a load whose content is in the store, evict, or make slots.

        A load that fails counts as evicted: requests for it are refused and don't wait.
        """
        if isinstance(order, ResizeOrder):
            self._server_store.grow(order.num_slots)
            return
        if isinstance(order, EvictOrder):
            self._server_store.evict(order.slot, order.generation)
            return
        try:
            packed = self._store.get(order.adapter_id, order.adapter_id)
        except AdapterError:
            logger.exception("adapter %s can't be loaded", order.adapter_id)
            self._server_store.evict(order.slot, order.generation)
            return
        self._server_store.load(order.slot, order.generation, packed, order.runs)
