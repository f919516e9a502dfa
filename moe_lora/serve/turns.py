"""Requests begin one after another, of one client after another: nobody's many hold up what others ask."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from .limits import client_at


class InTurn:
    """Begins one request in a turn of the event loop, of each client in turn.

    What begins may take a millisecond until it waits for something, and between two of them the loop takes
    connections, reads, and sends tokens.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._has_begun = False
        """Whether one has begun in this turn, or others wait."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            peer = scope.get("client")
            await self._turn(client_at(peer[0] if peer else None))
        await self._app(scope, receive, send)

    async def _turn(self, client: str) -> None:
        loop = asyncio.get_running_loop()
        if not self._has_begun:
            self._has_begun = True
            loop.call_soon(self._next, loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._has_begun = False
