# SPDX-License-Identifier: Apache-2.0
"""Steps whose deltas the host sends for are replayed in pieces, with the bits of launches one by one.

On the stand-in for a CUDA device; whole steps in Triton's interpreter (started by
`tests/kernels/triton/test_in_interpreter.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.shape import ModelShape
from moe_lora.dist.deltas.session import FrameLayout
from moe_lora.dist.host_workers.workers import HostWorkers
from moe_lora.dist.lora_server.attach import LoraServerClient
from moe_lora.engine.ranks.exchange import Exchanges
from moe_lora.engine.step.step_batch import StepBatch, StepBuffer
from moe_lora.engine.step.step_graphs import StepGraphs
from moe_lora.engine.step.step_pieces import HostCalled, StepCapture, between_graphs
from moe_lora.kernels.operands import StepTables
from moe_lora.kernels.triton.configs import interpreted
from moe_lora.lora.backend import RoutedBackend
from moe_lora.lora.row_routing import RowRouting, Source
from tests.dist.deltas.test_remote_backend import leased_routing
from tests.dist.host_workers.queued_stream import InlineStream
from tests.dist.lora_server.cluster import Cluster, random_adapter
from tests.dist.lora_server.shapes import model_shape
from tests.engine.on_device import OnDevice, OnHost, Recorder
from tests.families import ALL_TARGETS, NUM_LAYERS, make_adapter, make_checkpoint
from tests.models.harness import Harness
from tests.stand_in_device import CUDA, DeviceTensor, noting, stand_in_device

whole_steps = pytest.mark.skipif(not interpreted(), reason="in a process of its own, with TRITON_INTERPRET=1")
PROMPTS = [(0, [3]), (-1, [11]), (1, [13]), (0, [5])]
GRAPHS = {"rows": (4,), "max_tokens": 4}


class TenTimes:
    """A backend of the host: deltas are ten times x.  rows: which have any.  asked: layers and sites."""

    def __init__(self) -> None:
        self.rows = slice(None)
        self.asked: list[tuple[int, int]] = []

    def begin_step(self, step, routing) -> None:
        pass

    def begin(self, layer, site, x, ids):
        self.asked.append((layer, site))
        if self.rows is None:
            return None
        deltas = torch.zeros_like(x)
        deltas[self.rows] = 10 * x[self.rows]
        return lambda y: y.add_(deltas)


class ThreeSites:
    """x = 2 t; y = x + 1 + deltas of x, three times, where the second begins before the first is added to."""

    def __init__(self) -> None:
        self.host, self.recorder = TenTimes(), Recorder()
        self.capture = StepCapture(self.recorder)
        self.backend = HostCalled(OnHost(self.host), self.capture)
        self.tokens = DeviceTensor(torch.ones(3))

    def compute(self) -> torch.Tensor:
        x = self.tokens * 2
        first = self.backend.begin(0, 0, x, None)
        y = x + 1
        second = self.backend.begin(0, 1, y, None)
        z = y * 3
        first(z)
        second(z)
        third = self.backend.begin(1, 0, z, None)
        out = z + 1
        third(out)
        return out

    @staticmethod
    def expected(tokens: torch.Tensor, rows) -> torch.Tensor:
        def deltas(x: torch.Tensor) -> torch.Tensor:
            found = torch.zeros_like(x)
            if rows is not None:
                found[rows] = 10 * x[rows]
            return found

        x = 2 * tokens
        z = 3 * (x + 1) + deltas(x) + deltas(x + 1)
        return z + 1 + deltas(z)


def test_each_replay_asks_the_host_anew_between_the_graphs():
    """Values of that replay, rows of that replay, in order; also where there were deltas before and are none
    now, and where a step was launched one by one meanwhile."""
    with stand_in_device():
        step = ThreeSites()
        pieces, out = step.capture(step.compute)
        assert not step.host.asked, "nothing is computed while a step is captured"
        assert len(pieces) == 2 * 6 + 1
        assert all(step.recorder.graphs)
        for rows in (slice(None), None, slice(1, 3), None):
            step.host.rows = rows
            step.tokens.add_(1)
            expected = step.expected(step.tokens.held, rows)
            step.host.asked.clear()
            for piece in pieces:
                piece()
            assert step.host.asked == [(0, 0), (0, 1), (1, 0)]
            assert torch.equal(out.held, expected)
            if rows is not None:
                assert torch.equal(step.compute().held, expected)


@pytest.mark.parametrize("fault", ["order", "left out", "elsewhere"])
def test_a_fault_in_the_pieces_shows(fault, monkeypatch):
    """The check itself."""
    with stand_in_device():
        step = ThreeSites()
        if fault == "elsewhere":
            compute = HostCalled._compute
            monkeypatch.setattr(
                HostCalled, "_compute", lambda self, begun, out: compute(self, begun, out.clone())
            )
        pieces, out = step.capture(step.compute)
        if fault == "order":
            pieces[5], pieces[6] = pieces[6], pieces[5]
        elif fault == "left out":
            pieces[-2] = lambda: None
        step.tokens.add_(1)
        for piece in pieces:
            piece()
        assert not torch.equal(out.held, step.expected(step.tokens.held, step.host.rows))


class OtherRank:
    """What a rank exchanges with: the other one's rows, parts and columns are twice its own.

    first: whether the rank that exchanges has all columns then.
    """

    def __init__(self, *, first: bool = True) -> None:
        self.num_asked = 0
        self._first = first

    def fill(self, y, ids) -> None:
        self._ask()
        y.held[ids.held.flatten() > 0] *= 2

    def add_up(self, y) -> None:
        self._ask()
        y.held.mul_(3)

    def gather(self, logits, vocab_size, out=None):
        self._ask()
        if out is None:
            out = logits.new_empty(len(logits), vocab_size)
        if self._first:
            out.held.copy_(torch.cat([logits.held, 2 * logits.held], 1)[:, :vocab_size])
        return out

    def _ask(self) -> None:
        assert not noting(), "a graph does not hold what ranks tell each other"
        self.num_asked += 1


def test_each_replay_exchanges_with_other_ranks_between_the_graphs():
    """The values of that replay, in place or at another one, as a step launched one by one does."""
    other = OtherRank()
    with stand_in_device():
        capture = StepCapture(Recorder())
        exchanges = between_graphs(Exchanges(other, other), capture)
        tokens = DeviceTensor(torch.arange(6.0).view(3, 2))

        def compute():
            x = tokens + 1
            for layer in range(2):
                y, ids = x * 2 + layer, (x > 3).to(torch.int32)
                exchanges.experts.fill(y.view(-1), ids)
                exchanges.sums.add_up(y)
                x = y + x
            return exchanges.sums.gather(x, 3)

        pieces, out = capture(compute)
        assert len(pieces) == 2 * 5 + 1
        for _ in range(2):
            tokens.add_(1)
            expected, other.num_asked = compute().held, 0
            for piece in pieces:
                piece()
            assert other.num_asked == 5
            assert torch.equal(out.held, expected)
            assert not torch.equal(expected[:, :2], tokens.held)


def test_a_replay_leaves_the_memory_of_logits_alone_where_a_rank_does_not_get_them():
    other = OtherRank(first=False)
    with stand_in_device():
        capture = StepCapture(Recorder())
        exchanges = between_graphs(Exchanges(sums=other), capture)
        tokens = DeviceTensor(torch.arange(6.0).view(3, 2))
        pieces, out = capture(lambda: exchanges.sums.gather(tokens + 1, 3))
        out.held.fill_(7)
        for _ in range(2):
            for piece in pieces:
                piece()
    assert other.num_asked == 2
    assert (out.held == 7).all()


def test_exchanges_that_a_rank_does_not_have_are_not_there_between_graphs():
    capture = StepCapture(Recorder())
    assert between_graphs(Exchanges(), capture) == Exchanges()


def test_a_step_that_needs_no_host_is_one_graph():
    with stand_in_device():
        recorder, tokens = Recorder(), DeviceTensor(torch.ones(3))
        [graph], out = StepCapture(recorder)(lambda: tokens * 2 + 1)
        tokens.add_(1)
        graph()
    assert out.held.tolist() == [5.0] * 3


def test_a_capture_that_fails_leaves_no_graph_open():
    with stand_in_device():
        step = ThreeSites()
        with pytest.raises(TypeError):
            step.capture(lambda: step.backend.begin(0, 0, step.tokens, None) + 1)
        assert not step.capture.running
        pieces, out = step.capture(step.compute)
        for piece in pieces:
            piece()
        assert torch.equal(out.held, step.expected(step.tokens.held, slice(None)))


def made(family: str, folder: Path) -> SimpleNamespace:
    """A tiny checkpoint with two adapters on all of its sites, in slots and packed."""
    base = make_checkpoint(family, folder / "base", seed=1)
    paths = [make_adapter(family, base, folder / str(r), r, ALL_TARGETS, seed=r, scale=0.5) for r in (4, 9)]
    harness = Harness(base, paths, max_sequences=16)
    shape = harness.model.spec.shape
    packed = [read_adapter(path, shape, torch.float32) for path in paths]
    return SimpleNamespace(harness=harness, shape=shape, packed=packed)


class Sites:
    """A step that is nothing but LoRA sites, whose x, ids and base outputs come from its tokens."""

    def __init__(self, shape: ModelShape, client: LoraServerClient) -> None:
        self.shape, self.host = shape, OnHost(client.backend)
        self.recorder, self.buffer = Recorder(), StepBuffer(CUDA)
        capture = StepCapture(self.recorder)
        hosts = {Source.LEASED: HostCalled(self.host, capture)}
        self.backend = RoutedBackend(hosts)
        self.graphs = StepGraphs(
            self.buffer,
            capture,
            lambda slots: [0] * len(shape.sites),
            rows=[6],
            max_tokens=8,
            block_size=4,
            kv_tokens=1 << 10,
            places=((int(Source.LEASED), 0),),
            hosts=hosts,
        )

    def compute(self, batch: StepBatch) -> torch.Tensor:
        self.backend.begin_step(batch.tables, batch.routing)
        top_k, total = self.shape.num_experts_per_token, batch.tokens.float()[:, None] * 0
        numbers = batch.tokens[:, None]
        for layer in range(self.shape.num_layers):
            for index, site in enumerate(self.shape.sites):
                ids = None
                if site.num_experts:
                    chosen = torch.arange(top_k, device=CUDA)[None]
                    ids = ((numbers + layer + 3 * chosen) % site.num_experts).to(torch.int32)
                of_x = numbers.repeat(1, top_k).view(-1, 1) if site.name == "down" else numbers
                columns = torch.arange(site.in_features, device=CUDA)[None]
                x = torch.sin(of_x + columns + layer) + total.mean()
                add_to = self.backend.begin(layer, index, x, ids)
                y = torch.cos(numbers + torch.arange(site.total_out_features, device=CUDA)[None])
                y = y if ids is None else y.repeat(1, top_k).view(-1, site.total_out_features)
                if add_to is not None:
                    add_to(y)
                total = total + torch.sin(y).view(len(batch.tokens), -1).mean(1, keepdim=True)
        return total

    def batch(self, tokens: list[int], routing: RowRouting) -> StepBatch:
        num_rows = len(tokens)
        tables = StepTables(
            query_start=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens=torch.ones(num_rows, dtype=torch.int32),
            block_tables=torch.zeros(num_rows, 1, dtype=torch.int32),
            decode=True,
        )
        rows = {"positions": torch.zeros(num_rows, dtype=torch.int64), "live": torch.ones(num_rows) > 0}
        return StepBatch(
            tokens=torch.tensor(tokens),
            logit_rows=torch.arange(num_rows),
            tables=tables,
            routing=routing,
            compiled=False,
            any_rows=False,
            **rows,
        )

    def launched(self, batch: StepBatch) -> torch.Tensor:
        return self.compute(batch.through(StepBuffer(CUDA))).held

    def replayed(self, batch: StepBatch) -> torch.Tensor:
        shape = self.graphs.shape_of(batch)
        assert shape is not None
        return self.graphs.run(shape, batch, self.compute).held


def test_replays_ask_a_lora_server_for_the_rows_of_their_own_step():
    """Rows, adapters, leases and tokens change from one replay to the next."""
    shape = model_shape()
    few = (*shape.sites[0].modules[:1], *shape.sites[-1].modules)
    adapters = [
        random_adapter("a", shape),
        random_adapter("b", shape, 7),
        random_adapter("few", shape, 2, few),
    ]
    with Cluster(shape) as cluster, stand_in_device():
        cluster.put(*adapters)
        client = cluster.client()
        leases = cluster.granted(client, adapters)
        sites = Sites(shape, client)
        every_site = shape.num_layers * len(shape.sites)
        steps = [
            ([0, -1, 1, 2, 0, 1], leases),
            ([-1, 1, 1, -1, 2, 0], leases),
            ([2, -1, -1, 2, -1, -1], leases),
            ([-1, 2, 0, 0, 1, -1], [leases[0], None, leases[2]]),
        ]
        for number, (rows, given) in enumerate(steps):
            routing = leased_routing(shape, np.array(rows, dtype=np.int32), adapters, given)
            batch = sites.batch([7 * number + 11 * i % 17 for i in range(6)], routing)
            expected, num_begun = sites.launched(batch), sites.host.num_begun
            assert torch.equal(sites.replayed(batch), expected)
            assert sites.host.num_begun == 2 * num_begun, "it is asked for the same sites"
            sites.host.num_begun = 0
            base = replace(routing, row_route=np.full(6, -1, dtype=np.int32))
            assert not torch.equal(expected, sites.launched(replace(batch, routing=base)))
        assert sites.graphs.num_captured == 1
        assert len(sites.recorder.graphs) == 2 * every_site + 1
        assert client.backend.num_fallback_rows > 0, "of the lease that was lost"
        none = leased_routing(shape, np.full(6, -1, dtype=np.int32), [], [])
        batch = sites.batch([1, 2, 3, 4, 5, 6], none)
        assert torch.equal(sites.replayed(batch), sites.launched(batch))
        assert len(sites.recorder.graphs) == 2 * every_site + 2, "a step of the base model is one graph"


def test_pieces_are_captured_ahead_without_asking_the_host():
    shape = model_shape()
    with Cluster(shape) as cluster, stand_in_device():
        sites = Sites(shape, cluster.client())

        def empty(rows: int, decode: bool) -> StepBatch:
            return sites.batch([0] * rows, leased_routing(shape, np.full(rows, -1, dtype=np.int32), [], []))

        sites.graphs.warm_up(empty, sites.compute, [4] * len(shape.sites))
        assert sites.graphs.num_captured == 2
        assert len(sites.recorder.graphs) == 2 * shape.num_layers * len(shape.sites) + 2
        adapter = random_adapter("a", shape)
        cluster.put(adapter)
        rows = np.zeros(6, dtype=np.int32)
        batch = sites.batch([1] * 6, leased_routing(shape, rows, [adapter], [None]))
        assert torch.equal(sites.replayed(batch), sites.launched(batch))
        assert sites.graphs.num_captured == 2


@pytest.mark.slow
@whole_steps
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_steps_with_leased_rows_are_those_launched_one_by_one(family, tmp_path):
    """Deltas of the MLP from a LoRA Server, the others from this device."""
    served = made(family, tmp_path)
    shape, packed = served.shape, served.packed
    sources = [Source.LEASED if s.name in ("gate_up", "down") else Source.LOCAL for s in shape.sites]
    at_server = NUM_LAYERS * sources.count(Source.LEASED)
    with Cluster(shape) as cluster, stand_in_device():
        cluster.put(*packed)
        client = cluster.client()
        leases = cluster.granted(client, packed)

        def device(**settings) -> tuple[OnDevice, OnHost]:
            host = OnHost(client.backend)
            hosts = {Source.LEASED: host}
            one = OnDevice(served.harness, PROMPTS, packed=packed, hosts=hosts, sources=sources, **settings)
            for adapter, lease in zip(one.adapters, leases, strict=True):
                adapter.lease = lease
            return one, host

        (launched, _), (replayed, host) = device(), device(**GRAPHS)
        for num_captured in (2 * at_server + 1, 0):
            replayed.recorder.graphs.clear()
            assert torch.equal(replayed.step(), launched.step())
            assert len(replayed.recorder.graphs) == num_captured
        assert host.num_begun == 2 * at_server
        assert replayed.graphs.num_replayed == 2
        assert not client.backend.num_fallback_rows, "the LoRA Server computed what is leased"


@pytest.mark.slow
@whole_steps
def test_steps_with_rows_of_host_workers_are_those_launched_one_by_one(tmp_path):
    """An adapter that is on its way beside one that is here, over a device's stream."""
    served = made("mixtral", tmp_path)
    store = HostStore(tmp_path / "store")
    for one in served.packed:
        store.put(one)
    layout = FrameLayout(served.shape, torch.float32, 16 * served.shape.num_experts_per_token)
    present = np.zeros((2, NUM_LAYERS), dtype=bool)
    workers = HostWorkers(layout, store, 1, 16, stream=InlineStream())
    try:
        with stand_in_device():

            def device(**settings) -> tuple[OnDevice, OnHost]:
                host = OnHost(workers.backend)
                given = {"packed": served.packed, "hosts": {Source.HOST: host}, "present": present}
                one = OnDevice(served.harness, PROMPTS, **given, **settings)
                one.adapters[0].slot, one.adapters[0].loading_slot = None, 0
                return one, host

            (launched, _), (replayed, host) = device(), device(**GRAPHS)
            for _ in range(2):
                assert torch.equal(replayed.step(), launched.step())
            num_begun = host.num_begun
            assert num_begun == 2 * NUM_LAYERS * len([s for s in served.shape.sites if s.name != "router"])
            present[0, 0] = True  # the device's own deltas differ in their last bits
            found, expected = replayed.step(), launched.step()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert host.num_begun == 3 * num_begun // 2, "rows of host workers stay theirs"
            assert replayed.graphs.num_captured == 1
    finally:
        workers.close()
