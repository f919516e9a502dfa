# SPDX-License-Identifier: Apache-2.0
"""Processes of this host: started together, each started again whenever it ends, ended together."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO

from moe_lora.config import ControllerConfig, EngineConfig, FrontEndConfig, FrontEndPlace
from moe_lora.config.cluster import ClusterConfig, cluster_text
from moe_lora.config.devices import instance_names
from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.errors import AdapterError, ConfigError, EngineDeadError, RegistryError
from moe_lora.core.processes import is_stopped
from moe_lora.dist.net.codec import Decoder, Message, encode

if TYPE_CHECKING:
    from .spare import Spare

logger = logging.getLogger(__name__)

FRONT_END, CONTROLLER, INSTANCE = "front-end", "controller", "instance"
_OF_SETTINGS = (ConfigError, AdapterError, RegistryError)
START_TRIES = 3
"""Starts of a process that may end without a word before who awaits all is told: what ends them may pass, as
a lack of memory does."""
STOP_S = 20.0
"""From SIGTERM to SIGKILL, beside the time that a front end drains: an instance finishes its step."""
STOPPED_DEATHS = 2.0
"""A process that is stopped so many times as long as one may be silent is ended: until then it may wake."""
_LOOK_S = 0.5
_LOOKS = 20
"""At a stopped process, in the time for which it may be stopped."""


class Started(Message, frozen=True):
    """What a process says once over its status descriptor.  error: what keeps it from its part."""

    error: Exception | None = None


_DECODE = Decoder(Started)


class _Died(EngineDeadError):
    """A role's process ended without a word."""


def say_started(status: int | None, error: Exception | None = None) -> None:
    """Tell who started this process that it does its part, or why it can't.  status: a descriptor, closed."""
    if status is not None:
        with suppress(OSError), open(status, "wb") as pipe:
            pipe.write(encode(Started(error)))


@contextmanager
def failure_told(status: int | None) -> Iterator[None]:
    """Tell who started this process what ends it."""
    try:
        yield
    except Exception as error:
        say_started(status, error)
        raise


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """A process that ends within `quick_s` of its start died quickly; after several such deaths in a row it
    waits before each start, so that it takes no cores from those that work."""

    quick_s: float = 30.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 5.0

    def pause_s(self, num_deaths: int) -> float:
        """Seconds to wait after so many quick deaths in a row, 0 after the first."""
        if num_deaths <= 1:
            return 0.0
        return min(self.longest_pause_s, self.first_pause_s * 2 ** (num_deaths - 2))


