# SPDX-License-Identifier: Apache-2.0
"""Runs the application until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

import moe_lora
from moe_lora.config import FrontEndConfig
from moe_lora.core.address import Address, parse_address, unix_socket
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import allow_many_files, num_open_files, resident_bytes, return_memory
from moe_lora.serve.admin.adapter_routes import adapters_router
from moe_lora.serve.admin.status import (
    capacity_router,
    instances_router,
    models_router,
    status_router,
    welcome_router,
)
from moe_lora.serve.openai import later_router
from moe_lora.serve.openai.endpoints import HEADER, RequestIds, generating_router
from moe_lora.serve.openai.fields import IGNORED_HEADER
from moe_lora.serve.openai.preparing import Preparer

from .access import ANYONE, NO_ADMIN, Access, checked_keys
from .connections import ACCEPTED_AT_ONCE, Connection, limited, most_connections
from .frontend import Frontend
from .http_errors import ApiError, install_error_handlers
from .limits import Limits

if TYPE_CHECKING:
    from .reload import Reload

logger = logging.getLogger(__name__)


def create_app(frontend: Frontend) -> FastAPI:
    """OpenAI-compatible endpoints over a front end's engine."""
    # FastAPI's /docs and /redoc load external scripts.
    shows_docs = frontend.config.docs_page
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if shows_docs else None,
        title="moe_lora",
        version=moe_lora.__version__,
        description="Many LoRA adapters over one model, through the OpenAI interface.",
    )
    install_error_handlers(app)
    access, keys = frontend.config, checked_keys(frontend.config)
    app.state.keys = keys
    is_open = keys is None and access.admin_address is None
    if not is_open:
        app.add_middleware(Access, keys=keys, address=access.admin_address, count=frontend.limits.count)
    app.add_middleware(RequestIds, caller=ANYONE if is_open else NO_ADMIN, origins=access.cors_origins)
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, IGNORED_HEADER],
        )
    preparer = Preparer(
        *(frontend.tokenizer, frontend.limits, frontend.checks, frontend.adapter_texts),
        aliases=frontend.aliases,
        bases=frontend.model_names,
    )
    app.include_router(generating_router(frontend, preparer))
    app.include_router(later_router(frontend, preparer))
    for make_router in (models_router, adapters_router, capacity_router, instances_router, status_router):
        app.include_router(make_router(frontend))
    app.include_router(_registry_router(frontend))
    if shows_docs:
        app.include_router(welcome_router(frontend, app))
    return app


def _registry_router(frontend: Frontend) -> APIRouter:
    """The registry's routes, or routes that refuse."""
    if frontend.cluster.registry is not None:
        from moe_lora.serve.admin.registry_routes import registry_router

        return registry_router(frontend)

    async def refuse(request: Request) -> None:
        raise ApiError(404, "there is no registry of adapters; start with --registry FOLDER")

    methods = ["GET", "POST", "DELETE"]
    return APIRouter(routes=[Route("/v1/registry/{path:path}", refuse, methods=methods)])


class QuietLoop:
    """Exception handler: logs the lack of file descriptors once."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif not self._said:
            self._said = True
            logger.error("no connection can be accepted: %s; raise the limit with ulimit -n", error.strerror)


RARE_COLLECTIONS = (20_000, 10, 10)
"""Thresholds of Python's garbage collector; the defaults took 6 % of the time.

At 1000, middle collections would keep objects of 1000 concurrent streams alive.
"""
DRAIN_S = 20.0
"""Time for running requests at shutdown."""
_LAST_WORDS_S = 5.0
UNSENT_BYTES = 1 << 17
"""Kernel buffer for unread bytes, by default megabytes."""
PEAK_BYTES, RETURN_S = 64 << 20, 60.0
"""Memory growth before a return of free memory, and seconds between periodic returns.

Requests leave fragments of some 100 bytes; a return takes 1 ms.
"""
MEMORY_LOOK_S = 5.0
SWEEP_S = 1.0
"""Interval of checks for slow clients."""
BACKLOG = 4096
"""Accept queue; the kernel's somaxconn may be lower."""


@dataclass
class ProcessMemory:
    """The process's memory since the last return."""

    least_bytes: int
    returned_s: float

    def is_due(self, found_bytes: int, now_s: float, *, bodies_bytes: int) -> bool:
        """True after a peak, once no bodies are held, and every `RETURN_S`."""
        self.least_bytes = min(self.least_bytes, found_bytes)
        is_peak = found_bytes > self.least_bytes + PEAK_BYTES and not bodies_bytes
        return is_peak or now_s >= self.returned_s + RETURN_S


