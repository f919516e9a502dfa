# SPDX-License-Identifier: Apache-2.0
"""Registry of instances and adapters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import move_on_after

from moe_lora.core.errors import EngineDeadError, MoeLoraError
from moe_lora.core.request import AdapterInfo, EngineStats
from moe_lora.engine.client.client import EngineClient
from moe_lora.engine.client.messages import (
    AbortOrder,
    Beat,
    DrainOrder,
    Heartbeat,
    KnownAliases,
    Move,
    PauseScope,
)
from moe_lora.policies.routing.routing import InstanceLoad

from .drains import Drains
from .reports import add_counters
from .suspects import Suspects

if TYPE_CHECKING:
    from moe_lora.dist.cluster.pool.directory import PoolDirectory

    from .standing_orders import StandingOrders

Entry = TypeVar("Entry")
REST_S = 60.0
"""Longest wait of an instance for loads everywhere, before it enters routing."""
DIAL_IN_S = 20.0
"""All running instances dial in within this time."""
MAX_UNLOADED = 10_000
"""Most unloaded names with a known version; others count from the highest."""
_LOOK_S = 0.1
ABSENCE = "none has dialled in, or all have left; send the request again in a while"
"""Text for tenants, without addresses."""


@dataclass(frozen=True)
class ServedVersion:
    """An adapter version under a name.  content_hash None: the directory's content at the first instance."""

    path: str
    version: int
    pinned: bool = False
    content_hash: str | None = None

    def is_same(self, other: ServedVersion | None) -> bool:
        """True for equal versions, with equal contents if known."""
        if other is None or (self.path, self.version) != (other.path, other.version):
            return False
        return None in (self.content_hash, other.content_hash) or self.content_hash == other.content_hash


@dataclass(frozen=True)
class Holding:
    """An instance holds all served adapters but `missing`.  problems: reasons by name."""

    incarnation: str | None
    missing: frozenset[str] = frozenset()
    problems: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """The served adapters.

    versions: the latest of each name; a name without an adapter was unloaded at that version.
    """

    adapters: Mapping[str, ServedVersion] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)

    def lacking(self, have: Mapping[str, ServedVersion]) -> set[str]:
        """Adapters missing in `have`."""
        return {name for name, adapter in self.adapters.items() if not adapter.is_same(have.get(name))}

    def state_of(self, name: str) -> tuple[int, bool]:
        """The latest version or 0; True if served."""
        return self.versions.get(name, 0), name in self.adapters

    @staticmethod
    def of(adapters: Mapping[str, ServedVersion]) -> Served:
        """An account without unloaded adapters."""
        return Served(adapters, {name: one.version for name, one in adapters.items()})

    def joined(self, other: Served) -> Served:
        """The higher version of each name in both accounts.

        At equal versions an unload precedes an adapter, known content a file's, and this account the other; a
        pin in either counts.
        """
        adapters = dict(self.adapters)
        for name, version in other.versions.items():
            mine, theirs = adapters.get(name), other.adapters.get(name)
            known = self.versions.get(name, 0)
            if version < known:
                continue
            if theirs is None:
                adapters.pop(name, None)
            elif mine is not None and mine.is_same(theirs):
                adapters[name] = replace(
                    mine,
                    pinned=mine.pinned or theirs.pinned,
                    content_hash=mine.content_hash or theirs.content_hash,
                )
            elif version > known or (mine is not None and theirs.content_hash and not mine.content_hash):
                adapters[name] = theirs
        versions = {
            name: max(self.versions.get(name, 0), other.versions.get(name, 0))
            for name in {**self.versions, **other.versions}
        }
        return Served(adapters, versions)


