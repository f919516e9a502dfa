# SPDX-License-Identifier: Apache-2.0
"""Processes of this host: start, restart and stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moe_lora.config import FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.devices import instance_names
from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.errors import AdapterError, ConfigError, EngineDeadError, RegistryError
from moe_lora.core.processes import LOWEST, Child, RestartPolicy, set_priority
from moe_lora.dist.net.codec import Decoder, Message, encode

if TYPE_CHECKING:
    from .spare import Spare

logger = logging.getLogger(__name__)

FRONT_END, CONTROLLER, INSTANCE = "front-end", "controller", "instance"
_OF_SETTINGS = (ConfigError, AdapterError, RegistryError)
START_TRIES = 3
"""Silent deaths before `ready` fails: the cause may pass."""
STOP_S = 20.0
"""From SIGTERM to SIGKILL, plus a front end's drain time."""
STOPPED_DEATHS = 2.0
"""A process stopped for this multiple of dead_s is killed."""
_LOOK_S = 0.5
_LOOKS = 20
"""Checks of a stopped process before its kill."""


class Started(Message, frozen=True):
    """A child's first word to its keeper.  error: of a failed start."""

    error: Exception | None = None


_DECODE = Decoder(Started)


class _Died(EngineDeadError):
    """A role's process ended silently."""


def say_started(status: int | None, error: Exception | None = None) -> None:
    """Report the start, or its error, and close the descriptor."""
    if status is not None:
        with suppress(OSError), open(status, "wb") as pipe:
            pipe.write(encode(Started(error)))


@contextmanager
def failure_told(status: int | None) -> Iterator[None]:
    """Report the exception that ends this process."""
    try:
        yield
    except Exception as error:
        say_started(status, error)
        raise


