# SPDX-License-Identifier: Apache-2.0
"""The leader and the instances' lease clients over real connections."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moe_lora.adapters.host_store import HostStore
from moe_lora.cache.leases.leases import LeaseTable
from moe_lora.core.errors import AdapterNotFoundError, CapacityError, LoraServerError, StorageError
from moe_lora.core.records import ServerState
from moe_lora.dist.lora_server import attach, content, leader
from moe_lora.dist.lora_server.attach import NUM_REGISTERS, LeaseClient
from moe_lora.dist.lora_server.control import called, join, network
from moe_lora.dist.lora_server.leader import Leader, OwnRank
from moe_lora.dist.lora_server.messages import Order
from moe_lora.dist.net.keys import make_keys
from moe_lora.policies.caching.caching import ANYBODY, Asker
from tests.core.test_address import ipv6
from tests.dist.cluster_jobs import free_port
from tests.dist.lora_server.cluster import Cluster, random_adapter, until
from tests.dist.lora_server.shapes import model_shape
from tests.patience import PATIENCE_S

SHAPE = model_shape(num_experts=4, num_layers=2)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Room for two of the adapters "a" to "e"; a silent instance is given up after five seconds."""
    with Cluster(SHAPE, "EP2-PP1", capacity=2, lease_timeout_s=5.0) as made:
        made.put(*(random_adapter(name, SHAPE) for name in "abcde"))
        yield made


def joined(cluster: Cluster, instance: str, adapters: str = "abcde", **settings) -> LeaseClient:
    leases = cluster.leases(cluster.client(instance, **settings))
    for adapter_id in adapters:
        leases.register(adapter_id)
    return leases


def granted(leases: LeaseClient, adapter_id: str) -> None:
    until(lambda: leases.lease(adapter_id), f"{adapter_id} is granted")


def settled(leases: LeaseClient) -> ServerState:
    """The leader's counters once it has heard all that was said before."""
    return network().run(called(leases._peer, "state"))


def left_by_one_tenant(cluster) -> LeaseClient:
    """One tenant's a is idle, and another has asked for b and c."""
    leases = joined(cluster, "one")
    leases.acquire("a", Asker("acme", 1.0))
    granted(leases, "a")
    leases.release("a")
    for adapter_id in "bc":
        leases.acquire(adapter_id, Asker("globex", 1.0))
    return leases


def test_the_leader_keeps_for_a_tenant_what_is_within_its_share_and_names_none(cluster):
    leases = left_by_one_tenant(cluster)
    granted(leases, "b")
    state = settled(leases)
    assert (state.num_resident, state.num_waiting, state.num_evictions) == (2, 1, 0)
    assert "acme" not in str(state)
    leases.release("b")
    granted(leases, "c")
    leases.acquire("a", Asker("acme", 1.0))
    granted(leases, "a")
    assert settled(leases).num_loads == 3


def test_what_a_tenant_left_is_given_after_its_absence_though_nobody_asks(cluster, monkeypatch):
    monkeypatch.setattr("moe_lora.policies.caching.arena_shares.PRESENT_S", 0.4)
    monkeypatch.setattr("moe_lora.dist.lora_server.leader.LOOK_AGAIN_S", 0.05)
    leases = left_by_one_tenant(cluster)
    assert settled(leases).num_waiting == 1
    granted(leases, "c")


def test_an_adapter_that_two_tenants_of_an_instance_need_comes_by_the_earlier_turn(cluster):
    leases = joined(cluster, "one")
    for adapter_id in "abcd":
        leases.acquire(adapter_id, Asker("globex", 1.0))
    leases.acquire("d", Asker("acme", 1.0))
    leases.acquire("d", Asker("globex", 1.0))
    assert settled(leases).num_waiting == 2
    leases.release("a")
    granted(leases, "d")
    assert leases.lease("c") is None


def leader_of(table: LeaseTable) -> tuple[Leader, list[Order]]:
    """Of a server of one rank, without connections, and what that rank is told."""
    orders: list[Order] = []
    partition = SimpleNamespace(layout=SimpleNamespace(num_ranks=1), clients_of_server=lambda rank: ())
    return Leader(table, None, partition, None, 0, OwnRank(orders.append, *[lambda *args: None] * 2)), orders


