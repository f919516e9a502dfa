"""One client rank and one server rank: a ring of request frames there, a ring of answer frames here.

Request n lies in frame n mod depth and is announced by signal value n + 1; so is its answer.  A frame is used
again only when its answer was taken, so an answer also gives the frame back and no other credit is needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from moe_lora.core.errors import PeerGoneError, SignalTimeoutError
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window

from .frames import DONE, FrameLayout, Request, answer_rows, read_answer_header, read_request

_SLICE_S = 0.05
"""How long a wait for an answer sleeps before it looks whether the server is still there."""


class SessionLostError(Exception):
    """The other side is gone, or answered that it can't: the deltas have to be computed elsewhere."""


@dataclass(frozen=True)
class Exchange:
    """When things happened to one request, on the monotonic clock (of one host).

    sent to taken: under way.  started to finished: computed by the server.  asked: from when on the engine
    waited for it.
    """

    layer: int
    site: int
    sent_ns: int
    started_ns: int
    finished_ns: int
    asked_ns: int
    taken_ns: int


@dataclass(eq=False)
class Sent:
    """A request under way.

    request: in its frame, or a copy once the frame was needed again.  delta: its answer, if it was taken
    because the frame was needed.  refused: the answer was that the deltas can't be had there.
    """

    number: int
    request: Request
    sent_ns: int
    delta: torch.Tensor | None = None
    refused: bool = False


class ClientSession:
    """The client's half.  One thread sends and takes answers; any thread may `break_off`.

    observed: set to a list, it gets an `Exchange` of every answer, for measurements.
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
        self._requests = requests
        self._answers = answers
        self._layout = layout
        self._depth = depth
        self._answer_timeout_s = answer_timeout_s
        self._under_way: dict[int, Sent] = {}
        self._next = 0
        self._broken = False
        size = layout.request_bytes
        views = [requests.view(i * size, size) for i in range(depth)]
        self._direct = views[0] is not None
        if self._direct:
            self._frames = [view for view in views if view is not None]
        else:
            self._frames = list(torch.empty(depth, size, dtype=torch.uint8))
        self._answer_frames = list(answers.bytes.view(depth, layout.answer_bytes))
        self.observed: list[Exchange] | None = None

    @property
    def broken(self) -> bool:
        return self._broken

    def break_off(self) -> None:
        """Nothing more is sent, and waits end with SessionLostError."""
        self._broken = True

    def frame(self) -> torch.Tensor:
        """Where the next request is to be laid out.  Raises SessionLostError."""
        oldest = self._under_way.get(self._next - self._depth)
        if oldest is not None:
            self._clear_frame(oldest)
        if self._broken:
            raise SessionLostError
        return self._frames[self._next % self._depth]

    def _clear_frame(self, sent: Sent) -> None:
        """Keep elsewhere what is still needed of a request and its answer."""
        answer = self._answer(sent)
        if answer is not None:
            sent.delta = answer.clone()
            return
        frame = self._frames[sent.number % self._depth]
        sent.request = read_request(frame[: sent.request.frame_bytes].clone(), self._layout)

    def send(self, request: Request) -> Sent:
        """Put the request that was laid out in `frame()`.  Raises SessionLostError."""
        number = self._next
        slot = number % self._depth
        sent_ns = time.monotonic_ns()
        try:
            if self._direct:
                self._requests.signal(0, number + 1)
            else:
                frame = self._frames[slot][: request.frame_bytes]
                offset = slot * self._layout.request_bytes
                self._transport.put_signal(self._requests, offset, frame, 0, number + 1)
        except PeerGoneError as error:
            self.break_off()
            raise SessionLostError from error
        self._next += 1
        sent = self._under_way[number] = Sent(number, request, sent_ns)
        return sent

    def take(self, sent: Sent) -> torch.Tensor:
        """The deltas [R, N] of a request; valid until the next `frame()`.

        Raises SessionLostError: `sent.request` still has what is needed to compute them elsewhere.
        """
        delta = sent.delta
        if delta is None and not sent.refused:
            delta = self._answer(sent)
        if delta is None:
            raise SessionLostError
        return delta

    def _answer(self, sent: Sent) -> torch.Tensor | None:
        """Wait for it; None if the server refused.  Raises SessionLostError."""
        asked_ns = time.monotonic_ns()
        self._wait(sent.number + 1)
        del self._under_way[sent.number]
        frame = self._answer_frames[sent.number % self._depth]
        state, started_ns, finished_ns = read_answer_header(frame)
        if self.observed is not None:
            place = (sent.request.layer, sent.request.site, sent.sent_ns)
            self.observed.append(Exchange(*place, started_ns, finished_ns, asked_ns, time.monotonic_ns()))
        sent.refused = state != DONE
        if sent.refused:
            return None
        return answer_rows(frame, self._layout, sent.request.site, sent.request.num_rows)

    def _wait(self, at_least: int) -> None:
        deadline_s = time.monotonic() + self._answer_timeout_s
        while not self._broken:
            try:
                self._transport.signal_wait_until(self._answers, 0, at_least, _SLICE_S)
                return
            except SignalTimeoutError:
                if not self._requests.alive() or time.monotonic() > deadline_s:
                    self.break_off()
        raise SessionLostError
