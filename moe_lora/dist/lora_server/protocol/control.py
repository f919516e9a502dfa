"""Control connections of the LoRA Server, beside the one-sided data path, for its threads that wait.

A connection begins with a hello whose type names its purpose and which says what both sides must agree on.
Both sides send a beat every BEAT_S; a side that hears nothing for `silence_s` treats the other as gone.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

from websockets.asyncio.connection import Connection

from moe_lora.core.address import Address, parse_address
from moe_lora.core.errors import CapacityError, ConfigError, LoraServerError
from moe_lora.dist.net import connection as net
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.net.peer import Asked, Peer, PeerEndedError
from moe_lora.dist.net.thread import LoopThread

from .control_messages import (
    ADMIN_VERSION,
    HELLOS,
    PROTOCOL,
    AdminHello,
    AdminWelcome,
    Refused,
    ServerBeat,
    ServerHello,
    ServerState,
)

logger = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 3.0
"""Default for `silence_s`, and how long a peer may take to say what a connection is for."""
_MAX_UNREAD = 64
_RETRY_S = 0.05
_SETTING = "lora_server.address"
Handler = Callable[["ControlConnection", Any], None]


@cache
def _network() -> LoopThread:
    """The event loop of this process's control connections."""
    return LoopThread("control")


class ControlConnection:
    """Messages to and from one peer.  `send` may be called from any thread, `receive` from one.

    `send` never waits for the peer, so that it may be called under a lock.  Made in the event loop of
    `_network`.  host: of the peer.
    """

    def __init__(self, peer: Peer, host: str) -> None:
        self.host = host
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._heard_s = time.monotonic()
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._beat())]

    @property
    def peer(self) -> str:
        return self._peer.name

    def send(self, message: Message) -> None:
        """Raises OSError when the peer is known to be gone."""
        self._check()
        self._loop.call_soon_threadsafe(self._peer.send, message)

    def send_all(self, messages: Iterable[Message]) -> None:
        """As `send`, one after the other; each is drawn from the iterable as it leaves, in another thread."""
        self._check()
        self._loop.call_soon_threadsafe(self._peer.send_all, iter(messages))

    def receive(self, timeout_s: float, silence_s: float | None = None) -> Message | None:
        """The next message that is not a beat; None after timeout_s.

        Raises EOFError or OSError when the peer is gone, TimeoutError when it was silent for silence_s.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            wait_s = max(0.0, min(BEAT_S, deadline_s - time.monotonic()))
            try:
                message = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                if silence_s is not None and time.monotonic() - self._heard_s > silence_s:
                    self.close()
                    raise TimeoutError(f"{self.peer} has been silent for {silence_s} s") from None
                if time.monotonic() >= deadline_s:
                    return None
                continue
            if message is None:
                self._inbox.put(None)
                raise EOFError(self._peer.problem)
            return message

    def close(self) -> None:
        """End the connection after what was sent; a `receive` of another thread ends with it."""
        with suppress(RuntimeError):  # the loop has ended, and the connection with it
            self._loop.call_soon_threadsafe(self._peer.end)

    def _check(self) -> None:
        if self._peer.ended.is_set():
            raise BrokenPipeError(f"{self.peer} is gone")

    async def _read(self) -> None:
        async for message in self._peer.messages():
            self._heard_s = time.monotonic()
            assert isinstance(message, Message)
            if isinstance(message, ServerBeat):
                continue
            self._inbox.put(message)
            while self._inbox.qsize() > _MAX_UNREAD and not self._peer.ended.is_set():
                await asyncio.sleep(0.002)
        self._inbox.put(None)
        self._tasks[1].cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._peer.send(ServerBeat())


def dial(
    address: str, keys: Keys | None, hello: ServerHello | AdminHello, timeout_s: float
) -> tuple[ControlConnection, Any]:
    """Connect and say hello; the connection and the answer.

    Raises LoraServerError if nobody answers within timeout_s, or if the peer refuses; ConfigError for an
    address that is none.
    """
    return _network().run(_dial(parse_address(_SETTING, address), keys, hello, timeout_s))


async def _dial(
    address: Address, keys: Keys | None, hello: ServerHello | AdminHello, timeout_s: float
) -> tuple[ControlConnection, Any]:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            rest_s = max(0.05, deadline_s - time.monotonic())
            connection = await asyncio.wait_for(net.dial(_SETTING, address, keys), rest_s)
            break
        except (ConnectionError, asyncio.TimeoutError) as error:
            if _of_certificates(error):
                raise LoraServerError(f"the LoRA Server's {error}") from error
            if time.monotonic() >= deadline_s:
                raise LoraServerError(
                    f"no LoRA Server answers at {_SETTING}={address} ({error}); start it, or correct the "
                    "address"
                ) from error
            await asyncio.sleep(_RETRY_S)
    peer = Peer(connection, PROTOCOL, str(address))
    peer.send(hello)
    try:
        answer = await peer.receive(max(1.0, deadline_s - time.monotonic()))
    except PeerEndedError as error:
        raise LoraServerError(f"the LoRA Server at {address} closed the connection ({error})") from error
    if isinstance(answer, Refused):
        peer.end()
        raise LoraServerError(f"the LoRA Server at {address} refused {hello.name}: {answer.error}")
    return ControlConnection(peer, address.host), answer


def _of_certificates(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__
    return error is not None


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
    """Accepts connections; each is served by the handler of its hello's type, in a thread of its own.

    agreed: what every peer's hello must repeat (protocol version, model, dtype), but an admin's, which knows
    nothing of the model.  address: where it listens, the port chosen if 0 was asked for.
    Raises LoraServerError if the address can't be listened at.
    """

    def __init__(
        self,
        address: Address,
        keys: Keys | None,
        agreed: Mapping[str, Any],
        handlers: Mapping[type[Message], Handler],
    ) -> None:
        self._agreed = agreed
        self._handlers = handlers
        self._connections: set[ControlConnection] = set()
        self._stopping = False
        self._over = asyncio.Event()
        listening: Future[Address] = Future()
        self._staying = asyncio.run_coroutine_threadsafe(
            self._stay(address, keys, listening), _network().loop
        )
        try:
            self.address = str(listening.result())
        except ConfigError as error:
            raise LoraServerError(str(error)) from error

    def close(self) -> None:
        """Accept no more, end all connections."""
        if not self._stopping:
            self._stopping = True
            _network().loop.call_soon_threadsafe(self._over.set)
            self._staying.result()

    async def _stay(self, address: Address, keys: Keys | None, listening: Future[Address]) -> None:
        try:
            async with net.listen(_SETTING, address, keys, self._visit) as place:
                listening.set_result(place)
                await self._over.wait()
        except Exception as error:
            if listening.done():
                raise
            listening.set_exception(error)

    async def _visit(self, socket: Connection, host: str) -> None:
        peer = Peer(socket, PROTOCOL, f"a peer from {host}")
        try:
            hello = await peer.receive(SILENCE_S)
        except PeerEndedError as error:
            logger.info("a peer from %s was turned away: %s", host, error)
            return
        if isinstance(hello, HELLOS):
            peer.name = hello.name
        connection = ControlConnection(peer, host)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        threading.Thread(
            target=self._serve, args=(connection, hello, done), name="control-peer", daemon=True
        ).start()
        await done
        peer.end()
        await peer.closed()

    def _serve(
        self, connection: ControlConnection, hello: Message | Asked, done: asyncio.Future[None]
    ) -> None:
        self._connections.add(connection)
        try:
            if not self._stopping:
                self._handle(connection, hello)
        except (EOFError, OSError) as error:
            if not self._stopping:
                logger.info("the connection to %s ended: %r", connection.peer, error)
        except Exception:
            logger.exception("the connection to %s failed", connection.peer)
        finally:
            self._connections.discard(connection)
            with suppress(RuntimeError):  # the loop has ended
                done.get_loop().call_soon_threadsafe(done.set_result, None)

    def _handle(self, connection: ControlConnection, hello: Message | Asked) -> None:
        handler = self._handlers.get(type(hello))  # type: ignore[arg-type]
        problem = None
        if isinstance(hello, ServerHello):
            problem = disagreement(self._agreed, hello.agreed, connection.peer)
        if problem is None and handler is not None:
            handler(connection, hello)
            return
        problem = problem or f"{type(hello).__name__} is not served here"
        logger.warning("%s was refused: %s", connection.peer, problem)
        connection.send(Refused(problem))


# What the front end asks of the LoRA Server's leader: how it stands, and to hold more or fewer adapters.


class Managed(Protocol):
    """A leader, as its admin sees it."""

    def state(self) -> ServerState: ...

    def resize(self, capacity: int) -> None:
        """Raises ConfigError below 1, CapacityError beyond what the ranks' memory holds."""
        ...