def test_those_that_wait_are_looked_at_once_for_all_that_is_released_in_one_turn(monkeypatch):
    """Before anything new is heard; who gave up its turn meanwhile and asks again comes last."""
    table, looks = LeaseTable(8, [8], 1, starvation_s=5.0), []
    look = table.grant_waiting
    monkeypatch.setattr(table, "grant_waiting", lambda now_s: looks.append(0) or look(now_s))
    for number in range(24):
        table.register(str(number), {0: {0: 1}})
    leader, orders = leader_of(table)
    one, other = (SimpleNamespace(instance=name) for name in ("one", "other"))

    async def hear() -> None:
        held = [await leader.acquire(one, str(number), *ANYBODY) for number in range(8)]
        asked = [await leader.acquire(other, str(number), *ANYBODY) for number in range(8, 24)]
        assert (all(lease.done() for lease in held), len(orders)) == (True, 8)
        for number in range(8):
            await leader.release(one, str(number))
        youngest = await leader.acquire(one, "0", *ANYBODY)
        await leader.release(other, "9")
        again = await leader.acquire(other, "9", *ANYBODY)
        assert looks == []
        await asyncio.sleep(0)
        assert len(looks) == 1
        assert "released" in str(asked[1].exception())
        assert [lease.done() for lease in asked] == [True] * 9 + [False] * 7
        assert not youngest.done()
        assert not again.done()
        await leader.release(other, "8")
        assert (await leader.state(other)).num_waiting == 8, "of what was said, all is counted"
        assert (len(looks), asked[9].done()) == (2, True)
        await asyncio.sleep(0)
        assert len(looks) == 2

    asyncio.run(hear())


@pytest.mark.parametrize("num_failures", [1, 2], ids=["of_the_turn", "of_the_timer_too"])
def test_what_a_look_decides_before_it_fails_is_carried_out_and_the_timers_look_gives_the_rest(
    num_failures, monkeypatch
):
    table, failures, heard, timers = LeaseTable(2, [8], 1, starvation_s=5.0), [], [], []
    for name in "abcde":
        table.register(name, {0: {0: 1}})
    bring_in = table._bring_in

    def fail_at_d(waiter, standing):
        if waiter.adapter.adapter_id == "d" and len(failures) < num_failures:
            failures.append(waiter)
            raise RuntimeError("no d today")
        return bring_in(waiter, standing)

    leader, orders = leader_of(table)
    one = SimpleNamespace(instance="one")

    async def hear() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, told: heard.append(str(told["exception"])))
        monkeypatch.setattr(loop, "call_later", lambda delay_s, call: timers.append(call))
        *_, c, d, e = [await leader.acquire(one, name, *ANYBODY) for name in "abcde"]
        monkeypatch.setattr(table, "_bring_in", fail_at_d)
        await leader.release(one, "a")
        await leader.release(one, "b")
        await asyncio.sleep(0)
        assert (c.done(), len(orders)) == (True, 4), "a and b were loaded; a has left, c was loaded"
        await leader.release(one, "x")
        await asyncio.sleep(0)
        assert len(failures) == 1, "not tried again in every turn"
        for _ in range(num_failures):
            assert (d.done(), table.is_due, len(timers)) == (False, True, 1)
            loop.call_soon(timers.pop())
            await asyncio.sleep(0)
        assert (d.done(), e.done(), table.is_due) == (True, False, False)
        assert heard == ["no d today"] * num_failures
        await leader.release(one, "c")
        await asyncio.sleep(0)
        assert e.done(), "in the next turn, as before the failure"

    asyncio.run(hear())


def test_leases_are_granted_first_come_first_served_over_all_instances(cluster):
    one, other = joined(cluster, "one"), joined(cluster, "other")
    one.acquire("a")
    one.acquire("b")
    granted(one, "a")
    granted(one, "b")
    other.acquire("c")
    settled(other)
    one.acquire("d")
    assert settled(one).num_waiting == 2
    one.release("a")
    granted(other, "c")
    assert one.lease("d") is None
    one.release("b")
    granted(one, "d")
    assert other.lease("c").generation >> 20 == one.lease("d").generation >> 20, "one leader's"


def test_waiting_ends_with_release(cluster):
    one, other = joined(cluster, "one"), joined(cluster, "other")
    for adapter_id in "abc":
        one.acquire(adapter_id)
    other.acquire("d")
    one.release("c")
    one.release("a")
    granted(other, "d")
    assert settled(one).num_waiting == 0
    assert one.lease("c") is None


def test_released_acquires_are_answered(cluster):
    """Else both ends keep each of them until their connection ends."""
    leases = joined(cluster, "one", "abc")
    for adapter_id in "abc":
        leases.acquire(adapter_id)
    granted(leases, "b")
    leases.acquire("c", Asker("acme", 1.0))
    assert settled(leases).num_waiting == 1
    leases.release("c")
    settled(leases)
    assert not leases._peer._calls
    assert leases.lease("c") is None


