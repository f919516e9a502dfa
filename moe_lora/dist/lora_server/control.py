# SPDX-License-Identifier: Apache-2.0
"""Control connections of a LoRA Server, on one event loop per process.  Pings detect lost peers."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from anyio import fail_after

from moe_lora.core.address import Address, parse_address
from moe_lora.core.errors import CapacityError, ConfigError, LoraServerError, MoeLoraError
from moe_lora.core.records import ServerState
from moe_lora.dist.net import connection as net
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.connection import Pings
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.net.peer import Asked, Peer, PeerEndedError
from moe_lora.dist.net.session import Dialler, Hello, RefusedError
from moe_lora.dist.net.thread import LoopThread

from .messages import HANDSHAKE

logger = logging.getLogger(__name__)

REJOIN_S = 1.0
"""Time limit of a redial."""
_SETTING = "lora_server.address"
Hear = Callable[[Peer, Message], Awaitable[None]]


@cache
def network() -> LoopThread:
    """The event loop of this process's control connections."""
    return LoopThread("control")


PINGS = Pings.within(3.0)


async def ignore(peer: Peer, message: Message) -> None:
    """Ignore messages."""


async def join(
    address: str,
    keys: Keys | None,
    hello: Hello,
    timeout_s: float,
    *begin: Any,
    hear: Hear = ignore,
    pings: Pings = PINGS,
) -> Peer:
    """Connect to a rank.  begin: method and arguments of a first call without an answer.  hear: called with
    the rank's further messages in order.

    Raises LoraServerError without an answer in timeout_s, or on refusal; ConfigError for a bad address.
    """
    place, deadline_s = parse_address(_SETTING, address), time.monotonic() + timeout_s
    while True:
        try:
            rest_s = max(0.05, deadline_s - time.monotonic())
            with fail_after(rest_s):
                connection = await net.dial(_SETTING, place, keys, pings)
            break
        except (ConnectionError, TimeoutError) as error:
            if _of_certificates(error):
                raise LoraServerError(f"the LoRA Server's {error}") from error
            if time.monotonic() >= deadline_s:
                how = error or f"in {timeout_s:g} s"
                raise LoraServerError(
                    f"no LoRA Server answers at {_SETTING}={place} ({how}); start it, or correct the address"
                ) from error
            await asyncio.sleep(0.05)
    rest_s = max(1.0, deadline_s - time.monotonic())
    try:
        peer, _ = await HANDSHAKE.open(connection, place, hello, rest_s)
    except RefusedError as error:
        raise LoraServerError(f"the LoRA Server at {place} refused {hello.name}: {error}") from error
    except PeerEndedError as error:
        raise LoraServerError(f"the LoRA Server at {place} closed the connection ({error})") from error
    hearing = asyncio.create_task(_hear(peer, hear))
    _hearing.add(hearing)
    hearing.add_done_callback(_hearing.discard)
    try:
        if begin:
            await called(peer, *begin)
    except BaseException:
        peer.end()
        raise
    return peer


_hearing: set[asyncio.Task[None]] = set()


async def _hear(peer: Peer, hear: Hear) -> None:
    try:
        async for message in peer.messages():
            assert isinstance(message, Message)
            await hear(peer, message)
    except Exception:
        logger.exception("what the LoRA Server at %s sent can't be followed", peer.name)
    peer.end()


