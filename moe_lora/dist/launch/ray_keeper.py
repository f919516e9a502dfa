# SPDX-License-Identifier: Apache-2.0
"""A Ray actor for the places of a cluster's roles: finds hosts, and new hosts for lost roles."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import state_folder, sweep_folders
from moe_lora.core.processes import RestartPolicy
from moe_lora.dist.net.keys import make_keys

from .cluster_file import check_instances
from .enrolment import Enrolment
from .host_roles import CONTROLLER, FRONT_END, INSTANCE, STOP_S
from .progress import PLACED, READY, RUNNING, RoleFacts
from .ray_role import CERTIFICATES, PREFIX, STATE, RoleActor
from .topology import LORA_SERVER, Hosts, Part, parts_of, roles_file

if TYPE_CHECKING:
    from .scaling import Fleet, Scaler, Snapshot, Snapshots

logger = logging.getLogger(__name__)

KEEPER = "keeper"
_HTTP = ("port", "tls_cert", "drain_s", "heartbeat_dead_s")
FAILED, PLACING, WAITING, SILENT = "failed", "placing", "waits for room", "silent"
"""States of a role without a host, or without an answer."""
_PLACING_S = 10.0
"""Time for a host to start an actor."""
_FACTS_S = 10.0
_LOST_S = 30.0
_LOOK_S = 1.0
_ROOM_S, _MOVED_S = 120.0, 600.0
"""Time for a role's placement at another host, and for the start there."""
_SPREAD = {FRONT_END, INSTANCE}
_LEAVES = (INSTANCE, LORA_SERVER, CONTROLLER, FRONT_END)
"""Order of the roles that leave a drained host."""


def cluster_on_ray(content: Any, num_front_ends: int) -> tuple[ClusterConfig, dict[str, Any]]:
    """The cluster as given, and the content of the roles' file.  Raises ConfigError."""
    hosts = Hosts(
        source="Ray",
        place="on all hosts",
        folder="/",
        certificates=CERTIFICATES,
        state_dir=STATE,
        num_front_ends=num_front_ends,
        name=lambda role, number: f"{role}-{number}",
    )
    cluster, given = roles_file(content, hosts)
    given["engine"].setdefault("num_threads", 1)  # as reserved: instances may share a host
    return cluster, given


@dataclass(kw_only=True)
class _Kept:
    """A role to keep.  facts: None without a host.  since_s: start of the wait for room."""

    part: Part
    number: int
    epoch: int = 0
    actor: Any = None
    facts: RoleFacts | None = None
    since_s: float = 0.0
    num_failures: int = 0
    problem: str = ""
    task: asyncio.Task[None] = field(init=False)

    @property
    def name(self) -> str:
        return f"{self.part.role}-{self.number}"

    def shown(self) -> RoleFacts:
        """For `status`."""
        facts = self.facts
        if facts is None:
            state, problem = self._absence()
            facts = RoleFacts(name=self.name, state=state, problem=problem)
        return replace(facts, num_failures=self.num_failures)

    def _absence(self) -> tuple[str, str]:
        if self.actor is None:
            return FAILED, self.problem
        if time.monotonic() - self.since_s < _PLACING_S:
            return PLACING, self.problem
        room = [f"{self.part.num_cores or 1} CPU"]
        if self.part.num_gpus:
            room.append(f"{self.part.num_gpus} GPU")
        return WAITING, f"no host has {' and '.join(room)} free"