def test_acquires_of_a_failed_adapter_and_of_an_unknown_one_are_answered():
    table = LeaseTable(1, [8], 1, starvation_s=5.0)
    for name in "ab":
        table.register(name, {0: {0: 1}})
    leader, _ = leader_of(table)
    one = SimpleNamespace(instance="one")

    async def hear() -> None:
        await leader.acquire(one, "a", *ANYBODY)
        waiting = await leader.acquire(one, "b", *ANYBODY)
        leader._fail("b", "the disk")
        assert "the disk" in str(waiting.exception())
        with pytest.raises(AdapterNotFoundError):
            await leader.acquire(one, "c", *ANYBODY)
        assert not leader._acquires

    asyncio.run(hear())


def test_grant_of_an_acquire_given_up_since_is_not_taken_for_the_next_one(cluster):
    one, other = joined(cluster, "one"), joined(cluster, "other")
    other.acquire("a")
    other.acquire("b")
    granted(other, "b")
    one.acquire("c")
    network().run(answered(one, "c", number=0))
    assert one.lease("c") is None
    other.release("a")
    granted(one, "c")


async def answered(leases: LeaseClient, adapter_id: str, number: int) -> None:
    """As if the acquire of that number were granted."""
    lease: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
    lease.set_result((0, 1))
    leases._take(adapter_id, number, lease)


def break_loads(cluster: Cluster, server_rank: int, monkeypatch, error: Exception) -> None:
    """That rank can't load the adapter of rank 7."""
    server_store = cluster.rank(server_rank).loop.server_store
    copy = server_store._copy

    def fail(packed, parts, target) -> None:
        if parts[0].table[:, 2].max() == 7:
            raise error
        copy(packed, parts, target)

    monkeypatch.setattr(server_store, "_copy", fail)


@pytest.mark.parametrize("server_rank", [0, 1])
@pytest.mark.parametrize("error", [OSError("the disk"), ValueError("ranks 0..513")], ids=["disk", "rank"])
def test_adapter_that_one_rank_can_not_load_is_given_up_by_all_and_instances_hear_why(
    cluster, server_rank, error
):
    """Others keep their leases; the adapter is tried again once it is registered again."""
    cluster.put(random_adapter("bad", SHAPE, 7))
    failures: list[tuple[str, str, Exception]] = []
    clients = {name: cluster.client(name) for name in ("one", "other", "third")}
    found = {}
    for name, client in clients.items():

        def note(adapter_id: str, error: Exception, name: str = name) -> None:
            failures.append((name, adapter_id, error))

        found[name] = client.leases(lambda: None, note)
        cluster._leases.append(found[name])
    one, other, third = found.values()
    for leases in (one, other):
        leases.register("bad")
    for leases in (one, third):
        leases.register("a")
    one.acquire("a")
    granted(one, "a")
    lease = one.lease("a")
    with pytest.MonkeyPatch.context() as patched:
        break_loads(cluster, server_rank, patched, error)
        for leases in (one, other):
            leases.acquire("bad")
        until(lambda: len(failures) == 2, "both are told")
    assert {failure[:2] for failure in failures} == {("one", "bad"), ("other", "bad")}
    assert all(str(error) in str(failure[2]) for failure in failures)
    assert all(f"rank {server_rank} of the LoRA Server" in str(failure[2]) for failure in failures)
    for leases in (one, other):
        assert leases.lease("bad") is None
        assert not leases.acquire("bad"), "none can come"
        leases.release("bad")
    state = settled(third)
    assert (state.num_leases, state.num_resident, state.num_waiting) == (1, 1, 0)
    assert one.lease("a") is lease
    for number in range(2):
        generation = cluster.rank(number).loop.server_store.generation
        until(
            lambda generation=generation: (np.delete(generation, lease.slot) % 2**20 == 2).any(),
            "stale there",
        )
    one.register("bad")
    assert one.acquire("bad")
    granted(one, "bad")
    for number in range(2):
        server_store, slot = cluster.rank(number).loop.server_store, one.lease("bad").slot
        until(lambda s=server_store, slot=slot: (s.loaded[slot] == one.lease("bad").generation).all())
    assert len(failures) == 2


def test_content_that_nobody_has_any_more_fails_its_adapter_only(cluster):
    failures: list[tuple[str, Exception]] = []
    client = cluster.client("one")
    leases = client.leases(lambda: None, lambda *failure: failures.append(failure))
    cluster._leases.append(leases)
    for name in "ab":
        leases.register(name)
    client.store.remove("a")
    leases.acquire("a")
    leases.acquire("b")
    granted(leases, "b")
    until(lambda: failures)
    [(adapter_id, error)] = failures
    assert adapter_id == "a"
    assert "instance one can't send it: it is not in the store" in str(error)
    state = settled(leases)
    assert (state.num_leases, state.num_resident) == (1, 1)
    client.store.put(random_adapter("a", SHAPE))
    leases.release("a")
    leases.register("a")
    leases.acquire("a")
    granted(leases, "a")


