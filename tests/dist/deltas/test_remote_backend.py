# SPDX-License-Identifier: Apache-2.0
"""Deltas of the LoRA Server against those of the local backend, bit for bit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from moe_lora.dist.lora_server import orders
from moe_lora.engine.step.execution_context import ExecutionContext
from moe_lora.kernels.operands import KvLayout, SlotTable, StepTables
from moe_lora.lora.backend import AddTo, LoraBackend, RoutedBackend
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import Lease, RoutedAdapter, RowRouting, Source, local_routing, no_terms
from tests.dist.lora_server.cluster import CPU, Cluster, random_adapter, until
from tests.dist.lora_server.shapes import model_shape
from tests.grids import diagonal
from tests.patience import PATIENCE_S
from tests.slots import write_slot

NUM_ROWS, LAYERS = 37, (0, 3)


STEP = StepTables(
    query_start=torch.arange(NUM_ROWS + 1, dtype=torch.int32),
    seq_lens=torch.ones(NUM_ROWS, dtype=torch.int32),
    block_tables=torch.zeros(NUM_ROWS, 1, dtype=torch.int32),
)


def random_rows(num_adapters: int, seed: int) -> np.ndarray:
    """[T] adapter of each row, in any order, a quarter of them -1."""
    rng = np.random.default_rng(seed)
    row_adapter = rng.integers(0, num_adapters, NUM_ROWS).astype(np.int32)
    row_adapter[rng.random(NUM_ROWS) < 0.25] = -1
    return row_adapter


def leased_routing(
    shape: ModelShape,
    row_adapter: np.ndarray,
    adapters: Sequence[PackedAdapter],
    leases: Sequence[Lease | None],
) -> RowRouting:
    """All deltas from the LoRA Server."""
    terms = no_terms(len(adapters), 1)
    for index, lease in enumerate(leases):
        slot, generation = (lease.slot, lease.generation) if lease else (-1, 0)
        terms[index, 0, 0] = (Source.LEASED, index, slot, generation)
    return RowRouting(
        groups=((0,) * len(shape.sites),) * shape.num_layers,
        row_route=row_adapter,
        terms=terms,
        adapters=[RoutedAdapter(packed.content_hash, packed.targets) for packed in adapters],
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


def outputs(backend: LoraBackend, shape: ModelShape, routing: RowRouting, seed: int) -> list[torch.Tensor]:
    """y of every site in two layers, sites begun before those before them are finished."""

    def finish(add_to: AddTo | None, y: torch.Tensor) -> None:
        if add_to is not None:
            add_to(y)
        found.append(y)

    generator = torch.Generator().manual_seed(seed)
    top_k = shape.num_experts_per_token
    found: list[torch.Tensor] = []
    under_way: list[tuple[AddTo | None, torch.Tensor]] = []
    backend.begin_step(STEP, routing)
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
                finish(*under_way.pop(0))
    finish(*under_way.pop())
    return found


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("layout", "num_experts"), diagonal(("EP1-PP1", "EP2-PP2", "DP2"), (8, 0)))
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
        leases = cluster.granted(client, adapters)
        local = local_backend(shape, adapters)
        for seed in (1, 2):
            rows = random_rows(len(adapters), seed)
            expected = outputs(local, shape, local_routing(shape, rows), seed)
            leased = leased_routing(shape, rows, adapters, leases)
            assert_equal(outputs(client.backend, shape, leased, seed), expected)
        assert client.backend.num_fallback_rows == 0
        assert client.backend.num_requests == sum(
            cluster.rank(number).loop.num_requests for number in range(cluster.num_ranks)
        )
        stale = [Lease(lease.slot, lease.generation - 1) for lease in leases]
        rows = random_rows(len(adapters), 3)
        leased = leased_routing(shape, rows, adapters, [stale[0], None, leases[2]])
        expected = outputs(local, shape, local_routing(shape, rows), 3)
        assert_equal(outputs(client.backend, shape, leased, 3), expected)
        assert client.backend.num_fallback_rows > 0
        assert not any(link.session.broken for link in client.links.values())


@pytest.mark.parametrize("num_experts", [8, 0], ids=["experts", "dense"])
def test_rows_with_a_lease_go_to_the_server_beside_rows_without(num_experts):
    shape = model_shape(num_experts)
    adapters = [random_adapter("leased", shape), random_adapter("leaseless", shape)]
    with Cluster(shape) as cluster:
        cluster.put(*adapters)
        client = cluster.client()
        [lease] = cluster.granted(client, adapters[:1])
        rows = random_rows(len(adapters), 1)
        expected = outputs(local_backend(shape, adapters), shape, local_routing(shape, rows), 1)
        counts = []
        for some in (rows, np.where(rows == 0, 0, -1), np.where(rows == 1, 1, -1)):
            backend, some = client.backend, some.astype(np.int32)
            before = np.array([backend.num_requests, backend.num_fallback_rows])
            found = outputs(backend, shape, leased_routing(shape, some, adapters, [lease, None]), 1)
            counts.append(np.array([backend.num_requests, backend.num_fallback_rows]) - before)
            if not counts[1:]:
                assert_equal(found, expected)
        both, leased, leaseless = counts
        assert leased[0] > 0
        assert leased[1] == 0
        assert leaseless[0] == 0
        assert list(both) == [leased[0], leaseless[1]]


def test_rank_that_is_gone_is_made_up_for_and_used_again_when_it_is_back():
    shape = model_shape()
    adapters = [random_adapter("a", shape), random_adapter("b", shape)]
    with Cluster(shape, "EP2-PP1") as cluster:
        cluster.put(*adapters)
        client = cluster.client()
        leases = cluster.granted(client, adapters)
        rows = random_rows(len(adapters), 1)
        expected = outputs(local_backend(shape, adapters), shape, local_routing(shape, rows), 1)
        leased = leased_routing(shape, rows, adapters, leases)
        first = client.links[1].session
        cluster.stop(1)
        assert_equal(outputs(client.backend, shape, leased, 1), expected)
        num_rows = client.backend.num_fallback_rows
        assert num_rows > 0
        cluster.start(1)
        until(lambda: client.links[1].session not in (None, first), "the link is made again")
        assert_equal(outputs(client.backend, shape, leased, 1), expected)
        assert client.backend.num_fallback_rows == num_rows, "the rank was told what is resident"


def test_rows_are_computed_here_while_their_adapter_travels_to_a_rank(tmp_path, monkeypatch):
    """The second rank is on another host, and the content comes when the test says so."""
    may_come, receive = threading.Event(), orders.receive_blocks

    async def held(*given) -> None:
        await receive(*given)
        await asyncio.to_thread(may_come.wait, PATIENCE_S)

    monkeypatch.setattr(orders, "receive_blocks", held)
    shape = model_shape()
    adapters = [random_adapter("a", shape), random_adapter("b", shape)]
    rows = random_rows(len(adapters), 1)
    with Cluster(shape, "EP2-PP1", answer_timeout_s=2 * PATIENCE_S) as cluster:
        cluster.stop(1)
        shared = cluster.config
        cluster.config = replace(shared, store_dir=str(tmp_path / "rank"))
        server_store = cluster.start(1).loop.server_store
        cluster.config = shared
        cluster.put(*adapters)
        client = cluster.client()
        leases = cluster.granted(client, adapters)
        leased = leased_routing(shape, rows, adapters, leases)
        expected = outputs(local_backend(shape, adapters), shape, local_routing(shape, rows), 1)
        assert_equal(outputs(client.backend, shape, leased, 1), expected)
        num_rows = client.backend.num_fallback_rows
        assert num_rows > 0
        assert not may_come.is_set()
        may_come.set()
        until(lambda: all((server_store.loaded[one.slot] == one.generation).all() for one in leases))
        assert_equal(outputs(client.backend, shape, leased, 1), expected)
        assert client.backend.num_fallback_rows == num_rows


@pytest.mark.parametrize(("answer_timeout_s", "limit_s"), [(2.0, 2.0), (30.0, 3.0)])
def test_put_to_a_stuck_rank_stops_the_step_for_a_short_limit(answer_timeout_s, limit_s):
    """Over gloo: another thread has the connection, and its peer is frozen."""
    shape, rows, limits = model_shape(), random_rows(1, 1), []
    adapters = [random_adapter("a", shape)]

    class Held:
        def acquire(self, timeout: float) -> bool:
            limits.append(timeout)
            return False

    with Cluster(shape, transport="gloo", answer_timeout_s=answer_timeout_s) as cluster:
        cluster.put(*adapters)
        client = cluster.client()
        leased = leased_routing(shape, rows, adapters, cluster.granted(client, adapters))
        session = client.links[0].session
        session._requests.window.link._lock = Held()
        expected = outputs(local_backend(shape, adapters), shape, local_routing(shape, rows), 1)
        assert_equal(outputs(client.backend, shape, leased, 1), expected)
        assert limits == [limit_s], "the first put breaks the session off"
        assert session.broken


def begin_some(backend: LoraBackend, shape: ModelShape, routing: RowRouting, num_sites: int) -> None:
    """A step that is cut: sites are begun, the first is added to, and nothing else."""
    generator = torch.Generator().manual_seed(9)
    backend.begin_step(STEP, routing)
    for number in range(num_sites):
        index = number % len(shape.sites)
        site, top_k = shape.sites[index], shape.num_experts_per_token
        ids, num_x, num_y = None, NUM_ROWS, NUM_ROWS
        if site.num_experts:
            ids = torch.randint(0, site.num_experts, (NUM_ROWS, top_k), generator=generator).to(torch.int32)
            num_y = NUM_ROWS * top_k
            num_x = num_y if site.name == "down" else NUM_ROWS
        x = torch.randn(num_x, site.in_features, generator=generator)
        add_to = backend.begin(number // len(shape.sites), index, x, ids)
        if number == 0 and add_to is not None:
            add_to(torch.zeros(num_y, site.total_out_features))


@pytest.mark.parametrize("layout", ["EP1-PP1", "EP2-PP2"])
@pytest.mark.parametrize("num_sites", [0, 1, 3, 7])
def test_step_that_is_abandoned_leaves_the_next_one_its_own_deltas(layout, num_sites):
    shape = model_shape()
    adapters = [random_adapter("a", shape), random_adapter("b", shape, 5)]
    with Cluster(shape, layout, max_rows=5, depth=2) as cluster:
        cluster.put(*adapters)
        client = cluster.client()
        leases = cluster.granted(client, adapters)
        routed = RoutedBackend({Source.LEASED: client.backend})
        rows = random_rows(len(adapters), 1)
        expected = outputs(local_backend(shape, adapters), shape, local_routing(shape, rows), 1)
        leased = leased_routing(shape, rows, adapters, leases)
        routed.abandon_step()
        for _ in range(2):
            begin_some(routed, shape, leased, num_sites)
            routed.abandon_step()
            assert_equal(outputs(routed, shape, leased, 1), expected)
        assert client.backend.num_fallback_rows == 0
        assert not any(link.session.broken for link in client.links.values())


@pytest.mark.parametrize("damage", ["missing", "damaged", "table"])
def test_adapter_that_can_not_be_computed_here_is_named_and_the_next_step_is_right(damage):
    """Its lease is lost, and this host has nothing to compute its deltas from."""
    shape = model_shape()
    good, bad = random_adapter("good", shape), random_adapter("bad", shape)
    with Cluster(shape, "EP2-PP1", max_rows=5, depth=2) as cluster:
        cluster.put(good)
        client = cluster.client()
        leases = cluster.granted(client, [good])
        if damage == "damaged":
            client.store.path("bad").write_bytes(b"no adapter")
        elif damage == "table":
            for layer in bad.layers:
                layer.table[:, 0] += 1
            client.store.put(bad)
        rows = random_rows(2, 1)
        leased = leased_routing(shape, rows, [good, bad], [*leases, None])
        for _ in range(2):
            with pytest.raises(AdapterError, match="bad"):
                outputs(client.backend, shape, leased, 1)
            client.backend.abandon_step()
            alone = np.where(rows == 0, 0, -1).astype(np.int32)
            expected = outputs(local_backend(shape, [good]), shape, local_routing(shape, alone), 1)
            assert_equal(
                outputs(client.backend, shape, leased_routing(shape, alone, [good], leases), 1), expected
            )


def test_step_without_adapters_sends_nothing():
    shape = model_shape()
    with Cluster(shape) as cluster:
        backend = cluster.client().backend
        base = leased_routing(shape, np.full(NUM_ROWS, -1, dtype=np.int32), [], [])
        generator = torch.Generator().manual_seed(1)
        before = torch.randn(NUM_ROWS, shape.sites[0].total_out_features, generator=generator)
        layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype=torch.float32)
        context = ExecutionContext(torch.empty(0), layout, RoutedBackend({Source.LEASED: backend}))
        context.begin_step(STEP, base)
        y = before.clone()
        x = torch.zeros(NUM_ROWS, shape.sites[0].in_features)
        context.lora_begin(0, 0, x, None)
        context.lora_add_to(0, 0, y)
        assert torch.equal(y, before)
        assert cluster.rank(0).loop.num_requests == 0
