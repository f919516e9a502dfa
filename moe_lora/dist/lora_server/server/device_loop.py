"""The data path of one server rank for instances whose devices put to it: a stream for each, no host.

A session's step is a fixed row of operations: wait for the step's frame; for each layer of this rank admit
its rows to slots; for each site wait for x, compute, put the answer.  On CUDA it is captured once and
replayed ahead of time, so that the device always waits for the next request (InfiniLoRA section 3: receive,
compute and send overlap, here of several instances, on as many streams).

NOT YET RUN on a GPU.  Without one, its operations run as they are called, which is what tests do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from moe_lora.dist.lora_server.protocol.device_frames import DeviceFrames
from moe_lora.dist.transport.device_puts import PUT_BLOCKS, AnswerRows, DevicePuts, SymmetricWindow
from moe_lora.kernels.lora import lora_delta
from moe_lora.kernels.operands import LoraOperands
from moe_lora.kernels.triton.configs import kernels

from .server_store import ServerAdapterStore

logger = logging.getLogger(__name__)

_AHEAD = 2
"""Steps of a session that are queued at once: the next waits while one is computed."""
_MAX_POLLS = 30_000_000
"""Looks at a signal of a step that has begun, or for a layer that is on its way, before it is given up."""


class ResidentTables:
    """On the device, what each slot of a server rank has: read by operations while they run.

    generation: [M].  loaded: [M, L].  Both int64, see `ServerAdapterStore`.  When slots are added there are
    new tables; of the old ones, which operations may still be bound to with the old slot table, nothing is
    loaded any more, and what leaves still does.
    """

    def __init__(self, server_store: ServerAdapterStore) -> None:
        self._store = server_store
        self._device = server_store.arena.device
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._before: list[torch.Tensor] = []
        self.generation, self.loaded = self._made()
        server_store.on_tables = self.publish
        self.publish()

    def _made(self) -> tuple[torch.Tensor, torch.Tensor]:
        make = partial(torch.zeros, dtype=torch.int64, device=self._device)
        return make(self._store.generation.shape), make(self._store.loaded.shape)

    def publish(self) -> None:
        """Bring them up to date; returns when they are.  Any thread."""
        with self._lock:
            # Slots and bytes that were written on the thread's own stream come first.
            if self._stream is not None:
                torch.cuda.current_stream(self._device).synchronize()
            generation = self._store.generation
            if len(self.generation) != len(generation):
                self._before.append(self.generation)
                self.generation, self.loaded = self._made()
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                for old in self._before:
                    _copy(generation[: len(old)], old)
                _copy(self._store.loaded, self.loaded)
                _copy(generation, self.generation)
            if self._stream is not None:
                self._stream.synchronize()


def _copy(array: np.ndarray, tensor: torch.Tensor) -> None:
    source = torch.from_numpy(array)
    tensor.copy_(source.pin_memory() if tensor.is_cuda else source, non_blocking=True)


class DeviceSession:
    """One instance's half at this rank.

    client: the instance's number.  num_steps: that were queued.
    """

    def __init__(
        self,
        client: int,
        server_rank: int,
        group: DevicePuts,
        window: SymmetricWindow,
        frames: DeviceFrames,
        server_store: ServerAdapterStore,
        tables: ResidentTables,
        lora_kernel: str,
    ) -> None:
        self._exchange = kernels("exchange")
        self._client, self._server_rank = client, server_rank
        self._group, self._window, self._frames = group, window, frames
        self._store, self._tables, self._kernel = server_store, tables, lora_kernel
        self._member = frames.member(client)
        make = partial(torch.zeros, device=group.device)
        self._expected = make(frames.num_signals, dtype=torch.int64)
        self.state, self._missing = make(1, dtype=torch.int64), make(1, dtype=torch.int64)
        self._token_slots = make(1 << (frames.max_rows - 1).bit_length(), dtype=torch.int32)
        start = frames.frame_at(client)
        self._frame = window.bytes[start : start + frames.frame_bytes].view(torch.int64)
        self._rows = {site: self._places(site) for site in frames.sites}
        partition = frames.partition
        self._work = [
            (
                layer,
                [site for site in frames.sites if server_rank in partition.servers_of_client(0, layer, site)],
            )
            for layer in partition.layers_of(server_rank)
        ]
        self.num_steps = 0

    def step(self) -> None:
        """Queue one step's operations."""
        exchange, is_first = self._exchange, True
        self._wait(self._frames.asked(self._client), PUT_BLOCKS, exchange.NO_BOUND)
        for layer, sites in self._work:
            if not sites:
                continue
            exchange.launch_admit(
                *(self._frame, self._tables.generation, self._tables.loaded, layer),
                *(self._token_slots, self._missing, self.state, _MAX_POLLS, is_first),
            )
            is_first = False
            for site in sites:
                self._serve(layer, site)
        self.num_steps += 1

    def captured(self) -> tuple[Callable[[], None], Any]:
        """What queues a step, and what it is bound to: as long as the store has these slots, it is right."""
        slots = self._store.slots
        if self._group.device.type != "cuda":
            return self.step, slots
        self._work_once()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        return graph.replay, slots

    def _work_once(self) -> None:
        """Have all kernels compiled, which a capture can't: with a state that lets no wait hold on."""
        self.state.fill_(self._exchange.ENDED)
        expected = self._expected.clone()
        self.step()
        self._expected.copy_(expected)
        self.state.zero_()

    def _wait(self, signal: int, more: int, max_polls: int) -> None:
        signals = self._exchange.Signals(self._window.words, self._expected, range(signal, signal + 1))
        self._exchange.launch_wait(signals, more, self.state, max_polls)

    def _serve(self, layer: int, number: int) -> None:
        frames, site = self._frames, self._frames.shape.sites[number]
        x, ids, out = self._rows[number]
        self._wait(frames.asked(self._client, number), PUT_BLOCKS * (1 if ids is None else 2), _MAX_POLLS)
        token_slots = self._token_slots[: frames.max_rows]
        store = self._store
        operands = LoraOperands(x, ids, site, layer, token_slots, store.slots, store.arena)
        lora_delta(operands, out, kernel=self._kernel)
        experts = frames.partition.experts_of(self._server_rank)
        answer = AnswerRows(
            rows=out,
            token_slots=token_slots,
            ids=ids,
            top_k=1 if ids is None else ids.shape[1],
            first_expert=experts.start,
            end_expert=experts.stop,
            frame=self._frame,
            generation=self._tables.generation,
            missing=self._missing,
            state=self.state,
            over=self._exchange.LOST | self._exchange.ENDED,
        )
        places = frames.answer_at(number), answer, frames.status_at(self._server_rank, number)
        self._group.put_rows(self._window, *places, frames.answered(self._server_rank, number), self._member)

    def _places(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """x and ids of a site in the window, and where its deltas are computed."""
        frames, site = self._frames, self._frames.shape.sites[number]
        data = self._window.bytes
        x_at, ids = frames.x_at(self._client, number), None
        x_end = x_at + frames.inputs(number) * site.in_features * frames.dtype.itemsize
        x = data[x_at:x_end].view(frames.dtype).view(-1, site.in_features)
        if site.num_experts:
            ids_at = frames.ids_at(self._client, number)
            ids = data[ids_at : ids_at + 4 * frames.outputs(number)].view(torch.int32)
            ids = ids.view(frames.max_rows, -1)
        width = site.total_out_features
        return x, ids, torch.zeros(frames.outputs(number), width, dtype=frames.dtype, device=data.device)


class DeviceLoop:
    """Serves all instances of a group that put to this rank, each in a thread with a stream, until `stop`.

    join: meets the other members.
    """

    def __init__(
        self,
        join: Callable[[], DevicePuts],
        frames: DeviceFrames,
        server_rank: int,
        server_store: ServerAdapterStore,
        lora_kernel: str,
    ) -> None:
        self._join, self._frames, self._server_rank = join, frames, server_rank
        self._store, self._kernel = server_store, lora_kernel
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
            self.sessions = [
                DeviceSession(
                    *(client, self._server_rank, group, window, self._frames, self._store, tables),
                    self._kernel,
                )
                for client in range(self._frames.num_clients)
            ]
        except Exception as error:  # instances ask over the transport then
            if not self._stopping.is_set():
                logger.error("no puts from device to device: %s", error)
            return
        for session in self.sessions:
            thread = threading.Thread(target=self._run, args=(session,), name="device-session", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, session: DeviceSession) -> None:
        try:
            self._serve(session)
        except Exception:  # its instance gets no answer and asks over the transport
            logger.exception("a session of devices that put to each other has ended")

    def _serve(self, session: DeviceSession) -> None:
        device = self._store.arena.device
        on_cuda = device.type == "cuda"
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext()
        queued: list[Any] = []
        bound: Any = None
        with torch.inference_mode(), stream:
            while not self._stopping.is_set():
                if bound is not self._store.slots:
                    queue, bound = session.captured()
                queue()
                if on_cuda:
                    queued.append(torch.cuda.Event())
                    queued[-1].record()
                    if len(queued) == _AHEAD:
                        queued.pop(0).synchronize()

    def stop(self) -> None:
        """End all waits; returns when the device does nothing for the group any more."""
        self._stopping.set()
        for session in self.sessions:
            _end(session.state, self._store.arena.device)
        for thread in self._threads[1:]:
            thread.join()


def _end(state: torch.Tensor, device: torch.device) -> None:
    """Tell a session's operations, which may be waiting on its own stream."""
    from moe_lora.kernels.triton.exchange import ENDED

    side = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with side:
        state.fill_(ENDED)