def test_content_is_sent_by_another_instance_when_the_first_has_lost_it_or_leaves(tmp_path):
    with Cluster(SHAPE, "EP1-PP1", store_dir=str(tmp_path / "server"), capacity=2) as cluster:
        failures: list[tuple[str, Exception]] = []
        found = []
        for name in ("one", "two", "three"):
            client = cluster.client(name, store_dir=str(tmp_path / name))
            client.store.put(random_adapter("a", SHAPE))
            leases = client.leases(lambda: None, lambda *failure: failures.append(failure))
            cluster._leases.append(leases)
            leases.register("a")
            found.append((client, leases))
        HostStore(tmp_path / "server").remove("a")
        for client, _ in found[:2]:
            client.store.remove("a")
        third = found[2][1]
        third.acquire("a")
        granted(third, "a")
        server_store, lease = cluster.rank(0).loop.server_store, third.lease("a")
        until(lambda: (server_store.loaded[lease.slot] == lease.generation).all())
        assert failures == []


@pytest.mark.parametrize("number", ["own", "of another host"])
def test_content_that_finds_no_room_is_told_and_the_connection_stays(tmp_path, monkeypatch, number):
    """Of the leader at the registration, of another rank at the load."""

    def fail(store: HostStore, content_hash: str, blocks) -> None:
        if content_hash == "a" and str(store.directory) == str(tmp_path / "full"):
            next(iter(blocks))
            raise StorageError("no space left")
        adopt(store, content_hash, blocks)

    adopt = HostStore.adopt
    stores = {"own": ["full"], "of another host": ["leader", "full"]}[number]
    with Cluster(SHAPE, f"EP{len(stores)}-PP1", store_dir=str(tmp_path / stores[0]), capacity=2) as cluster:
        if len(stores) == 2:
            cluster.stop(1)
            shared = cluster.config
            cluster.config = replace(shared, store_dir=str(tmp_path / "full"))
            cluster.start(1)
            cluster.config = shared
        failures: list[tuple[str, Exception]] = []
        client = cluster.client("one", store_dir=str(tmp_path / "client"))
        client.store.put(random_adapter("a", SHAPE))
        client.store.put(random_adapter("b", SHAPE))
        leases = client.leases(lambda: None, lambda *failure: failures.append(failure))
        cluster._leases.append(leases)
        leases.register("b")
        leases.acquire("b")
        granted(leases, "b")
        lease, peer = leases.lease("b"), leases._peer
        with monkeypatch.context() as patched:
            patched.setattr(HostStore, "adopt", fail)
            patched.setattr(content, "_BLOCK_BYTES", 1000)
            if number == "own":
                with pytest.raises(StorageError, match="no space left"):
                    leases.register("a")
            else:
                leases.register("a")
                leases.acquire("a")
                until(lambda: failures)
                assert "no space left" in str(failures[0][1])
                leases.release("a")
        leases.register("a")
        leases.acquire("a")
        granted(leases, "a")
        lease_a = leases.lease("a")
        for rank in range(len(stores)):
            server_store = cluster.rank(rank).loop.server_store
            until(lambda s=server_store: (s.loaded[lease_a.slot] == lease_a.generation).all())
        assert leases._peer is peer, "the connection went on"
        assert leases.lease("b") is lease


def test_file_that_is_damaged_at_the_leader_is_sent_again_at_the_registration(cluster):
    client = cluster.client("one")
    held = client.store.get("a", "a")
    client.store.path("a").unlink()
    client.store.path("a").write_bytes(b"no adapter")
    leases = cluster.leases(client)
    leases.register("a")
    leases.acquire("a")
    granted(leases, "a")
    lease = leases.lease("a")
    for number in range(2):
        server_store = cluster.rank(number).loop.server_store
        until(lambda s=server_store: (s.loaded[lease.slot] == lease.generation).all())
    assert held.content_hash in client.store


def test_answer_that_fails_for_any_reason_ends_no_connection(cluster, monkeypatch):
    leases = joined(cluster, "one", "ab")
    leases.acquire("b")
    granted(leases, "b")
    lease = leases.lease("b")

    def fail(*given) -> None:
        raise IndexError("a table of another model")

    with monkeypatch.context() as patched:
        patched.setattr(Leader, "_shares", fail)
        with pytest.raises(CapacityError, match="a table of another model"):
            leases.register("c")
    assert leases.connected
    assert leases.lease("b") is lease


def test_instance_that_is_gone_frees_its_leases(cluster):
    one, other = joined(cluster, "one"), joined(cluster, "other")
    one.acquire("a")
    one.acquire("b")
    granted(one, "b")
    other.acquire("c")
    one.stop()
    granted(other, "c")


