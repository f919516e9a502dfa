# SPDX-License-Identifier: Apache-2.0
"""Adapters that are ready when the LoRA Server has leased them, and when it is away."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.config import EngineConfig
from moe_lora.core.errors import CapacityError, LoraServerError, StorageError
from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.adapters.leased_adapters import LeasedAdapters
from moe_lora.engine.adapters.make_store import make_store
from tests.dist.lora_server.cluster import Cluster, random_adapter, until
from tests.dist.lora_server.shapes import model_shape
from tests.dist.lora_server.test_leader import settled
from tests.patience import PATIENCE_S

SHAPE = model_shape(num_experts=4, num_layers=2)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(SHAPE, capacity=1, lease_timeout_s=5.0, memory_gb=0.0005) as made:
        yield made


@pytest.fixture
def leases(cluster) -> Iterator[LeasedAdapters]:
    made = LeasedAdapters(cluster.client("one"))
    yield made
    made.close()


def add(leases: LeasedAdapters, name: str, uid: int, lora_rank: int = 3) -> AdapterVersion:
    return AdapterVersion(uid, 1, leases.keep(random_adapter(name, SHAPE, lora_rank)), None)


def changes(leases: LeasedAdapters) -> threading.Event:
    """Set at each change from now on."""
    changed = threading.Event()
    leases.on_change = changed.set
    return changed


def held(leases: LeasedAdapters, adapter: AdapterVersion) -> None:
    until(lambda: leases.acquire(adapter), f"{adapter.name} is held")


def test_adapter_is_ready_once_it_is_leased_and_change_is_told(leases):
    adapter = add(leases, "a", 1)
    changed = changes(leases)
    leases.acquire(adapter)  # the lease may be here at once
    assert changed.wait(PATIENCE_S)
    assert leases.acquire(adapter)
    assert adapter.lease is not None
    assert list(leases.resident()) == [adapter]
    leases.release(adapter)
    assert adapter.lease is None
    assert list(leases.resident()) == []


def test_adapter_without_room_waits_until_another_is_let_go(leases):
    first, second = add(leases, "a", 1), add(leases, "b", 2)
    held(leases, first)
    assert not leases.acquire(second)
    changed = changes(leases)
    leases.release(first)
    while not leases.acquire(second):  # the first change may tell that the other's lease ended
        assert changed.wait(PATIENCE_S)
        changed.clear()


def test_grant_that_crosses_the_release_leaves_no_lease_behind(leases):
    """The adapter is asked for and given back at once, as when its only request is aborted."""
    first, second = add(leases, "a", 1), add(leases, "b", 2)
    for _ in range(20):
        leases.acquire(first)
        leases.release(first)
    held(leases, second)
    assert not leases.acquire(first), "the one place is taken, so this lease would be a ghost"


def test_two_versions_of_one_content_share_the_lease(leases):
    one, same = add(leases, "a", 1), add(leases, "a", 2)
    held(leases, one)
    held(leases, same)
    lease = one.lease
    leases.release(one)
    leases.forget(one.packed)
    assert same.lease == lease
    assert leases.acquire(same)


def test_lease_is_unused_until_a_request_of_any_version_of_its_content_holds_it(leases):
    one, same = add(leases, "a", 1), add(leases, "a", 2)
    assert not leases.is_unused(one)
    leases.acquire(one)
    until(lambda: leases.is_unused(one), "the lease comes")
    held(leases, one)
    assert leases.is_unused(same)
    one.num_running = 1
    assert not leases.is_unused(same)


def test_waiting_request_starts_without_a_lease_when_the_server_goes(cluster, leases):
    first, second = add(leases, "a", 1), add(leases, "b", 2)
    held(leases, first)
    assert not leases.acquire(second)
    changed = changes(leases)
    cluster.stop(0)
    assert changed.wait(PATIENCE_S), "a stalled engine would never look again"
    until(lambda: first.lease is None)
    assert leases.acquire(second)
    assert second.lease is None
    leases.release(second)
    cluster.start(0)
    until(lambda: first.lease is not None, "the lease is given again")
    assert not leases.acquire(second)


def test_new_requests_of_an_adapter_held_since_an_outage_wait_for_its_lease(cluster, leases):
    """Else the adapters of an outage stay held without a lease for as long as requests come."""
    adapters = add(leases, "a", 1), add(leases, "b", 2)
    cluster.stop(0)
    until(lambda: not leases._leases.connected)
    for adapter in adapters:
        assert leases.acquire(adapter), "nothing can come"
        assert adapter.lease is None
    cluster.start(0)
    until(lambda: any(adapter.lease for adapter in adapters), "the one place is leased")
    leased, other = sorted(adapters, key=lambda adapter: adapter.lease is None)
    assert not leases.acquire(other), "its running requests go on, new ones wait"
    assert leases.acquire(leased)
    assert list(leases.resident()) == list(adapters)
    leases.release(leased)
    until(lambda: other.lease is not None, "the place is given on")
    assert leases.acquire(other)


def test_adapter_that_a_new_server_has_no_room_for_is_computed_here(cluster, leases):
    large = add(leases, "large", 1, lora_rank=30)
    cluster.stop(0)
    cluster.config = cluster.config.__class__(**{**vars(cluster.config), "memory_gb": 0.0001})
    changed = changes(leases)
    cluster.start(0)
    until(lambda: leases._leases.connected)
    assert changed.wait(PATIENCE_S)
    held(leases, large)
    assert large.lease is None


def test_adapter_that_could_never_be_ready_is_refused_and_forgotten(leases):
    large = random_adapter("content hash", SHAPE, 500)
    with pytest.raises(CapacityError) as caught:
        leases.keep(replace(large, name="legal"))
    message = str(caught.value)
    assert f"adapter 'legal' of {large.nbytes / 1e9:.6f} GB can't be served" in message
    assert "budget for all adapters is 0.000500 GB" in message
    assert "raise lora_server.memory_gb (--lora-server-memory-gb) to 0.0" in message
    assert len(leases) == 0


@pytest.fixture
def registered(leases, monkeypatch) -> list[str]:
    """Adapters that were registered, in order."""
    found, register = [], leases._leases.register

    def noted(adapter_id: str) -> None:
        found.append(adapter_id)
        register(adapter_id)

    monkeypatch.setattr(leases._leases, "register", noted)
    return found


def test_the_engine_waits_for_no_register_of_a_prepared_adapter(leases, registered):
    prepared = leases.prepare(random_adapter("a", SHAPE))
    assert registered == ["a"]
    adapter = AdapterVersion(1, 1, leases.keep(prepared), None)
    assert registered == ["a"]
    held(leases, adapter)
    assert adapter.lease is not None
    add(leases, "b", 2)
    assert registered == ["a", "b"], "it was not prepared"


def test_the_engine_waits_for_no_register_of_two_loads_of_one_content(leases, registered):
    loads = [leases.prepare(random_adapter("a", SHAPE)) for _ in range(2)]
    for one in loads:
        leases.keep(one)
    assert registered == ["a", "a"]
    for one in loads:
        leases.forget(one)
    until(lambda: not leases._leases.knows("a"))


def test_an_adapter_whose_prepare_ends_just_before_the_move_is_registered_when_kept(leases, cluster):
    client = cluster.client("two")
    following = leases.leases_at(client)
    following.succeed(leases._leases)
    prepared = leases.prepare(random_adapter("a", SHAPE))
    former = leases.lease_from(client, following)
    adapter = AdapterVersion(1, 1, leases.keep(prepared), None)
    assert following.knows("a")
    held(leases, adapter)
    assert adapter.lease is not None
    former.stop()


def test_an_adapter_that_fails_between_prepare_and_keep_is_served_again(leases):
    prepared = leases.prepare(random_adapter("a", SHAPE))
    leases._leases._fail("a", LoraServerError("rank 0 can't load it"))
    adapter = AdapterVersion(1, 1, leases.keep(prepared), None)
    held(leases, adapter)
    assert adapter.lease is not None


def test_a_keep_just_after_the_last_version_goes_registers_again(leases, registered):
    first = add(leases, "a", 1)
    leases.forget(first.packed)
    second = add(leases, "a", 2)
    assert registered == ["a", "a"]
    held(leases, second)
    assert leases._leases.knows("a")


def test_an_undone_adapter_is_unregistered_but_for_another_version(leases):
    known = leases._leases._registered
    leases.undo_prepare(leases.prepare(random_adapter("a", SHAPE)))
    until(lambda: known == set())
    first = add(leases, "a", 1)
    leases.undo_prepare(leases.prepare(random_adapter("a", SHAPE)))
    leases.undo_prepare(first.packed)
    held(leases, first)
    assert first.lease is not None
    assert known == {"a"}


def test_a_prepared_adapter_stays_registered_while_its_last_version_goes(leases, registered):
    first = add(leases, "a", 1)
    prepared = leases.prepare(random_adapter("a", SHAPE))
    leases.forget(first.packed)
    second = AdapterVersion(2, 1, leases.keep(prepared), None)
    held(leases, second)
    assert second.lease is not None
    assert registered == ["a", "a"]


def test_an_adapter_beyond_the_server_s_memory_is_refused_before_the_engine_has_it(leases):
    large = random_adapter("large", SHAPE, 500)
    with pytest.raises(CapacityError, match=r"adapter 'large' of .* can't be served by the LoRA Server"):
        leases.prepare(large)
    assert leases._leases._registered == set()
    with pytest.raises(CapacityError, match="can't be served by the LoRA Server"):
        leases.keep(large)


@pytest.mark.parametrize("refuses", [False, True])
def test_an_adapter_that_is_prepared_during_a_move_is_known_to_the_next_server(leases, registered, refuses):
    """The move ends while the former server answers."""
    former, following = leases._leases, []

    class Next:
        def register(self, adapter_id: str) -> None:
            following.append(adapter_id)

    def moved(adapter_id: str) -> None:
        leases._leases = Next()
        if refuses:
            raise CapacityError("too large")

    former.register = moved
    leases.prepare(random_adapter("a", SHAPE))
    leases._leases = former
    assert following == ["a"]


def test_adapter_within_the_budget_waits_for_the_leases_of_others(cluster):
    """It takes most of the budget; small ones were there before."""
    cluster.stop(0)
    cluster.config = replace(cluster.config, capacity=8)
    cluster.start(0)
    leases = LeasedAdapters(cluster.client("one"))
    try:
        until(lambda: leases._leases.connected, "without a link nothing needs a lease")
        small = [add(leases, f"s{number}", number, lora_rank=1) for number in range(4)]
        for adapter in small:
            held(leases, adapter)
            assert adapter.lease is not None
        large = add(leases, "large", 9, lora_rank=42)
        assert not leases.acquire(large), "it waits"
        assert settled(leases._leases).num_waiting == 1
        for adapter in small:
            leases.release(adapter)
        held(leases, large)
        assert large.lease is not None
    finally:
        leases.close()


@pytest.mark.parametrize("is_wired", [True, False])
def test_adapter_that_the_server_gives_up_is_told_and_computed_here_until_it_is_kept_again(
    cluster, leases, monkeypatch, is_wired
):
    failures: list[tuple[str, Exception]] = []
    changed = changes(leases)
    if is_wired:
        leases.on_failure = lambda *failure: failures.append(failure)
    server_store = cluster.rank(0).loop.server_store

    def fail(*given) -> None:
        raise ValueError("ranks 0..513")

    first = add(leases, "a", 1)
    with monkeypatch.context() as patched:
        patched.setattr(server_store, "_copy", fail)
        held(leases, first)
        until(lambda: first.lease is None and not leases._leases.acquire("a"), "it is given up")
    leases._leases.release("a")
    assert changed.is_set()
    if is_wired:
        until(lambda: failures)
        [(content_hash, error)] = failures
        assert content_hash == "a"
        assert "ranks 0..513" in str(error)
    assert leases.acquire(first)
    assert first.lease is None
    again = add(leases, "a", 2)
    leases.release(first)
    leases.forget(first.packed)
    held(leases, again)
    assert again.lease is not None
    until(lambda: (server_store.loaded[again.lease.slot] == again.lease.generation).all())


def test_damaged_file_in_the_store_is_written_again(leases):
    leases._server.store.path("a").write_bytes(b"no adapter")
    adapter = add(leases, "a", 1)
    held(leases, adapter)
    assert adapter.lease is not None


def test_a_load_goes_on_beside_the_drop_of_an_earlier_version(cluster, leases, monkeypatch):
    """The leader deletes the file after the load has put it."""
    store, is_put, remove = cluster.rank(0)._store, threading.Event(), HostStore.remove
    put = leases._server.store.put

    def remove_later(removing: HostStore, content_hash: str) -> None:
        assert removing is not store or is_put.wait(PATIENCE_S)
        remove(removing, content_hash)

    def noted(packed: PackedAdapter) -> bool:
        found = put(packed)
        is_put.set()
        return found

    leases.forget(leases.keep(random_adapter("a", SHAPE)))
    monkeypatch.setattr(HostStore, "remove", remove_later)
    monkeypatch.setattr(leases._server.store, "put", noted)
    leases.delete("a")
    again = AdapterVersion(2, 1, leases.keep(leases.prepare(random_adapter("a", SHAPE))), None)
    held(leases, again)
    assert again.lease is not None
    assert "a" in store


def test_a_drop_while_a_load_maps_the_file_has_the_file_written_again(leases, monkeypatch):
    """After the header is read, before the data is."""
    mapped, store, from_file = [], leases._server.store, torch.UntypedStorage.from_file

    def dropped(path, *given, **words):
        if not mapped:
            store.remove("a")
        mapped.append(path)
        return from_file(path, *given, **words)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", dropped)
    adapter = AdapterVersion(1, 1, leases.keep(leases.prepare(random_adapter("a", SHAPE))), None)
    held(leases, adapter)
    assert adapter.lease is not None
    assert len(mapped) > 1
    assert "a" in store


def test_a_whole_file_that_can_not_be_mapped_stays(tmp_path, monkeypatch):
    """As without a free file descriptor."""
    store = HostStore(tmp_path)
    store.put(random_adapter("a", SHAPE))

    def refused(*given, **words):
        raise RuntimeError("unable to open file: Too many open files (24)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", refused)
    with pytest.raises(StorageError, match=r"can't be mapped now: .* Too many open files"):
        AdapterContents(SHAPE, torch.float32, store)._kept("a", "a")
    assert "a" in store


def test_a_whole_file_that_can_not_be_opened_stays(tmp_path):
    store, (soft, hard) = HostStore(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    store.put(random_adapter("a", SHAPE))
    contents = AdapterContents(SHAPE, torch.float32, store)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(StorageError, match="can't be mapped now"):
            contents._kept("a", "a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "a" in store


def test_each_mapping_in_use_restores_a_lost_file(tmp_path):
    """The latest may be dropped first, and one without a file has another name."""
    store = HostStore(tmp_path)
    store.put(random_adapter("a", SHAPE))
    mapped = [store.get("a", "first"), store.get("a", "second")]
    store.remove("a")
    mapped.append(store.get("a", "third"))
    for _ in range(3):
        assert store.restore("a")
        store.remove("a")
        del mapped[len(mapped) // 2]
    assert not store.restore("a")


def test_content_that_a_late_drop_deletes_after_its_arrival_is_sent_again(cluster, leases, monkeypatch):
    """As a rank of the leader's host does."""
    store, adopted = cluster.rank(0)._store, []
    adopt, shared = store.adopt, leases._server.store

    def dropped(content_hash: str, blocks) -> None:
        adopt(content_hash, blocks)
        adopted.append(content_hash)
        if len(adopted) == 1:
            store.remove(content_hash)

    monkeypatch.setattr(store, "adopt", dropped)
    shared.put(random_adapter("a", SHAPE))
    mapped = shared.get("a", "a")
    shared.remove("a")
    leases._leases.register(mapped.content_hash)
    assert leases._leases.knows("a")
    assert adopted == ["a", "a"]


