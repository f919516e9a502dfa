"""A server rank's standing connection to the leader, and to the first rank of its stage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import AdapterError, LastProblem, LoraServerError
from moe_lora.dist.lora_server.protocol.content import receive_content
from moe_lora.dist.lora_server.protocol.control import SILENCE_S, ControlConnection, dial
from moe_lora.dist.lora_server.protocol.control_messages import (
    Content,
    EvictOrder,
    FindHello,
    FindWelcome,
    LoadOrder,
    Need,
    Order,
    RankHello,
    RankWelcome,
    ResizeOrder,
    TurnsHello,
)
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.keys import Keys

from .server_store import ServerAdapterStore

# Carries out on one rank what the leader decided: loads and evictions, fetching content that is not here.


logger = logging.getLogger(__name__)


class Orders:
    """The leader's messages, turned into work of the server_store."""

    def __init__(self, server_store: ServerAdapterStore, store: HostStore) -> None:
        self._server_store = server_store
        self._store = store
        self._awaiting: dict[str, list[LoadOrder]] = {}

    def start_over(self, first_generation: int) -> None:
        """A leader that knows nothing of what is here: all slots are empty from now on."""
        self._awaiting.clear()
        self._server_store.start_over(first_generation)
        self._server_store.set_led(True)

    def lose_leader(self) -> None:
        """Nothing is loaded until a leader is back; what is here goes on being served."""
        self._server_store.set_led(False)

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


_RETRY_S = 0.3


class Membership(threading.Thread):
    """Keeps this rank joined: hears what to load; starts over when the leader is a new one.

    welcome: what the leader said first; the rank's memory is laid out by it, and slots are added by later
    orders.  on_change: called when a new leader wants another layout, which takes a new process.
    """

    def __init__(
        self, address: str, keys: Keys | None, hello: RankHello, on_change: Callable[[], None]
    ) -> None:
        super().__init__(name="membership", daemon=True)
        self._address = address
        self._keys = keys
        self._hello = hello
        self._on_change = on_change
        self._orders: Orders | None = None
        self._stopping = threading.Event()
        self._connection, self.welcome = self._join(timeout_s=120.0)

    def begin(self, orders: Orders) -> None:
        """Carry out the leader's orders from now on."""
        self._orders = orders
        self.start()

    def stop(self) -> None:
        self._stopping.set()
        self._connection.close()

    def _join(self, timeout_s: float) -> tuple[ControlConnection, RankWelcome]:
        return dial(self._address, self._keys, self._hello, timeout_s)

    def run(self) -> None:
        assert self._orders is not None
        problem = LastProblem()
        first_generation = self.welcome.first_generation
        while True:
            try:
                self._obey(self._connection, first_generation)
            except (EOFError, OSError) as error:
                if not self._stopping.is_set():
                    logger.warning("lost the leader of the LoRA Server: %r", error)
            except Exception:
                logger.exception("an order of the LoRA Server's leader can't be carried out; joining it anew")
                self._stopping.wait(_RETRY_S)
            self._orders.lose_leader()
            self._connection.close()
            while not self._stopping.is_set():
                try:
                    self._connection, welcome = self._join(timeout_s=1.0)
                    break
                except Exception as error:  # whatever it is, the leader may be well again later
                    if problem.is_new(str(error)):
                        logger.warning("%s", error)
                    self._stopping.wait(_RETRY_S)
            if self._stopping.is_set():
                self._connection.close()
                return
            first_generation = welcome.first_generation
            if _layout(welcome) != _layout(self.welcome):
                logger.error("the new leader of the LoRA Server has other memory; this rank starts over")
                self._on_change()
                return

    def _obey(self, connection: ControlConnection, first_generation: int) -> None:
        """Carry out orders until the connection ends: raises EOFError or OSError."""
        assert self._orders is not None
        self._orders.start_over(first_generation)
        while True:
            message = connection.receive(1.0, SILENCE_S)
            if message is not None:
                self._orders.hear(connection, message)


def _layout(welcome: RankWelcome) -> tuple[object, ...]:
    """What a rank that is running can't change."""
    return welcome.num_pages, welcome.page_bytes


def find_rank(
    address: str, keys: Keys | None, agreed: Mapping[str, Any], server_rank: int, timeout_s: float = 1.0
) -> str:
    """Where the leader at `address` says that a server rank listens.

    Raises LoraServerError if the leader does not answer, or the rank has not joined, within timeout_s.
    """
    hello = FindHello(name="find", server_rank=server_rank, agreed=agreed)
    deadline_s = time.monotonic() + timeout_s
    while True:
        connection, answer = dial(address, keys, hello, timeout_s)
        connection.close()
        assert isinstance(answer, FindWelcome)
        if answer.address is not None:
            return answer.address
        if time.monotonic() > deadline_s:
            raise LoraServerError(f"rank {server_rank} of the LoRA Server has not joined; start it")
        time.sleep(0.1)


class TurnsListener(threading.Thread):
    """Lets the first rank of the stage announce whose turn it is (see `data_loop.DataLoop`)."""

    def __init__(
        self, find: Callable[[], str], keys: Keys | None, hello: TurnsHello, seen: Callable[[], int]
    ) -> None:
        super().__init__(name="turns", daemon=True)
        self._find = find
        self._keys = keys
        self._hello = hello
        self._seen = seen
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = dial(self._find(), self._keys, replace(self._hello, seen=self._seen()), 1.0)
            except LoraServerError as error:
                logger.debug("no stage leader: %s", error)
                self._stopping.wait(_RETRY_S)
                continue
            try:
                while not self._stopping.is_set():
                    connection.receive(0.5, SILENCE_S)
            except (EOFError, OSError) as error:
                logger.debug("the stage leader is gone: %r", error)
            except Exception:
                logger.exception("what the stage leader sent can't be read; connecting anew")
                self._stopping.wait(_RETRY_S)
            connection.close()