def test_instance_that_came_back_is_heard_on_its_newest_connection_only(cluster):
    hello = cluster.client("one")._hello

    async def speak() -> None:
        old, new = [
            await join(cluster.config.address, None, hello, 5.0, "join_instance", "one") for _ in range(2)
        ]
        assert await called(new, "register", "a")
        assert await called(new, "acquire", "a", *ANYBODY)
        old.call("release", "a")
        await old.ended.wait()
        assert (await called(new, "state")).num_leases == 1
        new.end()

    network().run(speak(), 60.0)


def test_adapter_unregistered_by_one_instance_is_still_served_to_another(cluster):
    one, other = joined(cluster, "one", "a"), joined(cluster, "other", "a")
    one.unregister("a")
    settled(one)
    other.acquire("a")
    granted(other, "a")
    other.unregister("a")
    assert settled(other).num_resident == 1, "served to the end"
    other.release("a")
    assert settled(other).num_resident == 0


def test_new_leader_is_told_what_was_registered_and_wanted(cluster):
    changes = threading.Semaphore(0)
    leases = cluster.leases(cluster.client("one"), changes.release)
    for adapter_id in "abc":
        leases.register(adapter_id)
        leases.acquire(adapter_id)
    granted(leases, "b")
    before = leases.lease("a")
    while changes.acquire(blocking=False):
        pass
    cluster.stop(0)
    until(lambda: not leases.connected)
    assert leases.lease("a") is None
    assert changes.acquire(timeout=PATIENCE_S), "also told to those that only wait"
    assert not leases.acquire("c"), "nothing can come now"
    cluster.start(0)
    granted(leases, "a")
    granted(leases, "b")
    assert leases.lease("a").generation > before.generation
    leases.release("a")
    granted(leases, "c")
    until(
        lambda: cluster.rank(1).loop.server_store.loaded.min() > before.generation, "the other rank loads too"
    )


