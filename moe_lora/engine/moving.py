# SPDX-License-Identifier: Apache-2.0
"""An engine's part in a move of a request.

The source puts full blocks into the target's window while decoding, and the rest under the hold; the target
copies KV into its pages between steps.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.cache.orders import Namespace
from moe_lora.cache.pages import BlockTable
from moe_lora.core.clock import Clock
from moe_lora.core.errors import MoveError
from moe_lora.core.request import TokenOutput
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window
from moe_lora.engine.client.messages import HeldRequest, KvSent, KvWindow, RequestLoad
from moe_lora.engine.sequence import Sequence
from moe_lora.kernels.operands import KvLayout
from moe_lora.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from moe_lora.engine.ranks.rank import Rank

    from .prompt_kv import Prompts


logger = logging.getLogger(__name__)

SLACK_TOKENS = 256
"""Room of a window for tokens generated meanwhile."""
STEP_BYTES = 16 << 20
"""Bytes that a target copies between steps."""
LOOK_S = 0.005
"""Interval of an idle target's looks at its windows."""
_PUBLISHED = "a new version of the adapter was published during the move"
_GIVES_WAY = "KV of an unfinished prompt gives way to other requests"
NUM_THREADS = 4
"""Threads that put KV: a stopped target blocks a thread until the timeout."""


@dataclass(eq=False)
class Incoming:
    """KV in `window`; the table's first num_taken pages have it."""

    sequence: Sequence
    table: BlockTable
    window: Window
    num_taken: int = 0


@dataclass(eq=False)
class Outgoing:
    """KV of num_tokens in a peer's window; pages from first_page on were put twice.  number: counts up."""

    descriptor: bytes
    window: RemoteWindow
    adapter: Namespace
    table: BlockTable | None = None
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    first_page: int = 0
    number: int = 0


