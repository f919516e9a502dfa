# SPDX-License-Identifier: Apache-2.0
"""The data path of one server rank; receive, compute and send overlap (InfiniLoRA section 3)."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from moe_lora.config.optional_parts import StageTime
from moe_lora.core.errors import PeerGoneError
from moe_lora.core.shape import MAX_CUDA_LORA_RANK, ModelShape
from moe_lora.dist.deltas.host_deltas import FailureLog, request_deltas
from moe_lora.dist.deltas.session import (
    DONE,
    HEADER_BYTES,
    STALE,
    DeltaRequest,
    FrameLayout,
    PeerFrames,
    answer_rows,
    answer_size,
    check_ids,
    lay_out_request,
    read_request,
    write_answer_header,
)
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window
from moe_lora.timing.layer_stages import share_of_layer

from ..deltas.host_deltas import HostCompute, HostShare
from .server_store import ServerAdapterStore

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
_TURNS = 64
_WARM_RANKS = (64, MAX_CUDA_LORA_RANK)
"""Larger ranks launch different code."""


class ServerSession:
    """The server's half of a session.

    on_drop: called for a lost client.  client_rank: of the instance.
    """

    def __init__(
        self,
        name: str,
        instance: str,
        requests: Window,
        answers: PeerFrames,
        layout: FrameLayout,
        depth: int,
        client_rank: int = 0,
    ) -> None:
        self.name, self.client_rank = name, client_rank
        self.instance = instance_number(instance)
        self.requests = requests
        self.answers = answers
        self.layout = layout
        self.on_drop: Callable[[], object] = lambda: None
        self.handled = 0
        self.num_host_rows = 0
        self.left = threading.Event()
        """Set after the last use of the session's memory."""
        self._request_frames = list(requests.bytes.view(depth, layout.request_bytes))

    def pending(self) -> DeltaRequest | None:
        """The oldest unanswered request.  Raises ValueError for an unreadable frame."""
        if self.requests.read_signal(0) <= self.handled:
            return None
        return read_request(self._request_frames[self.handled % len(self._request_frames)], self.layout)

    def deltas(self, request: DeltaRequest) -> torch.Tensor:
        """Target of the deltas, [R, N]."""
        return answer_rows(self.answers.frame(self.handled), self.layout, request.site, request.num_rows)

    def answer(self, request: DeltaRequest, state: int, started_ns: int) -> None:
        """Answer the pending request.  Raises PeerGoneError."""
        frame, num_host_rows = self.answers.frame(self.handled), self.num_host_rows if state == DONE else 0
        write_answer_header(frame, state, started_ns, time.monotonic_ns(), num_host_rows)
        self.num_host_rows = 0
        end = answer_size(self.layout, request.site, request.num_rows) if state == DONE else HEADER_BYTES
        self.handled += 1
        self.answers.send(self.handled - 1, end)


def instance_number(name: str) -> int:
    """An instance's name as a number."""
    return zlib.crc32(name.encode())


