# SPDX-License-Identifier: Apache-2.0
"""Host workers behind a device's stream: the same bits, and nobody waits for longer than the stream."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import numpy as np
import pytest
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.dist.deltas.session import FrameLayout
from moe_lora.dist.host_workers.worker import StoreDeltas
from moe_lora.dist.host_workers.worker_link import DEPTH
from moe_lora.dist.host_workers.workers import HostWorkers, WorkerTimes
from moe_lora.lora.row_routing import (
    RoutedAdapter,
    RowRouting,
    Source,
    content_number,
    local_routing,
    no_terms,
)
from tests.dist.deltas.test_remote_backend import (
    NUM_ROWS,
    STEP,
    assert_equal,
    local_backend,
    outputs,
    random_rows,
)
from tests.dist.lora_server.cluster import random_adapter, until
from tests.dist.lora_server.shapes import model_shape
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

from .queued_stream import QueuedStream

C = 3


class Streamed:
    """Workers that get three rows at a time over a stream, and the backend whose bits they must have."""

    def __init__(
        self,
        num_experts: int,
        folder,
        num_workers: int = 2,
        stream=None,
        answer_timeout_s: float = PATIENCE_S,
    ) -> None:
        self.shape = shape = model_shape(num_experts)
        self.adapters = [
            random_adapter("a" * 64, shape),
            random_adapter("b" * 64, shape, 7),
            random_adapter("c" * 64, shape, 2, (*shape.sites[0].modules[:1], *shape.sites[-1].modules)),
        ]
        store = HostStore(folder)
        for packed in self.adapters:
            store.put(packed)
        self.local = local_backend(shape, self.adapters)
        self.stream = stream or QueuedStream()
        layout = FrameLayout(shape, torch.float32, C * max(1, shape.num_experts_per_token))
        times = WorkerTimes(answer_timeout_s=answer_timeout_s)
        self.workers = HostWorkers(layout, store, num_workers, C, times=times, stream=self.stream)
        self.backend = self.workers.backend
        self.links = list(self.workers.links.values())

    def routing(self, rows) -> RowRouting:
        terms = no_terms(len(self.adapters), 1)
        for number, packed in enumerate(self.adapters):
            terms[number, 0, 0] = (Source.HOST, number, number, content_number(packed.content_hash))
        return RowRouting(
            groups=((0,) * len(self.shape.sites),) * self.shape.num_layers,
            row_route=rows,
            terms=terms,
            adapters=[RoutedAdapter(packed.content_hash, packed.targets) for packed in self.adapters],
        )

    def expected(self, seed: int) -> list[torch.Tensor]:
        rows = local_routing(self.shape, random_rows(len(self.adapters), seed))
        return outputs(self.local, self.shape, rows, seed)

    def local_sum(self, rows, x: torch.Tensor, layers: tuple[int, ...], site: int) -> torch.Tensor:
        """Deltas of a dense site in these layers, added one after the other."""
        y = torch.zeros(len(x), self.shape.sites[site].total_out_features)
        self.local.begin_step(STEP, local_routing(self.shape, rows))
        for layer in layers:
            self.local.begin(layer, site, x, None)(y)
        return y

    def queued(self, seed: int) -> list[torch.Tensor]:
        """Outputs of a step; they are there once the stream has come to them."""
        return outputs(self.backend, self.shape, self.routing(random_rows(len(self.adapters), seed)), seed)

    def check(self, *seeds: int) -> None:
        found = [self.queued(seed) for seed in seeds]
        self.stream.synchronize()
        for seed, one in zip(seeds, found, strict=True):
            assert_equal(one, self.expected(seed))

    def until_back(self, gone: set[int | None]) -> None:
        until(lambda: all(pid is not None and pid not in gone for pid in self.workers.pids), "they are back")
        for link in self.links:
            until(link.serving.is_set, "they serve again")


@pytest.fixture(
    scope="module",
    params=[pytest.param(8, id="experts"), pytest.param(0, id="dense", marks=pytest.mark.slow)],
)
def streamed(request, tmp_path_factory):
    found = Streamed(request.param, tmp_path_factory.mktemp("streamed"))
    yield found
    found.workers.close()
    assert not found.stream.registered


def test_steps_are_queued_without_waiting_and_have_the_bits_of_the_device(streamed):
    """The stream begins nothing before three steps are queued: slots come round many times meanwhile."""
    before = streamed.backend.num_fallback_rows
    num_before = streamed.backend.num_requests
    streamed.stream.hold()
    found = {seed: streamed.queued(seed) for seed in (1, 2, 3)}
    streamed.stream.go_on()
    streamed.stream.synchronize()
    for seed, one in found.items():
        assert_equal(one, streamed.expected(seed))
    assert streamed.backend.num_requests - num_before > 3 * 2 * DEPTH
    assert streamed.backend.num_fallback_rows == before, "workers computed every row"


@pytest.mark.parametrize("num_killed", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_killed_while_the_stream_waits_change_nothing_and_come_back(streamed, num_killed):
    pids = streamed.workers.pids
    before = streamed.backend.num_fallback_rows
    for pid in pids:
        stop(pid)
    found = {seed: streamed.queued(seed) for seed in (4, 5)}
    assert streamed.stream.waiting.wait(PATIENCE_S)
    for number, pid in enumerate(pids):
        os.kill(pid, signal.SIGKILL if number < num_killed else signal.SIGCONT)
    streamed.stream.synchronize()
    for seed, one in found.items():
        assert_equal(one, streamed.expected(seed))
    assert streamed.backend.num_fallback_rows > before
    streamed.until_back(set(pids[:num_killed]))
    before = streamed.backend.num_fallback_rows
    streamed.check(6)
    assert streamed.backend.num_fallback_rows == before


def test_late_worker_is_ended_before_the_engine_answers_for_it(streamed):
    stopped = streamed.workers.pids[0]
    before = streamed.backend.num_fallback_rows
    stop(stopped)
    link = streamed.links[0]
    patient, link._times = link._times, WorkerTimes(answer_timeout_s=1.0)
    try:
        streamed.check(7, 8)
    finally:
        link._times = patient
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    assert streamed.backend.num_fallback_rows > before
    streamed.until_back({stopped})
    before = streamed.backend.num_fallback_rows
    streamed.check(9)
    assert streamed.backend.num_fallback_rows == before


def test_captured_step_counts_on_when_it_is_replayed(streamed):
    """Slots are fixed in the graph, their counters are not: three times, each with other rows of x."""
    shape, site = streamed.shape, 0
    rows = random_rows(3, 1)
    generator = torch.Generator().manual_seed(1)
    x = torch.empty(NUM_ROWS, shape.sites[site].in_features)
    y = torch.empty(NUM_ROWS, shape.sites[site].total_out_features)
    backend = streamed.backend

    def step() -> None:
        streamed.stream.queue(y.zero_)
        backend.begin_step(STEP, streamed.routing(rows))
        backend.begin(2, site, x, None)(y)

    replay = streamed.stream.capture(step)
    before = backend.num_fallback_rows
    for _ in range(3):
        x.copy_(torch.randn(x.shape, generator=generator))
        replay()
        streamed.stream.synchronize()
        assert torch.equal(y, streamed.local_sum(rows, x, (2,), site))
    assert y.abs().sum() > 0
    streamed.check(2)
    assert backend.num_fallback_rows == before


def test_adapter_that_nobody_has_is_said_by_the_engine_and_holds_nothing_up(streamed, tmp_path):
    rows = random_rows(3, 1)
    routing = streamed.routing(rows)
    routing.terms["generation"][0] = content_number("d" * 64)
    outputs(streamed.backend, streamed.shape, routing, 1)
    streamed.stream.synchronize()
    [(number, error)] = streamed.backend.failures().items()
    assert number == content_number("d" * 64)
    assert isinstance(error, AdapterError)
    assert "ddd" in str(error)
    assert not streamed.backend.failures(), "each is said once"
    before = streamed.backend.num_fallback_rows
    streamed.check(1)
    assert streamed.backend.num_fallback_rows == before, "workers go on after what they refused"


def test_rows_that_lack_memory_even_apart_are_said_and_hold_nothing_up(streamed, monkeypatch):
    def out_of_memory(*_: object) -> None:
        raise MemoryError("no memory")

    routing = streamed.routing(random_rows(3, 1))
    routing.terms["generation"][:] = content_number("d" * 64)  # workers refuse these rows
    monkeypatch.setattr(StoreDeltas, "fill_apart", out_of_memory)
    outputs(streamed.backend, streamed.shape, routing, 1)
    streamed.stream.synchronize()
    assert list(streamed.backend.failures()) == [content_number("d" * 64)]
    streamed.check(1)


def test_rows_beside_an_adapter_that_nobody_has_are_right(streamed):
    rows = random_rows(3, 1)
    routing = streamed.routing(rows)
    routing.terms["generation"][0] = content_number("d" * 64)
    site = 0
    x = torch.randn(NUM_ROWS, streamed.shape.sites[site].in_features)
    y = torch.zeros(NUM_ROWS, streamed.shape.sites[site].total_out_features)
    streamed.backend.begin_step(STEP, routing)
    streamed.backend.begin(2, site, x, None)(y)
    streamed.stream.synchronize()
    assert list(streamed.backend.failures()) == [content_number("d" * 64)]
    known = np.where(rows == 0, -1, rows)
    assert (known >= 0).any()
    assert torch.equal(y, streamed.local_sum(known, x, (2,), site))


def test_step_that_is_abandoned_leaves_the_next_one_its_own_deltas(streamed):
    """Slots are asked and their answers not taken; one adapter of the step is nowhere."""
    backend, shape = streamed.backend, streamed.shape
    before = backend.num_fallback_rows
    site, rows = shape.sites[0], random_rows(3, 1)
    x = torch.randn(NUM_ROWS, site.in_features)
    for is_known in (True, False):
        routing = streamed.routing(rows)
        if not is_known:
            routing.terms["generation"][0] = content_number("d" * 64)
        backend.begin_step(STEP, routing)
        for layer in range(3):
            backend.begin(layer, 0, x, None)
        backend.abandon_step()
        assert (backend.num_fallback_rows > before) == (not is_known)
        streamed.check(1, 2)
    assert not backend.failures()


def test_adapter_whose_file_is_gone_is_computed_by_the_engine_that_has_it_mapped(streamed):
    """A new version of the adapter, or a cleaner of temporary files, removes it before a worker reads it."""
    store, before = streamed.workers.store, streamed.backend.num_fallback_rows
    packed = random_adapter("e" * 64, streamed.shape, 5)
    store.put(packed)
    mapped = store.get(packed.content_hash, packed.name)
    store.remove(packed.content_hash)
    routing = streamed.routing(random_rows(3, 1))
    routing.terms["generation"][1] = content_number(packed.content_hash)
    found = outputs(streamed.backend, streamed.shape, routing, 1)
    streamed.stream.synchronize()
    assert not streamed.workers.failures()
    local = local_backend(streamed.shape, [streamed.adapters[0], mapped, streamed.adapters[2]])
    assert_equal(found, outputs(local, streamed.shape, local_routing(streamed.shape, random_rows(3, 1)), 1))
    assert streamed.backend.num_fallback_rows > before


def test_engine_that_ends_while_its_stream_waits_answers_first(tmp_path):
    streamed = Streamed(0, tmp_path, 1)
    [pid] = streamed.workers.pids
    stop(pid)
    found = streamed.queued(1)
    assert streamed.stream.waiting.wait(PATIENCE_S)
    closing = threading.Thread(target=streamed.workers.close)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert_equal(found, streamed.expected(1))
    assert not any(link.is_alive() for link in streamed.links)
    assert not streamed.stream.registered


def test_frames_that_the_device_cannot_use_are_refused_and_no_worker_stays(tmp_path):
    class Full(QueuedStream):
        def register(self, memory):
            if len(self.registered) == 4:
                raise ConfigError("no more")
            return super().register(memory)

    before = set(threading.enumerate())
    stream = Full()
    with pytest.raises(ConfigError, match="no more"):
        Streamed(0, tmp_path, 2, stream)
    until(lambda: not stream.registered, "what was registered is given back")
    until(lambda: len(set(threading.enumerate()) - before) == 1, "only the stream's own is left")