@dataclass(frozen=True, kw_only=True)
class Role:
    """A process to keep running.

    kind: roles of one kind stand in for each other.  words: of its command, after the interpreter; it gets
    `--status-fd` and `--starts`, how often it was started before, beside them.  fds: that it inherits.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    fds: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class HostRoles:
    """Keeps roles running; belongs to one event loop.

    Everything is started again, for ever, unless a setting keeps its first process from its part.  drain_s:
    how long a front end may take to end what it serves.  at_once: when it is set, `stop` waits for nobody.
    dead_s: one that is stopped (SIGSTOP) for STOPPED_DEATHS of this is killed.
    spare: of the roles of kind INSTANCE.  failed: what kept all of a kind from their part.
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
        self._roles = list(roles)
        self._drain_s = drain_s
        self._clock = clock or WallClock()
        self._policy = policy or RestartPolicy()
        self._stopping = False
        self._running: dict[str, tuple[Role, asyncio.subprocess.Process]] = {}
        self._kept = [role.kind for role in roles]
        self._ready = {role.name: asyncio.get_running_loop().create_future() for role in roles}
        self._tasks = [asyncio.create_task(self._keep(role)) for role in roles]
        self._tasks.append(asyncio.create_task(self._end_stopped()))

    async def ready(self) -> None:
        """Return when each role has said that it does its part.

        Raises what one says that keeps it from that, or how it ended if it does so `START_TRIES` times.
        """
        await asyncio.gather(*self._ready.values())

    def kill(self, name: str) -> None:
        """End a process that does nothing any more, be it stopped or stuck; it is started again."""
        found = self._running.get(name)
        if found is not None:
            with suppress(ProcessLookupError):
                found[1].kill()

    async def _end_stopped(self) -> None:
        """Kill those that are stopped for too long, as somebody who looks into one may forget to wake it."""
        since_s: dict[int, float] = {}
        while True:
            await asyncio.sleep(max(_LOOK_S, self._stopped_s / _LOOKS))
            now_s, running = self._clock.now_s(), dict(self._running)
            stopped = {name: one.pid for name, (_, one) in running.items() if is_stopped(one.pid)}
            since_s = {pid: since_s.get(pid, now_s) for pid in stopped.values()}
            for name, pid in stopped.items():
                if now_s - since_s[pid] >= self._stopped_s:
                    logger.error("%s is stopped for %.0f s and is ended", name, now_s - since_s[pid])
                    self.kill(name)

    def hang_up(self) -> None:
        """Have all read again what they can of their settings.

        One that does not listen for the signal yet ends by it, and reads them when it is started again.
        """
        for _, process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        """End all, those first that others work for; return when they have ended."""
        self._stopping = True
        if self._spare is not None:
            await self._spare.stop()
        running = [found for role in self._roles if (found := self._running.get(role.name)) is not None]
        for first, limit_s in ((True, STOP_S + self._drain_s), (False, STOP_S)):
            some = [process for role, process in running if (role.kind == FRONT_END) == first]
            await _end(some, limit_s, self._at_once)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, role: Role) -> None:
        num_deaths = num_starts = 0
        while not self._stopping:
            started_s = self._clock.now_s()
            error = await self._live(role, num_starts)
            if self._stopping:
                return
            num_starts += 1
            lived_s = self._clock.now_s() - started_s
            num_deaths = num_deaths + 1 if lived_s < self._policy.quick_s else 1
            logger.warning("%s ended after %.1f s: %s", role.name, lived_s, error)
            was_said = not isinstance(error, _Died)
            if (was_said or num_starts >= START_TRIES) and not self._ready[role.name].done():
                self._ready[role.name].set_exception(error)
                self._ready[role.name].exception()
            if num_starts == 1 and isinstance(error, _OF_SETTINGS):
                self._give_up(role, error)
                return
            await asyncio.sleep(self._policy.pause_s(num_deaths))

    async def _live(self, role: Role, num_starts: int) -> Exception:
        """Start a role's process and wait for its end; what it said was wrong, or how it ended.

        _Died also for what fails here, for want of handles, memory or threads: perhaps not the next time.
        """
        try:
            return await self._run(role, num_starts)
        except Exception as error:
            return _Died(f"it can't be kept running: {error!r}")

    async def _run(self, role: Role, num_starts: int) -> Exception:
        """As `_live`; raises what fails here, after it has ended what it started."""
        spare = self._spare if role.kind == INSTANCE else None
        starts = ("--starts", str(num_starts))
        process, pipe = (spare and spare.acquire(role.name, num_starts)) or await start_process(
            role.words, starts, role.fds, role.environment
        )
        with pipe:
            self._running[role.name] = role, process
            try:
                logger.info("%s started (process %d)", role.name, process.pid)
                if self._stopping:  # it came too late for `stop`
                    await _end([process], STOP_S, self._at_once)
                said = await _all_of(pipe)
                started: Started | None = _DECODE(said) if said else None
                if started is not None and started.error is None:
                    self._does_its_part(role, spare)
                code = await process.wait()
            finally:
                if process.returncode is None:
                    await _end([process], STOP_S, self._at_once)
                del self._running[role.name]
        if started is not None and started.error is not None:
            return started.error
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _Died(f"process {process.pid} {how}{'' if started else ' while starting'}")

    def _does_its_part(self, role: Role, spare: Spare | None) -> None:
        if not self._ready[role.name].done():
            self._ready[role.name].set_result(None)
        if spare is not None and not self._stopping:
            spare.put_off()

    def _give_up(self, role: Role, error: Exception) -> None:
        logger.error("%s is not started again, since a setting is the cause: %s", role.name, error)
        self._kept.remove(role.kind)
        if role.kind not in self._kept and not self.failed.done():
            self.failed.set_result(error)


async def start_process(
    words: Sequence[str],
    options: Sequence[str],
    fds: Sequence[int],
    environment: Mapping[str, str] | None = None,
) -> tuple[asyncio.subprocess.Process, BinaryIO]:
    """A Python process of these words, `--status-fd` and options; the pipe of its status."""
    status, theirs = os.pipe()
    try:
        # A session of its own: a Ctrl-C in the terminal reaches the process that ends all others.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *words, "--status-fd", str(theirs), *options),
            pass_fds=(*fds, theirs),
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    except BaseException:
        os.close(status)
        raise
    finally:
        os.close(theirs)
    return process, os.fdopen(status, "rb")


