"""An engine's side of `door`: it dials every front end, serves them all, and dials again what it lost."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from moe_lora.core.problems import LastProblem

from .heartbeat import Pulse, beat_until
from .inbox import Inbox
from .lines import Lines
from .messages import Command, Dead, Event, Stop
from .outbox import Outbox
from .wire import Hello, Welcome, dial

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_LAST_WORDS_S = 1.0


class FrontEndLinks:
    """A link to each door (name -> host, port), through which an engine loop is asked and answers.

    What the loop emits for a door that is not there is dropped: nobody waits for it.
    """

    def __init__(
        self, doors: Mapping[str, tuple[str, int]], key: str, inbox: Inbox, max_model_len: int
    ) -> None:
        self._inbox = inbox
        self._lines = Lines(inbox, max_model_len)
        self._stopping = threading.Event()
        self._links = [
            FrontEndLink(name, address, key.encode(), self._lines, self._stopping)
            for name, address in doors.items()
        ]
        self.failed = False
        """Whether the engine itself ended the service."""

    def emit(self, event: Event) -> None:
        """Send an event to those it is for; called from the loop's threads."""
        self._lines.emit(event)
        if isinstance(event, Dead):
            self.failed = True
            self.stop()

    def stop(self) -> None:
        """End `run`, from any thread or a signal handler's."""
        self._stopping.set()
        for link in self._links:
            link.end()

    def run(self, hello: Hello, pulse: Pulse) -> None:
        """Serve until `stop`; the loop is told to stop then.  pulse: of the loop."""
        for link in self._links:
            threading.Thread(
                target=link.run, args=(hello, pulse), name=f"link-{link.name}", daemon=True
            ).start()
        self._stopping.wait()
        self._inbox.put(Stop())


class FrontEndLink:
    """Dials one door, at host:port, again and again."""

    def __init__(
        self, name: str, address: tuple[str, int], key: bytes, lines: Lines, stopping: threading.Event
    ) -> None:
        self.name = name
        self._host, self._port = address
        self._key = key
        self._lines = lines
        self._stopping = stopping
        self._outbox: Outbox | None = None

    def end(self) -> None:
        """End the connection that there is."""
        outbox = self._outbox
        if outbox is not None:
            outbox.end(_LAST_WORDS_S)

    def run(self, hello: Hello, pulse: Pulse) -> None:
        """Serve until `stopping` is set."""
        said = LastProblem()
        while not self._stopping.is_set():
            try:
                connection, welcome = dial(self._host, self._port, self._key, hello)
            except (OSError, EOFError, AuthenticationError) as error:
                problem = f"nobody answers: {error!r}"
                if isinstance(error, AuthenticationError | EOFError):
                    problem = f"this instance was turned away ({error!r}); is the key the same?"
            else:
                problem = welcome.refusal or ""
                if not problem:
                    logger.info("joined %s at %s:%d", self.name, self._host, self._port)
                    self._serve(connection, welcome, pulse)
                connection.close()
            if not problem:
                said.over()
            elif said.is_new(problem):
                logger.warning("%s at %s:%d: %s; trying on", self.name, self._host, self._port, problem)
            self._stopping.wait(_RETRY_S)

    def _serve(self, connection: Connection, welcome: Welcome, pulse: Pulse) -> None:
        """Take commands until the connection ends, then end what it had asked for."""
        outbox = self._outbox = Outbox(connection)
        line = self._lines.open(outbox.put)
        ended = threading.Event()
        beat_until(
            ended, welcome.heartbeat_s, lambda: outbox.put(self._lines.elsewhere(line, pulse.stuck_s()))
        )
        try:
            while not self._stopping.is_set():
                command: Command = connection.recv()
                self._lines.put(line, command)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            if not self._stopping.is_set():
                logger.warning("lost %s: %r; its requests end here", self.name, error)
        self._outbox = None
        ended.set()
        self._lines.close(line)
        outbox.end()
