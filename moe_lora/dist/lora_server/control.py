"""Control connections of the LoRA Server: small JSON messages beside the one-sided data path.

A connection begins with a hello that names its purpose and what both sides must agree on.  Both sides send
a beat every BEAT_S; a side that hears nothing for `silence_s` treats the other as gone.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from moe_lora.core.errors import LoraServerError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
Message = dict[str, Any]
Handler = Callable[["ControlConnection", Message], None]


def parse_address(address: str) -> tuple[str, Any]:
    """(family, address) of "host:port" or of a path.  Raises LoraServerError for anything else."""
    if address.startswith("/"):
        return "AF_UNIX", address
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit()):
        raise LoraServerError(
            f"lora_server_address={address!r} is neither host:port nor an absolute path of a socket"
        )
    return "AF_INET", (host, int(port))


class ControlConnection:
    """Messages to and from one peer.  `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self.peer = peer
        self._connection = connection
        self._send_lock = threading.Lock()
        self._heard_s = time.monotonic()
        self._beat_s = 0.0
        self.closed = threading.Event()

    def send(self, kind: str, **fields: Any) -> None:
        """Raises OSError when the peer is gone."""
        data = json.dumps({"kind": kind, **fields}).encode()
        with self._send_lock:
            self._connection.send_bytes(data)

    def send_with_blocks(self, blocks: Iterable[bytes], kind: str, **fields: Any) -> None:
        """As `send`, with blocks of raw bytes after the message, to be taken with `receive_block`."""
        data = json.dumps({"kind": kind, **fields}).encode()
        with self._send_lock:
            self._connection.send_bytes(data)
            for block in blocks:
                self._connection.send_bytes(block)

    def receive_block(self) -> bytes:
        return self._connection.recv_bytes()

    def receive(self, timeout_s: float, silence_s: float | None = None) -> Message | None:
        """The next message that is not a beat; None after timeout_s.  Sends beats meanwhile.

        Raises EOFError or OSError when the peer is gone, TimeoutError when it was silent for silence_s.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            if now_s - self._beat_s >= BEAT_S:
                self._beat_s = now_s
                self._beat()
            if self._connection.poll(max(0.0, min(BEAT_S, deadline_s - now_s))):
                message: Message = json.loads(self._connection.recv_bytes())
                self._heard_s = time.monotonic()
                if message["kind"] != "beat":
                    return message
            elif silence_s is not None and time.monotonic() - self._heard_s > silence_s:
                raise TimeoutError(f"{self.peer} has been silent for {silence_s} s")
            if time.monotonic() >= deadline_s:
                return None

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beats are sent while the body runs, which takes long and calls no `receive`."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(BEAT_S):
                try:
                    self.send("beat")
                except OSError:
                    return  # the next `receive` says so

        thread = threading.Thread(target=beat, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat(self) -> None:
        """Raises OSError when the peer is gone and left nothing to read."""
        try:
            self.send("beat")
        except OSError:
            if not self._connection.poll(0):
                raise

    def reachable(self, address: str) -> str:
        """The peer's own listening address, as seen from here: 0.0.0.0 becomes where it connected from."""
        if not address.startswith("0.0.0.0:"):
            return address
        with socket.socket(fileno=socket.dup(self._connection.fileno())) as sock:
            return f"{sock.getpeername()[0]}:{address.rpartition(':')[2]}"

    def close(self) -> None:
        """Also ends a `receive` of another thread."""
        if not self.closed.is_set():
            self.closed.set()
            try:
                with socket.socket(fileno=socket.dup(self._connection.fileno())) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                logger.debug("the connection to %s was closed already", self.peer)
            self._connection.close()


def _without_delay(connection: Connection) -> None:
    """Small messages must not wait for the acknowledgement of earlier ones."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as sock:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def dial(address: str, key: bytes, hello: Message, timeout_s: float) -> tuple[ControlConnection, Message]:
    """Connect and say hello; the connection and the answer.

    Raises LoraServerError if nobody answers within timeout_s, or if the peer refuses.
    """
    family, place = parse_address(address)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            raw = Client(place, family=family, authkey=key)
            break
        except AuthenticationError as error:
            raise LoraServerError(
                f"the LoRA Server at {address} does not accept the cluster key; give all roles the same key"
            ) from error
        except (OSError, EOFError) as error:
            if time.monotonic() >= deadline_s:
                raise LoraServerError(
                    f"no LoRA Server answers at lora_server_address={address} ({error}); start it, or "
                    "correct the address"
                ) from error
            time.sleep(0.05)
    _without_delay(raw)
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
        raise LoraServerError(f"the LoRA Server at {address} refused this {hello['role']}: {reason}")
    return connection, answer


def disagreement(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first thing that both sides must agree on and don't; None if they agree."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here; both must be the same"
    return None


class ControlServer:
    """Accepts connections; each is served by the handler of its role, in a thread of its own.

    agreed: what every peer's hello must repeat under "agreed" (protocol version, model, dtype).
    """

    def __init__(
        self, address: str, key: bytes, agreed: Mapping[str, Any], handlers: Mapping[str, Handler]
    ) -> None:
        family, place = parse_address(address)
        try:
            self._listener = Listener(place, family=family, backlog=64)
        except OSError as error:
            raise LoraServerError(f"can't listen at {address}: {error}; choose another address") from error
        self._key = key
        self._agreed = agreed
        self._handlers = handlers
        self._connections: set[ControlConnection] = set()
        self._stopping = False
        threading.Thread(target=self._accept, name="control-accept", daemon=True).start()

    @property
    def address(self) -> str:
        place = self._listener.address
        return place if isinstance(place, str) else f"{place[0]}:{place[1]}"

    def close(self) -> None:
        self._stopping = True
        self._listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                raw = self._listener.accept()
            except OSError:
                if not self._stopping:
                    logger.exception("no more connections are accepted")
                return
            else:
                threading.Thread(target=self._serve, args=(raw,), name="control", daemon=True).start()

    def _serve(self, raw: Connection) -> None:
        connection = ControlConnection(raw, "a peer")
        self._connections.add(connection)
        try:
            _without_delay(raw)
            deliver_challenge(raw, self._key)
            answer_challenge(raw, self._key)
            hello = connection.receive(10.0)
            if hello is None:
                return
            connection.peer = hello.get("name", "a peer")
            handler = self._handlers.get(hello.get("role", ""))
            problem = disagreement(self._agreed, hello.get("agreed", {}))
            if handler is None:
                problem = f"role {hello.get('role')!r} is not served here"
            if problem or handler is None:
                connection.send("refused", error=problem)
            else:
                handler(connection, hello)
        except (AuthenticationError, EOFError, OSError) as error:
            if not self._stopping:
                logger.info("the connection to %s ended: %r", connection.peer, error)
        except Exception:
            logger.exception("the connection to %s failed", connection.peer)
        finally:
            self._connections.discard(connection)
            connection.close()
