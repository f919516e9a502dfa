"""Control connections of the LoRA Server: small JSON messages beside the one-sided data path.

A connection begins with a hello that names its purpose and what both sides must agree on.  Both sides send
a beat every BEAT_S; a side that hears nothing for `silence_s` treats the other as gone.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from moe_lora.core.errors import LoraServerError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 3.0
"""Default for `silence_s`, and the longest that one read or write of a message waits for the peer."""
Message = dict[str, Any]
Handler = Callable[["ControlConnection", Message], None]

_BEAT = json.dumps({"kind": "beat"}).encode()


def parse_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """(family, address) of "host:port" or of a path.  Raises LoraServerError for anything else."""
    if address.startswith("/"):
        return socket.AF_UNIX, address
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and int(port) < 1 << 16):
        raise LoraServerError(
            f"lora_server.address={address!r} is neither host:port nor an absolute path of a socket"
        )
    return socket.AF_INET, (host, int(port))


class ControlConnection:
    """Messages to and from one peer.  `send` may be called from any thread, `receive` from one.

    A thread of its own writes, and beats while there is nothing to write: `send` never waits for the peer,
    so that it may be called under a lock.
    """

    def __init__(self, connection: Connection, peer: str) -> None:
        self.peer = peer
        # Its descriptor is closed with the last reference, never under a thread that reads or writes.
        self._connection = connection
        self._outbox: queue.SimpleQueue[Iterable[bytes] | None] = queue.SimpleQueue()
        self._gone = threading.Event()
        self._heard_s = time.monotonic()
        threading.Thread(target=self._write, name="control-write", daemon=True).start()

    def send(self, kind: str, **fields: Any) -> None:
        """Raises OSError when the peer is known to be gone."""
        self.send_with_blocks((), kind, **fields)

    def send_with_blocks(self, blocks: Iterable[bytes], kind: str, **fields: Any) -> None:
        """As `send`, with blocks of raw bytes after the message, to be taken with `receive_block`.

        The blocks are drawn from the iterable as they leave, in another thread.
        """
        if self._gone.is_set():
            raise BrokenPipeError(f"{self.peer} is gone")
        self._outbox.put(itertools.chain([json.dumps({"kind": kind, **fields}).encode()], blocks))

    def receive_block(self) -> bytes:
        block = self._connection.recv_bytes()
        self._heard_s = time.monotonic()
        return block

    def receive(self, timeout_s: float, silence_s: float | None = None) -> Message | None:
        """The next message that is not a beat; None after timeout_s.

        Raises EOFError or OSError when the peer is gone, TimeoutError when it was silent for silence_s.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            wait_s = max(0.0, min(BEAT_S, deadline_s - time.monotonic()))
            if self._connection.poll(wait_s):
                message: Message = json.loads(self._connection.recv_bytes())
                self._heard_s = time.monotonic()
                if message["kind"] != "beat":
                    return message
            elif silence_s is not None and time.monotonic() - self._heard_s > silence_s:
                raise TimeoutError(f"{self.peer} has been silent for {silence_s} s")
            if time.monotonic() >= deadline_s:
                return None

    def reachable(self, address: str) -> str:
        """The peer's own listening address, as seen from here: 0.0.0.0 becomes where it connected from."""
        if not address.startswith("0.0.0.0:"):
            return address
        with socket.socket(fileno=socket.dup(self._connection.fileno())) as sock:
            return f"{sock.getpeername()[0]}:{address.rpartition(':')[2]}"

    def close(self) -> None:
        """End the connection after what was sent; a `receive` of another thread ends with it."""
        self._outbox.put(None)

    def _write(self) -> None:
        try:
            while (parts := self._next_parts()) is not None:
                for part in parts:
                    self._connection.send_bytes(part)
        except OSError as error:
            logger.debug("can't send to %s: %r", self.peer, error)
        finally:
            self._gone.set()
            hang_up(self._connection)

    def _next_parts(self) -> Iterable[bytes] | None:
        try:
            return self._outbox.get(timeout=BEAT_S)
        except queue.Empty:
            return [_BEAT]


