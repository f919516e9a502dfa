# SPDX-License-Identifier: Apache-2.0
"""A session of a client rank and a server rank: a ring of request frames there, of answer frames here.

Request n and its answer use frame n mod depth and signal value n + 1.  A taken answer frees the frame.

Legend: T token rows, K experts per token, R rows of the answer, D input width, N output width.

A request: header, slot [T] int32, generation [T] int64, ids [T, K] int32 (only where K > 0), x [T, D].
An answer: header, delta [R, N]; row r belongs to the r-th id that is not -1 (or to token r where K = 0).
Arrays start at multiples of 64 bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from moe_lora.core.errors import ConfigError, PeerGoneError, SignalTimeoutError
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window

HEADER_BYTES = 64
_ALIGN = 64

DONE, STALE = 1, 2
"""States of an answer: with deltas; or a slot lost its content."""


def starts(first: int, *sizes: int, align: int = _ALIGN) -> list[int]:
    """Offsets of consecutive arrays, and of the end."""
    found = [first]
    for size in sizes:
        found.append(found[-1] + -(-size // align) * align)
    return found


@dataclass(frozen=True)
class FrameLayout:
    """Frame sizes of a model, for `max_rows` rows of x and of the answer.

    shard: of a rank with a part of each matrix, sized by `shape`.  Raises ConfigError if one token's rows
    do not fit.
    """

    shape: ModelShape
    dtype: torch.dtype
    max_rows: int
    shard: ModelShard | None = None

    def __post_init__(self) -> None:
        least = max(1, self.shape.num_experts_per_token)
        if self.max_rows < least:
            raise ConfigError(
                f"lora_server.max_rows={self.max_rows} can't hold a token's rows, one for each of its "
                f"experts; choose {least} or more"
            )

    @property
    def request_bytes(self) -> int:
        top_k = max(1, self.shape.num_experts_per_token)
        width = max(site.in_features for site in self.shape.sites) * self.dtype.itemsize
        rows = self.max_rows
        return starts(HEADER_BYTES, 4 * rows, 8 * rows, 4 * rows * top_k, width * rows)[-1]

    @property
    def answer_bytes(self) -> int:
        width = max(site.total_out_features for site in self.shape.sites) * self.dtype.itemsize
        return starts(HEADER_BYTES, width * self.max_rows)[-1]


@dataclass(frozen=True)
class DeltaRequest:
    """One site's work: views of a frame."""

    layer: int
    site: int
    num_rows: int
    slot: np.ndarray
    generation: np.ndarray
    ids: np.ndarray | None
    x: torch.Tensor
    frame_bytes: int


def lay_out_request(
    frame: torch.Tensor,
    layout: FrameLayout,
    layer: int,
    site: int,
    num_tokens: int,
    top_k: int,
    num_rows: int,
) -> DeltaRequest:
    """Write the header; returns views to fill.  top_k 0: no ids."""
    frame.numpy()[:HEADER_BYTES].view(np.int64)[:5] = (layer, site, num_tokens, top_k, num_rows)
    return read_request(frame, layout)


def read_request(frame: torch.Tensor, layout: FrameLayout) -> DeltaRequest:
    """The request in `frame` (uint8), arrays unchecked (see `check_ids`).

    Raises ValueError for an impossible header.
    """
    raw = frame.numpy()
    layer, site, num_tokens, top_k, num_rows = raw[:HEADER_BYTES].view(np.int64)[:5].tolist()
    sites = layout.shape.sites
    if not (
        0 <= layer < layout.shape.num_layers
        and 0 <= site < len(sites)
        and (top_k > 0) == (sites[site].num_experts > 0)
        and 0 <= num_tokens <= layout.max_rows
        and 0 <= num_rows <= layout.max_rows
        and 0 <= top_k <= max(1, layout.shape.num_experts_per_token)
    ):
        raise ValueError(
            f"a frame claims layer {layer}, site {site}, {num_tokens} tokens of {top_k} experts and "
            f"{num_rows} rows; the model has {layout.shape.num_layers} layers and {len(sites)} sites, and "
            f"frames hold {layout.max_rows} rows"
        )
    return request_at(frame, layout, layer, site, num_tokens, top_k, num_rows)