def changes(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> dict[str, Entry | None]:
    """New and changed entries of `now`; None for those that are gone."""
    found: dict[str, Entry | None] = {
        key: one for key, one in now.items() if (known := before.get(key)) is not one and known != one
    }
    return found | dict.fromkeys(before.keys() - now.keys())


def take_changes(entries: dict[str, Entry], changed: Mapping[str, Entry | None]) -> None:
    """Bring `entries` up to date, by `changes`."""
    for key, one in changed.items():
        if one is None:
            entries.pop(key, None)
        else:
            entries[key] = one


def reason(error: Exception) -> str:
    """A failed load in words for clients."""
    return str(error) if isinstance(error, MoeLoraError) else type(error).__name__


@dataclass(eq=False)
class Instance:
    """An engine among several.  A restart or redial replaces `client`.

    outstanding_tokens: tokens that requests may still need; tokens_elsewhere: the part of other front ends.
    silent: out of routing for lack of progress.  missing: adapters with a failed load; problems: reasons.
    starting: client of a process not yet in routing.  past: counters of earlier processes; past_before:
    before the latest, with its incarnation.
    """

    index: int
    client: EngineClient
    name: str
    live: bool = True
    silent: bool = False
    outstanding_tokens: int = 0
    tokens_elsewhere: int = 0
    load: InstanceLoad = field(default_factory=InstanceLoad)
    missing: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)
    starting: EngineClient | None = None
    num_starts: int = 1
    num_resent: int = 0
    latest: EngineStats = field(default_factory=EngineStats)
    past: EngineStats = field(default_factory=EngineStats)
    past_before: EngineStats = field(default_factory=EngineStats)
    incarnation: str | None = None
    devices: tuple[str, ...] = ()

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)

    def hear(self, beat: Beat) -> None:
        """Record a beat: other front ends' requests, and room for adapters."""
        self.outstanding_tokens += beat.outstanding_tokens - self.tokens_elsewhere
        self.tokens_elsewhere = beat.outstanding_tokens
        num_elsewhere = beat.num_running + beat.num_waiting
        self.load.num_requests += num_elsewhere - self.load.num_elsewhere
        self.load.num_elsewhere = num_elsewhere
        self.load.held_back = beat.held_back


