# SPDX-License-Identifier: Apache-2.0
"""A link of two kinds of messages and two methods, and what stands between its ends."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from moe_lora.core.address import Address
from moe_lora.core.errors import AdapterNotFoundError
from moe_lora.dist.net.codec import Interface, Message, Protocol
from moe_lora.dist.net.connection import Pings, dial, listen
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.net.peer import Asked, Peer
from tests.patience import PATIENCE_S


class Note(Message, frozen=True):
    number: int
    text: str = ""


class Secret(Message, frozen=True):
    """What the other end does not know."""

    code: str


class Methods(typing.Protocol):
    def double(self, number: int) -> int: ...

    def find(self, name: str) -> str: ...

    def wait(self) -> None: ...


CALLS = Interface(Methods)
SERVER = Protocol.of(Note, answers=CALLS)
CLIENT = Protocol.of(Note, asks=CALLS)


class Server:
    """Echoes notes, answers calls, and remembers how connections ended."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.peers: list[Peer] = []
        self.ends: list[str] = []
        self.waiting: list[Asked] = []

    async def visit(self, connection: Any, host: str) -> None:
        await self.talk(Peer(connection, SERVER, "the client"))

    async def talk(self, peer: Peer) -> None:
        self.peers.append(peer)
        async for message in peer.messages():
            if isinstance(message, Asked):
                self._answer(message)
            else:
                assert isinstance(message, Note)
                self.notes.append(message)
                peer.send(message)
        self.ends.append(peer.problem)

    def _answer(self, asked: Asked) -> None:
        if asked.method == "double":
            asked.answer(2 * asked.args[0])
        elif asked.method == "find":
            asked.fail(AdapterNotFoundError(f"no {asked.args[0]}"))
        else:
            self.waiting.append(asked)


@asynccontextmanager
async def serving(
    address: Address, keys: Keys | None = None, pings: Pings | None = None
) -> AsyncIterator[tuple[Server, Address]]:
    server = Server()
    async with listen("address", address, keys, server.visit, pings) as place:
        yield server, place


@asynccontextmanager
async def dialled(
    address: Address, keys: Keys | None = None, protocol: Protocol = CLIENT, pings: Pings | None = None
) -> AsyncIterator[Peer]:
    """A peer whose answers are heard; notes come to `heard`."""
    peer = Peer(await dial("address", address, keys, pings), protocol, "the server")
    peer.heard = []  # type: ignore[attr-defined]

    async def hear() -> None:
        async for message in peer.messages():
            peer.heard.append(message)  # type: ignore[attr-defined]

    task = asyncio.create_task(hear())
    try:
        yield peer
    finally:
        peer.end()
        await task
        await peer.closed()


class Relay:
    """Stands between two ends of a TCP connection: passes bytes on, adds some, or cuts."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writers: list[asyncio.StreamWriter] = []
        self.to_server: asyncio.StreamWriter | None = None
        self.to_client: asyncio.StreamWriter | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Address]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, back]
        self.to_server, self.to_client = back, writer
        await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
        writer.write_eof()
    except OSError:
        writer.transport.abort()


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), timeout_s)


async def error_of(awaitable: Awaitable[Any]) -> Exception:
    try:
        await awaitable
    except Exception as error:
        return error
    raise AssertionError("nothing was wrong")