def serve_admin(leader: Managed, connection: ControlConnection, hello: AdminHello) -> None:
    """One question of an admin, answered with the state after it."""
    if hello.protocol != ADMIN_VERSION:
        connection.send(Refused(f"protocol {hello.protocol} there and {ADMIN_VERSION} at the server"))
        return
    problem = None
    if hello.capacity is not None:
        try:
            leader.resize(hello.capacity)
        except (CapacityError, ConfigError) as error:
            problem = str(error)
    connection.send(AdminWelcome(problem, leader.state()))


class LoraServerAdmin:
    """Asks the leader at `address`, over a connection a question; may be used from any thread.

    timeout_s: how long a leader that is not there is looked for.
    """

    def __init__(self, address: str, keys: Keys | None, *, timeout_s: float = 1.0) -> None:
        self._address = address
        self._keys = keys
        self._timeout_s = timeout_s

    def state(self) -> ServerState:
        """Raises LoraServerError if the leader does not answer."""
        return self._ask(None)

    def resize(self, capacity: int) -> ServerState:
        """Change the number of adapters resident at once, as `LeaseTable.resize` does, on all ranks.

        Raises CapacityError for a capacity that can't be, LoraServerError if the leader does not answer.
        """
        return self._ask(capacity)

    def _ask(self, capacity: int | None) -> ServerState:
        hello = AdminHello(name="front-end", capacity=capacity)
        connection, answer = dial(self._address, self._keys, hello, self._timeout_s)
        connection.close()
        assert isinstance(answer, AdminWelcome)
        if answer.problem is not None:
            raise CapacityError(answer.problem)
        return answer.state