class KvTransfer:
    """Both ends, for one engine.

    arena: uint8, of this rank.  open_transport: called in the thread of the first use; None: no KV moves.
    `send` and the release of a peer's window may block, and run in `threads`.
    """

    def __init__(
        self, arena: torch.Tensor, layout: KvLayout, open_transport: Callable[[], Transport] | None
    ) -> None:
        self._arena = arena.view(-1, layout.page_bytes)
        self._layout = layout
        self._open_transport = open_transport
        self._made: Transport | None = None
        self._making = threading.Lock()
        self._labels = itertools.count()
        self._incoming: dict[str, Incoming] = {}
        self._outgoing: dict[str, Outgoing] = {}
        self.block_size, self.page_bytes = layout.block_size, layout.page_bytes
        self.threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-puts")

    @property
    def enabled(self) -> bool:
        return self._open_transport is not None

    @property
    def _transport(self) -> Transport:
        with self._making:
            if self._made is None:
                assert self._open_transport is not None
                self._made = self._open_transport()
            return self._made

    def expect(self, sequence: Sequence) -> None:
        """Create a window, if memory and file descriptors allow."""
        room = min(sequence.limit_tokens, len(sequence.tokens) + SLACK_TOKENS)
        num_bytes = -(-room // self.block_size) * self._layout.page_bytes
        try:
            window = self._transport.alloc(f"kv-{next(self._labels)}", num_bytes, 1)
        except Exception as error:
            logger.warning(
                "no window of %d bytes for the KV of a moved request: %s; it is computed here instead",
                num_bytes,
                error,
            )
            return
        self._incoming[sequence.request.request_id] = Incoming(sequence, sequence.table, window)

    def window(self, request_id: str) -> KvWindow | None:
        """The window for the source, if any."""
        incoming = self._incoming.get(request_id)
        return None if incoming is None else KvWindow(incoming.window.descriptor(), repr(self._layout))

    def take_in(self) -> bool:
        """Copy some received KV, drop windows of requests without pages; True while windows are left."""
        for request_id, incoming in list(self._incoming.items()):
            sequence = incoming.sequence
            if not (sequence.awaits_kv and sequence.table is incoming.table and incoming.table.pages):
                self.forget(request_id)
                continue
            num_there = min(incoming.window.read_signal(0), len(incoming.table.pages))
            most = max(1, STEP_BYTES // self._layout.page_bytes)
            self._copy_in(incoming, min(num_there, incoming.num_taken + most))
        return bool(self._incoming)

    def finish_taking(self, request_id: str, num_tokens: int, first_page: int) -> bool:
        """Copy KV of num_tokens, from first_page on again; True if the sequence has the KV."""
        incoming = self._incoming.get(request_id)
        if incoming is None or incoming.sequence.table is not incoming.table or not num_tokens:
            self.forget(request_id)
            return False
        incoming.num_taken = min(incoming.num_taken, first_page)
        self._copy_in(incoming, -(-num_tokens // self.block_size))
        self.forget(request_id)
        return True

    def forget(self, request_id: str) -> None:
        incoming = self._incoming.pop(request_id, None)
        if incoming is not None:
            incoming.window.free()

    def _copy_in(self, incoming: Incoming, num_pages: int) -> None:
        page_bytes = self._layout.page_bytes
        for number in range(incoming.num_taken, num_pages):
            page = self._arena[incoming.table.pages[number]]
            page.copy_(incoming.window.bytes[number * page_bytes : (number + 1) * page_bytes])
        incoming.num_taken = max(incoming.num_taken, num_pages)

    def send(self, sequence: Sequence, target: KvWindow) -> Outgoing:
        """Put new KV into the window: full blocks, and for a held sequence the last block.

        Runs in `threads`.  Raises MoveError if the pages differ in layout, PeerGoneError,
        PeerUnreachableError.
        """
        if not self.enabled:
            raise MoveError(
                "an instance of several ranks, or of a model with recurrent layers, sends no KV; move the "
                "request by its tokens"
            )
        if target.layout != repr(self._layout):
            raise MoveError(f"KV lies as {self._layout} here and as {target.layout} there; move it by tokens")
        descriptor = target.descriptor
        outgoing = self._outgoing.pop(sequence.request.request_id, None)
        if outgoing is not None and outgoing.descriptor != descriptor:
            self._transport.detach(outgoing.window)
            outgoing = None
        if outgoing is None:
            window = self._transport.attach(descriptor)
            outgoing = Outgoing(descriptor, window, sequence.adapter_uid, number=next(self._labels))
            outgoing.first_page = window.num_bytes // self.page_bytes
        try:
            self._put(outgoing, sequence)
        except BaseException:  # a lost window must not fail later moves
            self._transport.detach(outgoing.window)
            raise
        return outgoing

    def _put(self, outgoing: Outgoing, sequence: Sequence) -> None:
        if outgoing.adapter != sequence.adapter_uid:
            raise MoveError(_PUBLISHED)
        size, page_bytes = self.block_size, self._layout.page_bytes
        table, num_tokens = sequence.table, sequence.num_computed
        if not sequence.held:
            num_tokens -= num_tokens % size
        num_pages = min(-(-num_tokens // size), outgoing.window.num_bytes // page_bytes)
        pages = table.pages[:num_pages]
        first = 0
        if table is outgoing.table:
            same = (before == now for before, now in zip(outgoing.pages, pages, strict=False))
            first = sum(itertools.takewhile(bool, same))
            # The last block may have more tokens now.
            first = min(first, outgoing.num_tokens // size)
        for number in range(first, len(pages)):
            data = self._arena[pages[number]].cpu()
            self._transport.put_signal(outgoing.window, number * page_bytes, data, 0, number + 1)
        self._transport.quiet(outgoing.window)
        if first < len(outgoing.pages):
            outgoing.first_page = min(outgoing.first_page, first)
        outgoing.table, outgoing.pages = table, pages
        outgoing.num_tokens = min(num_tokens, len(pages) * size)

    def sent(self, outgoing: Outgoing, sequence: Sequence) -> KvSent:
        """KV put by `send`; empty if the pages were freed meanwhile."""
        request_id, pages = sequence.request.request_id, outgoing.pages
        other = self._outgoing.get(request_id)
        if other is not None and other.number > outgoing.number:  # a later move has begun
            self.let_go(outgoing)
        else:
            self.drop(request_id)
            self._outgoing[request_id] = outgoing
        if sequence.table is not outgoing.table or sequence.table.pages[: len(pages)] != pages:
            return KvSent(0, 0)
        return KvSent(outgoing.num_tokens, outgoing.first_page)

    def drop(self, request_id: str) -> None:
        outgoing = self._outgoing.pop(request_id, None)
        if outgoing is not None:
            self.let_go(outgoing)

    def let_go(self, outgoing: Outgoing) -> None:
        self.threads.submit(self._transport.detach, outgoing.window)

    def drop_all_but(self, request_ids: Container[str]) -> None:
        """Close the windows of ended requests."""
        for request_id in list(self._outgoing):  # `send` may remove entries meanwhile
            if request_id not in request_ids:
                self.drop(request_id)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self._made is not None:
            self._made.close()


class RequestMoves:
    """Held requests: pages and adapter stay, and no tokens are gained.

    A leaving request is held between two steps; `prefill_only`: see `Prompts`.  An arriving request
    is announced with all tokens but the last computed or, for KV, with allocated pages.  Any thread calls
    `answer_beside`.
    """

    def __init__(
        self,
        sequences: Mapping[str, Sequence],
        scheduler: Scheduler[Sequence],
        clock: Clock,
        kv: KvTransfer,
    ) -> None:
        self._sequences = sequences
        self._scheduler = scheduler
        self._clock = clock
        self._kv = kv
        self.threads = kv.threads
        self._coming: list[Sequence] = []
        self._early: list[Sequence] = []
        self._prompts: Prompts | None = None

    def watch(self, sequence: Sequence) -> None:
        """Watch a request before it is queued.  Raises MoveError for an early hold while others wait."""
        if sequence.request.held:
            is_prompt = sequence.request.prefill_only and not sequence.request.generated
            if is_prompt and sequence.awaits_kv and self._kv.enabled:
                if self._num_waiting:
                    raise MoveError(_GIVES_WAY)
                sequence.early = True
                self._early.append(sequence)
            self._coming.append(sequence)
        elif self._kv.enabled and not sequence.request.generated:
            if self._prompts is None:
                from .prompt_kv import Prompts

                self._prompts = Prompts(self._is_live, self.threads, self.kv_send, self._kv.block_size)
            self._prompts.add(sequence)
        if not self._kv.enabled:
            sequence.awaits_kv = False

    def tend(self) -> float | None:
        """Copy and send KV, close windows of ended requests; returns seconds, as `EngineCore.tend`."""
        awaits_kv = self._kv.take_in()
        if self._prompts is not None:
            self._prompts.tend()
        self._kv.drop_all_but(self._sequences)
        return LOOK_S if awaits_kv else None

    def announce(self) -> list[TokenOutput]:
        """An output without tokens for each ready request, and of `Prompts.announce`."""
        signs = [] if self._prompts is None else [_sign(one) for one in self._prompts.announce()]
        if not self._coming:
            return signs
        live = [one for one in self._coming if self._is_live(one)]
        ready = [one for one in live if self._is_ready(one)]
        self._coming = [one for one in live if one.held and one not in ready]
        return signs + [_sign(sequence) for sequence in ready]

    def _is_live(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request.request_id) is sequence

    def answer_beside(self, method: str, request_id: str, *args: Any) -> Callable[[], Any] | None:
        """A method for any thread; None: a step may change its result."""
        if method == "kv_window":
            return partial(self.kv_window, request_id)
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.kept:
            return None
        sequence.kept = method != "resume_request"  # a later hold waits for the resume
        if method == "hold_request" and sequence.num_generated == args[0]:
            return lambda: self.send_rest(self.hold(request_id, args[0]), request_id, args[1])
        return None

    def _is_ready(self, sequence: Sequence) -> bool:
        if not sequence.awaits_kv:
            return sequence.num_uncomputed == 1 and sequence in self._scheduler.running
        if sequence not in self._scheduler.loading or sequence.waits.adapter_s is None:
            return False
        if not self._reserve(sequence, len(sequence.tokens)):
            return False
        self._kv.expect(sequence)
        return True

    def give_way(self) -> list[tuple[Sequence, str]]:
        """Early holds to end, the youngest first: without pages, for a waiting request or a free seat."""
        if not self._early:
            return []
        self._early = [one for one in self._early if one.early and self._is_live(one)]
        ended = [one for one in self._early if not self._has_place(one)]
        ended = ended or self._early[::-1][: self._num_waiting or self._scheduler.is_full]
        return [(one, _GIVES_WAY) for one in ended]

    @property
    def _num_waiting(self) -> int:
        """Other requests that wait, or run in the background."""
        background = self._scheduler.background
        num = 0 if background is None else background.num_waiting + background.runs
        return num + sum(not one.early for one in self._scheduler.waiting)

    def _has_place(self, sequence: Sequence) -> bool:
        """With an adapter, an early hold has pages and a window at once; a lease takes a while."""
        scheduler = self._scheduler
        if sequence.waits.adapter_s is None:
            waits_for_lease = scheduler.waits_for_others and sequence in scheduler.waiting
            return waits_for_lease or sequence in scheduler.loading
        has_window = self._kv.window(sequence.request.request_id) is not None
        return has_window and sequence in scheduler.loading

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages, if need be pages of early holds."""
        while not self._scheduler.reserve(sequence, num_tokens):
            early = [one for one in self._early if one.early and one in self._scheduler.loading]
            if sequence.early or not early:
                return False
            self._scheduler.finish(early[-1])
        return True

    def kv_window(self, request_id: str) -> KvWindow | None:
        """Window for an announced request; None: the request computes the KV."""
        return self._kv.window(request_id)

    def start_send(self, request_id: str, window: KvWindow, *, follows: bool) -> Future[KvSent]:
        """`kv_send` in a thread; follows: as `Prompts.send`."""
        sequence = self._find(request_id)
        sent = self._prompts.send(sequence, window) if follows and self._prompts is not None else None
        return sent or self.threads.submit(self.kv_send, request_id, window)

    def kv_send(self, request_id: str, window: KvWindow) -> KvSent:
        """Put a request's KV into its target's window."""
        sequence = self._find(request_id)
        outgoing = self._kv.send(sequence, window)
        if not self._is_live(sequence):
            self._kv.let_go(outgoing)
            raise _not_here(request_id)
        return self._kv.sent(outgoing, sequence)

    def send_rest(self, held: HeldRequest, request_id: str, window: KvWindow | None) -> Future[HeldRequest]:
        """The held request, after its KV is in the window."""
        if window is None:
            done: Future[HeldRequest] = Future()
            done.set_result(held)
            return done

        def send() -> HeldRequest:
            sent = self.kv_send(request_id, window)
            if _version(self._find(request_id)) != held.adapter_version:
                raise MoveError(_PUBLISHED)
            return replace(held, sent=sent)

        return self.threads.submit(send)

    def hold(self, request_id: str, since: int) -> HeldRequest:
        """Hold the request; returns the answer's tokens from number `since` on.

        Raises ValueError if not running.
        """
        sequence = self._find(request_id)
        sequence.held = True
        first = len(sequence.request.prompt_token_ids) + since
        return HeldRequest(
            tokens=tuple(sequence.tokens[first:]),
            adapter_version=_version(sequence),
            timing=sequence.timing(self._clock.now_s()),
            unshared=sequence.unshared,
        )

    def resume(
        self, request_id: str, tokens: Seq[int], kv_tokens: int, first_page: int, unshared: bool
    ) -> None:
        """Resume a request with further tokens, and KV as in `KvSent`.

        Without room for the KV, the request computes it.  Raises ValueError as `hold`.
        """
        sequence = self._find(request_id)
        if sequence.early and not self._has_place(sequence):
            raise MoveError(_GIVES_WAY)
        sequence.extend(tokens)
        if sequence.awaits_kv:
            sequence.early = False
            has_room = self._reserve(sequence, kv_tokens)
            taken = has_room and self._kv.finish_taking(request_id, kv_tokens, first_page)
            sequence.table.num_matched = kv_tokens if taken else 0
            sequence.awaits_kv, sequence.unshared = False, taken and unshared
        sequence.held = sequence.kept = False

    def close(self) -> None:
        self._kv.close()

    def loads(self) -> list[RequestLoad]:
        """Load of each request."""
        now_s = self._clock.now_s()
        return [self._load(sequence, now_s) for sequence in self._sequences.values()]

    def _load(self, sequence: Sequence, now_s: float) -> RequestLoad:
        waits = sequence.waits.admitted_s is None
        return RequestLoad(
            name=sequence.request.request_id,
            adapter=sequence.request.adapter,
            num_tokens=len(sequence.tokens),
            num_generated=sequence.num_generated,
            num_left=sequence.num_left,
            num_bytes=-(-len(sequence.tokens) // self._kv.block_size) * self._kv.page_bytes,
            waited_s=now_s - sequence.arrival_s if waits else None,
            held=sequence.held,
        )

    def _find(self, request_id: str) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise _not_here(request_id)
        return sequence


def make_moves(
    rank: Rank,
    open_transport: Callable[[], Transport] | None,
    sequences: Mapping[str, Sequence],
    scheduler: Scheduler[Sequence],
    clock: Clock,
) -> RequestMoves:
    """Moves of an engine."""
    return RequestMoves(sequences, scheduler, clock, KvTransfer(rank.arena, rank.layout, open_transport))


def _version(sequence: Sequence) -> int | None:
    return None if sequence.adapter is None else sequence.adapter.version


def _not_here(request_id: str) -> ValueError:
    return ValueError(f"request {request_id!r} is not running here; it has ended or was moved")


def _sign(sequence: Sequence) -> TokenOutput:
    return TokenOutput(
        request_id=sequence.request.request_id,
        token_ids=(),
        num_cached_tokens=sequence.num_cached,
        adapter_version=_version(sequence),
    )
