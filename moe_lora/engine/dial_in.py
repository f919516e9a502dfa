"""An engine's side of `door`: it dials the front end, serves it, and dials again when the connection ends."""

from __future__ import annotations

import logging
import pickle
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from moe_lora.core.problems import LastProblem
from moe_lora.dist.lora_server.control import hang_up

from .inbox import Inbox
from .messages import Abort, Command, Dead, Event, Generate, Outputs, Rejected, Stop
from .wire import Hello, dial

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class FrontEndLink:
    """Carries commands from the front end at host:port to an engine loop, and its events back.

    What the loop emits while there is no front end is dropped: nobody waits for it.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self._port, self._key = host, port, key.encode()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._running: set[str] = set()
        self._stopping = threading.Event()
        self.failed = False
        """Whether the engine itself ended the service."""

    def emit(self, event: Event) -> None:
        """Send an event; called from the loop's threads."""
        if isinstance(event, Outputs):
            self._running.difference_update(one.request_id for one in event.outputs if one.finish_reason)
        elif isinstance(event, Rejected):
            self._running.discard(event.request_id)
        with self._lock:
            if self._connection is not None:
                try:
                    self._connection.send(event)
                except OSError:
                    hang_up(self._connection)
        if isinstance(event, Dead):
            self.failed = True
            self.stop()

    def stop(self) -> None:
        """End `run`, from any thread or a signal handler's."""
        self._stopping.set()
        connection = self._connection
        if connection is not None:
            hang_up(connection)

    def run(self, hello: Hello, inbox: Inbox) -> None:
        """Serve until `stop`; the loop is told to stop then."""
        said = LastProblem()
        while not self._stopping.is_set():
            try:
                connection, welcome = dial(self._host, self._port, self._key, hello)
            except (OSError, EOFError, AuthenticationError) as error:
                problem = f"no front end answers: {error!r}"
                if isinstance(error, AuthenticationError | EOFError):
                    problem = f"the front end turned this instance away ({error!r}); is the key the same?"
            else:
                problem = welcome.refusal or ""
                if not problem:
                    logger.info("joined the front end at %s:%d", self._host, self._port)
                    self._serve(connection, inbox)
                connection.close()
            if not problem:
                said.over()
            elif said.is_new(problem):
                logger.warning("%s:%d: %s; trying on", self._host, self._port, problem)
            self._stopping.wait(_RETRY_S)
        inbox.put(Stop())

    def _serve(self, connection: Connection, inbox: Inbox) -> None:
        """Take commands until the connection ends, then end what it had asked for."""
        with self._lock:
            self._connection = connection
        try:
            while not self._stopping.is_set():
                command: Command = connection.recv()
                if isinstance(command, Generate):
                    self._running.add(command.request.request_id)
                inbox.put(command)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            if not self._stopping.is_set():
                logger.warning("lost the front end: %r; its requests end here", error)
        with self._lock:
            self._connection = None
        for request_id in list(self._running):
            inbox.put(Abort(request_id))
        # The next front end may send a request of the same id; what the loop says of this one comes before.
        drained = threading.Event()
        inbox.put(drained.set)
        while not (drained.wait(_RETRY_S) or self._stopping.is_set()):
            continue