class Keeper:
    """Keeps every role of a cluster on a host with room.

    A restarted keeper finds the roles by name.  content: of the cluster's file.
    """

    def __init__(self, name: str, content: Any, num_front_ends: int) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        self._num_front_ends = num_front_ends
        self._cluster, self._content = cluster_on_ray(content, num_front_ends)
        context = ray.get_runtime_context()
        cluster = hashlib.sha256(context.gcs_address.encode()).hexdigest()[:8]
        self._folder = state_folder(None) / f"ray-{name}-{cluster}"
        if not context.was_current_actor_reconstructed:
            shutil.rmtree(self._folder, ignore_errors=True)
            make_keys(self._folder)
        self._enrolment = Enrolment(self._folder)
        self._last_number = 0
        self._kept: dict[str, _Kept] = {}
        self._book: dict[str, str] = {}
        self._drained: set[str] = set()
        self._changing = asyncio.Lock()
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._scaler: Scaler | None = None
        self._scaling: asyncio.Task[None] | None = None
        self._begun = asyncio.get_running_loop().create_task(self._begin())

    async def _begin(self) -> None:
        self._address = await self._enrolment.start(ray.util.get_node_ip_address())
        with suppress(FileNotFoundError):
            self._set_instances(int(self._number_file.read_text()))
        with suppress(FileNotFoundError):
            self._drained = set(self._drained_file.read_text().split())
        alive = self._found()
        self._last_number = max((epoch for epoch, _ in alive.values()), default=0)
        for kept in self._wanted():
            if (found := alive.pop(kept.name, None)) is not None:
                kept.epoch, kept.actor = found
                kept.facts = RoleFacts(name=kept.name, state=SILENT)
                logger.info("%s is found again", kept.name)
            self._add(kept)
        for name, (_, actor) in alive.items():
            logger.info("%s is ended: the cluster has fewer instances now", name)
            await end_role(actor)
        await asyncio.gather(*map(_refresh, self._kept.values()))
        if (scaling := self._cluster.scaling) is not None:
            from .scaling import Scaler, ScalingRule

            rule = ScalingRule(scaling, self._cluster.engine.max_num_seqs)
            self._scaler = Scaler(rule, self._look, self._change)
            self._scaling = asyncio.create_task(self._scaler.run(self._changing))

    def _found(self) -> dict[str, tuple[int, Any]]:
        """Epoch and actor of each role; ends actors that never got a process, and earlier ones."""
        found: dict[str, tuple[int, Any]] = {}
        for name, epoch, actor in alive_roles():
            last_epoch, last = found.get(name, (0, None))
            if (self._folder / f"{name}@{epoch}").exists() and epoch > last_epoch:
                found[name], actor = (epoch, actor), last
            if actor is not None:
                ray.kill(actor)
        return found

    def _wanted(self) -> list[_Kept]:
        parts = parts_of(self._cluster, self._num_front_ends)
        return [_Kept(part=part, number=number) for part in parts for number in range(part.count)]

    @property
    def _number_file(self) -> Path:
        return self._folder / "num_instances"

    @property
    def _drained_file(self) -> Path:
        return self._folder / "drained"

    def _set_instances(self, num_instances: int) -> None:
        """Raises ConfigError for too few or too many instances."""
        cluster = replace(self._cluster, engine=replace(self._cluster.engine, num_instances=num_instances))
        check_instances(cluster)
        self._cluster = cluster

    def _add(self, kept: _Kept) -> None:
        self._kept[kept.name] = kept
        kept.task = asyncio.create_task(self._keep(kept))

    async def _keep(self, kept: _Kept) -> None:
        policy, num_deaths = RestartPolicy(), 0
        while True:
            started_s, is_lost = time.monotonic(), False
            try:
                kept.problem = await self._live(kept)
            except RayActorError as error:
                kept.problem, is_lost = _loss(error), True
            except Exception as error:
                kept.problem = _cause(error)
            logger.warning("%s is placed anew: %s", kept.name, kept.problem)
            kept.num_failures += 1
            await self._release(kept, is_lost=is_lost)
            num_deaths = policy.num_deaths(num_deaths, time.monotonic() - started_s)
            await asyncio.sleep(policy.pause_s(num_deaths))

    async def _live(self, kept: _Kept) -> str:
        """Place a role and start the process; returns the final error.  Raises RayError."""
        if kept.actor is None:
            kept.since_s = time.monotonic()
            kept.epoch, kept.actor = self._place(kept)
        actor, record = kept.actor, self._folder / f"{kept.name}@{kept.epoch}"
        kept.facts = facts = await actor.facts.remote()
        record.touch()  # before a process
        self._book.update(facts.addresses)
        self._last_number = max(self._last_number, facts.book_number)
        if facts.state == PLACED:
            token = self._enrolment.add_token(kept.name)
            await actor.enrol.remote(self._address, token, self._enrolment.authority)
            await actor.start.remote(self._content, self._number(), self._book)
        self._send_book()
        logger.info("%s is on %s", kept.name, facts.host)
        while True:
            try:
                return str(await actor.failed.remote())
            except ActorUnavailableError:
                await _answer(actor)
                self._send_book()

    def _number(self) -> int:
        """Above all earlier numbers, also by a clock that was set back."""
        self._last_number = max(self._last_number + 1, time.time_ns())
        return self._last_number

    def _place(self, kept: _Kept) -> tuple[int, Any]:
        """Epoch and actor of a new place, pending until a host has room."""
        part, front_end, epoch = kept.part, self._cluster.front_end, self._number()
        http = {name: getattr(front_end, name) for name in _HTTP}
        http["has_key"] = front_end.api_keys is not None
        options = ray.remote(RoleActor).options(
            name=f"{kept.name}@{epoch}",
            lifetime="detached",
            num_cpus=part.num_cores or 1,
            num_gpus=part.num_gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD" if part.role in _SPREAD else "DEFAULT",
            label_selector=_elsewhere(self._drained),
        )
        return epoch, options.remote(part, kept.number, http)

    def _send_book(self) -> None:
        for kept in self._kept.values():
            if kept.facts is not None:
                kept.actor.set_book.remote(self._number(), self._book)

    async def _release(self, kept: _Kept, *, is_lost: bool = False) -> None:
        """End a role's actor, at once without a host."""
        actor, has_process = kept.actor, kept.facts is not None and not is_lost
        kept.actor = kept.facts = None
        if actor is not None:
            await end_role(actor, self._cluster.front_end.drain_s if has_process else None)

    async def status(self) -> list[RoleFacts]:
        """The state of every role, and the last decision on the number of instances."""
        await self._begun
        kept = list(self._kept.values())
        await asyncio.gather(*map(_refresh, kept))
        rows = [one.shown() for one in kept]
        if self._scaler is not None:
            rule, number = self._scaler.rule, self._cluster.engine.num_instances
            state = f"{number} of {rule.config.min_instances} to {rule.config.max_instances}"
            rows.append(RoleFacts(name="scaling", state=state, problem=rule.reason))
        rows += [RoleFacts(name="host", state="drained", host=host) for host in sorted(self._drained)]
        return rows

    async def drain(self, host: str) -> None:
        """Move a host's roles elsewhere, in turn; none return until `undrain`.

        Raises ConfigError for an unknown host, a silent role, and a role without room elsewhere.
        """
        hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        if host not in hosts:
            raise ConfigError(
                f"no host {host} is in this Ray cluster; choose one of {', '.join(sorted(hosts))}"
            )
        await self._begun
        async with self._changing:
            for kept in self._kept.values():
                if kept.facts is not None and not kept.facts.host:
                    raise ConfigError(f"the host of {kept.name} does not answer; call drain again later")
            await self._set_drained(self._drained | {host})
            for kept in sorted(self._kept.values(), key=lambda kept: _LEAVES.index(kept.part.role)):
                if kept.facts is not None and kept.facts.host == host:
                    await self._move(kept)

    async def undrain(self, host: str) -> None:
        """Let a host have roles again.  Raises ConfigError for an undrained host."""
        await self._begun
        async with self._changing:
            if host not in self._drained:
                raise ConfigError(
                    f"host {host} is not drained; drained: {', '.join(self._drained) or 'none'}"
                )
            await self._set_drained(self._drained - {host})

    async def _set_drained(self, hosts: set[str]) -> None:
        self._drained = hosts
        self._drained_file.write_text(" ".join(sorted(hosts)))
        for kept in self._kept.values():
            if kept.actor is not None and kept.facts is None:
                await self._start_anew(kept)  # by the new hosts

    async def _move(self, kept: _Kept) -> None:
        epoch, actor = self._place(kept)
        placed = asyncio.ensure_future(actor.facts.remote())
        try:
            await asyncio.wait([placed, self._ending], timeout=_ROOM_S, return_when=asyncio.FIRST_COMPLETED)
            placed.cancel()
            await placed
        except (RayError, asyncio.CancelledError) as error:
            ray.kill(actor)
            raise ConfigError(
                f"no other host has room for {kept.name}; add a host, then call drain again"
            ) from error
        logger.info("%s moves to another host", kept.name)
        await self._start_anew(kept, epoch, actor)
        deadline_s = time.monotonic() + _MOVED_S
        while not await self._serves(kept):
            if self._ending.done() or time.monotonic() > deadline_s:
                raise ConfigError(f"{kept.name} does not serve at the new host; see moe-lora cluster status")
            await asyncio.sleep(_LOOK_S)

    async def _serves(self, kept: _Kept) -> bool:
        """True if a front end is ready, or all front ends send an instance requests."""
        await _refresh(kept)
        state, role = kept.shown().state, kept.part.role
        if role != INSTANCE or self._cluster.front_end.admin_address is not None:  # which has the metrics
            return state == (READY if role == FRONT_END else RUNNING)
        found = await asyncio.gather(*map(_snapshot, self._front_ends()))
        return state == RUNNING and all(one is not None and kept.name in one.live for one in found)

    def _front_ends(self) -> list[_Kept]:
        return [one for one in self._kept.values() if one.part.role == FRONT_END]

    async def _start_anew(self, kept: _Kept, epoch: int = 0, actor: Any = None) -> None:
        """End a role; start the role at an actor, or at a new one."""
        kept.task.cancel()
        await asyncio.gather(kept.task, return_exceptions=True)
        await self._release(kept)
        kept.epoch, kept.actor, kept.since_s = epoch, actor, time.monotonic()
        kept.task = asyncio.create_task(self._keep(kept))

    async def _look(self) -> tuple[Snapshots, Fleet]:
        from .scaling import Fleet

        kept = list(self._kept.values())
        await asyncio.gather(*map(_refresh, kept))
        front_ends = self._front_ends()
        snapshots = await asyncio.gather(*map(_snapshot, front_ends))
        states = {one.name: one.shown().state for one in kept if one.part.role == INSTANCE}
        roomless = [name for name, state in states.items() if state == WAITING]
        starting = [name for name, state in states.items() if state not in (RUNNING, WAITING)]
        fleet = Fleet(number=len(states), starting=starting, roomless=roomless)
        return dict(zip((one.name for one in front_ends), snapshots, strict=True)), fleet

    async def scale(self, num_instances: int) -> None:
        """Add instances, or end the last instances; requests go on elsewhere.  Raises ConfigError."""
        await self._begun
        async with self._changing:
            await self._change(num_instances)

    async def _change(self, num_instances: int) -> None:
        self._set_instances(num_instances)
        self._number_file.write_text(str(num_instances))
        wanted = {kept.name: kept for kept in self._wanted()}
        for name in wanted.keys() - self._kept.keys():
            self._add(wanted[name])
        await self._remove([self._kept[name] for name in self._kept.keys() - wanted.keys()])

    async def _remove(self, roles: Collection[_Kept]) -> None:
        for kept in roles:
            kept.task.cancel()
        await asyncio.gather(*(kept.task for kept in roles), return_exceptions=True)
        await asyncio.gather(*map(self._release, roles))
        for kept in roles:
            del self._kept[kept.name]

    async def longest_stop_s(self) -> float:
        """Longest time of `stop`, in seconds."""
        return self._cluster.front_end.drain_s + 4 * STOP_S

    async def stop(self) -> None:
        """End front ends after open requests, then the rest; delete this host's files."""
        self._ending.cancel()  # a drain ends
        await asyncio.wait([self._begun])
        if self._scaling is not None:
            self._scaling.cancel()
        async with self._changing:
            await self._remove(self._front_ends())
            await self._remove(list(self._kept.values()))
            self._enrolment.stop()
            sweep_folders(Path(tempfile.gettempdir()), PREFIX)
            shutil.rmtree(self._folder)


