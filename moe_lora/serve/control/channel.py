"""One connection between the controller and a front end."""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any

from moe_lora.dist.lora_server.control import hang_up
from moe_lora.engine.wire import time_limit

from .messages import Beat

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENCE_S = 5.0
"""A side that hears nothing for so long takes the other for gone."""


class Channel:
    """Messages over a connection whose handshake is done; `send` from any thread, `receive` from one.

    A thread of its own writes, and beats while there is nothing to write, so that nobody waits for the peer.
    """

    def __init__(self, connection: Connection) -> None:
        # Its descriptor is closed with the last reference, never under a thread that reads or writes.
        self._connection = connection
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="control-write", daemon=True).start()

    def send(self, message: Any) -> None:
        """To a peer that is gone nothing is sent.  Raises what pickling it raises."""
        self._outbox.put(pickle.dumps(message))

    def receive(self) -> Any:
        """The next message that is no beat.  Raises EOFError or OSError when the peer is gone or silent."""
        with time_limit(self._connection, SILENCE_S):
            while isinstance(message := self._connection.recv(), Beat):
                continue
        return message

    def close(self, *, at_once: bool = False) -> None:
        """End the connection, after what was sent or at once; a `receive` of another thread ends with it."""
        self._outbox.put(None)
        if at_once:
            hang_up(self._connection)

    def _write(self) -> None:
        beat = pickle.dumps(Beat())
        try:
            while (content := self._next(beat)) is not None:
                self._connection.send_bytes(content)
        except OSError as error:
            logger.debug("can't send: %r", error)
        finally:
            hang_up(self._connection)

    def _next(self, beat: bytes) -> bytes | None:
        try:
            return self._outbox.get(timeout=BEAT_S)
        except queue.Empty:
            return beat
