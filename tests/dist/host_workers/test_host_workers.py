# SPDX-License-Identifier: Apache-2.0
"""Host workers: deltas of adapters that are on their way, bit for bit those of the device."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.dist.deltas import host_deltas as deltas
from moe_lora.dist.deltas.session import DONE, STALE, FrameLayout, lay_out_request
from moe_lora.dist.host_workers import worker
from moe_lora.dist.host_workers.worker_link import StreamWorkerLink, WorkerLink, WorkerTimes
from moe_lora.dist.host_workers.workers import HostWorkers, RowShares
from moe_lora.dist.transport.shm import ShmTransport
from moe_lora.lora.backend import RoutedBackend
from moe_lora.lora.row_routing import RoutedAdapter, RowRouting, Source, content_number, no_terms
from tests.dist.cluster_jobs import until
from tests.dist.lora_server.cluster import random_adapter
from tests.dist.lora_server.shapes import model_shape
from tests.families import make_adapter, make_checkpoint
from tests.grids import with_quick
from tests.models.harness import Harness
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

from .queued_stream import InlineStream

PROMPTS = [[5, 40, 7, 11], [9, 3], [5, 40, 7, 11], [33, 8, 60], [70, 4, 21, 90, 12]]
NUM_TOKENS = 4


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, ValueError])
def test_worker_refuses_what_it_can_not_compute_and_goes_on(tmp_path, monkeypatch, caplog, error):
    """The engine computes a refused request; a worker that ended would be started again and again."""

    def fail(*operands) -> None:
        raise error("no such matrix")

    shape = model_shape(0)
    layout, store = FrameLayout(shape, torch.float32, 4), HostStore(tmp_path)
    store.put(random_adapter("a" * 64, shape))
    frame = torch.zeros(layout.request_bytes, dtype=torch.uint8)
    request = lay_out_request(frame, layout, 0, 0, 2, 0, 2)
    request.generation[:] = content_number("a" * 64)
    out = torch.empty(2, shape.sites[0].total_out_features)
    found = worker.StoreDeltas(shape, store)
    assert found.compute(request, out) == DONE
    with monkeypatch.context() as patched:
        patched.setattr(deltas, "lora_shrink", fail)
        assert [found.compute(request, out) for _ in range(3)] == [STALE] * 3
    assert found.compute(request, out) == DONE
    assert len(caplog.records) == 1
    assert "aaa" in caplog.text


class HostHarness(Harness):
    """A harness whose stream s has adapter s: routes of even numbers are loading, odd ones are there."""

    def __init__(self, served: Served, present: np.ndarray) -> None:
        super().__init__(served.base, served.paths, max_sequences=8)
        self.routed = RoutedBackend(
            {Source.HOST: served.backend, Source.LOCAL: self.context.backend}, present
        )
        self.context.backend = self.routed
        self.adapters = [RoutedAdapter(p.content_hash, p.targets) for p in served.packed]
        self.terms = no_terms(len(served.packed), 1)
        for number, packed in enumerate(served.packed):
            source = Source.LOCAL if number % 2 else Source.HOST
            self.terms[number, 0, 0] = (source, number, number, content_number(packed.content_hash))
        shape = self.model.spec.shape
        self.groups = ((0,) * len(shape.sites),) * shape.num_layers

    def routing(self, token_slots: np.ndarray) -> RowRouting:
        return RowRouting(groups=self.groups, row_route=token_slots, terms=self.terms, adapters=self.adapters)


class Served:
    """A tiny checkpoint, adapters in a store, and workers that map it."""

    def __init__(self, family: str, folder, num_workers: int) -> None:
        self.base = make_checkpoint(family, folder / "base", seed=1)
        self.paths = [make_adapter(family, self.base, folder / f"r{r}", r, seed=r) for r in (4, 8, 3)]
        shape = Harness(self.base).model.spec.shape
        self.packed = [read_adapter(path, shape, torch.float32) for path in self.paths]
        store = HostStore(folder / "store")
        for packed in self.packed:
            store.put(packed)
        layout = FrameLayout(shape, torch.float32, max_rows=16)
        self.num_layers = shape.num_layers
        self.workers = HostWorkers(layout, store, num_workers, 3, times=WorkerTimes(PATIENCE_S))
        self.backend = self.workers.backend

    def logits(self, streams: list[int], present: np.ndarray | None = None) -> list[torch.Tensor]:
        """Of each step of a greedy continuation, all rows; present None: everything is on the device."""
        if present is None:
            harness: Harness = Harness(self.base, self.paths, max_sequences=8)
        else:
            harness = HostHarness(self, present)
        sequences, logits = harness.prefill(PROMPTS[: len(streams)], streams)
        found = [torch.cat(logits)]
        for _ in range(NUM_TOKENS - 1):
            last = [[int(rows[-1].argmax())] for rows in logits]
            logits = harness.step(list(zip(sequences, last, strict=True)))
            found.append(torch.cat(logits))
        self.harness = harness
        return found


@pytest.fixture(scope="module", params=["mixtral", "llama"])
def served(request, tmp_path_factory):
    found = Served(request.param, tmp_path_factory.mktemp("served"), 2)
    yield found
    found.workers.close()


def same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


STREAMS = [0, 1, 2, -1, 0]


def test_rows_of_loading_adapters_have_the_bits_of_those_that_are_there(served):
    expected = served.logits(STREAMS)
    backend = served.backend
    backend.num_fallback_rows, before = 0, backend.num_requests
    nothing = np.zeros((len(served.packed), served.num_layers), dtype=bool)
    assert same_bits(served.logits(STREAMS, nothing), expected)
    assert backend.num_requests > before
    assert backend.num_fallback_rows == 0, "workers computed every row"


def test_layers_that_have_come_are_computed_on_the_device(served):
    expected = served.logits(STREAMS)
    first_layers = np.zeros((len(served.packed), served.num_layers), dtype=bool)
    first_layers[0, 0] = True
    assert same_bits(served.logits(STREAMS, first_layers), expected)
    num_rows = len(PROMPTS[0]) + len(PROMPTS[4]) + 2 * (NUM_TOKENS - 1)
    assert served.harness.routed.num_taken_over == num_rows
    before = served.backend.num_requests
    everything = np.ones((len(served.packed), served.num_layers), dtype=bool)
    assert same_bits(served.logits(STREAMS, everything), expected)
    assert served.backend.num_requests == before


def test_engine_computes_for_a_worker_that_was_killed_and_starts_it_again(served):
    expected = served.logits(STREAMS)
    nothing = np.zeros((len(served.packed), served.num_layers), dtype=bool)
    killed = list(served.workers.pids)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert same_bits(served.logits(STREAMS, nothing), expected)
    assert served.backend.num_fallback_rows > 0
    served.backend.num_fallback_rows = 0
    links = served.workers.links.values()
    deadline_s = time.monotonic() + PATIENCE_S
    while any(link.session is None or link.pid in killed for link in links):
        assert time.monotonic() < deadline_s, "the workers did not come back"
        time.sleep(0.05)
    before = served.backend.num_requests
    assert same_bits(served.logits(STREAMS, nothing), expected)
    assert served.backend.num_requests > before
    assert served.backend.num_fallback_rows == 0


def test_worker_that_stops_is_given_up_and_started_again(served):
    expected = served.logits(STREAMS)
    nothing = np.zeros((len(served.packed), served.num_layers), dtype=bool)
    stopped = served.workers.pids[0]
    stop(stopped)
    served.workers.links[0].session._answer_timeout_s = 1.0
    try:
        assert same_bits(served.logits(STREAMS, nothing), expected)
        assert served.backend.num_fallback_rows > 0
        deadline_s = time.monotonic() + PATIENCE_S
        while served.workers.pids[0] in (None, stopped) or served.workers.links[0].session is None:
            assert time.monotonic() < deadline_s, "the worker did not come back"
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    served.backend.num_fallback_rows = 0
    assert same_bits(served.logits(STREAMS, nothing), expected)
    assert served.backend.num_fallback_rows == 0


@pytest.mark.parametrize("streamed", with_quick([False, True], [False]))
def test_worker_that_dies_in_its_start_says_how_in_the_log(tmp_path, caplog, streamed):
    no_core = 1 << 14
    layout, store = FrameLayout(model_shape(0), torch.float32, 4), HostStore(tmp_path)
    place = (0, ShmTransport(name=f"dying-{os.getpid()}"), layout, store, no_core, WorkerTimes(), False)
    link = StreamWorkerLink(InlineStream(), *place) if streamed else WorkerLink(*place)
    until(
        lambda: "host-worker-0 can't be started: it ended with exit code 1" in caplog.text,
        lambda: caplog.text,
    )
    link.close()
    link.end()
    link.join()
    assert link.pid is None


def test_rows_occupy_as_many_workers_as_their_pieces_need():
    shares = RowShares(3, 10, 4)

    def divided(num_rows: int) -> list[tuple[int, int]]:
        tokens = np.arange(num_rows)
        found = shares.shares(0, 0, tokens, tokens)
        assert np.array_equal(np.concatenate([piece for _, piece in found]), tokens)
        return [(worker, len(piece)) for worker, piece in found]

    assert divided(10) == [(0, 10)]
    assert divided(11) == [(0, 6), (1, 5)]
    assert divided(40) == [(0, 10), (1, 10), (2, 10), (0, 10)]


def test_part_of_a_core_takes_so_many_times_as_long(monkeypatch):
    now_ns = itertools.count(1000, 10)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic_ns=lambda: next(now_ns)))
    worker.slow_down(600, 4.0)
    assert next(now_ns) == 600 + 4 * 400 + 10