@dataclass(frozen=True, kw_only=True)
class Role:
    """A process to keep running.

    kind: of roles that can replace each other.  words: command after the interpreter, plus `--status-fd` and
    `--starts`.  fds: inherited.  yields: lowest priority until ready.  added: starts beside others, as after
    a first start.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    fds: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    yields: bool = False
    added: bool = False


class HostRoles:
    """Keeps roles running; belongs to one event loop.

    Restarts for ever, unless a setting breaks the first start.  drain_s: time for a front end's requests.
    at_once: once set, `stop` waits for no process.  failed: cause that stops every role of a kind.  started:
    names of roles in service.  problem: of the last end.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        *,
        clock: Clock | None = None,
        policy: RestartPolicy | None = None,
        drain_s: float = 0.0,
        at_once: asyncio.Event | None = None,
        dead_s: float = FrontEndConfig.heartbeat_dead_s,
        spare: Spare | None = None,
    ) -> None:
        self._spare = spare
        self._stopped_s = STOPPED_DEATHS * dead_s
        self._at_once = at_once or asyncio.Event()
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.started: set[str] = set()
        self.num_restarts = 0
        self.problem: Exception | None = None
        self._roles: dict[str, Role] = {}
        self._drain_s = drain_s
        self._clock = clock or WallClock()
        self._policy = policy or RestartPolicy()
        self._stopping = False
        self._running: dict[str, tuple[Role, Child]] = {}
        self._starts: Counter[str] = Counter()
        self._kept: list[str] = []
        self._ready: dict[str, asyncio.Future[None]] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        for role in roles:
            self.add(role)
        self._watching = asyncio.create_task(self._end_stopped())

    def add(self, role: Role) -> asyncio.Future[None]:
        """Keep a further role running; the result comes as from `ready`."""
        self._roles[role.name] = role
        self._kept.append(role.kind)
        self._ready[role.name] = asyncio.get_running_loop().create_future()
        self._keeping[role.name] = asyncio.create_task(self._keep(role))
        return self._ready[role.name]

    async def remove(self, name: str) -> None:
        """End a role for good: no death."""
        role, keeping = self._roles.pop(name), self._keeping.pop(name)
        if not keeping.done():
            self._kept.remove(role.kind)
        keeping.cancel()  # ends the process, as `stop` does
        await asyncio.wait([keeping])

    async def ready(self) -> None:
        """Wait until each role has started.

        Raises a role's start error, or its end after `START_TRIES` silent deaths.
        """
        await asyncio.gather(*self._ready.values())

    @property
    def running(self) -> Mapping[str, int]:
        """Processes by role."""
        return {name: child.pid for name, (_, child) in self._running.items()}

    def kill(self, name: str) -> None:
        """Kill a stuck process, for a restart."""
        found = self._running.get(name)
        if found is not None:
            found[1].process.kill()

    async def _end_stopped(self) -> None:
        since_s: dict[int, float] = {}
        while True:
            await asyncio.sleep(max(_LOOK_S, self._stopped_s / _LOOKS))
            now_s, running = self._clock.now_s(), dict(self._running)
            stopped = {name: one.pid for name, (_, one) in running.items() if one.is_stopped}
            since_s = {pid: since_s.get(pid, now_s) for pid in stopped.values()}
            for name, pid in stopped.items():
                if now_s - since_s[pid] >= self._stopped_s:
                    logger.error("%s is stopped for %.0f s and is ended", name, now_s - since_s[pid])
                    self.kill(name)

    def hang_up(self) -> None:
        """Have all read settings again; a process without a handler restarts."""
        for _, child in self._running.values():
            child.process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        """Stop all, dependents first, and wait."""
        self._stopping = True
        if self._spare is not None:
            await self._spare.stop()
        running = [found for name in self._roles if (found := self._running.get(name)) is not None]
        for first, limit_s in ((True, STOP_S + self._drain_s), (False, STOP_S)):
            some = [child for role, child in running if (role.kind == FRONT_END) == first]
            await _end(some, limit_s, self._at_once)
        tasks = [*self._keeping.values(), self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, role: Role) -> None:
        num_deaths = num_starts = 0
        while not self._stopping:
            started_s = self._clock.now_s()
            error = await self._live(role)
            if self._stopping:
                return
            num_starts += 1
            self.num_restarts, self.problem = self.num_restarts + 1, error
            lived_s = self._clock.now_s() - started_s
            num_deaths = self._policy.num_deaths(num_deaths, lived_s)
            logger.warning("%s ended after %.1f s: %s", role.name, lived_s, error)
            was_said = not isinstance(error, _Died)
            if (was_said or num_starts >= START_TRIES) and not self._ready[role.name].done():
                self._ready[role.name].set_exception(error)
                self._ready[role.name].exception()
            if num_starts == 1 and isinstance(error, _OF_SETTINGS):
                self._give_up(role, error)
                return
            await asyncio.sleep(self._policy.pause_s(num_deaths))

    async def _live(self, role: Role) -> Exception:
        """Run a role's process; returns its error or exit.

        A failure here, e.g. lack of memory, is _Died: the next try may work.
        """
        try:
            return await self._run(role)
        except Exception as error:
            return _Died(f"it can't be kept running: {error!r}")

    async def _run(self, role: Role) -> Exception:
        num_starts = self._starts[role.name] + role.added
        self._starts[role.name] += 1
        spare = self._spare if role.kind == INSTANCE else None
        child = (spare and spare.acquire(role.name, num_starts)) or Child(
            *role.words,
            "--status-fd",
            options=("--starts", str(num_starts)),
            fds=role.fds,
            environment=role.environment,
        )
        with child.socket:
            self._running[role.name] = role, child
            try:
                logger.info("%s started (process %d)", role.name, child.pid)
                if role.yields:
                    set_priority(child.pid, LOWEST)
                if self._stopping:
                    await _end([child], STOP_S, self._at_once)
                started = await _first_word(child)
                if started is not None and started.error is None:
                    if role.yields:
                        set_priority(child.pid, 0)
                    self._does_its_part(role, spare)
                await asyncio.wrap_future(child.ended)
            finally:
                if not child.ended.done():
                    await _end([child], STOP_S, self._at_once)
                del self._running[role.name]
                self.started.discard(role.name)
        if started is not None and started.error is not None:
            return started.error
        return _Died(f"process {child.pid} {child.how_ended}{'' if started else ' while starting'}")

    def _does_its_part(self, role: Role, spare: Spare | None) -> None:
        self.started.add(role.name)
        if not self._ready[role.name].done():
            self._ready[role.name].set_result(None)
        if spare is not None and not self._stopping:
            spare.put_off()

    def _give_up(self, role: Role, error: Exception) -> None:
        logger.error("%s is not started again, since a setting is the cause: %s", role.name, error)
        self._kept.remove(role.kind)
        if role.kind not in self._kept and not self.failed.done():
            self.failed.set_result(error)


