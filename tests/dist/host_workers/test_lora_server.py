# SPDX-License-Identifier: Apache-2.0
"""A LoRA Server with host workers: rows of layers that are still being loaded wait for nothing."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.dist.deltas.session import FrameLayout
from moe_lora.dist.host_workers.workers import HostWorkers
from moe_lora.dist.lora_server.server_store import ServerAdapterStore
from moe_lora.lora.row_routing import local_routing
from tests.dist.deltas.test_remote_backend import (
    assert_equal,
    leased_routing,
    local_backend,
    outputs,
    random_rows,
)
from tests.dist.lora_server.cluster import Cluster, random_adapter, until
from tests.dist.lora_server.shapes import model_shape
from tests.grids import diagonal
from tests.patience import PATIENCE_S

WARM, B, C = (letter * 64 for letter in "abc")


class HeldLoads:
    """Loads every layer of `WARM`, and of other adapters the first one until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load = ServerAdapterStore._load_layer
        self.go_on = threading.Event()

        def held(server_store, loading, layer, run):
            held_back = layer and loading.packed.content_hash != WARM
            assert not held_back or self.go_on.wait(PATIENCE_S)
            return load(server_store, loading, layer, run)

        monkeypatch.setattr(ServerAdapterStore, "_load_layer", held)


def with_host_workers(shape, layout: str) -> Cluster:
    """A worker beside each rank, that gets 3 rows at a time."""
    cluster = Cluster(shape, layout)
    frames = FrameLayout(shape, torch.float32, 8)
    store = HostStore(cluster.config.store_dir)
    cluster.make_host = lambda: HostWorkers(frames, store, 1, 3)
    return cluster


@pytest.mark.parametrize(
    ("layout", "num_experts"), diagonal(("EP1-PP1", "EP2-PP1", "EP1-PP2", "DP2"), (8, 0))
)
def test_rows_of_layers_that_are_loading_have_the_bits_of_those_that_are_there(
    layout, num_experts, monkeypatch
):
    loads = HeldLoads(monkeypatch)
    shape = model_shape(num_experts)
    few = (*shape.sites[0].modules[:1], *shape.sites[-1].modules)
    adapters = [
        random_adapter(WARM, shape),
        random_adapter(B, shape, 7),
        random_adapter(C, shape, 2, few),
    ]
    with with_host_workers(shape, layout) as cluster:
        cluster.put(*adapters)
        ranks = [cluster.rank(number) for number in range(cluster.num_ranks)]
        client = cluster.client()
        warm = cluster.granted(client, adapters[:1])
        until(lambda: all((rank.loop.server_store.loaded[warm[0].slot] > 0).all() for rank in ranks))
        leases = [*warm, *cluster.granted(client, adapters[1:])]
        local = local_backend(shape, adapters)

        def answers(seed: int) -> int:
            """Rows that hosts computed of an answer with the right bits."""
            before = sum(rank.loop.num_host_rows for rank in ranks)
            rows = random_rows(len(adapters), seed)
            leased = leased_routing(shape, rows, adapters, leases)
            expected = outputs(local, shape, local_routing(shape, rows), seed)
            assert_equal(outputs(client.backend, shape, leased, seed), expected)
            assert client.backend.num_host_rows == sum(rank.loop.num_host_rows for rank in ranks)
            return client.backend.num_host_rows - before

        assert answers(1) > 0
        worker = next(rank._host.links[0] for rank in ranks if rank._host.backend.num_requests)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert answers(2) > 0, "the server rank computes for a worker that was killed"
        assert sum(rank._host.backend.num_fallback_rows for rank in ranks) > 0
        loads.go_on.set()
        slots = [lease.slot for lease in leases]
        until(lambda: all((rank.loop.server_store.loaded[slots] > 0).all() for rank in ranks))
        assert answers(3) == 0, "all is there"
        assert client.backend.num_fallback_rows == 0


def test_request_that_comes_before_its_load_command_waits_for_it(monkeypatch):
    """The host has no name for its adapter yet."""
    loads = HeldLoads(monkeypatch)
    shape = model_shape(0)
    adapter = random_adapter(B, shape)
    late = threading.Event()
    load = ServerAdapterStore.load
    monkeypatch.setattr(ServerAdapterStore, "load", lambda *load_of: late.wait(PATIENCE_S) and load(*load_of))
    with with_host_workers(shape, "EP1-PP1") as cluster:
        cluster.put(adapter)
        client = cluster.client()
        leases = cluster.granted(client, [adapter])
        rows = random_rows(1, 1)
        threading.Timer(0.3, late.set).start()
        leased = leased_routing(shape, rows, [adapter], leases)
        expected = outputs(local_backend(shape, [adapter]), shape, local_routing(shape, rows), 1)
        assert_equal(outputs(client.backend, shape, leased, 1), expected)
        assert client.backend.num_fallback_rows == 0
        assert cluster.rank(0).loop.num_host_rows > 0
        loads.go_on.set()
