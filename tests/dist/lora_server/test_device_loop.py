# SPDX-License-Identifier: Apache-2.0
"""Sessions of devices, without a device: what they launch in which order, and what they keep.

What they compute is in `tests/engine/test_pushed.py`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_lora.core.partition import Layout, Partition
from moe_lora.dist.deltas.device_frames import DeviceFrames
from moe_lora.dist.lora_server import device_loop
from moe_lora.dist.lora_server.device_loop import DeviceSession, ResidentTables
from moe_lora.dist.lora_server.messages import Memory
from moe_lora.dist.lora_server.server_store import ServerAdapterStore
from moe_lora.dist.transport.device_puts import WORDS_PER_SIGNAL, SymmetricWindow
from tests import stand_in_device
from tests.dist.lora_server.cluster import CPU
from tests.dist.lora_server.shapes import model_shape
from tests.patience import PATIENCE_S

pytest.importorskip("triton")
SHAPE = model_shape()
PARTITION = Partition(SHAPE, Layout.parse("EP1-PP1"), 1)
CAPACITY = 2


class Stream:
    """Notes what it is used for.  at_rest: whether what is queued on it comes to an end."""

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted
        self.at_rest = threading.Event()
        self.at_rest.set()

    def wait_stream(self, other: str) -> None:
        self._noted.append(f"wait for {other}")

    def synchronize(self) -> None:
        locked = device_loop._capturing.locked()
        self._noted.append(f"synchronize {'in a capture' if locked else 'alone'}")
        assert self.at_rest.wait(PATIENCE_S), "nobody waits for an idle instance"


class Graph:
    """A capture of nothing."""

    def capture_begin(self, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


@pytest.fixture
def noted(monkeypatch) -> list[str]:
    """What CUDA is asked for, in order."""
    found: list[str] = []

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "the default stream")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return found


@pytest.fixture
def server_store() -> Iterator[ServerAdapterStore]:
    made = ServerAdapterStore(SHAPE, PARTITION, 0, Memory(CAPACITY, (4,), 256), CPU)
    yield made
    made.stop()


@pytest.fixture
def session_of(noted, server_store) -> Callable[[int], DeviceSession]:
    """An instance's session, as if there were streams."""
    frames = DeviceFrames(SHAPE, PARTITION, torch.float32, max_rows=4, num_clients=2)
    window = SymmetricWindow(
        label="none",
        num_bytes=frames.num_bytes,
        num_signals=frames.num_signals,
        bytes=torch.zeros(frames.num_bytes, dtype=torch.uint8),
        words=torch.zeros(frames.num_signals * WORDS_PER_SIGNAL, dtype=torch.int64),
    )
    tables = ResidentTables(server_store)

    def make(client: int) -> DeviceSession:
        group = SimpleNamespace(device=CPU)
        session = DeviceSession(client, group, window, frames, tables, "sgmv", 30.0)
        session.stream = Stream(noted)
        session.step = lambda: noted.append("step")
        return session

    return make


def test_a_capture_comes_after_what_other_streams_made_and_waits_for_steps_before_others_wait_for_it(
    session_of, noted
):
    session = session_of(0)
    session.prepare()
    assert noted == [
        "wait for the default stream",
        "synchronize alone",
        "step",
        "synchronize in a capture",
        "step",
    ]
    session.prepare()
    assert len(noted) == 5, "the slots are the same"


def test_an_idle_instance_keeps_no_other_from_being_captured(session_of):
    idle, busy = session_of(0), session_of(1)
    idle.stream.at_rest.clear()
    waiting = threading.Thread(target=idle.prepare)
    waiting.start()
    other = threading.Thread(target=busy.prepare, daemon=True)
    other.start()
    other.join(PATIENCE_S)
    captured = not other.is_alive()
    idle.stream.at_rest.set()
    waiting.join()
    assert captured


def test_steps_keep_the_tables_that_they_were_captured_with(session_of, server_store):
    session = session_of(0)
    session.prepare()
    resident = session._tables.now
    tensors = [*resident, server_store.slots.lora_rank]
    held = [weakref.ref(one) for one in tensors]
    server_store.grow(CAPACITY + 3)
    assert resident.generation.tolist() == [device_loop._LEFT] * CAPACITY
    assert len(session._tables.now.generation) == CAPACITY + 3
    del resident, tensors
    gc.collect()
    assert all(one() is not None for one in held), "a step that is queued reads them"
    session.prepare()
    gc.collect()
    assert all(one() is None for one in held)


def test_tables_that_grow_page_lock_no_memory(noted, monkeypatch):
    """It may wait for a device at rest, which sessions that wait keep it from."""
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(noted))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(noted))
    with stand_in_device.stand_in_device():
        arena = stand_in_device.to_device(torch.zeros(64, dtype=torch.uint8))
        store = SimpleNamespace(arena=arena, generation=np.full(2, 5), loaded=np.full((2, 3), 5))
        tables = ResidentTables(store)
        before, num_locked = tables.now, len(stand_in_device._pinned)
        store.generation, store.loaded = np.full(9, 7), np.full((9, 3), 6)
        store.on_tables()
        assert len(stand_in_device._pinned) == num_locked
    assert before.generation.held.tolist() == [device_loop._LEFT] * 2
    assert tables.now.generation.held.tolist() == [7] * 9
    assert tables.now.loaded.held.tolist() == [[6] * 3] * 9