async def _all_of(pipe: BinaryIO) -> bytes:
    """What is written to a pipe before its end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()


async def _end(
    processes: Sequence[asyncio.subprocess.Process], limit_s: float, at_once: asyncio.Event
) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            process.terminate()
    await asyncio.gather(*(_ended(process, limit_s, at_once) for process in processes))


async def _ended(process: asyncio.subprocess.Process, limit_s: float, at_once: asyncio.Event) -> None:
    """Return when it has; it is killed after `limit_s`, or `at_once`."""
    ended, told = asyncio.create_task(process.wait()), asyncio.create_task(at_once.wait())
    await asyncio.wait((ended, told), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        logger.warning("process %d does not end and is killed", process.pid)
        with suppress(ProcessLookupError):
            process.kill()
    told.cancel()
    await ended


async def run_roles(
    roles: Sequence[Role],
    drain_s: float = 0.0,
    reload: Callable[[HostRoles], Coroutine[Any, Any, None]] | None = None,
    at_once: asyncio.Event | None = None,
    dead_s: float = FrontEndConfig.heartbeat_dead_s,
    spare: Spare | None = None,
) -> bool:
    """Keep the roles running until SIGINT or SIGTERM; whether all did their part up to then.

    drain_s, dead_s, spare: see `HostRoles`.  reload: what SIGHUP does.  at_once: set by a second signal, also
    when this has returned.
    """
    over, at_once = asyncio.Event(), at_once or asyncio.Event()
    kept = HostRoles(roles, drain_s=drain_s, at_once=at_once, dead_s=dead_s, spare=spare)

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


# A whole cluster on this host: its file, and its roles as processes (`host_roles` keeps them running).


@contextmanager
def cluster_file(cluster: ClusterConfig) -> Iterator[int]:
    """A descriptor of the cluster's file.

    The file has no name: nothing stays of it however the processes end that have it open.
    """
    with TemporaryFile() as file:
        write_cluster(file.fileno(), cluster)
        yield file.fileno()


def write_cluster(file: int, cluster: ClusterConfig) -> None:
    """Have the file say this; processes read it when they start, or are told to.

    Raises OSError where there is no room for it, and then the file says what it said.
    """
    text, before = cluster_text(cluster).encode(), os.pread(file, os.fstat(file).st_size, 0)
    try:
        if os.pwrite(file, text, 0) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        text = before
        os.pwrite(file, text, 0)
        raise
    finally:
        os.ftruncate(file, len(text))


def on_sockets(cluster: ClusterConfig, num_front_ends: int, folder: str) -> ClusterConfig:
    """The same cluster with all its addresses sockets in a folder that only this user enters.

    num_front_ends: 1: the one that starts the instances, and decides.
    """
    front_end = replace(cluster.front_end, engines_address=None)
    if num_front_ends == 1:
        alone = replace(front_end, engines_address=f"{folder}/engines")
        return replace(cluster, certificates=None, front_end=alone, front_ends={}, controller=None)
    return replace(
        cluster,
        certificates=None,
        front_end=front_end,
        front_ends={
            f"front-end-{number}": FrontEndPlace(engines_address=f"{folder}/front-end-{number}")
            for number in range(num_front_ends)
        },
        controller=ControllerConfig(address=f"{folder}/controller", engines_address=f"{folder}/engines"),
    )


def roles_of(cluster: ClusterConfig, file: int, http: Sequence[int]) -> list[Role]:
    """The controller, front ends that share the listening sockets `http`, and instances, in this order.

    file: descriptor of the cluster's file.
    """
    listen = [word for one in http for word in ("--listen-fd", str(one))]
    serve = ("-m", "moe_lora.cli.main", "serve", *_told(file))
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
    """The instances of a cluster on this host.  file: descriptor of the cluster's file."""
    names, run = instance_names(num_instances), _instance(file)
    return [Role(name=name, kind=INSTANCE, words=(*run, "--name", name), fds=(file,)) for name in names]


def spare_of(cluster: ClusterConfig, file: int) -> Spare | None:
    """Of the cluster's instances on this host.  file: descriptor of the cluster's file."""
    if not cluster.engine.spare_process or cluster.engine.num_instances == 1:
        return None
    from .spare import Spare

    return Spare(_instance(file), (file,))


def _instance(file: int) -> tuple[str, ...]:
    return *_RUN_ROLE, *_told(file), "--role", "instance"


def server_roles(num_ranks: int, file: int) -> list[Role]:
    """The LoRA Server's ranks, as those of a torchrun job.  file: descriptor of the cluster's file."""
    return [
        Role(
            name=f"lora-server-{rank}",
            kind="lora-server",
            words=(*_RUN_ROLE, *_told(file), "--role", "lora-server"),
            fds=(file,),
            environment={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)},
        )
        for rank in range(num_ranks)
    ]


_RUN_ROLE = ("-m", "moe_lora.dist.launch.run_role")


def _told(file: int) -> tuple[str, ...]:
    """Options of a process that reads the cluster from a descriptor, and ends with this one."""
    return "--config", f"/dev/fd/{file}", "--parent", str(os.getpid())


# What each of several instances on one machine gets of it.


def thread_share(num_threads: int | None, num_instances: int, num_cores: int) -> int:
    """CPU threads of each instance: as asked for, else an equal share of the cores, at least one.

    Processes with more threads than cores wait for each other's at every parallel step.  Raises ConfigError
    if more were asked for.
    """
    share = max(1, num_cores // num_instances)
    if num_threads is not None and num_threads > share:
        raise ConfigError(
            f"num_threads={num_threads} for each of {num_instances} instances makes "
            f"{num_threads * num_instances} threads, but there are {num_cores} cores; choose at most {share} "
            "threads, or fewer instances"
        )
    return num_threads or share


def check_pool(config: EngineConfig) -> None:
    """Raises ConfigError for an adapter pool that `config.num_instances` on this machine can't keep."""
    pool = config.pool
    if pool is None:
        return
    if config.num_instances < 2:
        raise ConfigError(
            "an adapter pool is over several instances; give --instances 2 or more, or leave it out"
        )
    if pool.replicas > config.num_instances:
        raise ConfigError(
            f"pool.replicas={pool.replicas} is more than the {config.num_instances} instances; choose fewer"
        )