def _of_certificates(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__
    return error is not None


async def called(peer: Peer, method: str, *args: Any) -> Any:
    """The rank's answer.  Raises LoraServerError for a lost rank, and its errors."""
    try:
        return await peer.call(method, *args)
    except PeerEndedError as error:
        raise LoraServerError(f"the LoRA Server at {peer.name} was lost: {error}") from error


async def ask(
    address: str, keys: Keys | None, hello: Hello, timeout_s: float, method: str, *args: Any
) -> Any:
    """One call over a new connection.  Raises as `join`, `called`."""
    async with joined(address, keys, hello, timeout_s) as peer:
        return await called(peer, method, *args)


@asynccontextmanager
async def joined(address: str, keys: Keys | None, hello: Hello, timeout_s: float) -> AsyncIterator[Peer]:
    """As `join`, ended at exit."""
    peer = await join(address, keys, hello, timeout_s)
    try:
        yield peer
    finally:
        peer.end()


async def find_rank(address: str, keys: Keys | None, hello: Hello, server_rank: int, timeout_s: float) -> str:
    """Address of a server rank, from the leader.  Raises LoraServerError after timeout_s."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found: str | None = await ask(address, keys, hello, timeout_s, "find", server_rank)
        if found is not None:
            return found
        if time.monotonic() > deadline_s:
            raise LoraServerError(f"rank {server_rank} of the LoRA Server has not joined; start it")
        await asyncio.sleep(0.1)


def disagreement(ours: Mapping[str, Any], theirs: Mapping[str, Any], peer: str) -> str | None:
    """The first differing fact; None if both agree."""
    for name in sorted(theirs):
        if ours.get(name) != theirs[name]:
            return f"{name} is {ours.get(name)!r} at the LoRA Server and {theirs[name]!r} at {peer}"
    return None


@dataclass(eq=False)
class Visitor:
    """A peer at a rank of the LoRA Server.  left: callbacks at the connection's end."""

    peer: Peer
    host: str
    left: AsyncExitStack = field(default_factory=AsyncExitStack)
    instance: str = ""
    server_rank: int = -1


Answer = Callable[..., Coroutine[Any, Any, Any]]
"""Called with visitor and arguments.  A returned future is answered later."""


class ControlServer:
    """Accepts peers with the agreed facts, and answers each peer's calls in order.

    address: port 0 picks a free port.  Raises LoraServerError for an unavailable address.
    """

    def __init__(
        self,
        address: Address,
        keys: Keys | None,
        agreed: Mapping[str, Any],
        answers: Mapping[str, Answer],
        pings: Pings = PINGS,
    ) -> None:
        self._agreed = agreed
        self._answers = answers
        self._listening = AsyncExitStack()
        visit = partial(HANDSHAKE.receive, self._check, self._serve)
        listening = net.listen(_SETTING, address, keys, visit, pings)
        try:
            self.address = str(network().run(self._listening.enter_async_context(listening)))
        except ConfigError as error:
            raise LoraServerError(str(error)) from error

    def close(self) -> None:
        """Close the listener and all connections."""
        network().run(self._listening.aclose())

    def _check(self, caller: Dialler) -> None:
        problem = disagreement(self._agreed, caller.payload, caller.name)
        if problem is not None:
            raise RefusedError(problem, "both must be the same")

    async def _serve(self, peer: Peer, caller: Dialler) -> None:
        visitor = Visitor(peer, caller.host)
        async with visitor.left:
            async for asked in peer.messages():
                await self._answer(visitor, asked)

    async def _answer(self, visitor: Visitor, asked: Message | Asked) -> None:
        if not isinstance(asked, Asked):
            raise PeerEndedError(f"{type(asked).__name__} means nothing here")
        answer = self._answers.get(asked.method)
        try:
            if answer is None:
                raise LoraServerError(f"{asked.method} is not answered by this rank")
            found = await answer(visitor, *asked.args)
        except ConnectionError:
            raise
        except Exception as error:
            if not isinstance(error, MoeLoraError | ValueError):
                logger.exception("%s of %s failed", asked.method, visitor.peer.name)
            asked.fail(error)
            return
        if isinstance(found, asyncio.Future):
            found.add_done_callback(partial(_answer_later, asked))
        else:
            asked.answer(found)


def _answer_later(asked: Asked, later: asyncio.Future[Any]) -> None:
    error = later.exception()
    if isinstance(error, Exception):
        asked.fail(error)
    else:
        asked.answer(later.result())


class LoraServerAdmin:
    """Calls the leader, a connection per call; thread-safe."""

    def __init__(self, address: str, keys: Keys | None, *, timeout_s: float = 1.0) -> None:
        self._address = address
        self._keys = keys
        self._timeout_s = timeout_s

    def state(self) -> ServerState:
        """Raises LoraServerError without an answer."""
        found: ServerState = self._ask("state")
        return found

    def resize(self, capacity: int) -> ServerState:
        """See `ServerCalls.resize`.  Raises CapacityError, or LoraServerError without an answer."""
        try:
            found: ServerState = self._ask("resize", capacity)
            return found
        except ConfigError as error:
            raise CapacityError(str(error)) from error

    def restart(self, server_rank: int) -> None:
        """See `ServerCalls.restart`."""
        self._ask("restart", server_rank)

    def _ask(self, method: str, *args: Any) -> Any:
        hello = HANDSHAKE.hello("front-end", {})
        return network().run(ask(self._address, self._keys, hello, self._timeout_s, method, *args))
