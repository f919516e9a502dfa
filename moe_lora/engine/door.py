"""The front end's door for engines on other hosts: they dial in, take part, leave, and dial in again."""

from __future__ import annotations

import logging
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from moe_lora.core.errors import ConfigError, EngineDeadError
from moe_lora.core.request import ModelInfo
from moe_lora.dist.lora_server.control import hang_up

from .attendance import Attendance
from .connection_client import ConnectionClient
from .entry import CatchUp, Entry
from .roster import Roster
from .wire import PROTOCOL_VERSION, Hello, Welcome, greet, listen

logger = logging.getLogger(__name__)

_ALIKE = ("family", "dtype", "max_model_len", "vocab_size", "eos_token_ids")


class DialledClient(ConnectionClient):
    """`EngineClient` of an engine that dialled in.  Closing it ends the connection, not the engine."""

    def __init__(self, connection: Connection, name: str) -> None:
        super().__init__(connection, f"instance {name}")
        self.start_reading()

    def shut_down(self) -> None:
        self._stopping = True
        hang_up(self._connection)
        assert self._reader is not None
        self._reader.join()

    async def close(self) -> None:
        self.shut_down()


class Door:
    """Listens at host:port and lets engines that know the key into the roster; each has a thread.

    entry: how they come into routing; by default they are given what they lack before.
    Raises ConfigError if the address can't be had.
    """

    def __init__(self, host: str, port: int, key: str, roster: Roster, entry: Entry | None = None) -> None:
        try:
            self._listener = listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"can't listen at front_end.engines_address={host}:{port}: {error.strerror}; choose another"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._key = key.encode()
        self._roster = roster
        self._entry = entry or CatchUp(roster)
        self._lock = threading.Lock()
        self._closing = False
        self._inside: set[str] = set()
        self._info: ModelInfo | None = None
        threading.Thread(target=self._accept, name="engines-door", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more; those inside stay.  May be called again."""
        self._closing = True
        if self._listener.fileno() >= 0:
            # Closing alone would leave the accepting thread in its call.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, (host, *_) = self._listener.accept()
            except OSError as error:
                if not self._closing:  # out of descriptors, say: the next one may fare better
                    logger.error("an engine's connection could not be accepted: %s", error)
                    time.sleep(0.1)
                continue
            thread = threading.Thread(
                target=self._receive, args=(sock, host), name="engine-door", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                logger.error("an engine from %s can't be let in: %s", host, error)
                sock.close()

    def _receive(self, sock: socket.socket, host: str) -> None:
        try:
            connection, hello = greet(sock, self._key)
        except (AuthenticationError, EOFError, OSError) as error:
            logger.warning("what dialled in from %s was turned away: %r; is its key another?", host, error)
            return
        with connection:
            refusal = self._refusal(hello)
            try:
                connection.send(Welcome(refusal, self._roster.heartbeat.interval_s))
                if refusal is None:
                    self._host(connection, hello, host)
            except OSError as error:
                logger.warning("instance %s left at the door: %r", hello.name, error)
            finally:
                if refusal is None:
                    self._inside.discard(hello.name)
        if refusal is not None:
            logger.warning("instance %s from %s was refused: %s", hello.name, host, refusal)

    def _refusal(self, hello: Hello) -> str | None:
        """Why this engine can't take part; None: its name is taken from now on."""
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol {hello.protocol} there and {PROTOCOL_VERSION} here; install the same version"
        with self._lock:
            first = self._info or hello.info
            for fact in _ALIKE:
                there, here = getattr(hello.info, fact), getattr(first, fact)
                if there != here:
                    return f"{fact} is {there!r} there and {here!r} at the other instances"
            if hello.name in self._inside:
                return f"an instance named {hello.name} is here already; give each its own --name"
            self._info = first
            self._inside.add(hello.name)
        return None

    def _host(self, connection: Connection, hello: Hello, host: str) -> None:
        """Have the engine take part until its connection ends."""
        client = DialledClient(connection, hello.name)

        def come() -> None:
            was_silent = instance.silent
            self._entry.bring_in(instance, client, hello.incarnation)
            how = "gets on again" if was_silent else f"dialled in from {host}"
            logger.info("instance %s %s", hello.name, how)

        try:
            instance = self._roster.enter(hello.name, client)
            Attendance(self._roster, instance, client, come, lambda: hang_up(connection)).run()
            if not self._roster.closed.is_set():
                logger.warning("instance %s left; its requests go on elsewhere", hello.name)
        except (EngineDeadError, ConfigError) as error:
            logger.warning("instance %s left before it took part: %s", hello.name, error)
        finally:
            client.shut_down()
