# SPDX-License-Identifier: Apache-2.0
"""Which instances there are, which of them are live, and which adapters they all serve: of one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from anyio import move_on_after

from moe_lora.core.errors import EngineDeadError, MoeLoraError
from moe_lora.core.request import AdapterInfo, EngineStats
from moe_lora.engine.client.client import EngineClient
from moe_lora.engine.client.heartbeat import Heartbeat
from moe_lora.engine.client.messages import Beat, DrainOrder, Move
from moe_lora.policies.routing.routing import InstanceLoad

from .drains import Drains
from .reports import add_counters
from .suspects import Suspects

if TYPE_CHECKING:
    from moe_lora.dist.cluster.pool.directory import PoolDirectory

DIAL_IN_S = 20.0
"""So long after a registry was made all instances that run take part; half of it a controller may spend with
waiting for a front end that is away."""
_LOOK_S = 0.1

# What is served under each adapter's name, and which of two accounts of that is the later one.


@dataclass(frozen=True)
class ServedVersion:
    """What every instance serves under a name.

    content_hash: `AdapterInfo.content_hash`; None: what the first instance finds in the directory.
    """

    path: str
    version: int
    pinned: bool = False
    content_hash: str | None = None

    def is_same(self, other: ServedVersion | None) -> bool:
        """Whether both are one version, and as far as it is known one content."""
        if other is None or (self.path, self.version) != (other.path, other.version):
            return False
        return None in (self.content_hash, other.content_hash) or self.content_hash == other.content_hash


@dataclass(frozen=True)
class Holding:
    """An instance holds all served adapters but `missing`.

    problems: known reasons by name.  incarnation: see `messages.Hello`.
    """

    incarnation: str | None
    missing: frozenset[str] = frozenset()
    problems: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """An account of what is served.

    adapters: by name.  versions: of each name ever known, the latest: one that is not among `adapters` was
    unloaded at that version.
    """

    adapters: Mapping[str, ServedVersion] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)

    def lacking(self, have: Mapping[str, ServedVersion]) -> set[str]:
        """The adapters of which an engine that has `have` lacks what is served."""
        return {name for name, adapter in self.adapters.items() if not adapter.is_same(have.get(name))}

    @staticmethod
    def of(adapters: Mapping[str, ServedVersion]) -> Served:
        """An account that knows of nothing that was unloaded."""
        return Served(adapters, {name: one.version for name, one in adapters.items()})

    def joined(self, other: Served) -> Served:
        """Both accounts in one: of each name the higher version.

        Of equal ones an unloading goes before what was unloaded, and what is known here before the other's;
        an adapter is pinned if one of both says so.
        """
        adapters = dict(self.adapters)
        for name, version in other.versions.items():
            mine, theirs = adapters.get(name), other.adapters.get(name)
            known = self.versions.get(name, 0)
            if version < known:
                continue
            if theirs is None:
                adapters.pop(name, None)
            elif version > known:
                adapters[name] = theirs
            elif mine is not None and mine.is_same(theirs):
                adapters[name] = replace(
                    mine,
                    pinned=mine.pinned or theirs.pinned,
                    content_hash=mine.content_hash or theirs.content_hash,
                )
        versions = {
            name: max(self.versions.get(name, 0), other.versions.get(name, 0))
            for name in {**self.versions, **other.versions}
        }
        return Served(adapters, versions)


def reason(error: Exception) -> str:
    """A failed load in words for clients: the project's message, else the error's type."""
    return str(error) if isinstance(error, MoeLoraError) else type(error).__name__


@dataclass(eq=False)
class Instance:
    """An engine among several.  `client` is replaced when the engine is restarted, or dials in again.

    name: its number, or the name it dialled in with.  asked_tokens: what the requests that it got from
    here may still need; tokens_elsewhere: what those of other front ends may.  load: see
    `policies.routing.routing.InstanceView`.  silent: out of routing because it does not get on.  missing:
    adapters that could not be loaded at a start; problems: why, by name.  starting: the client of a
    process that is not in routing yet.  latest: the stats it gave last.  past: counters of its earlier
    processes; past_before: of those before the latest, whose incarnation (of an engine that dials in) is
    kept beside it.  devices: of its ranks, as it said when it dialled in.
    """

    index: int
    client: EngineClient
    name: str
    live: bool = True
    silent: bool = False
    asked_tokens: int = 0
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

    @property
    def outstanding_tokens(self) -> int:
        return self.asked_tokens + self.tokens_elsewhere

    def hear(self, beat: Beat) -> None:
        """Take over what the engine says of other front ends' requests, and of room for adapters."""
        self.tokens_elsewhere = beat.outstanding_tokens
        self.load.num_elsewhere = beat.num_running + beat.num_waiting
        self.load.held_back = beat.held_back


