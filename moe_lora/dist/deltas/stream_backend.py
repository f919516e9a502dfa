# SPDX-License-Identifier: Apache-2.0
"""The host backend of a device with streams: stream operations copy rows to a worker's frame, raise its
signal, wait for the answer and add the deltas.

Source: Toppings section 4.2, "Sync-free CPU LoRA invocation".

Legend: P rows of a piece, R rows of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape
from moe_lora.kernels.page_locked import page_lock
from moe_lora.kernels.triton.configs import kernels
from moe_lora.lora.backend import AddTo
from moe_lora.lora.row_routing import Source

from .frame_slots import FrameSlots
from .remote_backend import DividedBackend, Division
from .session import HEADER_BYTES, DeltaRequest, answer_rows, request_at


class Stream(Protocol):
    """A device's operations, in order; only `synchronize` blocks."""

    device: torch.device

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """A copy; the array may change."""
        ...

    def queue(self, operation: Callable[[], object]) -> None:
        """Queue torch calls, without waits."""
        ...

    def ask(
        self, header: torch.Tensor, facts: Sequence[int], word: torch.Tensor, counter: torch.Tensor
    ) -> None:
        """header[:5] = facts; counter += 1; then word = counter, with release order.

        header, word: int64, host memory.  counter: int64 [1], on the device.
        """
        ...

    def wait(self, word: torch.Tensor, counter: torch.Tensor) -> None:
        """Later operations start once word >= counter."""
        ...

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        """Give the device access; returns the undo.  Raises ConfigError."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued operations."""
        ...


@dataclass(eq=False)
class SlotUse:
    """A use of a slot.  delta: [R, N] on the device, once copied."""

    slot: int
    site: int
    num_rows: int
    taken: bool = False
    delta: torch.Tensor | None = None


class StreamSession:
    """The engine's half of one worker's slots, for one thread.

    The stream takes an answer before a slot's reuse.
    """

    def __init__(self, slots: FrameSlots, stream: Stream) -> None:
        self._slots = slots
        self._stream = stream
        # 16 bytes apart: Triton compiles again for less aligned pointers.
        counters = torch.zeros(slots.depth, 2, dtype=torch.int64, device=stream.device)
        self._counters = counters[:, :1]
        self._asked: list[SlotUse | None] = [None] * slots.depth
        self._next = 0

    def ask(self, facts: tuple[int, int, int, int, int], fill: Callable[[DeltaRequest], object]) -> SlotUse:
        """facts: layer, site, num_tokens, top_k, num_rows.  fill: queued, writes the rest."""
        slots, slot = self._slots, self._next
        self._next = (slot + 1) % slots.depth
        before = self._asked[slot]
        if before is not None:
            self.take(before)
        frame = slots.request_frames[slot]
        self._stream.queue(partial(fill, request_at(frame, slots.layout, *facts)))
        header = frame[:HEADER_BYTES].view(torch.int64)
        self._stream.ask(header, facts, slots.request_words.tensor(slot), self._counters[slot])
        asked = self._asked[slot] = SlotUse(slot, facts[1], facts[4])
        return asked

    def take(self, asked: SlotUse) -> None:
        """Queue, once, wait and copy to `asked.delta`."""
        if asked.taken:
            return
        asked.taken = True
        self._asked[asked.slot] = None
        slots, device = self._slots, self._stream.device
        self._stream.wait(slots.answer_words.tensor(asked.slot), self._counters[asked.slot])
        frame = slots.answer_frames[asked.slot]

        def copy() -> None:
            rows = answer_rows(frame, slots.layout, asked.site, asked.num_rows)
            asked.delta = rows.to(device, non_blocking=True, copy=True)

        self._stream.queue(copy)

    def abandon(self) -> None:
        """Drop a step's uses; the stream waits for each answer."""
        for slot, asked in enumerate(self._asked):
            if asked is not None:
                self._asked[slot] = None
                self._stream.wait(self._slots.answer_words.tensor(slot), self._counters[slot])


class StreamLink(Protocol):
    """A session with one worker; every use is answered.

    num_fallback_rows: answered by the engine.  problems: of rows without deltas, by `content_number`.
    """

    stream_session: StreamSession
    num_fallback_rows: int
    problems: dict[int, Exception]


@dataclass(frozen=True)
class _Piece:
    """rows, generation: [P] int64."""

    worker: int
    rows: torch.Tensor
    generation: torch.Tensor


