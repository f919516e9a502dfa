# SPDX-License-Identifier: Apache-2.0
"""The data path of one server rank for device puts: a stream per instance, no host.

A step is fixed: wait for the frame; per layer, admit rows to slots; per site, wait for x, compute, put the
answer.  CUDA captures the step once and replays ahead (InfiniLoRA section 3).  An idle instance's session
waits without bound, so the process must never synchronise the device.

NOT YET RUN on a GPU.  Without a GPU operations run eagerly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_lora.config import EngineConfig
from moe_lora.core.partition import Partition
from moe_lora.core.shape import MAX_CUDA_LORA_RANK
from moe_lora.dist.deltas.device_frames import DeviceFrames, DeviceHalf
from moe_lora.dist.transport.device_puts import (
    PUT_BLOCKS,
    AnswerRows,
    DevicePuts,
    SymmetricWindow,
    join_device_group,
)
from moe_lora.kernels.lora import lora_delta
from moe_lora.kernels.operands import LoraOperands, SlotTable
from moe_lora.kernels.page_locked import Staging

from .server_store import ServerAdapterStore, on_stream

logger = logging.getLogger(__name__)

_AHEAD = 2
"""Queued steps per session."""
_SOONER = 16
"""Fraction of the answer timeout before a loading layer is abandoned."""
_LEFT = 1 << 62
_STAGE_BYTES = 1 << 20


class Resident(NamedTuple):
    """Device state of each slot, int64.  generation: [M].  loaded: [M, L]."""

    generation: torch.Tensor
    loaded: torch.Tensor


class ResidentTables:
    """Slot state of a server rank, in tables for running operations.

    Added slots make new tables; old tables then show every slot as empty.  stream: without waiting sessions.
    """

    def __init__(self, server_store: ServerAdapterStore) -> None:
        self.store = server_store
        self._device = server_store.arena.device
        self._lock = threading.Lock()
        on_cuda = self._device.type == "cuda"
        self.stream = torch.cuda.Stream(self._device) if on_cuda else None
        # Once: page-locking may wait for a device that never rests.
        self._staging = Staging(_STAGE_BYTES) if on_cuda else None
        self.now = self._made()
        server_store.on_tables = self.publish
        self.publish()

    def _made(self) -> Resident:
        shapes = self.store.generation.shape, self.store.loaded.shape
        return Resident(*(torch.zeros(shape, dtype=torch.int64, device=self._device) for shape in shapes))

    def publish(self) -> None:
        """Update the tables; returns when done.  Any thread."""
        with self._lock, self._beside():
            before = tables = self.now
            if len(before.generation) != len(self.store.generation):
                tables = self._made()
                before.generation.fill_(_LEFT)
            self._copy(self.store.loaded, tables.loaded)
            self._copy(self.store.generation, tables.generation)
            if self.stream is not None:
                self.stream.synchronize()
            self.now = tables

    def _copy(self, array: np.ndarray, table: torch.Tensor) -> None:
        source, there = (one.view(-1).view(torch.uint8) for one in (torch.from_numpy(array), table))
        if self._staging is None:
            there.copy_(source)
        else:
            self._staging.copy(source, there)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.stream(self.stream):
            yield


class DeviceSession(DeviceHalf):
    """One instance's half at this rank.

    Work is abandoned well before answer_timeout_s, so the instance learns of missing rows.
    """

    def __init__(
        self,
        client: int,
        group: DevicePuts,
        window: SymmetricWindow,
        frames: DeviceFrames,
        tables: ResidentTables,
        lora_kernel: str,
        answer_timeout_s: float,
    ) -> None:
        super().__init__(group, window, frames, client, answer_timeout_s)
        self._store, self._tables, self._kernel = tables.store, tables, lora_kernel
        self._server_rank = server_rank = self._store.server_rank
        self._member = frames.member(client)
        make = partial(torch.zeros, device=group.device)
        self._missing = make(1, dtype=torch.int64)
        self._token_slots = make(1 << (frames.max_rows - 1).bit_length(), dtype=torch.int32)
        start = frames.frame_at(client)
        self._frame = window.bytes[start : start + frames.frame_bytes].view(torch.int64)
        partition = frames.partition
        self._work = [
            (
                layer,
                [
                    site
                    for site in frames.sites
                    if server_rank in partition.servers_of_client(0, layer, site)
                    and frames.shape.has_site(layer, frames.shape.sites[site].name)
                ],
            )
            for layer in partition.layers_of(server_rank)
        ]
        self.stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
        self._again: Callable[[], None] = self.step
        self._bound: tuple[Resident, SlotTable] | None = None
        self._queued: list[Any] = []
        self._ended = False
        self.num_steps = 0

    def step(self) -> None:
        """Queue one step's operations, after `prepare`."""
        assert self._bound is not None
        exchange, is_first, (resident, _) = self._exchange, True, self._bound
        self._wait_for(self._frames.asked(self._client), PUT_BLOCKS, exchange.NO_BOUND)
        for layer, sites in self._work:
            if not sites:
                continue
            exchange.launch_admit(
                *(self._frame, *resident, layer),
                *(self._token_slots, self._missing, self.state, self._max_polls // _SOONER + 1, is_first),
            )
            is_first = False
            for site in sites:
                self._serve(layer, site, *self._bound)

    def queue(self) -> None:
        """Queue a step, then wait for a short queue."""
        self.prepare()
        with on_stream(self.stream):
            self._again()
            self.num_steps += 1
            if self.stream is not None:
                self._queued.append(torch.cuda.Event())
                self._queued[-1].record()
                if len(self._queued) == _AHEAD:
                    self._queued.pop(0).synchronize()

    def is_lost(self) -> bool:
        """True after a wait hit its bound."""
        with on_stream(self._tables.stream):
            return bool(int(self.state.item()) & self._exchange.LOST)

    def end(self) -> None:
        """End all waits of operations, and wait for the operations."""
        self._ended = True
        with on_stream(self._tables.stream):
            self.state.fill_(self._exchange.ENDED)
        if self.stream is not None:
            self.stream.synchronize()

    def prepare(self) -> None:
        """Capture a step, unless captured for the current slots."""
        resident = self._tables.now
        if self._bound is not None and self._bound[0] is resident:
            return
        if self.stream is None:
            self._bound = resident, self._store.slots
            return
        # Another stream made the session's initial state.
        self.stream.wait_stream(torch.cuda.current_stream(self._group.device))
        # A queued step waits for an idle instance; other captures must not.
        self.stream.synchronize()
        with _capturing, torch.cuda.stream(self.stream):
            self._bound = resident, self._store.slots
            # Compile kernels before the capture, without waits and puts.
            self.state.fill_(self._exchange.ENDED)
            expected = self._expected.clone()
            self.step()
            self._expected.copy_(expected)
            self.state.zero_()
            self.stream.synchronize()
            if self._ended:
                self.state.fill_(self._exchange.ENDED)
            # `torch.cuda.graph` waits for the device and other sessions.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            self.step()
            graph.capture_end()
            self._again = graph.replay

    def _wait_for(self, signal: int, more: int, max_polls: int) -> None:
        self._wait(range(signal, signal + 1), more, max_polls)

    def _serve(self, layer: int, number: int, resident: Resident, slots: SlotTable) -> None:
        frames, site = self._frames, self._frames.shape.sites[number]
        x, ids, out = self._rows[number]
        self._wait_for(
            frames.asked(self._client, number), PUT_BLOCKS * (1 if ids is None else 2), 2 * self._max_polls
        )
        token_slots = self._token_slots[: frames.max_rows]
        operands = LoraOperands(x, ids, site, layer, token_slots, slots, self._store.arena)
        # Empty slots may get any rank later.
        lora_delta(operands, out, kernel=self._kernel, max_lora_rank=MAX_CUDA_LORA_RANK)
        experts = frames.partition.experts_of(self._server_rank)
        answer = AnswerRows(
            rows=out,
            token_slots=token_slots,
            ids=ids,
            top_k=1 if ids is None else ids.shape[1],
            first_expert=experts.start,
            end_expert=experts.stop,
            frame=self._frame,
            generation=resident.generation,
            missing=self._missing,
            state=self.state,
            over=self._exchange.LOST | self._exchange.ENDED,
        )
        status_at = frames.status_at(self._client, self._server_rank, number)
        signal = frames.answered(self._server_rank, number)
        self._group.put_rows(self._window, answer, status_at, signal, self._member)


_capturing = threading.Lock()


class DeviceLoop:
    """Serves a device group's instances at this rank, a thread and stream each."""

    def __init__(
        self,
        join: Callable[[], DevicePuts],
        frames: DeviceFrames,
        server_store: ServerAdapterStore,
        lora_kernel: str,
        answer_timeout_s: float,
    ) -> None:
        self._join, self._frames = join, frames
        self._store, self._kernel, self._answer_timeout_s = server_store, lora_kernel, answer_timeout_s
        self._stopping = threading.Event()
        self.tables: ResidentTables | None = None
        self.sessions: list[DeviceSession] = []
        self._threads = [threading.Thread(target=self._meet, name="device-puts", daemon=True)]
        self._threads[0].start()

    def _meet(self) -> None:
        try:
            group = self._join()
            window = group.alloc(self._frames.num_bytes, self._frames.num_signals)
            tables = self.tables = ResidentTables(self._store)
            for client in range(self._frames.num_clients):
                given = (client, group, window, self._frames, tables)
                session = DeviceSession(*given, self._kernel, self._answer_timeout_s)
                session.prepare()
                self.sessions.append(session)
            group.meet()
        except Exception as error:
            if not self._stopping.is_set():
                logger.error("no puts from device to device: %s", error)
            return
        for session in self.sessions:
            thread = threading.Thread(target=self._run, args=(session,), name="device-session", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, session: DeviceSession) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping.is_set() and not session.is_lost():
                    session.queue()
            if not self._stopping.is_set():
                logger.error("an instance did not go on with a step that it began: its puts get no answer")
        except Exception:
            logger.exception("a session of devices that put to each other has ended")
        finally:
            session.end()

    def stop(self) -> None:
        """End all waits, and wait for the device."""
        self._stopping.set()
        for session in self.sessions:
            session.end()
        for thread in self._threads[1:]:
            thread.join()


def device_loop(
    config: EngineConfig,
    partition: Partition,
    server_rank: int,
    server_store: ServerAdapterStore,
    meeting: tuple[str, int, int, int],
) -> DeviceLoop:
    """The loop of a server rank."""
    server = config.lora_server
    assert server is not None
    address, _, num_clients, max_rows = meeting
    frames = DeviceFrames(partition.shape, partition, getattr(torch, config.dtype), max_rows, num_clients)
    place = address, server_rank, frames.size, server_store.arena.device
    join = partial(join_device_group, server.device_puts, *place)
    return DeviceLoop(join, frames, server_store, config.lora_kernel, server.answer_timeout_s)
