"""Deltas of the LoRA Server against those of the local backend, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server.attach import LoraServerClient
from moe_lora.execution.local import LocalBackend
from moe_lora.kernels.step import Lease, LeasedAdapter, LeasedRows, SlotTable, StepTables
from tests.slots import write_slot

from .cluster import CPU, Cluster, random_adapter, until
from .shapes import model_shape

NUM_ROWS, LAYERS = 37, (0, 3)


def random_step(adapters: Sequence[PackedAdapter], leases: Sequence[Lease | None], seed: int) -> StepTables:
    """Rows of adapters in any order, a quarter of them without one.  row_slot is the index of the adapter."""
    rng = np.random.default_rng(seed)
    row_adapter = rng.integers(0, len(adapters), NUM_ROWS).astype(np.int32)
    row_adapter[rng.random(NUM_ROWS) < 0.25] = -1
    leased = [
        LeasedAdapter(packed.content_hash, packed.targets, lease)
        for packed, lease in zip(adapters, leases, strict=True)
    ]
    return StepTables(
        row_slot=torch.from_numpy(row_adapter),
        query_start=torch.arange(NUM_ROWS + 1, dtype=torch.int32),
        seq_lens=torch.ones(NUM_ROWS, dtype=torch.int32),
        block_tables=torch.zeros(NUM_ROWS, 1, dtype=torch.int32),
        has_adapters=True,
        leased=LeasedRows(leased, row_adapter),
    )


def local_backend(shape: ModelShape, adapters: Sequence[PackedAdapter]) -> LocalBackend:
    arena = torch.zeros(sum(packed.nbytes for packed in adapters), dtype=torch.uint8)
    slots = SlotTable(len(adapters), shape.num_layers, shape.num_entries, CPU)
    start = 0
    for slot, packed in enumerate(adapters):
        starts = np.cumsum([start, *(layer.nbytes for layer in packed.layers)]).tolist()
        write_slot(slots, slot, arena, packed, starts[:-1])
        start = starts[-1]
    return LocalBackend(shape, arena, slots)


def outputs(backend, shape: ModelShape, step: StepTables, seed: int) -> list[torch.Tensor]:
    """y of every site in two layers, sites begun before those before them are finished."""
    generator = torch.Generator().manual_seed(seed)
    top_k = shape.num_experts_per_token
    found, under_way = [], []
    backend.begin_step(step)
    for layer in LAYERS:
        for index, site in enumerate(shape.sites):
            ids = None
            num_x = num_y = NUM_ROWS
            if site.num_experts:
                order = torch.rand(NUM_ROWS, site.num_experts, generator=generator).argsort(1)
                ids = order[:, :top_k].to(torch.int32)
                num_y = NUM_ROWS * top_k
                num_x = num_y if site.name == "down" else NUM_ROWS
            x = torch.randn(num_x, site.in_features, generator=generator)
            y = torch.randn(num_y, site.total_out_features, generator=generator)
            under_way.append((backend.begin(layer, index, x, ids), y))
            if len(under_way) > 1:
                ticket, y = under_way.pop(0)
                backend.add_to(ticket, y)
                found.append(y)
    ticket, y = under_way.pop()
    backend.add_to(ticket, y)
    return [*found, y]


def leases_of(cluster: Cluster, client: LoraServerClient, adapters: Sequence[PackedAdapter]) -> list[Lease]:
    leases = cluster.leases(client)
    for packed in adapters:
        leases.register(packed.content_hash)
        leases.acquire(packed.content_hash)
    until(lambda: all(leases.lease(packed.content_hash) for packed in adapters), "all leases are granted")
    return [lease for packed in adapters if (lease := leases.lease(packed.content_hash))]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("layout", ["EP1-PP1", "EP2-PP2", "DP2"])
@pytest.mark.parametrize("num_experts", [8, 0], ids=["experts", "dense"])
def test_same_deltas_as_the_local_backend_bit_for_bit(layout, num_experts):
    """Messages hold 5 rows of 37, two of them may be under way."""
    shape = model_shape(num_experts)
    adapters = [
        random_adapter("all", shape),
        random_adapter("rank 7", shape, 7),
        random_adapter("few", shape, 2, (*shape.sites[0].modules[:1], *shape.sites[-1].modules)),
    ]
    with Cluster(shape, layout, max_rows=5, depth=2) as cluster:
        cluster.put(*adapters)
        client = cluster.client()
        leases = leases_of(cluster, client, adapters)
        local = local_backend(shape, adapters)
        for seed in (1, 2):
            step = random_step(adapters, leases, seed)
            expected = outputs(local, shape, step, seed)
            assert_equal(outputs(client.backend, shape, step, seed), expected)
        assert client.backend.num_fallback_rows == 0
        assert client.backend.num_requests == sum(
            cluster.rank(number).loop.num_requests for number in range(cluster.num_ranks)
        )
        stale = [Lease(lease.slot, lease.generation - 1) for lease in leases]
        step = random_step(adapters, [stale[0], None, leases[2]], 3)
        assert_equal(outputs(client.backend, shape, step, 3), outputs(local, shape, step, 3))
        assert client.backend.num_fallback_rows > 0
        assert not any(link.session.broken for link in client.links.values())


def test_rank_that_is_gone_is_made_up_for_and_used_again_when_it_is_back():
    shape = model_shape()
    adapters = [random_adapter("a", shape), random_adapter("b", shape)]
    with Cluster(shape, "EP2-PP1") as cluster:
        cluster.put(*adapters)
        client = cluster.client()
        leases = leases_of(cluster, client, adapters)
        step = random_step(adapters, leases, 1)
        expected = outputs(local_backend(shape, adapters), shape, step, 1)
        first = client.links[1].session
        cluster.stop(1)
        assert_equal(outputs(client.backend, shape, step, 1), expected)
        rows = client.backend.num_fallback_rows
        assert rows > 0
        cluster.start(1)
        until(lambda: client.links[1].session not in (None, first), "the link is made again")
        assert_equal(outputs(client.backend, shape, step, 1), expected)
        assert client.backend.num_fallback_rows == rows, "the rank was told what is resident"


def test_step_without_adapters_sends_nothing():
    shape = model_shape()
    with Cluster(shape) as cluster:
        backend = cluster.client().backend
        step = random_step([random_adapter("a", shape)], [None], 1)
        step.leased = None
        generator = torch.Generator().manual_seed(1)
        before = torch.randn(NUM_ROWS, shape.sites[0].total_out_features, generator=generator)
        backend.begin_step(step)
        y = before.clone()
        backend.add_to(backend.begin(0, 0, torch.zeros(NUM_ROWS, shape.sites[0].in_features), None), y)
        assert torch.equal(y, before)
        assert cluster.rank(0).loop.num_requests == 0