class ScriptedPeer:
    """A leader's connection: `answer` makes the result of a register, None leaves the call open."""

    def __init__(self, answer: Callable[[str], bool | Exception | None]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.open: deque[asyncio.Future[bool]] = deque()
        self.most_open = 0
        self.ended, self.problem, self.name = asyncio.Event(), "cut", "leader"
        self._answer = answer

    def call(self, method: str, adapter_id: str, *args: object) -> asyncio.Future[bool]:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.calls.append((method, adapter_id))
        found = self._answer(adapter_id) if method == "register" else None
        if isinstance(found, Exception):
            answer.set_exception(found)
        elif found is not None:
            answer.set_result(found)
        elif method == "register":
            self.open.append(answer)
            self.most_open = max(self.most_open, len(self.open))
        return answer

    def end(self) -> None:
        self.ended.set()

    async def closed(self) -> None: ...


def rejoined(
    adapters: Sequence[str], answer: Callable[[str], bool | Exception | None]
) -> tuple[LeaseClient, ScriptedPeer]:
    """An instance that has registered and acquired all adapters, at its second leader."""

    async def make(answer: Callable[[str], bool | Exception | None]) -> ScriptedPeer:
        return ScriptedPeer(answer)

    first, second = network().run(make(lambda adapter_id: True)), network().run(make(answer))
    coming = iter((first, second))

    async def join_leader(timeout_s: float, hear: object) -> ScriptedPeer:
        return next(coming)

    leases = LeaseClient(join_leader, SimpleNamespace(), lambda: None, 1.0)
    for adapter_id in adapters:
        leases.register(adapter_id)
        leases.acquire(adapter_id)
    until(lambda: len(first.calls) == 2 * len(adapters))
    network().loop.call_soon_threadsafe(first.end)
    until(lambda: leases._peer is second)
    return leases, second


def test_few_registers_of_a_rejoin_are_in_flight_at_once():
    """More would keep the leader from reading pings."""
    adapters = [str(number) for number in range(5 * NUM_REGISTERS)]
    leases, peer = rejoined(adapters, lambda adapter_id: None)

    async def answer_next() -> None:
        peer.open.popleft().set_result(True)

    for _ in adapters:
        until(lambda: peer.open)
        network().run(answer_next())
    until(lambda: len(peer.calls) == 2 * len(adapters))
    assert peer.most_open == NUM_REGISTERS
    for method in ("register", "acquire"):
        assert [one for name, one in peer.calls if name == method] == adapters, "in the order of needs"
    leases.stop()


@pytest.mark.parametrize(
    ("error", "num_calls"),
    [
        (OSError("too many open files"), 3),
        (StorageError("no space left"), 3),
        (CapacityError("too large"), 1),
    ],
    ids=["files", "disk", "size"],
)
def test_adapter_rejected_at_a_rejoin_is_registered_again_if_the_cause_can_pass(
    monkeypatch, error, num_calls
):
    monkeypatch.setattr("moe_lora.dist.lora_server.attach.FIRST_RETRY_S", 0.01)
    answers = {"a": deque([error, error, True]), "b": deque([True])}
    leases, peer = rejoined("ab", lambda adapter_id: answers[adapter_id].popleft())
    until(lambda: peer.calls.count(("register", "a")) == num_calls)
    until(lambda: ("acquire", "b") in peer.calls)
    passes = num_calls > 1
    until(lambda: leases.acquire("a") == passes, "computed here unless it is registered")
    if passes:
        until(lambda: ("acquire", "a") in peer.calls)
    leases.stop()
    assert peer.calls.count(("register", "a")) == num_calls


def test_shares_of_an_adapter_are_computed_once(cluster, monkeypatch):
    computed, compute = [], Leader._shares
    monkeypatch.setattr(
        Leader,
        "_shares",
        lambda leader, adapter_id: computed.append(adapter_id) or compute(leader, adapter_id),
    )
    one = joined(cluster, "one", "ab")
    other = joined(cluster, "other", "ab")
    assert computed == ["a", "b"]
    for leases in (one, other):
        leases.unregister("a")
        settled(leases)
    other.register("a")
    assert computed == ["a", "b", "a"], "shares are dropped with the adapter"


def test_rank_that_comes_back_is_told_what_is_resident(cluster):
    leases = joined(cluster, "one", "ab")
    leases.acquire("a")
    leases.acquire("b")
    granted(leases, "a")
    granted(leases, "b")
    cluster.stop(1)
    rank = cluster.start(1)
    wanted = {leases.lease(name).slot: leases.lease(name).generation for name in "ab"}
    until(lambda: all((rank.loop.server_store.loaded[slot] == wanted[slot]).all() for slot in wanted))


def test_content_goes_to_a_leader_and_from_it_to_ranks_of_other_hosts(tmp_path):
    """Three stores: the leader's, the other rank's and the client's."""
    with Cluster(SHAPE, "EP2-PP1", store_dir=str(tmp_path / "leader"), capacity=2) as cluster:
        cluster.stop(1)
        shared = cluster.config
        cluster.config = cluster.config.__class__(**{**vars(shared), "store_dir": str(tmp_path / "rank")})
        rank = cluster.start(1)
        client = cluster.client("one", store_dir=str(tmp_path / "client"))
        client.store.put(random_adapter("a", SHAPE))
        leases = cluster.leases(client)
        leases.register("a")
        leases.acquire("a")
        granted(leases, "a")
        lease = leases.lease("a")
        until(lambda: (rank.loop.server_store.loaded[lease.slot] == lease.generation).all())
        files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("leader", "rank")]
        assert files[0] == files[1] == [client.store.path("a").name]
        cluster.stop(0)
        for path in (tmp_path / "leader").iterdir():
            path.unlink()
        until(lambda: not leases.connected)
        cluster.config = shared
        cluster.start(0)
        granted(leases, "a")  # asked for before the content had come again


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_adapter_whose_content_travels_to_the_leader_delays_no_other_lease(tmp_path, monkeypatch, is_lost):
    """At the registration, and after the leader has lost the file."""
    arrives, may_arrive, receive = threading.Event(), threading.Event(), leader.receive_blocks

    async def held(peer, store, adapter_id: str, number: int) -> None:
        if adapter_id == "a":
            arrives.set()
            await asyncio.to_thread(may_arrive.wait, PATIENCE_S)
        await receive(peer, store, adapter_id, number)

    with Cluster(SHAPE, store_dir=str(tmp_path / "leader"), capacity=2) as cluster:
        client = cluster.client("one", store_dir=str(tmp_path / "client"))
        for adapter_id in "ab":
            client.store.put(random_adapter(adapter_id, SHAPE))
        leases = cluster.leases(client)
        leases.register("b")
        if is_lost:
            leases.register("a")
            HostStore(tmp_path / "leader").remove("a")
        monkeypatch.setattr(leader, "receive_blocks", held)
        loading = threading.Thread(target=leases.register, args=("a",))
        if is_lost:
            leases.acquire("a")
        else:
            loading.start()
        assert arrives.wait(PATIENCE_S)
        leases.acquire("b")
        granted(leases, "b")
        assert not may_arrive.is_set()
        may_arrive.set()
        if not is_lost:
            loading.join(PATIENCE_S)
            leases.acquire("a")
        granted(leases, "a")
        server_store, lease = cluster.rank(0).loop.server_store, leases.lease("a")
        until(lambda: (server_store.loaded[lease.slot] == lease.generation).all())
    assert not leases._tasks


