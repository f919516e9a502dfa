"""Messages on their way to another process."""

from __future__ import annotations

import logging
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any

from moe_lora.dist.lora_server.control import hang_up

logger = logging.getLogger(__name__)


class Outbox:
    """Sends in order, from a thread of its own: a peer that does not read holds up nobody here.

    A connection that fails is ended, so that who reads from it notices.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Anything but None."""
        self._messages.put(message)

    def end(self, patience_s: float = 0.0) -> None:
        """End the connection, once what was put before is sent or patience_s have passed; wait for that."""
        self._messages.put(None)
        self._thread.join(patience_s)
        hang_up(self._connection)
        self._thread.join()

    def _send(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._connection.send(message)
            except OSError as error:
                logger.debug("a connection ended under what was sent: %r", error)
                hang_up(self._connection)
                return
            except Exception:  # a message that can't be pickled: its sender would wait for ever
                logger.exception("%s can't be sent", type(message).__name__)
                hang_up(self._connection)
                return