class HttpServer(uvicorn.Server):
    """A uvicorn server that reports its address, and refuses connections beyond the file limit."""

    on_ready: Callable[[str], None] | None = None
    context: ssl.SSLContext | None = None

    def __init__(self, config: uvicorn.Config, limits: Limits) -> None:
        super().__init__(config)
        self._limits = limits

    @property
    def url(self) -> str:
        """The server's URL; after the start only."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://{Address(host, port)}"

    async def startup(self, sockets: list | None = None) -> None:
        for_files = most_connections(allow_many_files(), num_open_files())
        self.context, self.config.ssl = self.config.ssl, None  # TLS starts after the count of connections
        protocol = limited(self._limits, for_files, self.context)
        self.config.http_protocol_class = protocol  # type: ignore[assignment]
        asyncio.get_running_loop().set_exception_handler(QuietLoop())
        for sock in sockets or []:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            await super().startup(sockets)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"can't listen at the front end's address: {reason}") from error
        for sock in sockets or []:
            sock.listen(BACKLOG)  # asyncio also uses its backlog as number per turn
        for server in self.servers:
            for sock in server.sockets:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._sweeping = asyncio.create_task(self._sweep())
        if self.started and self.on_ready is not None:
            self.on_ready(self.url)

    async def _sweep(self) -> None:
        memory, look_s = ProcessMemory(resident_bytes(), time.monotonic()), 0.0
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            if now_s >= look_s:
                look_s = now_s + MEMORY_LOOK_S
                if memory.is_due(resident_bytes(), now_s, bodies_bytes=self._limits.bodies.in_all):
                    await asyncio.to_thread(return_memory)
                    memory = ProcessMemory(resident_bytes(), now_s)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and now_s >= min(
                    connection.late_s, connection.unread_s
                ):
                    connection.end_if_late(now_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().shutdown(sockets)
        finally:
            self._sweeping.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end_unread(self) -> None:
        """End connections of clients that don't read: messages don't arrive."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and connection.is_unread:
                connection.transport.abort()

    def stop(self) -> None:
        """Drain and end; at once if called again."""
        self.force_exit = self.should_exit
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Bind the address before the engine's long start; port 0 takes a free port.

    The socket refuses connections until the server listens.  Raises ConfigError for a taken port, except
    beside a socket with SO_REUSEADDR that does not listen yet.
    """
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = min(places, key=lambda place: place[0] != socket.AF_INET)
        sock = socket.socket(family, kind, protocol)
        try:
            _take(sock, address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"can't listen at host={host} port={port}: {reason}; choose another (port 0 takes a free one)"
        ) from error
    return sock


def _take(sock: socket.socket, address: Any) -> None:
    try:
        # Before Linux 6.8 a port bound with SO_REUSEADDR stays open to other servers.
        sock.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # A former server's closing connections admit only a socket with the option.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


@contextlib.contextmanager
def bind_admin(address: str | None) -> Iterator[list[socket.socket]]:
    """Administrators' sockets, if any.  Raises ConfigError."""
    if address is None:
        yield []
        return
    place = parse_address("admin_address", address)
    if not place.path:
        with bind(place.host, place.port) as sock:
            yield [sock]
        return
    with contextlib.ExitStack() as stack:
        try:
            sock = stack.enter_context(unix_socket(place.path))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"can't listen at admin_address={address}: {reason}; choose another") from error
        yield [sock]


@contextlib.contextmanager
def bound(config: FrontEndConfig) -> Iterator[list[socket.socket]]:
    """Sockets of a front end and its administrators.  Raises ConfigError."""
    if config.batch_dir is not None:
        from .batches.store import check_folder

        check_folder(config.batch_dir)
    with bind(config.host, config.port) as sock, bind_admin(config.admin_address) as admin:
        yield [sock, *admin]


def _http_config(frontend: Frontend, drain_s: float) -> uvicorn.Config:
    access, limits = frontend.config, frontend.limits.config
    return uvicorn.Config(
        create_app(frontend),
        log_config=None,
        log_level="error",  # clients' errors are counted, not logged
        access_log=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(drain_s + _LAST_WORDS_S)),
        timeout_keep_alive=ceil(limits.idle_timeout_s),
        proxy_headers=bool(limits.trusted_proxies),
        forwarded_allow_ips=list(limits.trusted_proxies),
        backlog=ACCEPTED_AT_ONCE,
        ssl_certfile=access.tls_cert,
        ssl_keyfile=access.tls_key,
    )


async def serve_forever(
    frontend: Frontend,
    socks: Sequence[socket.socket],
    drain_s: float = DRAIN_S,
    reload: Reload | None = None,
    at_once: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish requests (up to `drain_s`, then with an error).

    Pauses end with the last front end.  reload: effect of SIGHUP; None: SIGHUP ends the process.  at_once:
    set by a second signal, also after the return.
    """
    limits = frontend.limits
    server = HttpServer(_http_config(frontend, drain_s), limits)

    def ready(url: str) -> None:
        if frontend.config.batch_dir is not None:
            from .batches.endpoints import opened

            opened(frontend, cast("FastAPI", server.config.app))
        logger.info("Serving %s at %s", frontend.model_name, url)

    server.on_ready = ready
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def cut() -> None:
        server.end_unread()
        frontend.ending.cut()

    def stop() -> None:
        frontend.ending.begun = True
        server.stop()
        if server.force_exit:
            if at_once is not None:
                at_once.set()
            cut()
            return
        logger.info("Ending: what runs gets %g s to finish; a second signal ends it at once", drain_s)
        loop.call_later(drain_s, cut)
        tasks.add(loop.create_task(frontend.controller.leave()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if reload is not None:
        from .reload import on_hang_up

        loop.add_signal_handler(signal.SIGHUP, on_hang_up(stop, lambda: reload.begin(limits, server.context)))
    # Exempt current objects, and collect rarely: requests leave few cycles.
    gc.freeze()
    gc.collect()  # the collector waits for a quarter of the last, now frozen, objects
    gc.set_threshold(*RARE_COLLECTIONS)
    async with controlled(frontend):
        # a separate task: uvicorn's loop wakes ten times a second
        await asyncio.create_task(server.serve(sockets=list(socks)))


@contextlib.asynccontextmanager
async def controlled(frontend: Frontend) -> AsyncIterator[None]:
    """Runs the front end's controller; yields once ready."""
    deciding = asyncio.create_task(frontend.controller.run())
    try:
        await frontend.controller.ready()
        yield
    finally:
        deciding.cancel()


def run_server(frontend: Frontend, socks: Sequence[socket.socket], drain_s: float = DRAIN_S) -> None:
    """`serve_forever` in a new event loop."""
    asyncio.run(serve_forever(frontend, socks, drain_s))