def made_for(cluster: Cluster, instance: str) -> tuple[LeasedAdapters, AdapterContents]:
    """As an engine makes both."""
    config, rank = EngineConfig(model_dir="none"), SimpleNamespace(lora_server=cluster.client(instance))
    contents = AdapterContents(SHAPE, torch.float32, rank.lora_server.store)
    with ExitStack() as undo:
        store = make_store(config, rank, *(SimpleNamespace(),) * 2, contents, SimpleNamespace(), undo)
    return store, contents


@pytest.fixture
def made(cluster) -> Iterator[tuple[LeasedAdapters, AdapterContents]]:
    store, contents = made_for(cluster, "one")
    yield store, contents
    store.close()


def test_a_load_that_the_server_refuses_leaves_no_file_and_no_memory(made):
    leases, contents = made

    def refused() -> weakref.ref[PackedAdapter]:
        large = random_adapter("large", SHAPE, 500)
        contents.store.put(large)
        with pytest.raises(CapacityError, match="can't be served by the LoRA Server"):
            leases.prepare(large)
        return weakref.ref(large)

    large = refused()
    settled(leases._leases)
    assert list(contents.store.directory.iterdir()) == []
    gc.collect()
    assert large() is None
    assert list(contents.store._mapped) == []


def test_a_load_that_the_engine_refuses_leaves_no_file_unless_a_name_uses_it(made):
    leases, contents = made
    served = leases.keep(leases.prepare(random_adapter("a", SHAPE)))
    contents.serve("name", "a")
    for name in "ab":
        leases.undo_prepare(leases.prepare(random_adapter(name, SHAPE)))
    kept = leases.keep(leases.prepare(random_adapter("c", SHAPE)))  # as beside too few pages of the engine
    leases.forget(kept)
    leases.undo_prepare(kept)
    settled(leases._leases)
    assert [one in contents.store for one in "abc"] == [True, False, False]
    assert leases._leases._registered == {served.content_hash}
    leases.forget(served)
    settled(leases._leases)
    assert "a" in contents.store, "the name may return to this content"


