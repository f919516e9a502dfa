# SPDX-License-Identifier: Apache-2.0
"""The pool of a fleet over stand-ins for engines, which hold adapters in a dict."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from moe_lora.config import FrontEndConfig
from moe_lora.core.errors import (
    AdapterError,
    AdapterNotFoundError,
    CapacityError,
    EngineDeadError,
    StorageError,
)
from moe_lora.core.request import AdapterFacts, AdapterInfo
from moe_lora.dist.cluster.adapter_calls import FleetAdapters
from moe_lora.dist.cluster.controller.routes import Routes, make_routes
from moe_lora.dist.cluster.instances import InstanceRegistry, ServedVersion
from moe_lora.dist.cluster.listener import catch_up, held_by
from moe_lora.dist.cluster.pool.directory import PoolDirectory
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.engine.client.client import CallableEngine
from moe_lora.engine.client.messages import PoolEntry
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.policies.routing.routing import LeastOutstanding
from tests.dist.cluster.fleet_parts import cluster_config
from tests.patience import PATIENCE_S
from tests.virtual_clock import VirtualClock

SIZES = {"big": 100, "small": 10, "tiny": 1}
Log = list[tuple[Any, ...]]


def facts_of(name: str, path: str) -> AdapterFacts:
    """An adapter whose content is what its path says."""
    return AdapterFacts(
        name=name,
        content_hash=f"#{path}",
        max_lora_rank=8,
        nbytes=SIZES.get(path, 20),
        targets=(),
        dtype="float32",
        num_entries=1,
        layer_elements=(4,),
    )


class Engine(CallableEngine):
    """As much of an engine loop as a pool sees.  refuse: paths that can't be read.  log: of all engines.
    used: content hashes of which there are requests."""

    def __init__(self, name: str, log: Log, refuse: tuple[str, ...] = ()) -> None:
        self.ended = asyncio.Event()
        self.name, self.log, self.refuse = name, log, refuse
        self.known: dict[str, tuple[AdapterFacts, str, int]] = {}
        self.held: set[str] = set()
        self.used: set[str] = set()
        self.sources: dict[str, Sequence[bytes]] = {}

    async def call(self, method: str, *args: Any, **words: Any) -> Any:
        if self.ended.is_set():
            raise EngineDeadError("it has ended")
        return getattr(self, f"_{method}")(*args, **words)

    async def settled(self) -> None:
        """It does at once what it is told."""

    def _entry(self, name: str) -> PoolEntry:
        facts, path, version = self.known[name]
        info = AdapterInfo(
            name=name,
            version=version,
            lora_rank=8,
            nbytes=facts.nbytes,
            targets=(),
            path=path,
            residency="host" if facts.content_hash in self.held else "peer",
        )
        return PoolEntry(info=info, facts=facts, source=self._source(facts.content_hash))

    def _source(self, content_hash: str) -> bytes | None:
        return f"{self.name}{content_hash}".encode() if content_hash in self.held else None

    def _forget(self, name: str) -> None:
        if name in self.known:
            del self.known[name]

    def _pool_known(self, content_hashes: Sequence[str]) -> list[str]:
        served = {facts.content_hash for facts, *_ in self.known.values()} | self.used
        return [content_hash for content_hash in content_hashes if content_hash in served]

    def _pool_orphans(self) -> list[str]:
        return sorted(self.held - set(self._pool_known(sorted(self.held))))

    def _pool_free(self, content_hash: str) -> None:
        self.held.discard(content_hash)

    def _pool_load(
        self, name: str, path: str, replace: bool, version: int, content_hash: str | None = None
    ) -> PoolEntry:
        if path in self.refuse:
            raise AdapterError(f"{path} can't be read")
        self.log.append(("read", self.name, path))
        self._forget(name)
        facts = facts_of(name, path)
        self.known[name] = facts, path, version
        self.held.add(facts.content_hash)
        return self._entry(name)

    def _pool_know(
        self, facts: AdapterFacts, path: str, replace: bool, version: int, sources: Sequence[bytes]
    ) -> PoolEntry:
        if path in self.refuse:
            raise AdapterError(f"{path} is too large")
        if self.known.get(facts.name, (None,))[0] != facts:
            self._forget(facts.name)
        self.known[facts.name] = facts, path, version
        self.sources[facts.content_hash] = sources
        return self._entry(facts.name)

    def _pool_hold(self, content_hash: str, sources: Sequence[bytes]) -> bytes | None:
        if content_hash not in {facts.content_hash for facts, *_ in self.known.values()}:
            raise AdapterNotFoundError(content_hash)
        if "hold" in self.refuse:
            raise AdapterError("no memory is left")
        self.log.append(("hold", self.name, content_hash, *sources))
        self.held.add(content_hash)
        return self._source(content_hash)

    def _pool_drop(self, content_hash: str) -> None:
        self.log.append(("drop", self.name, content_hash))
        self.held.discard(content_hash)

    def _pool_sources(self, sources: dict[str, Sequence[bytes]]) -> None:
        self.sources.update(sources)

    def _pool_state(self) -> list[PoolEntry]:
        return [self._entry(name) for name in self.known]

    def _list_adapters(self) -> list[AdapterInfo]:
        return [self._entry(name).info for name in self.known]

    def _unload_adapter(self, name: str, waits: bool = True) -> None:
        if name not in self.known:
            raise AdapterNotFoundError(name)
        self._forget(name)

    def end(self) -> None:
        self.ended.set()


class Fleet:
    """Engines with adapters divided over them, as `moe-lora serve` does it at its start."""

    def __init__(self, count: int, adapters: Sequence[str] = (), replicas: int = 1) -> None:
        self.log: Log = []
        self.engines = [Engine(str(number), self.log) for number in range(count)]
        self.directory = PoolDirectory(replicas)
        pairs = [(name, name) for name in adapters]
        asyncio.run(self.directory.fill(self.engines, pairs))
        self.instance_registry = InstanceRegistry(self.engines, pairs, pool=self.directory)
        adapters = FleetAdapters(self.instance_registry)
        routes = Routes(config=FrontEndConfig(), router=LeastOutstanding())
        self.client = FleetClient(self.instance_registry, routes, VirtualClock(), adapters.call)
        assert adapters.pool is not None
        self.pool = adapters.pool

    def holders(self, path: str) -> list[int]:
        return [number for number, engine in enumerate(self.engines) if f"#{path}" in engine.held]

    def step(self) -> None:
        asyncio.run(self.pool.step())

    def end(self, number: int) -> None:
        engine = self.engines[number]
        engine.end()
        self.instance_registry.lose(self.instance_registry.instances[number], engine)

    def check_sources(self) -> None:
        """Every live engine knows the true place of what it does not hold."""
        live = [engine for engine in self.engines if not engine.ended.is_set()]
        for engine in live:
            for facts, *_ in engine.known.values():
                true = {other._source(facts.content_hash) for other in live if other is not engine} - {None}
                if facts.content_hash not in engine.held:
                    assert set(engine.sources[facts.content_hash]) == true


@pytest.mark.parametrize(("replicas", "read"), [(1, 6), (2, 12)])
def test_at_the_start_adapters_are_read_by_their_holders_alone(replicas, read):
    fleet = Fleet(3, "abcdef", replicas)
    assert len(fleet.log) == read
    assert {len(fleet.holders(name)) for name in "abcdef"} == {replicas}
    assert {len(engine.held) for engine in fleet.engines} == {2 * replicas}
    assert all(len(engine.known) == 6 for engine in fleet.engines)
    fleet.step()
    assert len(fleet.log) == read, "at rest nothing moves"
    fleet.check_sources()


@pytest.mark.parametrize(("method", "number"), [("_pool_load", 0), ("_pool_load", 1), ("_pool_know", 1)])
@pytest.mark.parametrize("kind", [StorageError, CapacityError, AdapterError])
def test_a_start_goes_on_without_an_optional_adapter_that_an_engine_refuses(method, number, kind):
    fleet = Fleet(3)

    def refuse(*args: Any) -> None:
        if "x" in (args[0], getattr(args[0], "name", None)):
            raise kind("not here")
        return getattr(Engine, method)(fleet.engines[number], *args)

    setattr(fleet.engines[number], method, refuse)
    directory = PoolDirectory(2 if method == "_pool_load" else 1)
    pairs = [("x", "x"), ("y", "y")]
    with pytest.raises(kind, match="not here"):
        asyncio.run(PoolDirectory(directory.replicas).fill(fleet.engines, pairs))
    asyncio.run(directory.fill(fleet.engines, pairs, frozenset(["x"])))
    assert all("y" in engine.known for engine in fleet.engines)


def test_adapter_is_loaded_where_least_is_held_and_known_everywhere():
    fleet = Fleet(2)

    async def load() -> None:
        await fleet.client.call("load_adapter", "x", "big")
        await fleet.client.call("load_adapter", "y", "small")
        await fleet.client.call("load_adapter", "z", "tiny")

    asyncio.run(load())
    assert [fleet.holders(path) for path in ("big", "small", "tiny")] == [[0], [1], [1]]
    assert all(engine.known.keys() == {"x", "y", "z"} for engine in fleet.engines)
    fleet.check_sources()
    asyncio.run(fleet.client.call("load_adapter", "x", "tiny", replace=True))
    fleet.step()
    assert (fleet.holders("big"), len(fleet.holders("tiny"))) == ([], 1)
    fleet.check_sources()
    asyncio.run(fleet.client.call("unload_adapter", "x"))
    assert not any("x" in engine.known for engine in fleet.engines)


@pytest.mark.parametrize("change", ["replace", "unload"])
def test_a_version_is_held_while_any_instance_has_a_request_of_it(change):
    fleet = Fleet(2, ["old"])
    home = fleet.holders("old")[0]
    fleet.engines[1 - home].used.add("#old")
    if change == "unload":
        asyncio.run(fleet.client.call("unload_adapter", "old"))
    else:
        asyncio.run(fleet.client.call("load_adapter", "old", "new", replace=True))
    fleet.step()
    assert fleet.holders("old") == [home]
    fleet.engines[1 - home].used.clear()
    fleet.step()
    assert fleet.holders("old") == []
    assert len(fleet.holders("new")) == (change == "replace")


def test_adapter_is_loaded_elsewhere_when_its_holder_has_ended():
    fleet = Fleet(3, ["big"])
    home = fleet.holders("big")[0]
    emptiest = min({0, 1, 2} - {home})
    fleet.engines[emptiest].end()  # nobody has noticed yet
    asyncio.run(fleet.client.call("load_adapter", "x", "small"))
    assert fleet.holders("small") == [3 - home - emptiest]
    for engine in fleet.engines:
        engine.end()
    with pytest.raises(EngineDeadError):
        asyncio.run(fleet.client.call("load_adapter", "y", "tiny"))


def test_load_that_one_refuses_is_taken_back_by_the_others():
    fleet = Fleet(2, ["old"])
    fleet.engines[1 - fleet.holders("old")[0]].refuse = ("bad",)
    for name, replace in (("new", False), ("old", True)):
        with pytest.raises(AdapterError):
            asyncio.run(fleet.client.call("load_adapter", name, "bad", replace=replace))
        assert all(engine.known.keys() == {"old"} for engine in fleet.engines)
    assert [path for kind, _, path in fleet.log if kind == "read"].count("old") == 1, "it is held still"
    fleet.step()
    assert not fleet.holders("bad")
    fleet.step()
    assert len(fleet.holders("old")) == 1
    fleet.check_sources()


def test_a_placement_copies_then_routes_then_drops():
    fleet = Fleet(2, ["big", "small"])
    home = fleet.holders("big")[0]
    fleet.log.clear()

    async def move() -> None:
        async with fleet.pool.moving({"big": [(1 - home, 1.0)], "small": [(0, 0.5), (1, 0.5)]}):
            assert fleet.holders("big") == [0, 1], "copied before it is routed by"
            fleet.log.append(("routed",))

    asyncio.run(move())
    assert fleet.holders("big") == [1 - home]
    assert fleet.holders("small") == [0, 1]
    order = [entry[0] for entry in fleet.log]
    assert order == ["hold", "hold", "routed", "drop"]
    assert ("hold", str(1 - home), "#big", f"{home}#big".encode()) in fleet.log
    fleet.check_sources()
    fleet.step()
    assert len(fleet.log) == 4, "at rest nothing moves"


def test_placement_that_goes_on_from_a_table_has_adapters_held_where_that_sends_them():
    fleet = Fleet(2, ["big", "small"])
    routes = make_routes(cluster_config(FrontEndConfig(placement="loraserve")))
    assert isinstance(routes.router, PhiRouting)
    routes.router.swap({"big": [(1, 1.0)], "small": [(1, 1.0)]})
    placement = routes.placement(fleet.client, fleet.pool)
    assert placement is not None
    placement.resume({})
    fleet.step()
    assert fleet.holders("big") == fleet.holders("small") == [1]
    fleet.check_sources()


def test_nothing_is_dropped_while_a_copy_is_not_confirmed():
    fleet = Fleet(2, ["big"])
    home = fleet.holders("big")[0]
    fleet.engines[1 - home].refuse = ("hold",)

    async def move() -> None:
        async with fleet.pool.moving({"big": [(1 - home, 1.0)]}):
            pass

    asyncio.run(move())
    assert fleet.holders("big") == [home]
    fleet.engines[1 - home].refuse = ()
    fleet.step()
    assert fleet.holders("big") == [1 - home]


def test_an_adapter_that_is_unloaded_before_its_copy_is_no_warning(caplog):
    fleet = Fleet(2, ["big"])
    home = fleet.holders("big")[0]
    fleet.engines[1 - home]._forget("big")

    async def move() -> None:
        async with fleet.pool.moving({"big": [(1 - home, 1.0)]}):
            pass

    asyncio.run(move())
    assert (fleet.holders("big"), caplog.text) == ([home], "")


@pytest.mark.parametrize("replicas", [1, 2])
def test_holder_that_ends_is_replaced(replicas):
    fleet = Fleet(3, "abcdef", replicas)
    lost = [name for name in "abcdef" if 0 in fleet.holders(name)]
    fleet.log.clear()
    fleet.end(0)
    fleet.step()
    held = {entry[2]: entry[3:] for entry in fleet.log if entry[0] == "hold"}
    assert held.keys() == {f"#{name}" for name in lost}
    assert all(len(sources) == replicas - 1 for sources in held.values())
    for name in "abcdef":
        assert len(set(fleet.holders(name)) - {0}) == replicas
    fleet.check_sources()


def test_engine_that_comes_back_holds_nothing_at_first_and_its_share_later():
    fleet = Fleet(2, "abcd")
    fleet.end(0)
    fleet.step()
    back = fleet.engines[0] = Engine("again", fleet.log)
    have: dict = {}
    asyncio.run(catch_up(back, fleet.instance_registry.adapters, have, set(), fleet.directory))
    assert asyncio.run(fleet.instance_registry.join(fleet.instance_registry.instances[0], back, have, set()))
    assert (len(back.known), len(back.held)) == (4, 0)
    fleet.step()
    assert (len(back.held), len(fleet.engines[1].held)) == (2, 2)
    fleet.check_sources()


def test_engine_that_joins_holds_what_nobody_holds():
    fleet = Fleet(1, "ab")
    fleet.end(0)
    back = Engine("again", fleet.log)
    asyncio.run(catch_up(back, fleet.instance_registry.adapters, {}, set(), fleet.directory))
    assert back.held == {"#a", "#b"}


def test_a_load_that_hangs_delays_other_engines_loads_of_its_adapter_alone(monkeypatch):
    async def run() -> None:
        directory, log = PoolDirectory(1), []
        first, second = Engine("first", log), Engine("second", log)
        hanging = asyncio.Event()

        async def hang(*args: Any) -> None:
            hanging.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(first, "call", hang)
        load = asyncio.create_task(directory.give(first, "x", "x", 1))
        await asyncio.wait_for(hanging.wait(), PATIENCE_S)
        waiting = asyncio.create_task(directory.give(second, "x", "x", 1))
        await asyncio.wait_for(directory.give(second, "y", "y", 1), PATIENCE_S)
        assert second.known.keys() == {"y"}
        load.cancel()
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert second.known.keys() == {"x", "y"}

    asyncio.run(run())


def test_unserved_adapters_leave_the_directory_though_their_engine_ends(monkeypatch):
    fleet = Fleet(1, "ab")
    engine, directory = fleet.engines[0], PoolDirectory(1)

    def end(name: str, waits: bool) -> None:
        engine.end()
        raise EngineDeadError("it has ended")

    async def come() -> None:
        have, _ = await held_by(engine, directory)
        monkeypatch.setattr(engine, "_unload_adapter", end)
        await catch_up(engine, {}, have, set(), directory)

    with pytest.raises(EngineDeadError):
        asyncio.run(come())
    assert directory.content_hashes() == {}


def test_front_end_that_is_new_learns_from_engines_who_holds_what():
    fleet = Fleet(2, "abcd")
    directory = PoolDirectory(1)
    for engine in fleet.engines:
        asyncio.run(directory.enter(engine))
    clients = {engine: number for number, engine in enumerate(fleet.engines)}
    assert directory.held(clients) == {f"#{name}": fleet.holders(name) for name in "abcd"}
    assert directory.sizes() == fleet.directory.sizes()


def test_engine_that_can_not_hold_what_replaced_its_adapter_goes_on_without():
    fleet = Fleet(2, ["x"])
    asyncio.run(fleet.client.call("load_adapter", "x", "new", replace=True))
    fleet.end(fleet.holders("new")[0])
    away, missing = Engine("away", fleet.log, refuse=("hold",)), set[str]()
    away._pool_load("x", "x", True, 1)
    asyncio.run(
        catch_up(
            away, fleet.instance_registry.adapters, {"x": ServedVersion("x", 1)}, missing, fleet.directory
        )
    )
    assert (missing, away.known) == ({"x"}, {})


def test_name_that_is_loaded_anew_stays_known_when_an_engine_lets_its_last_version_go():
    fleet = Fleet(2, ["x"])
    have = {"x": ServedVersion("x", 1)}
    away = Engine("away", fleet.log)
    away._pool_load("x", "x", True, 1)
    asyncio.run(fleet.client.call("unload_adapter", "x"))
    served = fleet.instance_registry.adapters
    asyncio.run(fleet.client.call("load_adapter", "x", "new"))
    asyncio.run(catch_up(away, served, have, set(), fleet.directory))
    assert fleet.directory.content_hashes() == {"x": "#new"}
    assert fleet.directory.held(dict.fromkeys(fleet.engines, 0))["#new"]


def test_engine_that_was_told_by_a_front_end_before_is_told_all_anew():
    fleet = Fleet(2, "ab")
    directory = PoolDirectory(1)
    first, second = fleet.engines
    asyncio.run(directory.enter(first))
    asyncio.run(directory.enter(second))
    directory.sources("#a", second)  # it joins with another adapter, say
    assert {one: set(places) for one, places in directory.news(second, 0).items()} == {
        one: {first._source(one)} - {None} for one in ("#a", "#b")
    }


def test_engines_hear_of_a_change_however_many_there_were():
    fleet = Fleet(2, "ab")
    home = fleet.holders("a")[0]
    holder, other = fleet.engines[home], fleet.engines[1 - home]
    fleet.directory.news(other, 0)
    for _ in range(1100):
        fleet.directory.note(holder, "#a", b"new")
    fleet.directory.forget("b")
    fleet.directory.sources("#a", other)
    assert fleet.directory.news(other, 0) == {"#a": (b"new",)}


def test_copy_that_is_made_while_an_engine_is_silent_is_counted_when_it_gets_on(monkeypatch):
    fleet = Fleet(2, ["big"])
    silent = fleet.engines[1 - fleet.holders("big")[0]]

    async def settled() -> None:
        silent.held.add("#big")

    monkeypatch.setattr(silent, "settled", settled)
    asyncio.run(held_by(silent, fleet.directory))
    clients = {engine: number for number, engine in enumerate(fleet.engines)}
    assert sorted(fleet.directory.held(clients)["#big"]) == [0, 1]


def test_adapters_are_listed_in_the_order_in_which_they_came():
    fleet = Fleet(3, "fdbeca")
    assert [info.name for info in asyncio.run(fleet.client.list_adapters())] == list("fdbeca")
    assert {info.residency for info in asyncio.run(fleet.client.list_adapters())} == {"host"}