@pytest.mark.parametrize("is_lost", [False, True], ids=["of_a_load", "of_lost_content"])
def test_a_transfer_that_is_cut_is_repeated_on_another_connection(tmp_path, monkeypatch, is_lost):
    cuts, failed, receive = [], [], leader.receive_blocks

    async def cut(peer, *given) -> None:
        if len(cuts) < 3:
            cuts.append(peer.name)
            peer.abort("cut")
        await receive(peer, *given)

    with Cluster(SHAPE, store_dir=str(tmp_path / "leader"), capacity=2) as cluster:
        client = cluster.client("one", store_dir=str(tmp_path / "client"))
        client.store.put(random_adapter("a", SHAPE))
        leases = cluster.leases(client)
        leases.on_failure = lambda adapter_id, error: failed.append(error)
        peer = leases._peer
        if is_lost:
            leases.register("a")
            HostStore(tmp_path / "leader").remove("a")
        monkeypatch.setattr(leader, "receive_blocks", cut)
        if not is_lost:
            leases.register("a")
        leases.acquire("a")
        until(lambda: failed or (leases.lease("a") and "a" in HostStore(tmp_path / "leader")))
        assert failed == []
        assert cuts == ["one/0"] * 3
        assert leases._peer is peer, "the leases stay"


def test_a_load_that_is_cut_each_time_names_the_cut(tmp_path, monkeypatch):
    async def cut(peer, *given) -> None:
        peer.abort("cut")

    monkeypatch.setattr(leader, "receive_blocks", cut)
    with Cluster(SHAPE, store_dir=str(tmp_path / "leader"), capacity=2) as cluster:
        client = cluster.client("one", store_dir=str(tmp_path / "client"))
        client.store.put(random_adapter("a", SHAPE))
        with pytest.raises(CapacityError, match="transfer was cut"):
            cluster.leases(client).register("a")


def test_a_load_whose_answer_is_late_outlasts_a_passing_error(tmp_path, monkeypatch):
    monkeypatch.setattr(attach, "_ANSWER_S", 0.01)
    monkeypatch.setattr(attach, "FIRST_RETRY_S", 0.01)
    may_fail = threading.Event()
    with Cluster(SHAPE, store_dir=str(tmp_path / "leader"), capacity=2) as cluster:
        client = cluster.client("one", store_dir=str(tmp_path / "client"))
        client.store.put(random_adapter("a", SHAPE))
        leases = cluster.leases(client)
        give = leases._give

        async def fail_once(adapter_id: str) -> None:
            if not may_fail.is_set():
                await asyncio.to_thread(may_fail.wait, PATIENCE_S)
                raise LoraServerError("no LoRA Server answers")
            monkeypatch.setattr(attach, "_ANSWER_S", PATIENCE_S)
            await give(adapter_id)

        monkeypatch.setattr(leases, "_give", fail_once)
        leases.register("a")
        leases.acquire("a")
        may_fail.set()
        granted(leases, "a")
        assert leases.knows("a")


def test_an_unload_during_its_own_transfer_leaves_no_file(tmp_path, monkeypatch):
    arrives, may_arrive, receive = threading.Event(), threading.Event(), leader.receive_blocks

    async def held(*given) -> None:
        arrives.set()
        await asyncio.to_thread(may_arrive.wait, PATIENCE_S)
        await receive(*given)

    monkeypatch.setattr(leader, "receive_blocks", held)
    with Cluster(SHAPE, store_dir=str(tmp_path / "leader"), capacity=2) as cluster:
        client = cluster.client("one", store_dir=str(tmp_path / "client"))
        client.store.put(random_adapter("a", SHAPE))
        mapped = client.store.get("a", "a")
        leases = cluster.leases(client)
        loading = threading.Thread(target=leases.register, args=("a",))
        loading.start()
        assert arrives.wait(PATIENCE_S)
        leases.unregister("a")
        leases.drop("a")
        settled(leases)
        may_arrive.set()
        loading.join(PATIENCE_S)
        settled(leases)
        assert mapped is not None, "content that the instance still computes"
        assert "a" not in HostStore(tmp_path / "leader")
        assert leases._rejected == {}
        leases.register("a")
        leases.acquire("a")
        granted(leases, "a")


