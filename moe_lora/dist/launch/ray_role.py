# SPDX-License-Identifier: Apache-2.0
"""A Ray actor to keep a role's process running on a host."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from moe_lora.core.address import ADDRESSES, Address
from moe_lora.core.host import OwnFolder

from .enrolment import enrol
from .host_roles import CONTROLLER, FRONT_END, HostRoles, Role
from .progress import PLACED, READY, RUNNING, STARTING, RoleFacts
from .topology import Part

if TYPE_CHECKING:
    from .scaling import Snapshot

logger = logging.getLogger(__name__)

PREFIX = "moe_lora-ray-"
"""Start of the names of roles' folders."""
CERTIFICATES, STATE = "certificates", "state"
"""Folders in a role's folder."""
_BOOK = "addresses.json"
_READY_S, _METRICS_S = 2.0, 8.0
_MODULES = {FRONT_END: "moe_lora.cli.host_role", CONTROLLER: "moe_lora.cli.host_role"}
_MODULE = "moe_lora.dist.launch.run_role"


class RoleActor:
    """Keeps a role's process, with a private folder and reserved ports on this host."""

    def __init__(self, part: Part, number: int, http: Mapping[str, Any], host: str | None = None) -> None:
        """http: port, tls_cert, drain_s, heartbeat_dead_s, and has_key: metrics need a key; of front ends.

        host: this host's IP address.
        """
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._part, self._number, self._http = part, number, http
        self._host = host or _own_ip()
        self._family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._reserved: list[socket.socket] = []
        self._name = f"{part.role}-{number}"
        self._addresses = {
            f"{self._name}:{port}": str(Address(self._host, self._reserve())) for port in part.ports(number)
        }
        self._listening = self._listen(http["port"]) if part.role == FRONT_END else None
        self._port = 0 if self._listening is None else int(self._listening.getsockname()[1])
        self._key = secrets.token_urlsafe(32) if http["has_key"] else ""
        self._own: OwnFolder | None = None
        self._book_number = 0
        self._roles: HostRoles | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_ending = asyncio.Event()

    def _listen(self, port: int) -> socket.socket:
        """A listening socket; at a free port if the port is in use."""
        try:
            return socket.create_server((self._host, port), family=self._family)
        except OSError as error:
            logger.warning("HTTP has a free port: %d of %s: %s", port, self._host, error)
            return socket.create_server((self._host, 0), family=self._family)

    def _reserve(self) -> int:
        sock = socket.socket(self._family)
        sock.bind((self._host, 0))
        # Set after bind: the role's process may bind the port now, another role's `_reserve` may not.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.append(sock)
        return int(sock.getsockname()[1])

    @property
    def folder(self) -> Path:
        """The role's folder, made at the first call."""
        if self._own is None:
            self._own = OwnFolder(prefix=PREFIX)
        return self._own.path

    @property
    def _url(self) -> str:
        scheme = "http" if self._http["tls_cert"] is None else "https"
        return f"{scheme}://{Address(self._host, self._port)}" if self._port else ""

    async def facts(self) -> RoleFacts:
        """The role's state now."""
        state, problem, num_restarts = PLACED, "", 0
        if self._roles is not None:
            num_restarts = self._roles.num_restarts
            # A controller reports no start.
            serving = self._roles.running if self._part.role == CONTROLLER else self._roles.started
            state = RUNNING if serving else STARTING
            if not serving and self._roles.problem is not None:
                problem = str(self._roles.problem)
            if self._port and await _read(f"{self._url}/ready", _READY_S) is not None:
                state = READY
        return RoleFacts(
            name=self._name,
            state=state,
            host=self._host,
            addresses=self._addresses,
            book_number=self._book_number,
            url=self._url,
            num_restarts=num_restarts,
            problem=problem,
        )

    async def snapshot(self) -> Snapshot | None:
        """Metrics of the front end; None without an answer."""
        from .scaling import read_snapshot

        text = await _read(f"{self._url}/metrics", _METRICS_S, self._key)
        return None if text is None else read_snapshot(text)

    async def enrol(self, address: str, token: str, authority: str) -> None:
        """Get a certificate for this host.  Raises ConfigError."""
        await asyncio.to_thread(enrol, address, token, authority, self.folder / CERTIFICATES)

    async def start(self, content: Mapping[str, Any], number: int, book: Mapping[str, str]) -> None:
        """Start the role's process with this content of the cluster's file."""
        self.set_book(number, book)
        (self.folder / STATE).mkdir(exist_ok=True)
        front_end = {**content["front_end"], "host": self._host}
        if self._port:
            front_end["port"] = self._port
        if self._key:  # for this actor, beside the clients' keys
            digest = hashlib.sha256(self._key.encode()).hexdigest()
            front_end["admin_key_digests"] = [*front_end.get("admin_key_digests", ()), digest]
        file = self.folder / "cluster.yaml"
        file.write_text(yaml.safe_dump({**content, "front_end": front_end}, sort_keys=False))
        index = str(self._number)
        module = _MODULES.get(self._part.role, _MODULE)
        words = ("-m", module, "--config", str(file), "--parent", str(os.getpid()))
        fds = () if self._listening is None else (self._listening.fileno(),)
        listen = [word for fd in fds for word in ("--listen-fd", str(fd))]
        role = Role(
            name=self._name,
            kind=self._part.role,
            words=(*words, *self._part.options(index), *listen),
            fds=fds,
            environment={**self._part.environment(index), ADDRESSES: str(self.folder / _BOOK)},
        )
        self._roles = HostRoles([role], drain_s=self._http["drain_s"], dead_s=self._http["heartbeat_dead_s"])

    def set_book(self, number: int, book: Mapping[str, str]) -> None:
        """Replace the address book, except by a lower number."""
        if number > self._book_number:
            self._book_number = number
            new = self.folder / "addresses.new"
            new.write_text(json.dumps({**book, **self._addresses}))
            new.replace(self.folder / _BOOK)

    async def failed(self) -> str:
        """Wait for a final start error, or for `stop`; returns the reason."""
        assert self._roles is not None
        ends: list[asyncio.Future[Any]] = [
            self._roles.failed,
            asyncio.ensure_future(self._is_ending.wait()),
        ]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return str(self._roles.failed.result()) if self._roles.failed.done() else "its process was ended"

    async def stop(self) -> None:
        """End the process, a front end after open requests, and delete the folder.

        Idempotent: a second signal would end open requests.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._is_ending.set()
        if self._listening is not None:
            self._listening.close()
        if self._roles is not None:
            await self._roles.stop()
        if self._own is not None:
            self._own.remove()


def _own_ip() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


async def _read(url: str, limit_s: float, key: str = "") -> str | None:
    """The text at a URL; None without status 200."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No certificate is checked: the URL is this host's.
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=limit_s, headers=headers) as client:
        try:
            response = await client.get(url)
        except httpx.HTTPError:
            return None
    return response.text if response.status_code == 200 else None