def _extremes(frame: torch.Tensor, layout: FrameLayout, site: int) -> Iterator[DeltaRequest]:
    """A site's smallest and largest request, without adapters."""
    most = layout.shape.num_experts_per_token if layout.shape.sites[site].num_experts else 0
    # The experts' second half has a row of x per expert.
    for top_k in sorted({min(1, most), most}):
        for num_tokens in sorted({1, layout.max_rows // max(1, top_k)}):
            num_rows = num_tokens * max(1, top_k) - (top_k > 1)
            request = lay_out_request(frame, layout, 0, site, num_tokens, top_k, num_rows)
            request.slot[:] = -1
            request.x.zero_()
            if request.ids is not None:
                request.ids[:] = 0
                request.ids.reshape(-1)[num_rows:] = -1
            yield request


class DataLoop:
    """Serves the sessions of one server rank, instances in turn.

    host: computes rows with a layer still loading; None: the rows wait.  num_host_rows: rows computed there.
    A stage's first rank announces turns, and the stage's ranks prefer the announced instance (section 5.1).
    """

    def __init__(
        self,
        shape: ModelShape,
        server_store: ServerAdapterStore,
        transport: Transport,
        lora_time: StageTime | None = None,
        *,
        lora_kernel: str = "sgmv",
        host: HostCompute | None = None,
    ) -> None:
        self._shape = shape
        self._host = None if host is None else HostShare(shape, host, self.wake)
        self._lora_time = lora_time
        self._lora_kernel = lora_kernel
        self._transport = transport
        self._lock = threading.Lock()
        self._sessions: list[ServerSession] = []
        self._leaving: list[ServerSession] = []
        self._wake = transport.alloc("wake", 64, 1)
        self._num_wakes = 0
        self._stopping = self._ended = False
        self.turns = transport.alloc("turns", _TURNS * 8, 1)
        self._turns_seen = 0
        self._wanted: dict[int, None] = {}
        self._told: list[tuple[RemoteWindow, itertools.count[int]]] = []
        self.num_requests = self.num_stale = self.num_host_rows = 0
        self._failures = FailureLog(logger, "instances compute its deltas")
        self.server_store = server_store
        server_store.on_progress = self.wake

    def warm_up(self, layout: FrameLayout, sites: Iterable[int]) -> None:
        """Compute each site's smallest and largest request: CUDA compiles kernels and allocates memory."""
        frame = torch.zeros(layout.request_bytes, dtype=torch.uint8)
        for site in sites:
            for request in _extremes(frame, layout, site):
                out = torch.empty(
                    request.num_rows, layout.shape.sites[site].total_out_features, dtype=layout.dtype
                )
                place = request.slot, self.server_store.slots, self.server_store.arena
                for rank in _WARM_RANKS:
                    request_deltas(
                        request, layout.shape, *place, out, kernel=self._lora_kernel, max_lora_rank=rank
                    )

    def add(self, session: ServerSession) -> None:
        with self._lock:
            self._sessions = [*self._sessions, session]
        self.wake()

    def remove(self, session: ServerSession) -> None:
        """End a session; `session.left` is set after its last use."""
        with self._lock:
            self._sessions = [s for s in self._sessions if s is not session]
            self._leaving.append(session)
            if self._ended:
                session.left.set()
        self.wake()

    def tell(self, turns: RemoteWindow, num_seen: int) -> None:
        """Announce turns to another rank, after num_seen announcements."""
        with self._lock:
            self._told = [*self._told, (turns, itertools.count(num_seen))]

    def tell_no_more(self, turns: RemoteWindow) -> None:
        """Stop announcing turns to a rank."""
        with self._lock:
            self._told = [told for told in self._told if told[0] is not turns]

    @property
    def turns_seen(self) -> int:
        """Announcements received so far."""
        return self.turns.read_signal(0)

    def wake(self) -> None:
        """Wake the loop without a request."""
        with self._lock:
            self._num_wakes += 1
            self._wake.set_signal(0, self._num_wakes)

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    def run(self) -> None:
        """Serve until `stop`."""
        position = 0
        try:
            while not self._stopping:
                wakes = self._wake.read_signal(0)
                sessions = self._present()
                start = position % max(1, len(sessions))
                chosen, waits = self._choose(sessions[start:] + sessions[:start])
                if chosen is None:
                    self._transport.wait_any([*waits, (self._wake, 0, wakes + 1)], _IDLE_S)
                    continue
                session, request = chosen
                position = sessions.index(session) + 1
                self._serve_or_drop(session, request)
        finally:
            with self._lock:
                self._ended = True
            for session in self._present():
                self.remove(session)
            if self._host is not None:
                self._host.close()

    def _present(self) -> list[ServerSession]:
        with self._lock:
            leaving, self._leaving = self._leaving, []
            sessions = self._sessions
        for session in leaving:
            if self._host is not None:
                self._host.take(session)
            session.left.set()
        return sessions

    def _serve_or_drop(self, session: ServerSession, request: DeltaRequest) -> None:
        try:
            self._serve(session, request)
        except PeerGoneError as error:
            logger.info("client %s left: %s", session.name, error)
            self._drop(session)
        except ValueError as error:
            self._drop(session, error)

    def _drop(self, session: ServerSession, error: ValueError | None = None) -> None:
        if error is not None:
            logger.error("client %s is dropped: %s", session.name, error)
        self.remove(session)
        session.on_drop()

    def _choose(
        self, order: list[ServerSession]
    ) -> tuple[tuple[ServerSession, DeltaRequest] | None, list[tuple[Window, int, int]]]:
        self._read_turns()
        ready: list[tuple[ServerSession, DeltaRequest]] = []
        waits: list[tuple[Window, int, int]] = []
        for session in order:
            try:
                request = session.pending()
                answerable = request is not None and (
                    self._can_answer(request) or self._host_has_it(session, request)
                )
            except ValueError as error:
                self._drop(session, error)
                continue
            if request is None:
                waits.append((session.requests, 0, session.handled + 1))
            elif answerable:
                ready.append((session, request))
                if not self._wanted:
                    return ready[0], waits
        for instance in self._wanted:
            for choice in ready:
                if choice[0].instance == instance:
                    return choice, waits
        return (ready[0] if ready else None), waits

    def _host_has_it(self, session: ServerSession, request: DeltaRequest) -> bool:
        if self._host is None:
            return False
        if session not in self._host:
            check_ids(request, session.layout)
            server_store = self.server_store
            here = server_store.loaded[request.slot, request.layer] == request.generation
            self._host.begin(session, request, here, server_store.contents)
        return self._host.has(session)

    def _can_answer(self, request: DeltaRequest) -> bool:
        return self._is_stale(request) or self._is_ready(request) or not self.server_store.led

    def _is_stale(self, request: DeltaRequest) -> bool:
        server_store, slot = self.server_store, request.slot
        if len(slot) and not 0 <= slot.min() <= slot.max() < len(server_store.generation):
            return True
        return server_store.is_stale(slot, request.generation)

    def _is_ready(self, request: DeltaRequest) -> bool:
        return self.server_store.is_ready(request.slot, request.generation, request.layer)

    def _serve(self, session: ServerSession, request: DeltaRequest) -> None:
        start_ns = time.monotonic_ns()
        check_ids(request, session.layout)
        site = self._shape.sites[request.site]
        if site.num_experts:
            self._wanted.pop(session.instance, None)
        if self._told and site.num_experts:
            self._announce(session.instance)
        state = self._computed(session, request)
        if self._lora_time is not None and site.num_experts:
            num_tokens = -(-request.num_rows // self._shape.num_experts_per_token)
            busy_s = share_of_layer(site, self._shape) * self._lora_time.seconds(num_tokens)
            time.sleep(max(0.0, busy_s - (time.monotonic_ns() - start_ns) / 1e9))
        self.num_stale += state == STALE
        self.num_requests += 1
        session.answer(request, state, start_ns)

    def _computed(self, session: ServerSession, request: DeltaRequest) -> int:
        try:
            return self._compute(session, request)
        except Exception as error:
            device = self.server_store.arena.device
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            contents = map(self.server_store.contents.get, set(request.slot.tolist()))
            self._failures.add((found[1].content_hash for found in contents if found), error)
            return STALE

    def _compute(self, session: ServerSession, request: DeltaRequest) -> int:
        server_store, slot = self.server_store, request.slot
        on_host = None if self._host is None else self._host.take(session)
        with server_store.reading:
            if self._is_stale(request):
                return STALE
            if self._is_ready(request):
                on_host = None
            elif on_host is None:
                return STALE
            else:
                slot = np.where(on_host.tokens, -1, slot)
            if server_store.num_parts > 1:
                slot = np.where(slot < 0, -1, slot * server_store.num_parts + session.client_rank)
            out = session.deltas(request)
            place = slot, server_store.slots, server_store.arena
            request_deltas(request, session.layout.shape, *place, out, kernel=self._lora_kernel)
            if on_host is not None:
                out[on_host.rows] = on_host.deltas
                session.num_host_rows = len(on_host.rows)
                self.num_host_rows += len(on_host.rows)
            # An adapter evicted meanwhile may have been read in part.
            return STALE if self._is_stale(request) else DONE

    def _announce(self, instance: int) -> None:
        entry = torch.from_numpy(np.array([instance], dtype=np.int64))
        for told in self._told:
            turns, numbers = told
            number = next(numbers)
            try:
                self._transport.put_signal(turns, number % _TURNS * 8, entry, 0, number + 1)
            except PeerGoneError:
                with self._lock:
                    self._told = [other for other in self._told if other is not told]

    def _read_turns(self) -> None:
        value = self.turns.read_signal(0)
        if value == self._turns_seen:
            return
        entries = self.turns.bytes.numpy().view(np.int64)
        for number in range(max(self._turns_seen, value - _TURNS), value):
            instance = int(entries[number % _TURNS])
            self._wanted.pop(instance, None)
            self._wanted[instance] = None
        self._turns_seen = value
