"""Where front ends dial the controller."""

from __future__ import annotations

import asyncio
import logging
import socketserver
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from typing import Any, Protocol

from moe_lora.core.errors import ConfigError
from moe_lora.engine.wire import Welcome, greet
from moe_lora.provision.demand import DemandWindow, Visit

from .channel import Channel
from .messages import PROTOCOL, FrontEndHello, ToController, VisitEvent

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """A front end that is connected.  taken: number of the state that it routes by.  visits: requests of its
    that are under way.
    """

    name: str
    channel: Channel
    taken: int = 0
    visits: dict[int, Visit] = field(default_factory=dict)

    def see(self, window: DemandWindow, event: VisitEvent) -> None:
        """Bring what a request did into the window of the load."""
        if event.kind == "begin":
            assert event.adapter is not None
            self.visits[event.number] = window.begin(event.adapter)
            return
        visit = self.visits.get(event.number)
        if visit is None:  # it began before this controller
            return
        if event.kind == "start":
            visit.start()
            return
        del self.visits[event.number]
        if event.kind == "refuse":
            visit.refuse()
        else:
            visit.end(event.timing)


class Host(Protocol):
    """Whom the desk tells what front ends do, in the event loop."""

    def joined(self, session: Session, hello: FrontEndHello) -> None: ...

    def received(self, session: Session, message: ToController) -> None: ...

    def left(self, session: Session) -> None: ...


class Desk(socketserver.ThreadingTCPServer):
    """Listens at host:port; each front end that knows the key has a thread, which reads.

    Raises ConfigError if the address can't be had.  `serve_forever` and `shutdown` are of the base.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, key: str, told: Host, loop: asyncio.AbstractEventLoop) -> None:
        self.key = key.encode()
        self.told = told
        self.loop = loop
        self.closing = False
        try:
            super().__init__((host, port), _Visitor)
        except OSError as error:
            raise ConfigError(
                f"can't listen at controller.address={host}:{port}: {error.strerror}; choose another"
            ) from error
        self.port: int = self.server_address[1]

    def post(self, method: str, *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(getattr(self.told, method), *args)


class _Visitor(socketserver.BaseRequestHandler):
    """One connection."""

    def handle(self) -> None:
        desk = self.server
        assert isinstance(desk, Desk)
        host = self.client_address[0]
        try:
            connection, hello = greet(self.request, desk.key)
            problem = _refusal(hello)
            connection.send(Welcome(problem))
        except (AuthenticationError, EOFError, OSError) as error:
            logger.warning("what dialled the controller from %s was turned away: %r", host, error)
            return
        if problem is not None:
            logger.warning("what dialled the controller from %s was refused: %s", host, problem)
            connection.close()
            return
        session = Session(hello.name, Channel(connection))
        desk.post("joined", session, hello)
        try:
            while True:
                desk.post("received", session, session.channel.receive())
        except (EOFError, OSError) as error:
            if not desk.closing:
                logger.warning("lost front end %s: %r", session.name, error)
        finally:
            session.channel.close(at_once=True)
            desk.post("left", session)


def _refusal(hello: object) -> str | None:
    if isinstance(hello, FrontEndHello) and hello.protocol == PROTOCOL:
        return None
    there = getattr(hello, "protocol", None)
    return (
        f"front ends speak {PROTOCOL!r} with this controller, not {there!r}; instances dial "
        "controller.engines_address, and all roles need the same version of moe_lora"
    )