def test_dropped_content_is_deleted_on_all_hosts_with_its_last_registration(tmp_path):
    """Four stores; of 20 versions each keeps the registered one."""
    with Cluster(SHAPE, "EP2-PP1", store_dir=str(tmp_path / "leader"), capacity=2) as cluster:
        cluster.stop(1)
        shared = cluster.config
        cluster.config = replace(shared, store_dir=str(tmp_path / "rank"))
        rank = cluster.start(1)
        cluster.config = shared
        clients = [cluster.client(name, store_dir=str(tmp_path / name)) for name in ("one", "two")]
        one, two = map(cluster.leases, clients)

        def files(folder: str) -> list[str]:
            return sorted(path.name.partition(".")[0] for path in (tmp_path / folder).iterdir())

        kept = []
        for number in range(20):
            name = f"v{number}"
            for client, leases in zip(clients, (one, two), strict=True):
                client.store.put(random_adapter(name, SHAPE))
                kept.append(client.store.get(name, name))  # as an instance that has it loaded
                leases.register(name)
            one.acquire(name)
            granted(one, name)
            lease = one.lease(name)
            until(lambda lease=lease: (rank.loop.server_store.loaded[lease.slot] == lease.generation).all())
            one.release(name)
            if number:
                before = f"v{number - 1}"
                one.unregister(before)
                one.drop(before)
                settled(one)
                for folder in ("leader", "rank", "one", "two"):
                    assert before in files(folder), "the second instance has it still"
                two.unregister(before)
                settled(two)
        for folder in ("leader", "rank", "one", "two"):
            until(lambda folder=folder: files(folder) == ["v19"])


def test_content_that_is_registered_again_outlasts_an_earlier_drop(cluster):
    one, two = joined(cluster, "one", "a"), joined(cluster, "two", "")
    one.drop("a")
    two.register("a")
    for leases in (one, two):
        leases.unregister("a")
        settled(leases)
    store = HostStore(cluster.config.store_dir)
    assert "a" in store
    one.drop("a")
    until(lambda: "a" not in store)


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_drop_that_waits_for_an_instance_is_carried_out_when_the_instance_ends(cluster, comes_again):
    one, store = joined(cluster, "one", "ab"), HostStore(cluster.config.store_dir)
    hello = cluster.client("two")._hello

    async def end_two() -> None:
        place = cluster.config.address, None, hello, PATIENCE_S, "join_instance", "two"
        two = await join(*place)
        for adapter_id in "abc":
            assert await called(two, "register", adapter_id)
        await called(two, "acquire", "c", *ANYBODY)
        for adapter_id in "ac":
            await called(two, "drop", adapter_id)
        assert "c" in store, "an instance has requests of this version"
        if comes_again:
            two = await join(*place)
        two.end()

    network().run(end_two(), PATIENCE_S)
    until(lambda: "c" not in store)
    assert settled(one).num_resident == 0
    assert "a" in store
    assert "b" in store


def test_adapter_too_large_for_the_server_is_refused_by_the_size_it_needs():
    with Cluster(SHAPE, "EP2-PP1", memory_gb=0.0005) as cluster:
        cluster.put(random_adapter("small", SHAPE), random_adapter("huge", SHAPE, 500))
        leases = joined(cluster, "one", "")
        with pytest.raises(
            CapacityError, match=r"content huge takes 0\.\d+ GB on rank 0 .* budget .* or more"
        ):
            leases.register("huge")
        leases.register("small")
        leases.acquire("small")
        granted(leases, "small")


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"layout": "EP1-PP1"}, "layout"), ({"sites": "experts"}, "sites")],
)
def test_client_with_other_settings_is_refused_by_their_name(cluster, changes, field):
    with pytest.raises(LoraServerError, match=field):
        cluster.client("one", **changes)


@pytest.mark.parametrize("layout", ["EP1-PP1", "EP2-PP1"])
def test_content_that_the_store_has_lost_is_fetched_from_an_instance(layout):
    with Cluster(SHAPE, layout, capacity=2) as made:
        made.put(*(random_adapter(name, SHAPE) for name in "ab"))
        client = made.client("one")
        in_use = [client.store.get(name, name) for name in "ab"]
        one = made.leases(client)
        for name in "ab":
            one.register(name)
        shutil.rmtree(made.config.store_dir)
        for name in "ab":
            one.acquire(name)
            granted(one, name)
            lease = one.lease(name)
            for number in range(made.num_ranks):
                server_store = made.rank(number).loop.server_store
                until(
                    lambda server_store=server_store, lease=lease: (
                        server_store.loaded[lease.slot] == lease.generation
                    ).all(),
                    f"{name} is loaded",
                )
        assert all(packed.content_hash in client.store for packed in in_use)


@ipv6
@pytest.mark.parametrize("hosts", [("::1", "127.0.0.1"), ("127.0.0.1", "::1")])
def test_ranks_behind_a_name_with_addresses_of_both_families_are_reached(hosts, tmp_path, monkeypatch):
    find = socket.getaddrinfo

    def found(name, *given, **named):
        names = hosts if name == "both" else (name,)
        return [place for one in names for place in find(one, *given, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    make_keys(tmp_path / "keys")
    address = f"both:{free_port()}"
    with Cluster(SHAPE, "EP2-PP1", address=address, certificates=str(tmp_path / "keys")) as made:
        leases = joined(made, "one", "")
        until(lambda: settled(leases).is_whole, "both ranks are linked")
