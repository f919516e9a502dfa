# SPDX-License-Identifier: Apache-2.0
"""Ranks of an instance with tensor parallelism have deltas of their parts of sites from a LoRA Server."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from moe_lora.adapters.packed import PackedAdapter, entries_of_experts
from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import EmulationConfig, StepProfile
from moe_lora.core.errors import ConfigError, LoraServerError
from moe_lora.core.partition import Layout, Partition
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.dist.deltas.session import ClientSession, DeltaRequest, Sent, answer_size
from moe_lora.dist.launch import local
from moe_lora.dist.launch.server_role import build_rank, checked_partition
from moe_lora.dist.lora_server.attach import LoraServerClient
from moe_lora.dist.lora_server.control import ask, network
from moe_lora.dist.lora_server.rank_memory import rank_parts
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import Lease, local_routing
from tests.adapters.dense import shard_adapter
from tests.dist.lora_server.cluster import Cluster, random_adapter, until
from tests.dist.lora_server.shapes import model_shape
from tests.patience import PATIENCE_S
from tests.serve.demo_server import DEMO

from .test_remote_backend import assert_equal, leased_routing, local_backend, outputs, random_rows

DENSE, MOE = model_shape(0), model_shape(8)
CASES = [
    pytest.param(DENSE, (1, 2), "EP1-PP1", id="dense"),
    pytest.param(DENSE, (1, 2), "EP2-PP2", id="dense, four server ranks"),
    pytest.param(MOE, (1, 2), "EP2-PP1", id="divided experts"),
    pytest.param(MOE, (2, 2), "EP2-PP1", id="whole experts"),
]


def divided(shape: ModelShape, layout: str, ranks: tuple[int, int], **settings) -> Cluster:
    cluster = Cluster(shape, layout, **settings)
    cluster.ranks = ranks
    return cluster


def adapters_of(shape: ModelShape) -> list[PackedAdapter]:
    return [
        random_adapter("all", shape),
        random_adapter("rank 7", shape, 7),
        random_adapter("few", shape, 2, (*shape.sites[0].modules[:1], *shape.sites[-1].modules)),
    ]


def coupled(shard: ModelShard, adapters: list[PackedAdapter]) -> LocalBackend:
    """The local backend of a rank with its part of the adapters."""
    kept = [entries_of_experts(shard.whole, shard.experts)] * shard.whole.num_layers
    return local_backend(shard.shape, [shard_adapter(one, shard.whole, kept, shard) for one in adapters])


class Instance:
    """The ranks of an instance, with leases."""

    def __init__(self, cluster: Cluster, adapters: list[PackedAdapter]) -> None:
        cluster.put(*adapters)
        self.ranks = [cluster.client(client_rank=rank) for rank in range(max(cluster.ranks))]
        self.adapters, self.leases = adapters, cluster.granted(self.ranks[0], adapters)

    @property
    def shards(self) -> tuple[ModelShard, ...]:
        return self.ranks[0].partition.shards

    def check(self, rank: int, seed: int, leases: list[Lease] | None = None) -> None:
        """Compare the bits of a rank's step."""
        client, shard = self.ranks[rank], self.shards[rank]
        rows = random_rows(len(self.adapters), seed)
        leased = leased_routing(shard.whole, rows, self.adapters, leases or self.leases)
        local = coupled(shard, self.adapters)
        expected = outputs(local, shard.shape, local_routing(shard.whole, rows), seed)
        assert_equal(outputs(client.backend, shard.shape, leased, seed), expected)

    def num_fallback_rows(self) -> list[int]:
        return [client.backend.num_fallback_rows for client in self.ranks]