def request_at(
    frame: torch.Tensor,
    layout: FrameLayout,
    layer: int,
    site: int,
    num_tokens: int,
    top_k: int,
    num_rows: int,
) -> DeltaRequest:
    """Ignores the header."""
    raw, num_ids = frame.numpy(), num_tokens * top_k
    of_slot, of_generation, of_ids, of_x = starts(HEADER_BYTES, 4 * num_tokens, 8 * num_tokens, 4 * num_ids)
    slot = raw[of_slot : of_slot + 4 * num_tokens].view(np.int32)
    generation = raw[of_generation : of_generation + 8 * num_tokens].view(np.int64)
    ids = raw[of_ids : of_ids + 4 * num_ids].view(np.int32).reshape(num_tokens, top_k) if top_k else None
    width = layout.shape.sites[site].in_features
    end = of_x + num_tokens * width * layout.dtype.itemsize
    x = frame[of_x:end].view(layout.dtype).view(num_tokens, width)
    return DeltaRequest(layer, site, num_rows, slot, generation, ids, x, end)


def check_ids(request: DeltaRequest, layout: FrameLayout) -> None:
    """Raises ValueError unless answer rows belong to tokens or experts."""
    if request.ids is None:
        fits = request.num_rows == len(request.slot)
    else:
        num_experts = layout.shape.sites[request.site].num_experts
        fits = request.num_rows == np.count_nonzero(request.ids >= 0)
        fits = fits and bool((request.ids < num_experts).all())
    if not fits:
        raise ValueError(
            f"a frame asks for {request.num_rows} rows of answer that its {len(request.slot)} tokens and "
            "their experts don't make up"
        )


def write_answer_header(
    frame: torch.Tensor, state: int, started_ns: int, finished_ns: int, num_host_rows: int = 0
) -> None:
    """Times: the server host's monotonic clock.  num_host_rows: from host workers."""
    frame.numpy()[:HEADER_BYTES].view(np.int64)[:4] = (state, started_ns, finished_ns, num_host_rows)


def read_answer_header(frame: torch.Tensor) -> tuple[int, int, int, int]:
    """State, started_ns, finished_ns, num_host_rows."""
    state, started_ns, finished_ns, num_host_rows = frame.numpy()[:HEADER_BYTES].view(np.int64)[:4].tolist()
    return state, started_ns, finished_ns, num_host_rows


def answer_size(layout: FrameLayout, site: int, num_rows: int) -> int:
    """Bytes, header included."""
    return HEADER_BYTES + num_rows * layout.shape.sites[site].total_out_features * layout.dtype.itemsize


def answer_rows(frame: torch.Tensor, layout: FrameLayout, site: int, num_rows: int) -> torch.Tensor:
    """Deltas: [num_rows, N] in the model's dtype, a view."""
    width = layout.shape.sites[site].total_out_features
    end = answer_size(layout, site, num_rows)
    return frame[HEADER_BYTES:end].view(layout.dtype).view(num_rows, width)


class PeerFrames:
    """A ring of frames in the peer's window."""

    def __init__(self, transport: Transport, window: RemoteWindow, frame_bytes: int, depth: int) -> None:
        self.window = window
        self._transport = transport
        self._frame_bytes = frame_bytes
        mapped = window.view(0, depth * frame_bytes)
        self._in_place = mapped is not None
        if mapped is None:
            mapped = torch.empty(depth * frame_bytes, dtype=torch.uint8)
        self._frames = list(mapped.view(depth, frame_bytes))

    def frame(self, number: int) -> torch.Tensor:
        """Memory for this frame, uint8."""
        return self._frames[number % len(self._frames)]

    def send(self, number: int, num_bytes: int) -> None:
        """Put the frame's first bytes, and signal.  Raises PeerGoneError."""
        if self._in_place:
            self.window.signal(0, number + 1)
            return
        slot = number % len(self._frames)
        frame = self._frames[slot][:num_bytes]
        self._transport.put_signal(self.window, slot * self._frame_bytes, frame, 0, number + 1)


_SLICE_S = 0.05


class SessionLostError(Exception):
    """The peer is gone or refused: compute elsewhere."""