def hang_up(connection: Connection) -> None:
    """End a connection, also under a thread that reads from it."""
    try:
        with socket.socket(fileno=socket.dup(connection.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("the connection was closed already: %r", error)


def _bounded(sock: socket.socket) -> Connection:
    """Messages over a connected socket; a peer that stalls in the middle of one ends it with an OSError."""
    limit = struct.pack("ll", int(SILENCE_S), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
    if sock.family != socket.AF_UNIX:  # small messages must not wait for the acknowledgement of earlier ones
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(sock.detach())


def _connect(address: str, key: bytes, timeout_s: float) -> Connection:
    family, place = parse_address(address)
    with socket.socket(family) as sock:
        sock.settimeout(max(0.05, timeout_s))
        sock.connect(place)
        sock.settimeout(None)
        raw = _bounded(sock)
    try:
        answer_challenge(raw, key)
        deliver_challenge(raw, key)
    except BaseException:
        raw.close()
        raise
    return raw


def dial(address: str, key: bytes, hello: Message, timeout_s: float) -> tuple[ControlConnection, Message]:
    """Connect and say hello; the connection and the answer.

    Raises LoraServerError if nobody answers within timeout_s, or if the peer refuses.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            raw = _connect(address, key, deadline_s - time.monotonic())
            break
        except AuthenticationError as error:
            raise LoraServerError(
                f"the LoRA Server at {address} does not accept the cluster key; give all roles the same key"
            ) from error
        except (OSError, EOFError) as error:
            if time.monotonic() >= deadline_s:
                raise LoraServerError(
                    f"no LoRA Server answers at lora_server.address={address} ({error}); start it, or "
                    "correct the address"
                ) from error
            time.sleep(0.05)
    connection = ControlConnection(raw, address)
    try:
        connection.send("hello", **hello)
        answer = connection.receive(max(1.0, deadline_s - time.monotonic()))
    except (OSError, EOFError) as error:
        connection.close()
        raise LoraServerError(f"the LoRA Server at {address} closed the connection ({error!r})") from error
    if answer is None or answer["kind"] != "welcome":
        connection.close()
        reason = "it did not answer" if answer is None else answer.get("error", answer["kind"])
        raise LoraServerError(f"the LoRA Server at {address} refused {hello['name']}: {reason}")
    return connection, answer


def disagreement(ours: Mapping[str, Any], theirs: Mapping[str, Any], peer: str) -> str | None:
    """The first thing that a server and its peer must agree on and don't; None if they agree."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return (
                f"{name} is {ours.get(name)!r} at the LoRA Server and {theirs.get(name)!r} at {peer}; both "
                "must be the same"
            )
    return None


class ControlServer:
    """Accepts connections; each is served by the handler of its role, in a thread of its own.

    agreed: what every peer's hello must repeat under "agreed" (protocol version, model, dtype).
    admin_handlers: of roles that need not, because they know nothing of the model.  address: where it
    listens, the port chosen if 0 was asked for.
    Raises LoraServerError if the address can't be listened at.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        agreed: Mapping[str, Any],
        handlers: Mapping[str, Handler],
        admin_handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        family, place = parse_address(address)
        self._socket = socket.socket(family)
        try:
            if family == socket.AF_UNIX:
                _remove_dead_socket(place)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(place)
            self._socket.listen(64)
        except OSError as error:
            self._socket.close()
            raise LoraServerError(
                f"can't listen at lora_server.address={address}: {error}; choose another address"
            ) from error
        place = self._socket.getsockname()
        self.address = place if isinstance(place, str) else f"{place[0]}:{place[1]}"
        self._key = key
        self._agreed = agreed
        self._handlers = handlers
        self._admin_handlers = admin_handlers or {}
        self._connections: set[ControlConnection] = set()
        self._stopping = False
        threading.Thread(target=self._accept, name="control-accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more, end all connections."""
        if self._stopping:
            return
        self._stopping = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept of the other thread; close would not
        except OSError:
            logger.debug("the other thread was between two connections and has closed the socket")
        if self.address.startswith("/"):
            Path(self.address).unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        with self._socket:
            while not self._stopping:
                try:
                    sock, _ = self._socket.accept()
                except OSError as error:
                    if not self._stopping:  # out of descriptors, say: the next one may fare better
                        logger.error("a connection could not be accepted: %s", error)
                        time.sleep(0.1)
                else:
                    self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        """Serve the peer in a thread of its own; a peer that can't be served is hung up on."""
        try:
            with sock:
                raw = _bounded(sock)
        except OSError as error:  # the peer has left already, say
            logger.info("a connection ended at once: %s", error)
            return
        try:
            threading.Thread(target=self._serve, args=(raw,), name="control", daemon=True).start()
        except RuntimeError as error:
            logger.error("a connection can't be served: %s", error)
            raw.close()

    def _serve(self, raw: Connection) -> None:
        try:
            deliver_challenge(raw, self._key)
            answer_challenge(raw, self._key)
        except (AuthenticationError, EOFError, OSError) as error:
            logger.info("a peer was turned away: %r", error)
            raw.close()
            return
        connection = ControlConnection(raw, "a peer")
        self._connections.add(connection)
        try:
            hello = connection.receive(SILENCE_S)
            if hello is not None and not self._stopping:
                connection.peer = hello["name"]
                self._handle(connection, hello)
        except (EOFError, OSError) as error:
            if not self._stopping:
                logger.info("the connection to %s ended: %r", connection.peer, error)
        except Exception:
            logger.exception("the connection to %s failed", connection.peer)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _handle(self, connection: ControlConnection, hello: Message) -> None:
        role = hello.get("role", "")
        admin = self._admin_handlers.get(role)
        if admin is not None:
            admin(connection, hello)
            return
        handler = self._handlers.get(role)
        problem = disagreement(self._agreed, hello.get("agreed", {}), connection.peer)
        if problem is None and handler is not None:
            handler(connection, hello)
            return
        problem = problem or f"role {hello.get('role')!r} is not served here"
        logger.warning("%s was refused: %s", connection.peer, problem)
        connection.send("refused", error=problem)


def _remove_dead_socket(path: str) -> None:
    """What a process that was killed left behind must not keep its successor from listening there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except FileNotFoundError:
            logger.debug("%s is new", path)
