# SPDX-License-Identifier: Apache-2.0
"""Resizing a running LoRA Server over its control connection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_lora.core.errors import CapacityError, LoraServerError
from moe_lora.dist.lora_server.attach import LeaseClient
from moe_lora.dist.lora_server.control import LoraServerAdmin, join, network
from moe_lora.dist.lora_server.messages import HANDSHAKE
from tests.dist.lora_server.cluster import Cluster, random_adapter, until
from tests.dist.lora_server.shapes import model_shape
from tests.dist.lora_server.test_leader import granted, joined
from tests.patience import PATIENCE_S

SHAPE = model_shape(num_experts=4, num_layers=2)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Room for two of the adapters "a" to "e", and memory for more."""
    with Cluster(SHAPE, "EP2-PP1", capacity=2) as made:
        made.put(*(random_adapter(name, SHAPE) for name in "abcde"))
        yield made


def admin(cluster: Cluster, timeout_s: float = PATIENCE_S) -> LoraServerAdmin:
    return LoraServerAdmin(cluster.config.address, None, timeout_s=timeout_s)


def all_loaded(cluster: Cluster, leases: LeaseClient, adapters: str) -> None:
    for number in range(cluster.num_ranks):
        server_store = cluster.rank(number).loop.server_store
        for adapter_id in adapters:
            lease = leases.lease(adapter_id)
            until(
                lambda server_store=server_store, lease=lease: (
                    lease.slot < len(server_store.generation)
                    and bool((server_store.loaded[lease.slot] == lease.generation).all())
                ),
                f"{adapter_id} is loaded on rank {number}",
            )


def test_state_counts_what_is_there(cluster):
    leases = joined(cluster, "one")
    for adapter_id in "abc":
        leases.acquire(adapter_id)
    granted(leases, "b")
    until(lambda: admin(cluster).state().num_waiting == 1)
    state = admin(cluster).state()
    assert (state.capacity, state.num_resident, state.num_leases, state.num_loads) == (2, 2, 2, 2)
    assert state.max_capacity >= 5


def test_a_rank_that_is_told_to_end_says_that_it_is_to_be_started_again(cluster):
    asks = admin(cluster)
    until(lambda: asks.state().ranks == (1, 1))
    told: list[int] = []
    cluster.rank(1).on_restart = lambda: told.append(1)
    asks.restart(1)
    until(lambda: cluster.rank(1).restarts)
    assert told == [1]
    assert not cluster.rank(0).restarts
    until(lambda: asks.state().ranks == (1, 0))
    with pytest.raises(LoraServerError, match="is not there"):
        asks.restart(1)
    asks.restart(0)
    until(lambda: cluster.rank(0).restarts)


def test_a_rank_that_is_back_counts_instances_whose_link_to_it_is_not(cluster, monkeypatch):
    asks = admin(cluster)
    clients = [cluster.client(name) for name in ("one", "two")]
    assert asks.state().unlinked == (0, 0)  # of instances that have joined
    for client in clients:
        cluster.leases(client)
    until(lambda: asks.state().unlinked == (0, 0) and asks.state().num_instances == 2)

    async def away(timeout_s: float) -> None:
        raise LoraServerError("not yet")

    link = clients[1].links[1]
    with monkeypatch.context() as patch:
        patch.setattr(link, "_join", away)
        cluster.stop(1)
        until(lambda: asks.state().ranks == (1, 0) and asks.state().unlinked == (0, 2))
        cluster.start(1)
        until(lambda: asks.state().ranks == (1, 2) and asks.state().unlinked == (0, 1))
        assert link.session is None
    until(lambda: asks.state().unlinked == (0, 0) and link.session is not None)


def test_a_new_leader_hears_from_the_other_ranks_who_is_linked_to_them(cluster):
    joined(cluster, "one")
    asks = admin(cluster)
    cluster.stop(0)
    cluster.start(0)
    until(lambda: asks.state().num_instances == 1 and asks.state().unlinked == (0, 0))


