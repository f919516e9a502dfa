"""Carries out on one rank what the leader decided: loads and evictions, fetching content that is not here."""

from __future__ import annotations

import logging

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import AdapterError
from moe_lora.dist.net.codec import Message

from moe_lora.dist.lora_server.protocol.content import receive_content
from moe_lora.dist.lora_server.protocol.control import ControlConnection
from moe_lora.dist.lora_server.protocol.control_messages import Content, EvictOrder, LoadOrder, Need, Order, ResizeOrder
from .server_store import Shelf

logger = logging.getLogger(__name__)


class Orders:
    """The leader's messages, turned into work of the shelf."""

    def __init__(self, shelf: Shelf, store: HostStore) -> None:
        self._shelf = shelf
        self._store = store
        self._awaiting: dict[str, list[LoadOrder]] = {}

    def start_over(self, first_generation: int) -> None:
        """A leader that knows nothing of what is here: all slots are empty from now on."""
        self._awaiting.clear()
        self._shelf.start_over(first_generation)
        self._shelf.set_led(True)

    def lose_leader(self) -> None:
        """Nothing is loaded until a leader is back; what is here goes on being served."""
        self._shelf.set_led(False)

    def hear(self, connection: ControlConnection, message: Message) -> None:
        """One message of the leader to another rank."""
        if isinstance(message, Content):
            receive_content(connection, self._store, message)
            for order in self._awaiting.pop(message.adapter_id, []):
                self.carry_out(order)
        elif isinstance(message, LoadOrder) and message.adapter_id not in self._store:
            self._awaiting.setdefault(message.adapter_id, []).append(message)
            connection.send(Need(message.adapter_id))
        else:
            assert isinstance(message, Order)
            self.carry_out(message)

    def carry_out(self, order: Order) -> None:
        """Begin a load whose content is in the store, evict, or make slots.

        A load that fails counts as evicted: requests for it are refused and don't wait.
        """
        if isinstance(order, ResizeOrder):
            self._shelf.grow(order.num_slots)
            return
        if isinstance(order, EvictOrder):
            self._shelf.evict(order.slot, order.generation)
            return
        try:
            packed = self._store.get(order.adapter_id, order.adapter_id)
        except AdapterError:
            logger.exception("adapter %s can't be loaded", order.adapter_id)
            self._shelf.evict(order.slot, order.generation)
            return
        self._shelf.load(order.slot, order.generation, packed, order.runs)