async def _first_word(child: Child) -> Started | None:
    """The start report; None after a silent end."""
    reader, writer = await asyncio.open_connection(sock=child.socket)
    try:
        said = await reader.read()
    except ConnectionError:
        said = b""
    finally:
        writer.close()
    return _DECODE(said) if said else None


async def _end(children: Sequence[Child], limit_s: float, at_once: asyncio.Event) -> None:
    for child in children:
        child.process.terminate()
    await asyncio.gather(*(_ended(child, limit_s, at_once) for child in children))


async def _ended(child: Child, limit_s: float, at_once: asyncio.Event) -> None:
    ended, told = asyncio.wrap_future(child.ended), asyncio.create_task(at_once.wait())
    await asyncio.wait((ended, told), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if not child.ended.done():
        logger.warning("process %d does not end and is killed", child.pid)
        child.process.kill()
    told.cancel()
    await ended


async def run_roles(
    roles: Sequence[Role],
    drain_s: float = 0.0,
    reload: Callable[[HostRoles], Coroutine[Any, Any, None]] | None = None,
    at_once: asyncio.Event | None = None,
    dead_s: float = FrontEndConfig.heartbeat_dead_s,
    spare: Spare | None = None,
    at_start: Callable[[HostRoles], None] = lambda kept: None,
) -> bool:
    """Keep the roles running until SIGINT or SIGTERM; True if all started.

    at_once: set by a second signal.  at_start: gets the keeper.
    """
    over, at_once = asyncio.Event(), at_once or asyncio.Event()
    kept = HostRoles(roles, drain_s=drain_s, at_once=at_once, dead_s=dead_s, spare=spare)
    at_start(kept)

    def end() -> None:
        if over.is_set():
            at_once.set()
        over.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    tasks: set[asyncio.Task[None]] = set()
    if reload is not None:

        def read_again() -> None:
            task = asyncio.create_task(reload(kept))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)
    kept.failed.add_done_callback(lambda _: over.set())
    try:
        await over.wait()
    finally:
        await kept.stop()
    return not kept.failed.done()


def roles_of(cluster: ClusterConfig, file: int, http: Sequence[int]) -> list[Role]:
    """The controller, front ends on the listening sockets `http`, and instances."""
    listen = [word for one in http for word in ("--listen-fd", str(one))]
    serve = ("-m", "moe_lora.cli.host_role", *_told(file))
    return [
        Role(name="controller", kind=CONTROLLER, words=(*serve, "--role", "controller"), fds=(file,)),
        *(
            Role(
                name=name,
                kind=FRONT_END,
                words=(*serve, "--role", "front-end", "--name", name, *listen),
                fds=(file, *http),
            )
            for name in cluster.front_ends
        ),
        *instance_roles(cluster.engine.num_instances, file),
    ]


def instance_roles(num_instances: int, file: int) -> list[Role]:
    """The instances on this host."""
    names, run = instance_names(num_instances), _instance(file)
    return [Role(name=name, kind=INSTANCE, words=(*run, "--name", name), fds=(file,)) for name in names]


def spare_of(cluster: ClusterConfig, file: int) -> Spare | None:
    """The spare of the instances on this host, if any."""
    if not cluster.engine.spare_process or cluster.engine.num_instances == 1:
        return None
    from .spare import Spare

    return Spare(_instance(file), (file,))


def _instance(file: int) -> tuple[str, ...]:
    return *_RUN_ROLE, *_told(file), "--role", "instance"


def server_roles(num_ranks: int, file: int, before: str = "") -> list[Role]:
    """The LoRA Server's ranks, as in a torchrun job.  before: begins the names, beside another server."""
    return [
        Role(
            name=f"{before}lora-server-{rank}",
            kind="lora-server",
            words=(*_RUN_ROLE, *_told(file), "--role", "lora-server"),
            fds=(file,),
            environment={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)},
        )
        for rank in range(num_ranks)
    ]


_RUN_ROLE = ("-m", "moe_lora.dist.launch.run_role")


def _told(file: int) -> tuple[str, ...]:
    """Options: the cluster's descriptor, and the parent."""
    return "--config", f"/dev/fd/{file}", "--parent", str(os.getpid())