def test_a_refused_load_deletes_nothing_that_another_instance_serves(cluster, made):
    (one, _), (two, contents) = made, made_for(cluster, "two")
    one.keep(one.prepare(random_adapter("a", SHAPE)))
    two.undo_prepare(two.prepare(random_adapter("a", SHAPE)))
    settled(two._leases)
    one._leases.unregister("a")  # as at a restart
    settled(one._leases)
    assert "a" in contents.store
    two.close()


def test_a_refused_load_deletes_nothing_that_another_load_has_prepared(made):
    leases, contents = made
    refused, waiting = (leases.prepare(random_adapter("a", SHAPE)) for _ in range(2))
    leases.undo_prepare(refused)
    settled(leases._leases)
    assert "a" in contents.store
    assert leases._leases.knows("a")
    leases.undo_prepare(waiting)
    settled(leases._leases)
    assert "a" not in contents.store
    assert leases._leases._registered == set()


def test_leases_are_forgotten_with_their_adapter(leases):
    for number in range(5):
        adapter = add(leases, f"a{number}", number)
        leases.acquire(adapter)
        if number % 2:
            held(leases, adapter)
        leases.release(adapter)
        leases.forget(adapter.packed)
    last = add(leases, "last", 9)
    held(leases, last)
    assert set(leases._leases._granted) == {"last"}


def test_counters_are_those_of_the_backend(leases):
    leases._server.backend.num_requests, leases._server.backend.num_host_rows = 3, 2
    expected = {
        "lora_server_requests": 3,
        "lora_server_fallback_rows": 0,
        "lora_server_host_rows": 2,
        "lora_server_put_steps": 0,
        "lora_server_redone_steps": 0,
    }
    assert leases.counters() == expected
    leases._server.pushed = SimpleNamespace(num_steps=5, num_redone=1, close=lambda: None)
    expected |= {"lora_server_put_steps": 5, "lora_server_redone_steps": 1}
    assert leases.counters() == expected
