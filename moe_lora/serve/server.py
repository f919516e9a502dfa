"""Running the application on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import re
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import moe_lora
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import allow_many_files, num_open_files
from moe_lora.serve.admin.adapter_routes import adapters_router, registry_router
from moe_lora.serve.admin.status import capacity_router, models_router, status_router, welcome_router
from moe_lora.serve.openai.endpoints import HEADER, RequestIds, generating_router

from .frontend import Frontend
from .http_errors import install_error_handlers

# The HTTP application over one engine.


def create_app(frontend: Frontend) -> FastAPI:
    """OpenAI-compatible endpoints over a front end's engine; it does not run the controller."""
    # FastAPI's pages at /docs and /redoc load scripts from elsewhere, which a server without a network can't.
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        title="moe_lora",
        version=moe_lora.__version__,
        description="Many LoRA adapters over one model, through the OpenAI interface.",
    )
    install_error_handlers(app)
    app.add_middleware(RequestIds)
    cors_origins = frontend.cluster.front_end.cors_origins
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    managing = (models_router, adapters_router, registry_router, capacity_router, status_router)
    for make_router in (generating_router, *managing):
        app.include_router(make_router(frontend))
    app.include_router(welcome_router(frontend, app))
    return app


# What a server can't have: connections beyond its files, refused at once and said once, and endless headers.


logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8
"""Connections accepted in one turn of the event loop; the first of them is looked at a few turns later."""
_LINGERING = 16
_RESERVE = 5 * ACCEPTED_AT_ONCE + _LINGERING + 16
"""Files for connections that are not looked at yet or being refused, and for what requests open beside."""
_LINGER_S = 0.2
MAX_HEAD_BYTES = 1 << 16
"""Of a head that is not complete, or of what follows a body: the parser itself has no limit."""
_UPGRADE = re.compile(rb"(?i)\r\nupgrade(?=:)")
_BODY = b'{"error":{"message":"too many connections; try again later","type":"ServiceUnavailableError",' + (
    b'"param":null,"code":503}}'
)
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def most_connections(max_files: int, num_open: int) -> int:
    """Connections that may be open beside what is; at least one."""
    return max(1, max_files - num_open - _RESERVE)


def limited(limit: int) -> type[HttpToolsProtocol]:
    """uvicorn's protocol; it refuses connections above `limit` with a 503 and says so once, and headers
    longer than `MAX_HEAD_BYTES` with a 400."""

    class Limited(HttpToolsProtocol):
        said = False
        num_lingering = 0
        num_head_bytes = 0  # received since the parser last found a whole head or a piece of a body

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            if len(self.connections) < limit:
                super().connection_made(transport)
                return
            if not Limited.said:
                Limited.said = True
                logger.error(
                    "%d connections are open, all that the limit on open files leaves room for: more are "
                    "refused with a 503; raise it with ulimit -n",
                    limit,
                )
            transport.write(REFUSAL)
            if Limited.num_lingering >= _LINGERING:
                transport.close()
                return
            # Closed before the request has come, the connection would be reset, and the answer with it.
            Limited.num_lingering += 1
            asyncio.get_running_loop().call_later(_LINGER_S, self._leave, transport)

        def _leave(self, transport: asyncio.Transport) -> None:
            Limited.num_lingering -= 1
            transport.close()

        def data_received(self, data: bytes) -> None:
            if self not in self.connections:
                return
            if self.cycle is None or self.cycle.response_complete:
                # Clients that offer HTTP/2 (Java's) send a body all the same, which httptools would drop.
                head, end, rest = data.partition(b"\r\n\r\n")
                data = _UPGRADE.sub(b"\r\nignored", head) + end + rest
            self.num_head_bytes += len(data)
            super().data_received(data)
            if self.num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The head of a request has at most {MAX_HEAD_BYTES} bytes.")

        def on_headers_complete(self) -> None:
            self.num_head_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.num_head_bytes = 0
            super().on_body(body)

        def connection_lost(self, exc: Exception | None) -> None:
            if self in self.connections:
                super().connection_lost(exc)

    return Limited


class QuietLoop:
    """An event loop's exception handler that says once that no file is left, and all else as usual."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif not self._said:
            self._said = True
            logger.error("no connection can be accepted: %s; raise the limit with ulimit -n", error.strerror)


RARE_COLLECTIONS = (20_000, 50, 1000)
"""Thresholds of Python's collector in a front end's process; with its defaults it took 6 % of the time."""
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
        self.config.http_protocol_class = limited(limit)
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
    # What is there now is never looked at again, and what comes later seldom: requests leave few cycles.
    gc.freeze()
    gc.set_threshold(*RARE_COLLECTIONS)
    deciding = asyncio.create_task(frontend.controller.run())
    try:
        await frontend.controller.ready()
        await server.serve(sockets=[sock])
    finally:
        deciding.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def run_server(frontend: Frontend, sock: socket.socket, drain_s: float = DRAIN_S) -> None:
    """`serve_forever` in an event loop of its own."""
    asyncio.run(serve_forever(frontend, sock, drain_s))
