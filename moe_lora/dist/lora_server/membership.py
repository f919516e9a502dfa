"""A server rank's standing connection to the leader, and to the first rank of its stage."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable

from moe_lora.core.errors import LoraServerError

from .control import ControlConnection, Message, dial
from .orders import Orders

logger = logging.getLogger(__name__)

SILENCE_S = 3.0
_RETRY_S = 0.3


class Membership(threading.Thread):
    """Keeps this rank joined: hears what to load; starts over when the leader is a new one."""

    def __init__(self, address: str, key: bytes, hello: Message) -> None:
        super().__init__(name="membership", daemon=True)
        self._address = address
        self._key = key
        self._hello = hello
        self._orders: Orders | None = None
        self._stopping = threading.Event()
        self._connection, self.welcome = self._join(timeout_s=120.0)

    def begin(self, orders: Orders) -> None:
        """Carry out the leader's orders from now on."""
        self._orders = orders
        self.start()

    def stop(self) -> None:
        self._stopping.set()

    def _join(self, timeout_s: float) -> tuple[ControlConnection, Message]:
        return dial(self._address, self._key, self._hello, timeout_s)

    def run(self) -> None:
        assert self._orders is not None
        connection: ControlConnection | None = self._connection
        welcome = self.welcome
        while not self._stopping.is_set():
            try:
                if connection is None:
                    connection, welcome = self._join(timeout_s=1.0)
                self._orders.start_over(welcome["first_generation"])
                while not self._stopping.is_set():
                    message = connection.receive(1.0, SILENCE_S)
                    if message is not None:
                        self._orders.hear(connection, message)
            except LoraServerError:
                self._stopping.wait(_RETRY_S)
            except (EOFError, OSError) as error:
                logger.warning("lost the leader of the LoRA Server: %r", error)
            if connection is not None:
                connection.close()
                connection = None


def find_rank(address: str, key: bytes, agreed: Message, server_rank: int, timeout_s: float = 1.0) -> str:
    """Where the leader at `address` says that a server rank listens.

    Raises LoraServerError if the leader does not answer, or the rank has not joined, within timeout_s.
    """
    hello = {"role": "find", "name": "find", "server_rank": server_rank, "agreed": agreed}
    deadline_s = time.monotonic() + timeout_s
    while True:
        connection, answer = dial(address, key, hello, timeout_s)
        connection.close()
        found: str | None = answer["address"]
        if found is not None:
            return found
        if time.monotonic() > deadline_s:
            raise LoraServerError(f"rank {server_rank} of the LoRA Server has not joined; start it")
        time.sleep(0.1)


class TurnsListener(threading.Thread):
    """Lets the first rank of the stage announce whose turn it is (see `serving.DataLoop`)."""

    def __init__(
        self, find: Callable[[], str], key: bytes, hello: Message, descriptor: bytes, seen: Callable[[], int]
    ) -> None:
        super().__init__(name="turns", daemon=True)
        self._find = find
        self._key = key
        self._hello = hello | {"turns": base64.b64encode(descriptor).decode()}
        self._seen = seen
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = dial(self._find(), self._key, self._hello | {"seen": self._seen()}, 1.0)
                while not self._stopping.is_set():
                    connection.receive(1.0, SILENCE_S)
            except (LoraServerError, EOFError, OSError) as error:
                logger.debug("no stage leader: %r", error)
            self._stopping.wait(_RETRY_S)
