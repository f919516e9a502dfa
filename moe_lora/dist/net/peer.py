# SPDX-License-Identifier: Apache-2.0
"""The other end of a connection: ordered messages, and calls; the end fails open calls."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from anyio import fail_after
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed

from moe_lora.core.errors import MoeLoraError

from .codec import MAX_FRAME_BYTES, AnswerFrame, CallFrame, FailureFrame, Message, Protocol, encode

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 512 << 20
"""A peer with more queued bytes does not read, and is dropped."""
_LAST_WORDS_S = 1.0
_NOT_UNDERSTOOD, _GOING_AWAY = 1003, 1001


class PeerEndedError(ConnectionError):
    """The connection has ended; outcomes of open calls are unknown."""


@dataclass(eq=False)
class _Call:
    """A call under way.  waiter: may be cancelled.  over: answered."""

    method: str
    waiter: asyncio.Future[Any]
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, error: Exception) -> None:
        if not self.waiter.done():
            self.waiter.set_exception(error)
            self.waiter.exception()


@dataclass(eq=False)
class Asked:
    """A call of the peer; needs an answer or a failure."""

    peer: Peer
    number: int
    method: str
    args: tuple[Any, ...]

    def answer(self, value: Any) -> None:
        """Send the result, or an error if unsendable."""
        try:
            self.peer.send(AnswerFrame(self.number, msgspec.Raw(encode(value))))
        except Exception as error:
            self.fail(TypeError(f"what {self.method} returned can't be sent: {error}"))

    def fail(self, error: Exception) -> None:
        self.peer.send(FailureFrame(self.number, error))

    async def answer_by(self, method: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Send the method's result or error; the log has unexpected errors."""
        try:
            self.answer(await method(*args))
        except Exception as error:
            if not isinstance(error, MoeLoraError | OSError | ValueError | KeyError):
                logger.exception("%s failed", self.method)
            self.fail(error)


