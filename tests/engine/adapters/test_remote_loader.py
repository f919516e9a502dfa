"""Adapters that are ready when the LoRA Server has leased them, and when it is away."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from moe_lora.core.errors import CapacityError
from moe_lora.engine.adapters.adapter_loader import AdapterVersion
from moe_lora.engine.adapters.remote_loader import RemoteLoader
from tests.dist.lora_server.cluster import Cluster, random_adapter, until
from tests.dist.lora_server.shapes import model_shape

SHAPE = model_shape(num_experts=4, num_layers=2)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(SHAPE, capacity=1, lease_timeout_s=1.0, memory_gb=0.0005) as made:
        yield made


@pytest.fixture
def placement(cluster) -> Iterator[RemoteLoader]:
    made = RemoteLoader(cluster.client("one"))
    yield made
    made.close()


def add(placement: RemoteLoader, name: str, uid: int, lora_rank: int = 3) -> AdapterVersion:
    return AdapterVersion(uid, 1, placement.admit(random_adapter(name, SHAPE, lora_rank)), None)


def changes(placement: RemoteLoader) -> threading.Event:
    """Set at each change from now on."""
    changed = threading.Event()
    placement.on_change = changed.set
    return changed


def held(placement: RemoteLoader, adapter: AdapterVersion) -> None:
    until(lambda: placement.hold(adapter), f"{adapter.name} is held")


def test_adapter_is_ready_once_it_is_leased_and_change_is_told(placement):
    adapter = add(placement, "a", 1)
    changed = changes(placement)
    assert not placement.hold(adapter)
    assert changed.wait(20.0)
    assert placement.hold(adapter)
    assert adapter.lease is not None
    assert list(placement.resident()) == [adapter]
    placement.let_go(adapter)
    assert adapter.lease is None
    assert list(placement.resident()) == []


def test_adapter_without_room_waits_until_another_is_let_go(placement):
    first, second = add(placement, "a", 1), add(placement, "b", 2)
    held(placement, first)
    assert not placement.hold(second)
    changed = changes(placement)
    placement.let_go(first)
    assert changed.wait(20.0)
    assert placement.hold(second)


def test_grant_that_crosses_the_release_leaves_no_lease_behind(placement):
    """The adapter is asked for and given back at once, as when its only request is aborted."""
    first, second = add(placement, "a", 1), add(placement, "b", 2)
    for _ in range(20):
        placement.hold(first)
        placement.let_go(first)
    held(placement, second)
    assert not placement.hold(first), "the one place is taken, so this lease would be a ghost"


def test_two_versions_of_one_content_share_the_lease(placement):
    one, same = add(placement, "a", 1), add(placement, "a", 2)
    held(placement, one)
    held(placement, same)
    lease = one.lease
    placement.drop(one)
    assert same.lease == lease
    assert placement.hold(same)


def test_lease_is_unused_until_a_request_of_any_version_of_its_content_holds_it(placement):
    one, same = add(placement, "a", 1), add(placement, "a", 2)
    assert not placement.has_unused_lease(one)
    placement.hold(one)
    until(lambda: placement.has_unused_lease(one), "the lease comes")
    held(placement, one)
    assert placement.has_unused_lease(same)
    one.num_running = 1
    assert not placement.has_unused_lease(same)


def test_waiting_request_starts_without_a_lease_when_the_server_goes(cluster, placement):
    first, second = add(placement, "a", 1), add(placement, "b", 2)
    held(placement, first)
    assert not placement.hold(second)
    changed = changes(placement)
    cluster.stop(0)
    assert changed.wait(20.0), "a stalled engine would never look again"
    until(lambda: first.lease is None)
    assert placement.hold(second)
    assert second.lease is None
    placement.let_go(second)
    cluster.start(0)
    until(lambda: first.lease is not None, "the lease is given again")
    assert not placement.hold(second)


def test_adapter_that_a_new_server_has_no_room_for_is_computed_here(cluster, placement):
    large = add(placement, "large", 1, lora_rank=30)
    cluster.stop(0)
    cluster.config = cluster.config.__class__(**{**vars(cluster.config), "memory_gb": 0.0001})
    changed = changes(placement)
    cluster.start(0)
    until(lambda: placement._leases.connected)
    assert changed.wait(20.0)
    held(placement, large)
    assert large.lease is None


def test_adapter_that_could_never_be_ready_is_refused_and_forgotten(placement):
    with pytest.raises(CapacityError, match=r"lora_server\.memory_gb"):
        add(placement, "huge", 1, lora_rank=500)
    assert not placement._num_versions


def test_counters_are_those_of_the_backend(placement):
    placement._server.backend.num_requests = 3
    assert placement.counters() == {"lora_server_requests": 3, "lora_server_fallback_rows": 0}