class InstanceRegistry:
    """The instances and served adapters.

    clients: live from the start; others may `enter`.  adapters: (name, directory) at the start.  advice:
    error text for tenants without live instances.  pool None: every instance has all adapters.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        adapters: Sequence[tuple[str, str]] = (),
        advice: str = ABSENCE,
        heartbeat: Heartbeat | None = None,
        pool: PoolDirectory | None = None,
    ) -> None:
        self.heartbeat = heartbeat or Heartbeat()
        self.instances = [Instance(index, client, str(index)) for index, client in enumerate(clients)]
        self.closed = asyncio.Event()
        self.pool = pool
        self._adapters = {name: ServedVersion(path, 1) for name, path in adapters}
        self._versions = dict.fromkeys(self._adapters, 1)
        self._least_version = 0
        """The highest forgotten version."""
        self._numbers = {instance.name: instance.index for instance in self.instances}
        self._num_loading = 0
        self._holdings: Mapping[str, Holding] = {}
        self.directed = False
        """True once another process's controller has sent the served adapters."""
        self.advice = advice
        self.on_move: Callable[[Move], None] = lambda move: None
        """Called with move orders."""
        self.on_unheard: Callable[[Instance], None] = lambda instance: None
        """Called repeatedly with an instance without beats."""
        self.on_forget: Callable[[str], None] = lambda name: None
        """Called with a name no longer served."""
        self.recovered: Served | None = None
        """The account at the recovery's end; None before."""
        self.on_late: Callable[[dict[str, ServedVersion], dict[str, int]], Awaitable[None]] | None = None
        """Called after the recovery with a new process's adapters."""
        self.on_lacking: (
            Callable[[Instance, Mapping[str, ServedVersion]], Coroutine[Any, Any, None]] | None
        ) = None
        """Called with a joined instance and its adapters."""
        self.past = EngineStats()
        """Counters of removed instances."""
        self.suspects = Suspects(lambda: len(self.live), lambda: len(self.instances))
        self.drains = Drains(self._move_off)
        self.standing: StandingOrders | None = None
        """None before the first order."""
        self.aliases = KnownAliases()
        self.aborts: tuple[AbortOrder, ...] | None = None
        """The latest, in order; None: still unknown."""
        self.on_abort: Callable[[PauseScope], None] | None = None
        """Ends requests that wait for a resolver."""
        self._has_slots: Callable[[Instance], bool] = lambda instance: True
        self.on_drain: Callable[[Instance], None] = lambda instance: None
        """Called at a drain, and repeatedly until its end."""
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self._all_there_s = time.monotonic() + (0.0 if clients else DIAL_IN_S)

    def standing_orders(self) -> StandingOrders:
        """Created for the first order."""
        if self.standing is None:
            from .standing_orders import StandingOrders

            self.standing = StandingOrders(self)
        return self.standing

    @property
    def live(self) -> list[Instance]:
        """The instances in routing."""
        return [instance for instance in self.instances if instance.live]

    @property
    def drained(self) -> frozenset[str]:
        """Instances without requests while others serve."""
        return self.drains.names

    @property
    def undrained(self) -> list[Instance]:
        """Live instances that take requests."""
        return [instance for instance in self.live if instance.name not in self.drained]

    def _move_off(self, names: frozenset[str]) -> None:
        there = {one.name: one.load for one in self.instances}
        for leaving in names:
            for adapter, places in reversed([*self.drains.warmed.get(leaving, {}).items()]):
                for place in places:
                    if place in there:
                        there[place].note(adapter)
        for instance in self.instances:
            if instance.name in names:
                self.on_drain(instance)

    def hear_drain(self, name: str, order: DrainOrder) -> None:
        """Record the order of an instance that dials in, if still undirected."""
        if not self.directed and order.number:
            self.drains.learn({name: order})

    def candidates(self, adapter: str | None) -> list[Instance]:
        """Instances for a request: drained ones only without others.  Raises as `having`."""
        found = self.having(adapter)
        if not self.drains.names:
            return found
        return [instance for instance in found if instance.name not in self.drained] or found

    def having(self, adapter: str | None) -> list[Instance]:
        """Live instances with an adapter.  Raises EngineDeadError if there are none."""
        found = [i for i in self.instances if i.live and adapter not in i.missing]
        if found:
            return found
        if self.live:
            raise EngineDeadError(
                f"adapter {adapter!r} is unavailable: {self.problem(adapter or '')}; load it with "
                "load_inplace=true once that is mended"
            )
        raise EngineDeadError(f"no LLM instance is running: {self._absence()}")

    def problem(self, adapter: str) -> str:
        """Why no live instance has the adapter."""
        reasons = (one.problems.get(adapter) for one in self.live if adapter in one.missing)
        return next(filter(None, reasons), "its files are damaged or not those that were loaded")

    def _absence(self) -> str:
        silent = ", ".join(instance.name for instance in self.instances if instance.silent)
        if silent:
            return (
                f"instance {silent} does not get on; send the request again in a while, or end its process, "
                "which is started again"
            )
        return self.advice

    def lose(self, instance: Instance, client: EngineClient) -> None:
        """Remove an instance with a dead `client` from routing."""
        if instance.client is client:
            self._take_out(instance)

    def note_silent(self, instance: Instance, client: EngineClient) -> bool:
        """Remove a silent instance from routing; False if already removed."""
        was_live = instance.live
        if instance.client is client and was_live:
            instance.silent = True
            self._take_out(instance)
        return was_live and not instance.live

    def _take_out(self, instance: Instance) -> None:
        if instance.live:
            instance.live = False
            instance.past = add_counters([instance.past, instance.latest])
            instance.latest = EngineStats()

    def remove(self, instance: Instance) -> None:
        """Forget an instance, except for the index and the counters."""
        self._take_out(instance)
        self.past = add_counters([self.past, instance.past])
        self.instances = [one for one in self.instances if one is not instance]

    def enter(self, name: str, client: EngineClient) -> Instance:
        """The entry of an engine that dials in.  Raises EngineDeadError after `close`."""
        self._check_open()
        for instance in self.instances:
            if instance.name == name:
                break
        else:
            instance = Instance(self.number_of(name), client, name, live=False, num_starts=0)
            instance.load.has_slots = self._has_slots(instance)
            self.instances = sorted([*self.instances, instance], key=lambda one: one.index)
        instance.starting = client
        return instance

    def note_slots(self, has_slots: Callable[[Instance], bool]) -> None:
        """Adapters take slots at instances of which `has_slots` is true: present ones, and later entries."""
        self._has_slots = has_slots
        for instance in self.instances:
            instance.load.has_slots = has_slots(instance)

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise EngineDeadError("the instances were closed")

    def number_of(self, name: str) -> int:
        """The instance's index, even before its dial-in."""
        return self._numbers.setdefault(name, len(self._numbers))

    def name_of(self, index: int) -> str:
        """The instance's name, even before its dial-in."""
        return next(name for name, number in self._numbers.items() if number == index)

    async def dialled_in(self, condition: Callable[[], object]) -> None:
        """Wait for the condition, at most until all may have dialled in."""
        with move_on_after(self._all_there_s - time.monotonic()):
            while not condition() and not self.closed.is_set():
                await asyncio.sleep(_LOOK_S)

    async def at_rest(self) -> bool:
        """Return when no adapter loads everywhere, or after `close`; False after REST_S."""
        with move_on_after(REST_S):
            while self._num_loading and not self.closed.is_set():
                await self._at_rest.wait()
            return True
        return False

    async def join(
        self,
        instance: Instance,
        client: EngineClient,
        have: dict[str, ServedVersion],
        missing: set[str],
        incarnation: str | None = None,
        *,
        lacking: bool = False,
    ) -> bool:
        """Put an instance into routing if `have` is the served state; waits for running loads.

        lacking: also in another state; then, and where loads go on for REST_S, `missing` grows by the
        difference.  Raises EngineDeadError after `close`.
        """
        lacking = not await self.at_rest() or lacking
        self._check_open()
        if not self._is_all(have):
            if not lacking:
                return False
            missing |= self._unlike(have)
        self._route_to(instance, client, missing, incarnation)
        return True

    def _unlike(self, have: Mapping[str, ServedVersion]) -> set[str]:
        """Served adapters with another version or pin in `have`."""
        return {
            name
            for name, here in self._adapters.items()
            if not here.is_same(have.get(name)) or here.pinned != have[name].pinned
        }

    def _is_all(self, have: dict[str, ServedVersion]) -> bool:
        """True if an engine has all served adapters; learns their contents."""
        if have.keys() != self._adapters.keys() or self._unlike(have):
            return False
        for name, there in have.items():
            if self._adapters[name].content_hash is None:
                self._adapters[name] = there
        return True

    def _route_to(
        self, instance: Instance, client: EngineClient, missing: set[str], incarnation: str | None
    ) -> None:
        instance.client, instance.missing, instance.starting = client, missing, None
        instance.live, instance.silent = True, False
        if incarnation is not None and incarnation == instance.incarnation:
            instance.past = instance.past_before  # the process still counts its earlier work
        else:
            instance.num_starts += 1
            instance.past_before, instance.incarnation = instance.past, incarnation

    def join_as_it_is(
        self, instance: Instance, client: EngineClient, have: dict[str, ServedVersion], incarnation: str
    ) -> None:
        """Put an instance of another process's controller into routing.

        The controller's holding, else `have`, tells the missing adapters.  Raises EngineDeadError after
        `close`.
        """
        self._check_open()
        if not self.directed:
            self.recover(Served.of(have))
        holding = self.holding_of(instance.name, incarnation)
        if holding is not None:
            missing, instance.problems = set(holding.missing), dict(holding.problems)
        else:
            missing = self.served.lacking(have)
        self._route_to(instance, client, missing, incarnation)

    def holding_of(self, name: str, incarnation: str | None) -> Holding | None:
        """The process's holding, if in that controller's routing."""
        holding = self._holdings.get(name)
        return None if holding is None or holding.incarnation != incarnation else holding

    def follow(
        self,
        adapters: Mapping[str, ServedVersion | None],
        versions: Mapping[str, int | None],
        holdings: Mapping[str, Holding],
    ) -> None:
        """Follow another process's controller: `changes` of adapters and versions, and all holdings.

        An instance unseen by the controller lacks new adapters.
        """
        self.directed = True
        new = set()
        for name, served in adapters.items():
            if served is None:
                self.on_forget(name)
            elif not served.is_same(self._adapters.get(name)):
                new.add(name)
            else:
                continue
            self.suspects.forget(name)
        take_changes(self._adapters, adapters)
        take_changes(self._versions, versions)
        self._holdings = holdings
        for instance in self.instances:
            holding = self.holding_of(instance.name, instance.incarnation)
            if holding is not None:
                instance.missing, instance.problems = set(holding.missing), dict(holding.problems)
            else:
                instance.missing |= new

    @property
    def holdings(self) -> dict[str, Holding]:
        return {
            one.name: Holding(one.incarnation, frozenset(one.missing), dict(one.problems))
            for one in self.live
        }

    @property
    def adapters(self) -> dict[str, ServedVersion]:
        """A copy: name -> served version."""
        return dict(self._adapters)

    def served_version(self, name: str | None) -> ServedVersion | None:
        """The version under a name, if served."""
        return None if name is None else self._adapters.get(name)

    def version(self, name: str | None) -> int | None:
        served = self.served_version(name)
        return None if served is None else served.version

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While an adapter loads everywhere, no instance enters routing."""
        self._num_loading += 1
        self._at_rest.clear()
        try:
            yield
        finally:
            self._num_loading -= 1
            if not self._num_loading:
                self._at_rest.set()

    def next_version(self, name: str) -> int:
        """The name's next version."""
        return self._versions.get(name, self._least_version) + 1

    def serve(self, info: AdapterInfo, path: str) -> ServedVersion:
        """Serve this version on all instances."""
        version = max(info.version, self.next_version(info.name))
        self._versions.pop(info.name, None)
        self._versions[info.name] = version  # the latest loaded is last
        before = self._adapters.get(info.name)
        pinned = before is not None and before.pinned
        self._adapters[info.name] = ServedVersion(path, version, pinned, info.content_hash or None)
        if self.suspects.active:
            self.suspects.forget(info.name)
        else:
            self.suspects.proven.discard(info.name)
        return self._adapters[info.name]

    def pin(self, name: str, *, pinned: bool) -> None:
        """Record the adapter's pin."""
        self._adapters[name] = replace(self._adapters[name], pinned=pinned)

    def use_up(self, name: str, version: int) -> None:
        """Record a version as used, though not served: requests may have its number."""
        self._versions[name] = max(version, self._versions.get(name, 0))
        self._forget_oldest()

    def forget(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._forget_oldest()
        self.on_forget(name)
        self.suspects.forget(name)
        for instance in self.instances:
            instance.missing.discard(name)
            instance.problems.pop(name, None)

    def _forget_oldest(self) -> None:
        if len(self._versions) - len(self._adapters) > MAX_UNLOADED:
            oldest = next(one for one in self._versions if one not in self._adapters)
            self._least_version = max(self._least_version, self._versions.pop(oldest))

    @property
    def served(self) -> Served:
        """A copy, with the versions of earlier adapters."""
        return Served(dict(self._adapters), dict(self._versions))

    def recover(self, found: Served) -> None:
        """Merge other processes' accounts (`Served.joined`)."""
        joined = Served(self._adapters, self._versions).joined(found)
        self._adapters, self._versions = dict(joined.adapters), dict(joined.versions)

    def close(self) -> list[EngineClient]:
        """Refuse joins; returns the clients to close."""
        self.closed.set()
        self._at_rest.set()
        clients = [client for i in self.instances for client in (i.client, i.starting)]
        return [client for client in clients if client is not None]