class StreamBackend(DividedBackend):
    """Over host workers and a device's stream.

    The host does not know chosen experts: a worker answers a row for each id.
    """

    def __init__(
        self,
        shape: ModelShape,
        division: Division,
        links: Mapping[int, StreamLink],
        stream: Stream,
    ) -> None:
        super().__init__(shape, Source.HOST, division)
        self._links = links
        self._stream = stream

    @property
    def num_fallback_rows(self) -> int:
        return sum(link.num_fallback_rows for link in self._links.values())

    def failures(self) -> dict[int, Exception]:
        found: dict[int, Exception] = {}
        for link in self._links.values():
            while link.problems:
                number, error = link.problems.popitem()
                found[number] = error
        return found

    def abandon_step(self) -> None:
        """Waits: a dropped step's problem must not count for the next."""
        for link in self._links.values():
            link.stream_session.abandon()
        self._stream.synchronize()
        self.failures()

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        pieces = self._once(self._pieces, self._routing.groups[layer][site], site)
        if not pieces:
            return None
        return partial(self._add_to, [self._ask(piece, layer, site, x, ids) for piece in pieces])

    def _pieces(self, group: int, site: int) -> list[_Piece]:
        rows, shares = self._shares(group, 0, site)  # workers have all layers
        return [
            _Piece(worker, *self._stream.to_device(np.stack([some, rows.generation[some]])))
            for worker, some in shares
        ]

    def _ask(
        self, piece: _Piece, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None
    ) -> tuple[StreamSession, SlotUse, torch.Tensor]:
        session = self._links[piece.worker].stream_session
        self.num_requests += 1
        x_rows = y_rows = piece.rows
        generation, top_k = piece.generation, 0
        if ids is not None:
            top_k = ids.shape[1]
            y_rows = (piece.rows[:, None] * top_k + torch.arange(top_k, device=piece.rows.device)).view(-1)
            if x.shape[0] != ids.shape[0]:
                x_rows, generation = y_rows, piece.generation.repeat_interleave(top_k)
                ids, top_k = ids.reshape(-1, 1), 1

        def fill(request: DeltaRequest) -> None:
            torch.from_numpy(request.generation).copy_(generation, non_blocking=True)
            request.x.copy_(x[x_rows], non_blocking=True)
            if ids is not None:
                assert request.ids is not None
                torch.from_numpy(request.ids).copy_(ids[x_rows], non_blocking=True)

        asked = session.ask((layer, site, len(x_rows), top_k, len(y_rows)), fill)
        return session, asked, y_rows

    def _add_to(self, parts: Sequence[tuple[StreamSession, SlotUse, torch.Tensor]], y: torch.Tensor) -> None:
        for session, asked, y_rows in parts:
            session.take(asked)
            self._stream.queue(partial(_add, asked, y, y_rows))


def _add(asked: SlotUse, y: torch.Tensor, y_rows: torch.Tensor) -> None:
    delta, asked.delta = asked.delta, None
    assert delta is not None
    y.index_add_(0, y_rows, delta.to(y.dtype))


class CudaStream:
    """A CUDA device's current stream.  Raises ImportError without Triton.

    Signals are kernels of `kernels.triton.signals`, compiled for operands at multiples of 16 bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._signals = kernels("signals")
        counter = torch.zeros(1, dtype=torch.int64, device=device)
        own = torch.zeros(16, dtype=torch.int64, pin_memory=True)
        self.ask(own, (0, 0, 0, 0, 0), own[8:9], counter)
        self.wait(own[8:9], counter)
        self.synchronize()

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """torch keeps the pinned memory until the copy ends."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def queue(self, operation: Callable[[], object]) -> None:
        operation()

    def ask(
        self, header: torch.Tensor, facts: Sequence[int], word: torch.Tensor, counter: torch.Tensor
    ) -> None:
        self._signals.launch_ask(counter, header, word, facts)

    def wait(self, word: torch.Tensor, counter: torch.Tensor) -> None:
        self._signals.launch_wait(counter, word)

    def register(self, memory: torch.Tensor) -> Callable[[], None]:
        """Page-lock the memory.  Raises ConfigError."""
        try:
            return page_lock(memory, self.device)
        except RuntimeError as error:
            raise ConfigError(
                f"{memory.nbytes / 1e6:.3g} MB of a host worker's frames can't be page-locked ({error}); "
                "lower host_workers, or set host_workers=0"
            ) from error

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
