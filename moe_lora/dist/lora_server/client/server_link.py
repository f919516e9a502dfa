"""A client rank's standing connection to one server rank, made again whenever it was lost."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable

from msgspec.structs import replace

from moe_lora.core.errors import LastProblem, LoraServerError, PeerUnreachableError
from moe_lora.dist.lora_server.protocol.control import SILENCE_S, ControlConnection, dial
from moe_lora.dist.lora_server.protocol.control_messages import DataHello
from moe_lora.dist.lora_server.protocol.reach import attended
from moe_lora.dist.lora_server.protocol.session import ClientSession, FrameLayout
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window

logger = logging.getLogger(__name__)

_RETRY_S = 0.3


class ServerLink(threading.Thread):
    """Keeps a `ClientSession` with one server rank.

    find: the server rank's control address, looked for up to a timeout; raises LoraServerError.
    hello: what to say on connecting (see `control.dial`).  `session` is None while there is none: deltas are
    then computed here.
    """

    def __init__(
        self,
        find: Callable[[float], str],
        keys: Keys | None,
        hello: DataHello,
        transport: Transport,
        layout: FrameLayout,
        *,
        depth: int,
        answer_timeout_s: float,
    ) -> None:
        super().__init__(name=f"link-{hello.name}-{hello.server_rank}", daemon=True)
        self._find = find
        self._keys = keys
        self._hello = hello
        self._transport = transport
        self._layout = layout
        self._depth = depth
        self._answer_timeout_s = answer_timeout_s
        self._attempts = itertools.count()
        self._stopping = threading.Event()
        self._buffers: tuple[RemoteWindow, Window] | None = None
        self.session: ClientSession | None = None

    def connect(self, timeout_s: float) -> ControlConnection:
        """Make the session.  Raises LoraServerError."""
        address = self._find(timeout_s)
        label = f"answers-{self._hello.server_rank}-{next(self._attempts)}"
        answers = self._transport.alloc(label, self._depth * self._layout.answer_bytes, 1)
        try:
            hello = replace(self._hello, answers=answers.descriptor())
            with attended(self._transport, answers):
                connection, welcome = dial(address, self._keys, hello, timeout_s)
            try:
                requests = self._transport.attach(welcome.requests)
            except (PeerUnreachableError, ValueError) as error:
                connection.close()
                raise LoraServerError(f"the LoRA Server's buffers can't be reached: {error}") from error
        except BaseException:
            answers.free()
            raise
        self.session = ClientSession(
            self._transport, requests, answers, self._layout, self._depth, self._answer_timeout_s
        )
        self._buffers = (requests, answers)
        return connection

    def begin(self, connection: ControlConnection) -> None:
        """Watch over the session from now on."""
        self._connection: ControlConnection | None = connection
        self.start()

    def run(self) -> None:
        problem = LastProblem()
        while True:
            if self._connection is not None:
                self._watch(self._connection)
                self._stopping.wait(_RETRY_S)  # the engine's thread may still be waiting on the buffers
                self._let_buffers_go()
                self._connection = None
            if self._stopping.is_set():
                return
            try:
                self._connection = self.connect(timeout_s=1.0)
                logger.info("%s is linked to the LoRA Server again", self.name)
                problem.over()
            except Exception as error:  # whatever it is, deltas are computed here meanwhile
                if problem.is_new(str(error)):
                    logger.warning("%s: %s; deltas are computed here", self.name, error)
                self._stopping.wait(_RETRY_S)

    def _watch(self, connection: ControlConnection) -> None:
        try:
            while not self._stopping.is_set():
                connection.receive(0.2, SILENCE_S)
                if self.session is None or self.session.broken:
                    break
        except (EOFError, OSError) as error:
            if not self._stopping.is_set():
                logger.warning("lost the LoRA Server at %s: %r", connection.peer, error)
        except Exception:
            logger.exception("what the LoRA Server at %s sent can't be read", connection.peer)
        session, self.session = self.session, None
        if session is not None:
            session.break_off()
        connection.close()

    def _let_buffers_go(self) -> None:
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            requests, answers = buffers
            self._transport.detach(requests)
            answers.free()

    def stop(self) -> None:
        """End the link; `join` waits for it."""
        self._stopping.set()
        if self.session is not None:
            self.session.break_off()
