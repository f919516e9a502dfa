"""One connection between the controller and a front end."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from moe_lora.engine.outbox import Outbox
from moe_lora.engine.wire import time_limit

from .messages import Beat

BEAT_S = 1.0
"""Each side's event loop says so often that it goes on."""
SILENCE_S = 5.0
"""A side that hears nothing for so long takes the other for gone."""
_LAST_WORDS_S = 1.0


class Channel:
    """Messages over a connection whose handshake is done; `send` from any thread, `receive` from one.

    Nobody waits for the peer to read what is sent.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox = Outbox(connection)

    def send(self, message: Any) -> None:
        """To a peer that is gone nothing is sent."""
        self._outbox.put(message)

    def receive(self) -> Any:
        """The next message that is no beat.  Raises EOFError or OSError when the peer is gone or silent."""
        try:
            with time_limit(self._connection, SILENCE_S):
                while isinstance(message := self._connection.recv(), Beat):
                    continue
        except BlockingIOError as error:
            raise TimeoutError(f"nothing was heard for {SILENCE_S:g} s") from error
        return message

    def close(self, *, at_once: bool = False) -> None:
        """End the connection, after what was sent or at once; a `receive` of another thread ends with it."""
        self._outbox.end(0.0 if at_once else _LAST_WORDS_S)