class InstanceRegistry:
    """The instances and the adapters that they serve.

    clients: of the instances that are live from the start; others may `enter`.  adapters: (name, directory)
    pairs of the start.  advice: what is said when no instance is live, to tenants too, so without places.
    heartbeat: when an instance counts as silent.  pool: where adapters are held; None: every instance has
    them all.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        adapters: Sequence[tuple[str, str]] = (),
        advice: str = "none has dialled in",
        heartbeat: Heartbeat | None = None,
        pool: PoolDirectory | None = None,
    ) -> None:
        self.heartbeat = heartbeat or Heartbeat()
        self.instances = [Instance(index, client, str(index)) for index, client in enumerate(clients)]
        self.closed = asyncio.Event()
        self.pool = pool
        self._adapters = {name: ServedVersion(path, 1) for name, path in adapters}
        self._versions = dict.fromkeys(self._adapters, 1)
        self._numbers = {instance.name: instance.index for instance in self.instances}
        self._num_loading = 0
        self._holdings: Mapping[str, Holding] = {}
        self.directed = False
        """Whether a controller elsewhere has said what is served; until then it is what instances have."""
        self.advice = advice
        self.on_move: Callable[[Move], None] = lambda move: None
        """Called with what an instance was told to have moved; who sends requests from here sets it."""
        self.on_unheard: Callable[[Instance], None] = lambda instance: None
        """Called again and again with an instance that sends no beats; set as `on_move` is."""
        self.on_forget: Callable[[str], None] = lambda name: None
        """Called with a name that is not served any more; set as `on_move` is."""
        self.suspects = Suspects(lambda: len(self.live), lambda: len(self._numbers))
        self.drains = Drains(self._move_off)
        self.on_drain: Callable[[Instance], None] = lambda instance: None
        """Called with one that is drained from now on, and now and then while it is; set as `on_move` is."""
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self._all_there_s = time.monotonic() + (0.0 if clients else DIAL_IN_S)

    @property
    def live(self) -> list[Instance]:
        return [instance for instance in self.instances if instance.live]

    @property
    def drained(self) -> frozenset[str]:
        """Names of instances that get no requests while others take some."""
        return self.drains.names

    @property
    def undrained(self) -> list[Instance]:
        """Those that are live and take requests."""
        return [instance for instance in self.live if instance.name not in self.drained]

    def _move_off(self, names: frozenset[str]) -> None:
        for instance in self.instances:
            if instance.name in names:
                self.on_drain(instance)

    def hear_drain(self, name: str, order: DrainOrder) -> None:
        """What an instance that dials in was told; where a controller elsewhere decides, that one's word
        counts once it is known.
        """
        if not self.directed and order.number:
            self.drains.learn({name: order})

    def candidates(self, adapter: str | None) -> list[Instance]:
        """Instances that can take a request: drained ones where no other can.  Raises as `having` does."""
        found = self.having(adapter)
        if not self.drains.names:
            return found
        return [instance for instance in found if instance.name not in self.drained] or found

    def having(self, adapter: str | None) -> list[Instance]:
        """Live instances that have an adapter.  Raises EngineDeadError, saying why, if there is none."""
        found = [i for i in self.instances if i.live and (adapter is None or adapter not in i.missing)]
        if found:
            return found
        if self.live:
            raise EngineDeadError(
                f"adapter {adapter!r} is unavailable: {self.problem(adapter or '')}; load it with "
                "load_inplace=true once that is mended"
            )
        raise EngineDeadError(f"no LLM instance is running: {self._absence()}")

    def problem(self, adapter: str) -> str:
        """The reason for the adapter's absence from the live instances."""
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
        """Take an instance whose `client` is dead out of routing, unless it has another one by now."""
        if instance.client is client:
            self._take_out(instance)

    def note_silent(self, instance: Instance, client: EngineClient) -> bool:
        """Take an instance that is silent out of routing until it joins again; False if it is out already."""
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

    def enter(self, name: str, client: EngineClient) -> Instance:
        """The entry of an engine that dials in, not in routing yet: the one that its name had, or a new one.

        Raises EngineDeadError if the fleet was closed.
        """
        self._check_open()
        for instance in self.instances:
            if instance.name == name:
                break
        else:
            instance = Instance(self.number_of(name), client, name, live=False, num_starts=0)
            self.instances = sorted([*self.instances, instance], key=lambda one: one.index)
        instance.starting = client
        return instance

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise EngineDeadError("the instances were closed")

    def number_of(self, name: str) -> int:
        """The index of the instance of that name; one that has not dialled in yet will have it."""
        return self._numbers.setdefault(name, len(self._numbers))

    def name_of(self, index: int) -> str:
        """The name of the instance that has, or will have, this index."""
        return next(name for name, number in self._numbers.items() if number == index)

    async def dialled_in(self, condition: Callable[[], object]) -> None:
        """Return when the condition holds, or nothing that may still be dialling in can change that."""
        with move_on_after(self._all_there_s - time.monotonic()):
            while not condition() and not self.closed.is_set():
                await asyncio.sleep(_LOOK_S)

    async def at_rest(self) -> None:
        """Return when no adapter is being loaded everywhere, or the fleet was closed."""
        while self._num_loading and not self.closed.is_set():
            await self._at_rest.wait()

    async def join(
        self,
        instance: Instance,
        client: EngineClient,
        have: dict[str, ServedVersion],
        missing: set[str],
        incarnation: str | None = None,
    ) -> bool:
        """Put an instance into routing, if `have` is what all serve now; waits for loads under way.

        incarnation: if it is the one that was there before, the engine was not restarted.
        Raises EngineDeadError if the fleet was closed.
        """
        await self.at_rest()
        self._check_open()
        if not self._is_all(have):
            return False
        self._route_to(instance, client, missing, incarnation)
        return True

    def _is_all(self, have: dict[str, ServedVersion]) -> bool:
        """Whether an engine has what all serve; of an adapter that no engine had, it says the content."""
        if have.keys() != self._adapters.keys():
            return False
        for name, there in have.items():
            here = self._adapters[name]
            if not here.is_same(there) or here.pinned != there.pinned:
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
            instance.past = instance.past_before  # the process still counts what it did before
        else:
            instance.num_starts += 1
            instance.past_before, instance.incarnation = instance.past, incarnation

    def join_as_it_is(
        self, instance: Instance, client: EngineClient, have: dict[str, ServedVersion], incarnation: str
    ) -> None:
        """Put an instance into routing whose adapters a controller elsewhere looks after.

        It is no candidate for those of which `have` lacks what is served, unless the controller, which may
        have brought them meanwhile, says that it holds them.  Raises EngineDeadError if the fleet was closed.
        """
        self._check_open()
        if not self.directed:
            self.recover(Served.of(have))
        holding = self._holdings.get(instance.name)
        if holding is not None and holding.incarnation == incarnation:
            missing, instance.problems = set(holding.missing), dict(holding.problems)
        else:
            missing = self.served.lacking(have)
        self._route_to(instance, client, missing, incarnation)

    def follow(self, served: Served, holdings: Mapping[str, Holding]) -> None:
        """From now on this is served, as a controller elsewhere says, and its instances hold that.

        One that the controller does not see did not get what is new.
        """
        self.directed = True
        new = served.lacking(self._adapters)
        for name in self._adapters.keys() - served.adapters.keys():
            self.on_forget(name)
        for name in new:
            self.suspects.forget(name)
        self._adapters, self._versions = dict(served.adapters), dict(served.versions)
        self._holdings = holdings
        for instance in self.instances:
            holding = holdings.get(instance.name)
            if holding is not None and holding.incarnation == instance.incarnation:
                instance.missing, instance.problems = set(holding.missing), dict(holding.problems)
            else:
                instance.missing |= new

    @property
    def holdings(self) -> dict[str, Holding]:
        """What the live instances hold, by name."""
        return {
            one.name: Holding(one.incarnation, frozenset(one.missing), dict(one.problems))
            for one in self.live
        }

    @property
    def adapters(self) -> dict[str, ServedVersion]:
        """A copy: name -> what is served under it."""
        return dict(self._adapters)

    def served_version(self, name: str | None) -> ServedVersion | None:
        return None if name is None else self._adapters.get(name)

    def version(self, name: str | None) -> int | None:
        served = self.served_version(name)
        return None if served is None else served.version

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While an adapter is being loaded everywhere, no instance comes into routing."""
        self._num_loading += 1
        self._at_rest.clear()
        try:
            yield
        finally:
            self._num_loading -= 1
            if not self._num_loading:
                self._at_rest.set()

    def next_version(self, name: str) -> int:
        """The number that a new version of the name gets."""
        return self._versions.get(name, 0) + 1

    def serve(self, info: AdapterInfo, path: str) -> ServedVersion:
        """From now on all instances serve this.  Versions of a name count up, whatever was restarted."""
        version = max(info.version, self.next_version(info.name))
        self._versions[info.name] = version
        before = self._adapters.get(info.name)
        pinned = before is not None and before.pinned
        self._adapters[info.name] = ServedVersion(path, version, pinned, info.content_hash or None)
        if self.suspects.active:
            self.suspects.forget(info.name)
        else:
            self.suspects.proven.discard(info.name)
        return self._adapters[info.name]

    def pin(self, name: str, *, pinned: bool) -> None:
        """From now on the adapter is pinned on all instances, or on none."""
        self._adapters[name] = replace(self._adapters[name], pinned=pinned)

    def forget(self, name: str) -> None:
        """From now on no instance serves this name."""
        self._adapters.pop(name, None)
        self.on_forget(name)
        self.suspects.forget(name)
        for instance in self.instances:
            instance.missing.discard(name)
            instance.problems.pop(name, None)

    @property
    def served(self) -> Served:
        """A copy: what is served, and the versions of what was."""
        return Served(dict(self._adapters), dict(self._versions))

    def recover(self, found: Served) -> None:
        """Take over what others say was served before this process began (see `Served.joined`)."""
        joined = Served(self._adapters, self._versions).joined(found)
        self._adapters, self._versions = dict(joined.adapters), dict(joined.versions)

    def close(self) -> list[EngineClient]:
        """Let nothing come back; the clients to close."""
        self.closed.set()
        self._at_rest.set()
        clients = [client for i in self.instances for client in (i.client, i.starting)]
        return [client for client in clients if client is not None]
