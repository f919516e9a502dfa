"""The roles of a cluster as processes of this host: started together, each started again when it ends."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryFile

from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.config import LoraServerConfig
from moe_lora.engine.supervisor import RestartPolicy

from .cluster import ClusterConfig
from .cluster_text import cluster_text
from .front_ends import ControllerConfig, FrontEndPlace

logger = logging.getLogger(__name__)

FRONT_END = "front-end"
STOP_S = 20.0
"""From SIGTERM to SIGKILL: a front end drains, an instance finishes its step."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A process to keep running.

    kind: roles of one kind stand in for each other.  words: of its command, after the interpreter; fds: that
    it inherits.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    fds: tuple[int, ...] = ()


@contextmanager
def cluster_file(cluster: ClusterConfig) -> Iterator[int]:
    """A descriptor of the cluster's file.

    The file has no name, since it holds the key: nobody else can open it, and nothing stays of it however the
    processes end that have it open.
    """
    with TemporaryFile() as file:
        file.write(cluster_text(cluster).encode())
        file.flush()
        yield file.fileno()


def on_loopback(
    cluster: ClusterConfig, num_front_ends: int, server: LoraServerConfig | None
) -> ClusterConfig:
    """The same cluster with a key of its own and addresses on this host.

    server: the LoRA Server that runs here, None if there is none.
    """
    addresses = iter(_free_addresses(2 + num_front_ends))
    return replace(
        cluster,
        key=secrets.token_hex(32) if server is None else server.key,
        lora_server=None
        if server is None
        else {**(cluster.lora_server or {}), "address": server.address, "store_dir": server.store_dir},
        front_end=replace(cluster.front_end, engines_address=None),
        front_ends={
            f"front-end-{number}": FrontEndPlace(engines_address=next(addresses))
            for number in range(num_front_ends)
        },
        controller=ControllerConfig(address=next(addresses), engines_address=next(addresses)),
    )


def _free_addresses(count: int) -> list[str]:
    """Ports that are free now; a role that finds its own taken by then says so and ends."""
    with ExitStack() as held:
        socks = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{sock.getsockname()[1]}" for sock in socks]


def roles_of(cluster: ClusterConfig, file: int, http: int) -> list[Role]:
    """The controller, front ends that share the listening socket `http`, and instances, in this order.

    file: descriptor of the cluster's file.
    """
    config = ("--config", f"/dev/fd/{file}", "--parent", str(os.getpid()))
    serve = ("-m", "moe_lora.cli.main", "serve", *config)
    return [
        Role(name="controller", kind="controller", words=(*serve, "--role", "controller"), fds=(file,)),
        *(
            Role(
                name=name,
                kind=FRONT_END,
                words=(*serve, "--role", "front-end", "--name", name, "--listen-fd", str(http)),
                fds=(file, http),
            )
            for name in cluster.front_ends
        ),
        *(
            Role(
                name=f"instance-{number}",
                kind="instance",
                words=(
                    *("-m", "moe_lora.dist.worker", *config),
                    *("--role", "instance", "--name", f"instance-{number}"),
                ),
                fds=(file,),
            )
            for number in range(cluster.engine.num_instances)
        ),
    ]


class HostRoles:
    """Keeps roles running; one thread waits for each.

    failed: whether all of a kind ended too often within a short time to be started again.
    """

    def __init__(
        self, roles: Sequence[Role], clock: Clock | None = None, policy: RestartPolicy | None = None
    ) -> None:
        self.failed = False
        self.over = threading.Event()
        """Set when the roles are to be stopped."""
        self._clock = clock or WallClock()
        self._policy = policy or RestartPolicy()
        self._lock = threading.Lock()
        self._stopping = False
        self._running: dict[str, tuple[Role, subprocess.Popen[bytes]]] = {}
        self._kept = [role.kind for role in roles]
        self._threads = [
            threading.Thread(target=self._keep, args=(role,), name=f"keep-{role.name}", daemon=True)
            for role in roles
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all, those first that others work for; return when they have ended."""
        with self._lock:
            self._stopping = True
            running = list(self._running.values())
        self.over.set()
        _end([process for role, process in running if role.kind == FRONT_END])
        _end([process for role, process in running if role.kind != FRONT_END])
        for thread in self._threads:
            thread.join()

    def _keep(self, role: Role) -> None:
        num_deaths = 0
        while (process := self._start(role)) is not None:
            started_s = self._clock.now_s()
            code = process.wait()
            if self._stopping:
                return
            lived_s = self._clock.now_s() - started_s
            num_deaths = num_deaths + 1 if lived_s < self._policy.quick_s else 1
            logger.warning(
                "%s (process %d) ended with exit code %d after %.1f s", role.name, process.pid, code, lived_s
            )
            pause_s = self._policy.pause_s(num_deaths)
            if pause_s is None:
                self._give_up(role, num_deaths)
                return
            self.over.wait(pause_s)

    def _give_up(self, role: Role, num_deaths: int) -> None:
        logger.error(
            "%s ended %d times within %g s of its start and is not started again; find the cause above",
            role.name,
            num_deaths,
            self._policy.quick_s,
        )
        with self._lock:
            self._kept.remove(role.kind)
            if role.kind not in self._kept:
                self.failed = True
                self.over.set()

    def _start(self, role: Role) -> subprocess.Popen[bytes] | None:
        """None: everything is being stopped."""
        with self._lock:
            if self._stopping:
                return None
            # A session of its own: a Ctrl-C in the terminal reaches the process that ends all others.
            process = subprocess.Popen(
                [sys.executable, *role.words], pass_fds=role.fds, start_new_session=True
            )
            self._running[role.name] = role, process
        logger.info("%s started (process %d)", role.name, process.pid)
        return process


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("process %d does not end and is killed", process.pid)
            process.kill()
            process.wait()


def run_roles(roles: Sequence[Role]) -> bool:
    """Keep the roles running until SIGINT or SIGTERM; whether all did their part up to then."""
    kept = HostRoles(roles)
    before = {number: signal.signal(number, lambda *_: kept.over.set()) for number in _SIGNALS}
    try:
        kept.over.wait()
    finally:
        kept.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    return not kept.failed


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