def _elsewhere(hosts: Collection[str]) -> dict[str, str] | None:
    """Ray's selector of the nodes at other hosts."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] in hosts]
    return {"ray.io/node-id": f"!in({','.join(nodes)})"} if nodes else None


async def _refresh(kept: _Kept) -> None:
    actor, before = kept.actor, kept.facts
    if before is None:
        return
    try:
        facts = await asyncio.wait_for(actor.facts.remote(), _FACTS_S)
    except (RayError, asyncio.TimeoutError):
        facts = replace(before, state=SILENT, problem="the actor does not answer")
    if kept.actor is actor:
        kept.facts = facts


async def _snapshot(kept: _Kept) -> Snapshot | None:
    found: Snapshot | None = None
    with suppress(RayError, asyncio.TimeoutError):
        if kept.facts is not None:
            found = await asyncio.wait_for(kept.actor.snapshot.remote(), _FACTS_S)
    return found


def alive_roles() -> list[tuple[str, int, Any]]:
    """Name, epoch and actor of the roles in this namespace; a moving role has two."""
    found = []
    for name, _, epoch in (full.partition("@") for full in ray.util.list_named_actors() if "@" in full):
        with suppress(ValueError):  # the actor ended meanwhile
            found.append((name, int(epoch), ray.get_actor(f"{name}@{epoch}")))
    return found


async def end_role(actor: Any, drain_s: float | None = 0.0) -> None:
    """End a role's process and actor.  drain_s: time for requests; None: without a process."""
    try:
        if drain_s is not None:
            with suppress(RayError, asyncio.TimeoutError):
                await asyncio.wait_for(actor.stop.remote(), drain_s + 2 * STOP_S)
    finally:
        ray.kill(actor)


async def _answer(actor: Any) -> None:
    """Wait for an unavailable actor.  Raises RayActorError or TimeoutError after _LOST_S."""
    deadline_s = time.monotonic() + _LOST_S
    while True:
        try:
            await asyncio.wait_for(actor.facts.remote(), _LOST_S)
            return
        except ActorUnavailableError:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(1.0)


def _loss(error: RayActorError) -> str:
    """Why an actor is gone: the last line of an error in its constructor."""
    if getattr(error, "actor_init_failed", False):
        return str(error).strip().splitlines()[-1]
    return "the host or the actor was lost"


def _cause(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