def test_growing_serves_those_who_wait_on_all_ranks(cluster):
    leases = joined(cluster, "one")
    for adapter_id in "abcd":
        leases.acquire(adapter_id)
    granted(leases, "b")
    assert leases.lease("c") is None
    assert admin(cluster).resize(4).capacity == 4
    granted(leases, "c")
    granted(leases, "d")
    all_loaded(cluster, leases, "abcd")


def test_shrinking_lets_running_leases_end_and_gives_none_meanwhile(cluster):
    leases, other = joined(cluster, "one"), joined(cluster, "other")
    leases.acquire("a")
    leases.acquire("b")
    granted(leases, "a")
    granted(leases, "b")
    state = admin(cluster).resize(1)
    assert (state.capacity, state.num_resident, state.num_leases) == (1, 2, 2)
    other.acquire("c")
    leases.release("a")
    until(lambda: admin(cluster).state().num_resident == 1)
    assert other.lease("c") is None
    assert leases.lease("b") is not None
    leases.release("b")
    granted(other, "c")


def test_rank_that_comes_back_after_growing_has_the_slots(cluster):
    leases = joined(cluster, "one")
    admin(cluster).resize(5)
    cluster.stop(1)
    cluster.start(1)
    for adapter_id in "abcde":
        leases.acquire(adapter_id)
        granted(leases, adapter_id)
    all_loaded(cluster, leases, "abcde")


def test_new_leader_starts_with_its_configured_capacity_and_keeps_the_other_rank(cluster):
    leases = joined(cluster, "one")
    admin(cluster).resize(5)
    rank = cluster.rank(1)
    cluster.stop(0)
    until(lambda: not leases.connected)
    cluster.start(0)
    until(lambda: leases.connected)
    assert admin(cluster).state().capacity == 2
    leases.acquire("a")
    granted(leases, "a")
    all_loaded(cluster, leases, "a")
    assert cluster.rank(1) is rank
    assert len(rank.loop.server_store.generation) == 5


def test_capacity_beyond_the_ranks_memory_is_refused_with_what_fits(cluster):
    joined(cluster, "one")
    limit = admin(cluster).state().max_capacity
    with pytest.raises(CapacityError, match=rf"capacity={limit + 1} .* {limit} .* lora_server.memory_gb"):
        admin(cluster).resize(limit + 1)
    assert admin(cluster).state().capacity == 2
    assert admin(cluster).resize(limit).capacity == limit


def test_growing_is_refused_while_it_is_unknown_how_large_adapters_are(cluster):
    with pytest.raises(CapacityError, match="no adapter is registered"):
        admin(cluster).resize(3)
    assert admin(cluster).state().max_capacity is None


@pytest.mark.parametrize("capacity", [0, -3])
def test_capacity_below_one_is_refused(cluster, capacity):
    with pytest.raises(CapacityError, match="choose 1 or more"):
        admin(cluster).resize(capacity)


def test_server_that_is_gone_says_so(cluster):
    cluster.stop(0)
    with pytest.raises(LoraServerError, match="no LoRA Server answers"):
        admin(cluster, timeout_s=0.2).state()


def test_admin_of_another_version_is_refused(cluster):
    hello = replace(HANDSHAKE, version=0).hello("old", {})
    with pytest.raises(
        LoraServerError, match=r"refused old: protocol 0 at old and .*install the same version"
    ):
        network().run(join(cluster.config.address, None, hello, 5.0))


def test_store_keeps_what_it_holds_when_it_grows(cluster):
    leases = joined(cluster, "one")
    leases.acquire("a")
    granted(leases, "a")
    all_loaded(cluster, leases, "a")
    server_store = cluster.rank(1).loop.server_store
    slot = leases.lease("a").slot
    before = [
        getattr(server_store.slots, name)[slot].clone() for name in ("a_offset", "b_offset", "lora_rank")
    ]
    admin(cluster).resize(5)
    until(lambda: len(server_store.generation) == 5)
    after = [getattr(server_store.slots, name)[slot] for name in ("a_offset", "b_offset", "lora_rank")]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert (server_store.loaded[slot] == leases.lease("a").generation).all()
    assert not server_store.slots.lora_rank[2:].any()
