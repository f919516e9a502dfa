"""Running the application on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from moe_lora.core.errors import ConfigError
from moe_lora.core.open_files import allow_many_files, num_open_files

from .app import create_app
from .connections import ACCEPTED_AT_ONCE, QuietLoop, limited, most_connections
from .frontend import Frontend

logger = logging.getLogger(__name__)

DRAIN_S = 20.0
"""Requests under way at shutdown get this long to finish, in seconds; then they are ended with an error."""
_LAST_WORDS_S = 5.0
KEEP_ALIVE_S = 3900
"""An idle connection is kept for so long, in seconds.  Whoever closes first may do so while a request is on
its way, which the client sees as a reset: so clients and proxies (Envoy: an hour) close first."""
BACKLOG = 4096
"""Connections that may wait to be accepted; what the kernel's somaxconn allows, if that is less."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that says where it listens, and refuses connections for which no files are left.

    Signals are `serve_forever`'s.
    """

    on_ready: Callable[[str], None] | None = None

    @property
    def url(self) -> str:
        """Where it listens; only after the start."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list | None = None) -> None:
        limit = most_connections(allow_many_files(), num_open_files())
        self.config.http_protocol_class = limited(self.config.http_protocol_class, limit)
        asyncio.get_running_loop().set_exception_handler(QuietLoop())
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(BACKLOG)  # asyncio takes the number it was given for that of one turn, too
        if self.started and self.on_ready is not None:
            self.on_ready(self.url)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Drain and end; at once if called again."""
        self.force_exit = self.should_exit
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address before the engine starts, which takes long; port 0 takes a free one.

    It refuses connections until the server listens.  Raises ConfigError if the address can't be had.
    """
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = min(places, key=lambda place: place[0] != socket.AF_INET)
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"can't listen at host={host} port={port}: {reason}; choose another (port 0 takes a free one)"
        ) from error
    return sock


async def serve_forever(frontend: Frontend, sock: socket.socket, drain_s: float = DRAIN_S) -> None:
    """Serve until SIGINT or SIGTERM, then finish what runs (up to `drain_s`, then end it with an error).

    sock: from `bind`; closed at the end.  The front end's client stays open.
    """
    config = uvicorn.Config(
        create_app(frontend),
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(drain_s + _LAST_WORDS_S)),
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=ACCEPTED_AT_ONCE,
    )
    server = HttpServer(config)
    server.on_ready = lambda url: logger.info("Serving %s at %s", frontend.model_name, url)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.stop()
        if server.force_exit:
            frontend.ending.cut()
            return
        logger.info("Ending: what runs gets %g s to finish; a second signal ends it at once", drain_s)
        loop.call_later(drain_s, frontend.ending.cut)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    tasks = [asyncio.create_task(one.run()) for one in frontend.tasks]
    try:
        if frontend.ready is not None:
            await frontend.ready()
        await server.serve(sockets=[sock])
    finally:
        for task in tasks:
            task.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def run_server(frontend: Frontend, sock: socket.socket, drain_s: float = DRAIN_S) -> None:
    """`serve_forever` in an event loop of its own."""
    asyncio.run(serve_forever(frontend, sock, drain_s))