@pytest.mark.parametrize(("shape", "ranks", "layout"), CASES)
def test_each_rank_has_the_bits_of_its_own_part(shape, ranks, layout):
    """Messages hold 5 rows of 37.  A rank with an evicted adapter computes the same bits itself."""
    with divided(shape, layout, ranks, max_rows=5, depth=2) as cluster:
        instance = Instance(cluster, adapters_of(shape))
        for rank in (0, 1):
            instance.check(rank, rank)
        assert instance.num_fallback_rows() == [0, 0]
        stale = [Lease(lease.slot, lease.generation - 1) for lease in instance.leases]
        instance.check(1, 3, [stale[0], *instance.leases[1:]])
        instance.check(0, 3)
        assert [num > 0 for num in instance.num_fallback_rows()] == [False, True]


def test_a_server_rank_that_ends_is_made_up_for_by_each_rank_and_used_again():
    with divided(DENSE, "EP2-PP1", (1, 2)) as cluster:
        instance = Instance(cluster, adapters_of(DENSE))
        former = [client.links[1].session for client in instance.ranks]
        cluster.stop(1)
        for rank in (0, 1):
            instance.check(rank, 1)
        before = instance.num_fallback_rows()
        assert min(before) > 0
        cluster.start(1)
        for client, session in zip(instance.ranks, former, strict=True):
            until(lambda client=client, session=session: client.links[1].session not in (None, session))
        for rank in (0, 1):
            instance.check(rank, 2)
        assert instance.num_fallback_rows() == before


def test_a_slot_s_next_adapter_replaces_the_parts_of_all_ranks():
    """One place, two adapters in turn; then a second place for both."""
    with divided(DENSE, "EP1-PP1", (1, 2), capacity=1) as cluster:
        instance = Instance(cluster, adapters_of(DENSE)[:1])
        leases = cluster._of_granted[instance.ranks[0]]
        for name in ("next", "all"):
            leases.release(instance.adapters[0].content_hash)
            instance.adapters = [random_adapter(name, DENSE)]
            cluster.put(*instance.adapters)
            instance.leases = cluster.granted(instance.ranks[0], instance.adapters)
            for rank in (0, 1):
                instance.check(rank, 1)
        cluster.rank(0).loop.server_store.grow(2)
        for rank in (0, 1):
            instance.check(rank, 2)
        assert instance.num_fallback_rows() == [0, 0]


def counted(
    client: LoraServerClient, shape: ModelShape, adapter: PackedAdapter, lease: Lease
) -> Counter[tuple[str, str]]:
    """For each site of a step of 37 rows: requests, values of x and of deltas."""
    send, found = ClientSession.send, Counter[tuple[str, str]]()

    def sent(session: ClientSession, request: DeltaRequest) -> Sent:
        site = shape.sites[request.site]
        found[site.name, "requests"] += 1
        found[site.name, "x"] += request.x.numel()
        found[site.name, "deltas"] += request.num_rows * site.total_out_features
        answer_bytes = answer_size(session._layout, request.site, request.num_rows)
        found["all", "bytes"] += request.frame_bytes + answer_bytes
        return send(session, request)

    routing = leased_routing(shape, np.zeros(37, np.int32), [adapter], [lease])
    with mock.patch.object(ClientSession, "send", sent):
        outputs(client.backend, shape, routing, 1)
    return found


@pytest.mark.parametrize("shape", [DENSE, MOE], ids=["dense", "whole experts"])
def test_ranks_send_no_more_messages_than_one_and_each_fewer_bytes(shape):
    """docs/guides/parallel.md has the formulas: D + N/P with divided outputs, D/P + N with divided inputs."""
    adapter, ranks = random_adapter("all", shape), (2 if shape.num_experts else 1, 2)
    with Cluster(shape) as alone, divided(shape, "EP1-PP1", ranks) as cluster:
        alone.put(adapter)
        client = alone.client()
        whole = counted(client, shape, adapter, *alone.granted(client, [adapter]))
        instance = Instance(cluster, [adapter])
        parts = [
            counted(one, shard.shape, adapter, *instance.leases)
            for one, shard in zip(instance.ranks, instance.shards, strict=True)
        ]
    for site in shape.sites:
        by_x, by_deltas = (2, 1) if site.name in ("o", "down") else (1, 2)
        if site.name == "router" or site.num_experts:
            by_x = by_deltas = 1
        for part in parts:
            assert part[site.name, "requests"] == whole[site.name, "requests"]
            assert part[site.name, "x"] * by_x == whole[site.name, "x"]
            assert part[site.name, "deltas"] * by_deltas == whole[site.name, "deltas"]
    for part in parts:
        assert part["all", "bytes"] < whole["all", "bytes"]


