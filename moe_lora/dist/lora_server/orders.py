"""Carries out on one rank what the leader decided: loads and evictions, fetching content that is not here."""

from __future__ import annotations

import logging

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import AdapterError

from .content import receive_content
from .control import ControlConnection, Message
from .shelf import Shelf

logger = logging.getLogger(__name__)


class Orders:
    """The leader's messages, turned into work of the shelf."""

    def __init__(self, shelf: Shelf, store: HostStore) -> None:
        self._shelf = shelf
        self._store = store
        self._awaiting: dict[str, list[Message]] = {}

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
        adapter_id = message.get("adapter_id", "")
        if message["kind"] == "content":
            receive_content(connection, self._store, message)
            for order in self._awaiting.pop(adapter_id, []):
                self.carry_out(order)
        elif message["kind"] == "load" and adapter_id not in self._store:
            self._awaiting.setdefault(adapter_id, []).append(message)
            connection.send("need", adapter_id=adapter_id)
        else:
            self.carry_out(message)

    def carry_out(self, order: Message) -> None:
        """Begin a load whose content is in the store, evict, or make slots.

        A load that fails counts as evicted: requests for it are refused and don't wait.
        """
        if order["kind"] == "resize":
            self._shelf.grow(order["num_slots"])
            return
        slot, generation = order["slot"], order["generation"]
        if order["kind"] == "evict":
            self._shelf.evict(slot, generation)
            return
        adapter_id = order["adapter_id"]
        try:
            packed = self._store.get(adapter_id, adapter_id)
        except AdapterError:
            logger.exception("adapter %s can't be loaded", adapter_id)
            self._shelf.evict(slot, generation)
            return
        runs = {layer: (first, num_pages) for layer, first, num_pages in order["runs"]}
        self._shelf.load(slot, generation, packed, runs)
