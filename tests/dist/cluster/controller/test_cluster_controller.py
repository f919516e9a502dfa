# SPDX-License-Identifier: Apache-2.0
"""The controller and its front ends: what one changes, all have; what the controller knew comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from moe_lora.adapters.registry.registry import Registry
from moe_lora.config import FrontEndConfig
from moe_lora.core.address import Address
from moe_lora.core.errors import AdapterExistsError, AdapterNotFoundError, ControllerAwayError
from moe_lora.core.request import EngineStats, RequestTiming
from moe_lora.dist.cluster.controller import controller_link as link
from moe_lora.dist.cluster.controller import front_end_listener, placement_controller
from moe_lora.dist.cluster.controller.cluster_controller import controlled_fleet
from moe_lora.dist.cluster.controller.cluster_state import ClusterState, ClusterStateLog
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.controller.served_registry import ServedRegistry
from moe_lora.dist.cluster.instances import Served, ServedVersion
from moe_lora.engine.client.messages import Alias, AliasChange, DrainOrder
from tests.adapters.peft_folders import BASE, peft_folder
from tests.dist.cluster.fleet_parts import cluster_config
from tests.dist.cluster.listener_parts import Instance

from .parts import Cluster, FrontEndSide, until

TIMING = RequestTiming(queue_s=0.1, adapter_load_s=0.0, prefill_s=0.2, first_decode_s=0.1)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """A controller begins as soon as its front ends are there."""
    monkeypatch.setattr(front_end_listener, "RECOVERY_S", 0.0)
    monkeypatch.setattr(placement_controller, "SETTLE_S", 0.0)
    monkeypatch.setattr(front_end_listener, "POLL_S", 0.02)
    monkeypatch.setattr(link, "REPORT_S", 0.02)


def in_cluster(test: Callable[[Cluster], Awaitable[None]], placement: str | None = None) -> None:
    async def run() -> None:
        async with Cluster(placement) as cluster:
            await test(cluster)

    asyncio.run(run())


def test_an_adapter_loaded_over_one_front_end_is_used_over_the_other_at_once():
    async def test(cluster: Cluster) -> None:
        one, two = cluster.front_ends
        with pytest.raises(AdapterNotFoundError):
            await two.ask("r", "new")
        info = await one.fleet.call("load_adapter", "new", "places/new")
        assert (info.name, info.path) == ("new", "places/new")
        assert await two.ask("r", "new") == [2, 3, 4, 5]
        with pytest.raises(AdapterExistsError, match="already loaded"):
            await two.fleet.call("load_adapter", "new", "places/new")
        await two.fleet.call("unload_adapter", "new")
        with pytest.raises(AdapterNotFoundError):
            await one.ask("r", "new")

    in_cluster(test)


def test_a_pin_and_ranks_are_known_to_all():
    async def test(cluster: Cluster) -> None:
        one, two = cluster.front_ends
        await one.fleet.call("pin_adapter", "a", pinned=True)
        assert two.instance_registry.adapters["a"].pinned
        assert two.routes.ranks == {"a": 1, "b": 1}

    in_cluster(test)


def test_while_the_controller_is_away_requests_go_on_and_changes_are_refused():
    async def test(cluster: Cluster) -> None:
        one, two = cluster.front_ends
        await one.fleet.call("load_adapter", "new", "places/new")
        await cluster.controller.stop()
        await until(lambda: not one.link.up and not two.link.up)
        assert await one.ask("r", "new") == await two.ask("r", "new") == [2, 3, 4, 5]
        for change in (
            one.fleet.call("load_adapter", "other", "places/other"),
            two.fleet.call("unload_adapter", "new"),
            two.fleet.call("pin_adapter", "new", pinned=True),
        ):
            with pytest.raises(ControllerAwayError, match="nothing can be changed without it"):
                await change
        assert {info.name for info in await two.fleet.list_adapters()} == {"a", "b", "new"}

    in_cluster(test)


def test_a_new_controller_goes_on_with_what_front_ends_know():
    async def test(cluster: Cluster) -> None:
        one, two = cluster.front_ends
        for path in ("places/new", "places/newer"):
            await one.fleet.call("load_adapter", "new", path, replace=True)
        await one.fleet.call("pin_adapter", "new", pinned=True)
        await two.fleet.call("unload_adapter", "b")
        before = one.link.state
        assert before is not None
        await cluster.controller.stop()
        await until(lambda: not one.link.up and not two.link.up)
        await cluster.restart_controller()
        await until(lambda: one.link.state is not before and two.link.state is not before)
        assert one.link.state is not None
        assert one.link.state.number > before.number
        assert one.link.state.served == before.served
        assert cluster.controller.instance_registry.served == before.served
        assert await two.ask("r", "new") == [2, 3, 4, 5]
        with pytest.raises(AdapterNotFoundError):
            await one.ask("r", "b")
        await two.fleet.call("load_adapter", "new", "places/newest", replace=True)
        assert one.instance_registry.adapters["new"].version == before.served.versions["new"] + 1

    in_cluster(test)


def with_later_instances(tmp_path, test):
    """Run `test(controlled, log, start)` over a new controller; `start(name, adapters)` adds an instance."""
    path, made = str(tmp_path / "engines"), list[Instance]()
    cluster = cluster_config(FrontEndConfig(engines_address=path), adapters=(("start", "places/start"),))

    async def run() -> None:
        routes, address = make_routes(cluster), Address(path=path)
        async with controlled_fleet(cluster, routes, "engines_address", address) as controlled:

            async def start(name, adapters):
                made.append(Instance(name, path, adapters=adapters))
                await until(lambda: len(controlled.instance_registry.live) == len(made))
                return made

            await test(controlled, ClusterStateLog(controlled.instance_registry, routes, None), start)

    try:
        asyncio.run(run())
    finally:
        for one in made:
            one.stop()


LOADED = {"start": ("places/start", 1), "new": ("places/new", 2)}


def test_an_adapter_of_an_instance_later_than_the_recovery_reaches_front_ends_and_other_instances(tmp_path):
    """The front ends are as new as the controller: only the instances know the adapter."""

    async def test(controlled, log, start) -> None:
        controlled.catch_up.end_recovery()
        await start("first", {"start": ("places/start", 1)})
        made = await start("late", dict(LOADED))
        assert [one.loop.adapters for one in made] == [LOADED, LOADED]
        assert controlled.routes.ranks["new"] == 1
        assert [one.loop.calls.count(("list_adapters",)) for one in made] == [1, 1]
        assert log.write()
        assert log.state.served.versions == {"start": 1, "new": 2}
        assert [one.missing for one in log.state.holdings.values()] == [frozenset()] * 2

    with_later_instances(tmp_path, test)


@pytest.mark.parametrize("front_end", ["none", "in time", "late"])
def test_a_late_instance_brings_its_adapters_but_none_whose_unload_a_front_end_knows(tmp_path, front_end):
    """An instance was away at the unload, and during the recovery of the next controller."""

    async def test(controlled, log, start) -> None:
        state = ClusterState(number=7, served=Served({}, {"new": 2}))
        if front_end == "in time":
            log.recover(state)
        controlled.catch_up.end_recovery()
        if front_end == "late":
            log.learn_orders(state)
        [late] = await start("late", dict(LOADED))
        left = LOADED if front_end == "none" else {"start": LOADED["start"]}
        assert late.loop.adapters == left
        assert controlled.instance_registry.adapters.keys() == left.keys()

    with_later_instances(tmp_path, test)


def test_a_call_under_way_when_the_controller_ends_is_told_so():
    async def test(cluster: Cluster) -> None:
        [one, _] = cluster.front_ends
        held = asyncio.Event()
        load = cluster.engines[0].call

        async def slow(*args: object, **settings: object) -> object:
            held.set()
            await asyncio.sleep(60)
            return await load(*args, **settings)

        cluster.engines[0].call = slow  # type: ignore[method-assign]
        loading = asyncio.create_task(one.fleet.call("load_adapter", "new", "places/new"))
        await held.wait()
        await cluster.controller.stop()
        with pytest.raises(ControllerAwayError, match=r"not known whether .* goes on; .*GET /v1/lora_server"):
            await loading

    in_cluster(test)


def test_a_table_reaches_all_front_ends_and_outlives_the_controller():
    async def test(cluster: Cluster) -> None:
        one, two = cluster.front_ends
        await until(lambda: one.routes.table_version and two.routes.table_version)
        table = one.routes.router.table
        assert table == two.routes.router.table
        assert {index for row in table.values() for index, _ in row} == {0, 1}
        for number in range(6):
            await one.ask(f"r{number}", "a")
            await two.ask(f"s{number}", "a")
        await until(lambda: sum(cluster.controller.routes.meter._tokens.values()) == 12 * 6)
        placement = cluster.controller.placement
        assert placement is not None
        await placement.step()
        await until(lambda: two.routes.table_version == placement.version)
        assert len(two.routes.router.table["a"]) == 2
        copies, version, table = placement.num_copies, placement.version, two.routes.router.table
        await until(lambda: two.link.figures.num_copies == copies)
        await cluster.controller.stop()
        await cluster.restart_controller()
        placement = cluster.controller.placement
        await until(lambda: placement.version >= version)
        assert cluster.controller.routes.router.table == table
        for number in range(6):
            await one.ask(f"t{number}", "a")
            await two.ask(f"u{number}", "a")
        await until(lambda: sum(cluster.controller.routes.meter._tokens.values()) == 12 * 6)
        await placement.step()
        assert (placement.version, placement.num_copies) == (version + 1, 0)
        await until(lambda: one.routes.table_version == version + 1)

    in_cluster(test, "loraserve")


def test_a_front_end_that_takes_nothing_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(front_end_listener, "TAKEN_S", 0.1)

    async def test(cluster: Cluster) -> None:
        one, two = cluster.front_ends
        two.link.receive = lambda message: None  # type: ignore[method-assign]
        await one.fleet.call("load_adapter", "new", "places/new")
        assert "front ends two do not take state" in caplog.text
        assert await one.ask("r", "new") == [2, 3, 4, 5]

    in_cluster(test)


def test_the_load_on_adapters_is_seen_from_all_front_ends():
    async def test(cluster: Cluster) -> None:
        one, two = cluster.front_ends
        window = cluster.controller.provision.window
        visits = [front_end.link.window.begin(name) for front_end in (one, two) for name in "ab"]
        await until(lambda: window.demand().num_requests == 4)
        for visit in visits[:3]:
            visit.start()
        visits[0].end(TIMING)
        visits[3].refuse()
        await until(lambda: window.demand().num_timed == 1)
        await until(lambda: window.demand().num_requests == 3)
        await two.stop()  # what it had under way ended with it
        await until(lambda: len(cluster.controller.listener.sessions) == 1)
        cluster.controller.clock.advance(1.0)
        window.demand()
        assert window._num_started == 1

    in_cluster(test)


def test_a_connection_that_comes_back_changes_no_number(caplog):
    async def test(cluster: Cluster) -> None:
        [one, _] = cluster.front_ends
        await cluster.front_ends[1].fleet.call("load_adapter", "new", "places/new")
        number = one.link.state.number
        one.link._peer.abort("cut")
        await until(lambda: one.link.num_joins == 2 and one.link.up)
        await one.fleet.call("pin_adapter", "new", pinned=True)
        assert one.link.state.number == number + 1
        assert "given up" not in caplog.text

    in_cluster(test)


def test_a_state_that_comes_too_late_is_given_up_but_counted_above(caplog):
    async def test(cluster: Cluster) -> None:
        late = FrontEndSide("late", cluster.address, cluster.engines)
        await late.stop()
        stranger = Served.of({"stranger": ServedVersion("places/stranger", 3)})
        late.link.receive(ClusterState(number=1000, served=stranger))
        running = asyncio.create_task(late.link.run())
        await until(lambda: late.link.state.number > 1000)
        assert late.instance_registry.adapters == cluster.controller.instance_registry.adapters
        await cluster.front_ends[0].fleet.call("load_adapter", "new", "places/new")
        assert await late.ask("r", "new") == [2, 3, 4, 5]
        assert "given up: it came too late" in caplog.text
        running.cancel()

    in_cluster(test)


@pytest.mark.parametrize("number", [1, 1000])
def test_an_order_that_only_a_late_front_end_knows_of_is_not_lost(number):
    async def test(cluster: Cluster) -> None:
        late = FrontEndSide("late", cluster.address, cluster.engines)
        await late.stop()
        late.link.receive(ClusterState(number=number, drains={"0": DrainOrder(True, 5)}))
        running = asyncio.create_task(late.link.run())
        for one in cluster.front_ends:
            await until(lambda one=one: one.instance_registry.drained == {"0"})
        running.cancel()

    in_cluster(test)


@pytest.mark.parametrize("number", [1, 1000])
def test_a_late_front_end_gets_all_aliases_and_brings_its_own(number):
    async def test(cluster: Cluster) -> None:
        registry = cluster.controller.instance_registry
        await cluster.front_ends[0].link.call("change_alias", "blue", AliasChange("rollout", "a"))
        late = FrontEndSide("late", cluster.address, cluster.engines)
        await late.stop()
        aliases = {"blue": Alias("b", number=1), "green": Alias("b", number=2)}
        late.link.receive(ClusterState(number=number, aliases=aliases))
        running = asyncio.create_task(late.link.run())
        for one in (late, *cluster.front_ends):
            await until(lambda one=one: one.instance_registry.aliases == registry.aliases)
            await until(lambda one=one: set(one.instance_registry.aliases.live) == {"blue", "green"})
        assert (registry.aliases["blue"].current, registry.aliases["green"].current) == ("a", "b")
        running.cancel()

    in_cluster(test)


def test_who_has_the_state_by_its_lower_number_gets_the_higher_one():
    async def test(cluster: Cluster) -> None:
        late = FrontEndSide("late", cluster.address, cluster.engines)
        await late.stop()
        late.link.receive(ClusterState(number=1000))
        running = asyncio.create_task(late.link.run())
        await until(lambda: late.link.state.number == 1001)
        for one in cluster.front_ends:
            await until(lambda one=one: one.link.state.number == 1001)
        await until(lambda: {one.taken for one in cluster.controller.listener.sessions} == {1001})
        running.cancel()

    in_cluster(test)


def test_the_registry_is_where_the_controller_is(tmp_path):
    async def test(registry: Registry) -> None:
        async with Cluster(registry=ServedRegistry(registry, BASE)) as cluster:
            link = cluster.front_ends[0].link
            source = str(peft_folder(tmp_path / "source", 1))
            added = await link.call("registry_add", "new", source, "me", False)
            assert added.base_hash == await link.call("registry_base") == BASE
            assert added == await link.call("registry_resolve", "new") == registry.get("new")
            assert await link.call("registry_adapters", None, "", 10) == [added]
            with pytest.raises(AdapterNotFoundError):
                await link.call("registry_versions", "nobody")

    with Registry(tmp_path / "registry", create=True) as registry:
        asyncio.run(test(registry))


def test_one_that_joins_later_gets_the_state():
    async def test(cluster: Cluster) -> None:
        await cluster.front_ends[0].fleet.call("load_adapter", "new", "places/new")
        late = FrontEndSide("late", cluster.address, cluster.engines)
        await until(lambda: late.link.state is not None)
        assert await late.ask("r", "new") == [2, 3, 4, 5]
        await late.stop()

    in_cluster(test)


def test_all_front_ends_and_a_new_controller_know_who_is_drained():
    async def test(cluster: Cluster) -> None:
        first, second = cluster.front_ends
        await first.link.call("drain_instance", "0")
        for number, front_end in enumerate((first, second)):
            assert front_end.instance_registry.drained == {"0"}
            assert len(await front_end.ask(f"drained {number}")) == 4
        assert [len(engine.requests) for engine in cluster.engines] == [0, 2]
        await cluster.controller.stop()
        await cluster.restart_controller()
        await until(cluster.controller.listener._ready.is_set)
        assert cluster.controller.instance_registry.drained == {"0"}
        await second.link.call("undrain_instance", "0")
        assert first.instance_registry.drained == frozenset()

    in_cluster(test)


def test_a_restart_that_its_controller_does_not_outlive_leaves_nobody_drained():
    async def test(cluster: Cluster) -> None:
        cluster.engines[0].stats_now = EngineStats(num_running=1)  # so it is not told to end yet
        first, second = cluster.front_ends
        restarting = asyncio.create_task(first.link.call("restart_instance", "0", 20.0))
        for one in (first, second):
            await until(lambda one=one: one.instance_registry.drained == {"0"})
        await cluster.controller.stop()
        with pytest.raises(ControllerAwayError, match="GET /v1/instances"):
            await restarting
        await cluster.restart_controller()
        for one in (first, second):
            await until(lambda one=one: one.instance_registry.drained == frozenset())

    in_cluster(test)


def test_an_instance_is_back_when_every_front_end_has_it():
    async def test(cluster: Cluster) -> None:
        control = cluster.controller.controller.instances
        instances = [one.instance_registry.instances[0] for one in cluster.front_ends]
        instances[0].incarnation = "new"
        await until(
            lambda: (
                cluster.controller.listener.sessions[0].instances.get("0") == "new"
                or cluster.controller.listener.sessions[1].instances.get("0") == "new"
            )
        )
        assert not control.seen_by_all("0", "new")
        instances[1].incarnation = "new"
        await until(lambda: control.seen_by_all("0", "new"))
        for front_end in cluster.front_ends:
            await front_end.stop()
        await until(lambda: not cluster.controller.listener.sessions)
        assert not control.seen_by_all("0", "new")

    in_cluster(test)
