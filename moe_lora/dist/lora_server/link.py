"""A client rank's standing connection to one server rank, made again whenever it was lost."""

from __future__ import annotations

import base64
import itertools
import logging
import threading
from collections.abc import Callable

from moe_lora.core.errors import LoraServerError, PeerUnreachableError
from moe_lora.dist.transport.contract import Transport

from .control import ControlConnection, Message, dial
from .frames import FrameLayout
from .session import ClientSession

logger = logging.getLogger(__name__)

SILENCE_S = 3.0
_RETRY_S = 0.3


class ServerLink(threading.Thread):
    """Keeps a `ClientSession` with one server rank.

    find: the server rank's control address now; raises LoraServerError while it can't be known.
    hello: what to say on connecting (see `control.dial`).  `session` is None while there is none: deltas are
    then computed here.
    """

    def __init__(
        self,
        find: Callable[[], str],
        key: bytes,
        hello: Message,
        transport: Transport,
        layout: FrameLayout,
        *,
        depth: int,
        answer_timeout_s: float,
    ) -> None:
        super().__init__(name=f"link-{hello['name']}", daemon=True)
        self._find = find
        self._key = key
        self._hello = hello
        self._transport = transport
        self._layout = layout
        self._depth = depth
        self._answer_timeout_s = answer_timeout_s
        self._attempts = itertools.count()
        self._stop = threading.Event()
        self.session: ClientSession | None = None
        self.num_sessions = 0

    def connect(self, timeout_s: float) -> ControlConnection:
        """Make the session.  Raises LoraServerError."""
        answers = self._transport.alloc(
            f"{self._hello['name']}/answers-{next(self._attempts)}",
            self._depth * self._layout.answer_bytes,
            1,
        )
        try:
            hello = self._hello | {
                "answers": base64.b64encode(answers.descriptor()).decode(),
                "max_rows": self._layout.max_rows,
                "depth": self._depth,
            }
            connection, welcome = dial(self._find(), self._key, hello, timeout_s)
            try:
                requests = self._transport.attach(base64.b64decode(welcome["requests"]))
            except (PeerUnreachableError, ValueError) as error:
                connection.close()
                raise LoraServerError(f"the LoRA Server's buffers can't be reached: {error}") from error
        except BaseException:
            answers.free()
            raise
        self.session = ClientSession(
            self._transport, requests, answers, self._layout, self._depth, self._answer_timeout_s
        )
        self.num_sessions += 1
        return connection

    def begin(self, connection: ControlConnection) -> None:
        """Watch over the session from now on."""
        self._connection: ControlConnection | None = connection
        self.start()

    def run(self) -> None:
        while not self._stop.is_set():
            if self._connection is not None:
                self._watch(self._connection)
            try:
                self._connection = self.connect(timeout_s=1.0)
            except LoraServerError as error:
                logger.debug("still no link to %s: %s", self._hello["name"], error)
                self._connection = None
                self._stop.wait(_RETRY_S)

    def _watch(self, connection: ControlConnection) -> None:
        try:
            while not self._stop.is_set():
                connection.receive(1.0, SILENCE_S)
                if self.session is None or self.session.broken:
                    break
        except (EOFError, OSError) as error:
            if not self._stop.is_set():
                logger.warning("lost the LoRA Server at %s: %r", connection.peer, error)
        session, self.session = self.session, None
        if session is not None:
            session.break_off()
        connection.close()

    def stop(self) -> None:
        self._stop.set()
        if self.session is not None:
            self.session.break_off()
        self.join(timeout=5.0)