@pytest.mark.parametrize(("shape", "ranks", "layout"), CASES)
def test_a_server_holds_each_matrix_once_for_all_ranks(shape, ranks, layout):
    """But for the alignment of the parts: the parts of these sizes need none."""
    packed = random_adapter("a", shape, 16)
    alone = Partition(shape, Layout.parse(layout), 1)
    together = Partition(shape, Layout.parse(layout), ranks[0], tensor_parallel=ranks[1])
    for server_rank in range(alone.layout.num_ranks):
        for layer in alone.layers_of(server_rank):
            [whole] = rank_parts(packed, alone, server_rank, layer, 0)
            parts = rank_parts(packed, together, server_rank, layer, 0)
            assert len(parts) == 2
            assert parts[-1].num_elements == whole.num_elements


def test_ranks_with_whole_sites_share_one_part():
    assert Partition(MOE, Layout(), 2, sites="experts", tensor_parallel=2).shards == ()
    assert len(Partition(MOE, Layout(), 1, sites="experts", tensor_parallel=2).shards) == 2
    assert Partition(MOE, Layout(), 2, sites="all").shards == ()


def test_an_instance_of_other_ranks_is_refused():
    with divided(DENSE, "EP1-PP1", (1, 2)) as cluster:
        hello, address = cluster.client()._hello, cluster.config.address
        third = ask(address, None, hello, PATIENCE_S, "open_session", "i", b"", 5, 2, 2)
        with pytest.raises(LoraServerError, match="client_rank=2 of i must be 0 to 1"):
            network().run(third)
        cluster.ranks = 1, 1
        with pytest.raises(LoraServerError, match="tensor_parallel is 2 at the LoRA Server and 1 at"):
            cluster.client()


EMULATED = EmulationConfig(step_profile=StepProfile())


@pytest.mark.parametrize(
    ("server", "emulation", "problem"),
    [
        ({"host_workers": 1}, EmulationConfig(), "host_workers=1 compute whole sites, and tensor_parallel=2"),
        ({}, EMULATED, "step_profile has times of whole experts, and tensor_parallel=2 divides"),
    ],
)
def test_parts_of_sites_are_refused_before_processes_start(server, emulation, problem, monkeypatch, tmp_path):
    monkeypatch.setattr(local, "HostRoles", lambda *_, **__: pytest.fail("started"))
    config = EngineConfig(
        model_dir=str(DEMO / "model"),
        device="cpu",
        tensor_parallel=2,
        emulation=emulation,
        state_dir=str(tmp_path),
    )
    settings = LoraServerConfig(**server)
    cluster = ClusterConfig(engine=config, served_model_name="m", lora_server=settings)

    async def start() -> None:
        async with local.local_lora_server(cluster):
            pass

    with pytest.raises(ConfigError, match=problem):
        asyncio.run(start())
    with pytest.raises(ConfigError, match=problem):
        build_rank(replace(config, lora_server=settings), 0)


def test_an_emulated_step_goes_with_whole_experts_and_with_dense_sites():
    config = EngineConfig(model_dir="none", tensor_parallel=2, emulation=EMULATED)
    server = LoraServerConfig(sites="all")
    assert checked_partition(config, DENSE, server).shards
    assert checked_partition(replace(config, expert_parallel=2), MOE, server).shards