class Peer:
    """One end of an open connection; belongs to its event loop.

    Receives only during `next` or `messages`.  problem: the end's cause.  cut: ended without a farewell.
    """

    def __init__(self, socket: Connection, protocol: Protocol, name: str) -> None:
        self.name = name
        self.ended = asyncio.Event()
        self.problem = ""
        self.cut = False
        self._socket = socket
        self.protocol = protocol
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._waiting: list[bytes | Iterator[Message]] = []
        self._waiting_bytes = 0
        self._something = asyncio.Event()
        self._closing = False
        self._code = _GOING_AWAY
        self._writer = asyncio.create_task(self._write())

    @property
    def own_host(self) -> str:
        """This end's IP address; empty for a Unix socket."""
        address = self._socket.local_address
        return str(address[0]) if isinstance(address, tuple) else ""

    def send(self, message: Message) -> None:
        """Queue a message; a lost peer gets nothing.  Raises ValueError beyond MAX_FRAME_BYTES."""
        if self.ended.is_set() or self._closing:
            return
        data = encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(data)} bytes; a message has at most {MAX_FRAME_BYTES}")
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._something.set()
        if self._waiting_bytes > MAX_QUEUED_BYTES:
            self._end(f"{self.name} does not read what it is sent")

    def send_all(self, messages: Iterator[Message]) -> None:
        """As `send`, for messages drawn lazily."""
        if not (self.ended.is_set() or self._closing):
            self._waiting.append(messages)
            self._something.set()

    def call(self, method: str, *args: Any, **words: Any) -> asyncio.Future[Any]:
        """Run a peer's method; returns its result, or raises its error or PeerEndedError.

        Raises ValueError or TypeError as `Interface.bind`.
        """
        assert self.protocol.asks is not None
        args = self.protocol.asks.bind(method, args, words)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self.send(CallFrame(number, method, msgspec.Raw(encode(args))))  # first: may raise, or end
        if self.ended.is_set():
            future.set_exception(PeerEndedError(self.problem))
        else:
            self._calls[number] = _Call(method, future)
        return future

    async def next(self) -> Message | Asked:
        """The peer's next message or call.  Raises PeerEndedError."""
        while not self.ended.is_set():
            try:
                message = self.protocol.receives(await self._socket.recv(decode=False))
                if isinstance(message, AnswerFrame | FailureFrame):
                    self._take(message)
                    await asyncio.sleep(0)  # the answer's waiter runs before the next message
                elif isinstance(message, CallFrame):
                    asked = self._asked(message)
                    if asked is not None:
                        return asked
                else:
                    found: Message = message
                    return found
            except ConnectionClosed as error:
                self._note_cut(error)
                self._end(self.problem or _reason(error))
            except msgspec.DecodeError as error:
                self._code = _NOT_UNDERSTOOD
                self._end(f"{self.name} sent what is not understood here: {error}")
        await self.closed()
        raise PeerEndedError(self.problem)

    async def messages(self) -> AsyncIterator[Message | Asked]:
        """The peer's messages and calls until the end."""
        with suppress(PeerEndedError):
            while True:
                yield await self.next()

    async def receive(self, timeout_s: float) -> Message | Asked:
        """As `next` with a time limit, for handshakes."""
        try:
            # asyncio.wait_for loses a cancellation that comes with the message (Python before 3.12).
            with fail_after(timeout_s):
                return await self.next()
        except TimeoutError:
            self._end(f"{self.name} said nothing for {timeout_s:g} s")
            raise PeerEndedError(self.problem) from None

    def end(self, reason: str = "") -> None:
        """End the connection after earlier messages, or at once if stuck."""
        if not self._closing:
            self._closing = True
            self.problem = self.problem or reason or "the connection was closed"
            self._something.set()
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._abort)

    def abort(self, reason: str) -> None:
        """End the connection at once."""
        self._end(reason)
        self._abort()

    async def closed(self) -> None:
        """Wait for the complete end."""
        await asyncio.wait([self._writer])

    def abandon_calls(self, error: Exception) -> None:
        """Fail all waits for answers; `settled` still waits."""
        for call in self._calls.values():
            call.fail(error)

    async def settled(self, but: Collection[str] = ()) -> None:
        """Wait for the answers of earlier calls, even abandoned, of other methods.  Raises PeerEndedError."""
        for call in [one for one in self._calls.values() if one.method not in but]:
            await call.over.wait()
        if self.ended.is_set():
            raise PeerEndedError(self.problem)

    def _take(self, message: AnswerFrame | FailureFrame) -> None:
        call = self._calls.get(message.number)
        if call is None:
            return
        if isinstance(message, FailureFrame):
            call.fail(message.error)
        elif not call.waiter.done():
            assert self.protocol.asks is not None
            # A call with an unreadable answer stays open: the connection's end fails the call.
            call.waiter.set_result(self.protocol.asks.results[call.method](message.value))
        del self._calls[message.number]
        call.over.set()

    def _asked(self, call: CallFrame) -> Asked | None:
        answers = self.protocol.answers
        try:
            if answers is None:
                raise KeyError(call.method)
            return Asked(self, call.number, call.method, answers.args[call.method](call.args))
        except KeyError:
            self.send(FailureFrame(call.number, ValueError(f"{call.method!r} is not answered here")))
            return None
        except msgspec.DecodeError as error:
            self.send(FailureFrame(call.number, TypeError(f"{call.method} does not take this: {error}")))
            return None

    async def _write(self) -> None:
        try:
            while True:
                while self._waiting:
                    batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
                    for part in batch:
                        if isinstance(part, bytes):
                            await self._socket.send(part)
                            continue
                        for message in part:
                            await self._socket.send(encode(message))
                if self._closing:
                    break
                self._something.clear()
                await self._something.wait()
        except ConnectionClosed as error:
            self._note_cut(error)
            self._end(self.problem or _reason(error))
        await self._socket.close(self._code, self.problem.encode()[:120].decode(errors="ignore"))
        self._end(self.problem)

    def _end(self, problem: str) -> None:
        if self.ended.is_set():
            return
        self.problem = problem or "the connection ended"
        self.ended.set()
        self._closing = True
        self._waiting.clear()
        self._something.set()
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._abort)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.over.set()
            call.fail(PeerEndedError(self.problem))

    def _note_cut(self, error: ConnectionClosed) -> None:
        self.cut = self.cut or (error.rcvd is None and not self._closing)

    def _abort(self) -> None:
        self._socket.transport.abort()


def _reason(error: ConnectionClosed) -> str:
    if error.rcvd is not None and error.rcvd.reason:
        return error.rcvd.reason
    return f"the connection was cut ({error.__cause__!r})" if error.__cause__ else "the other end closed it"