@dataclass(frozen=True)
class ExchangeTimes:
    """Monotonic times of one request.  asked: start of the engine's wait."""

    layer: int
    site: int
    sent_ns: int
    started_ns: int
    finished_ns: int
    asked_ns: int
    taken_ns: int


@dataclass(eq=False)
class Sent:
    """request: copied if its frame is reused.  delta: an answer taken for the reuse."""

    number: int
    request: DeltaRequest
    sent_ns: int
    delta: torch.Tensor | None = None
    refused: bool = False
    num_host_rows: int = 0


class ClientSession:
    """The client's half, for one thread; any thread may `break_off`.

    observed: collects an `ExchangeTimes` per answer.
    """

    def __init__(
        self,
        transport: Transport,
        requests: RemoteWindow,
        answers: Window,
        layout: FrameLayout,
        depth: int,
        answer_timeout_s: float,
    ) -> None:
        self._transport = transport
        self._requests = PeerFrames(transport, requests, layout.request_bytes, depth)
        self._answers = answers
        self._layout = layout
        self._depth = depth
        self._answer_timeout_s = answer_timeout_s
        self._under_way: dict[int, Sent] = {}
        self._next = 0
        self._first_kept = 0
        """Earlier answers are dropped."""
        self.broken = False
        self._answer_frames = list(answers.bytes.view(depth, layout.answer_bytes))
        self.observed: list[ExchangeTimes] | None = None

    def break_off(self) -> None:
        """Stop sending, and end waits with SessionLostError."""
        self.broken = True

    def abandon(self) -> None:
        """Drop requests under way; `frame` still waits for their answers."""
        self._first_kept = self._next

    def frame(self) -> torch.Tensor:
        """Memory for the next request.  Raises SessionLostError."""
        oldest = self._under_way.get(self._next - self._depth)
        if oldest is not None:
            self._clear_frame(oldest)
        if self.broken:
            raise SessionLostError
        return self._requests.frame(self._next)

    def _clear_frame(self, sent: Sent) -> None:
        if sent.number < self._first_kept:
            self._wait(sent.number + 1)
            del self._under_way[sent.number]
            return
        answer = self._answer(sent)
        if answer is not None:
            sent.delta = answer.clone()
            return
        frame = self._requests.frame(sent.number)
        sent.request = read_request(frame[: sent.request.frame_bytes].clone(), self._layout)

    def send(self, request: DeltaRequest) -> Sent:
        """Put the request in `frame()`.  Raises SessionLostError."""
        number = self._next
        sent_ns = time.monotonic_ns()
        try:
            self._requests.send(number, request.frame_bytes)
        except PeerGoneError as error:
            self.break_off()
            raise SessionLostError from error
        self._next += 1
        sent = self._under_way[number] = Sent(number, request, sent_ns)
        return sent

    def take(self, sent: Sent) -> torch.Tensor:
        """A request's deltas [R, N]; valid until the next `frame()`.  Raises SessionLostError."""
        delta = sent.delta
        if delta is None and not sent.refused:
            delta = self._answer(sent)
        if delta is None:
            raise SessionLostError
        return delta

    def _answer(self, sent: Sent) -> torch.Tensor | None:
        asked_ns = time.monotonic_ns()
        self._wait(sent.number + 1)
        del self._under_way[sent.number]
        frame = self._answer_frames[sent.number % self._depth]
        state, started_ns, finished_ns, sent.num_host_rows = read_answer_header(frame)
        if self.observed is not None:
            place = (sent.request.layer, sent.request.site, sent.sent_ns)
            self.observed.append(
                ExchangeTimes(*place, started_ns, finished_ns, asked_ns, time.monotonic_ns())
            )
        sent.refused = state != DONE
        if sent.refused:
            return None
        return answer_rows(frame, self._layout, sent.request.site, sent.request.num_rows)

    def _wait(self, at_least: int) -> None:
        deadline_s = time.monotonic() + self._answer_timeout_s
        while not self.broken:
            try:
                self._transport.signal_wait_until(self._answers, 0, at_least, _SLICE_S)
                return
            except SignalTimeoutError:
                if not self._requests.window.alive() or time.monotonic() > deadline_s:
                    self.break_off()
        raise SessionLostError
