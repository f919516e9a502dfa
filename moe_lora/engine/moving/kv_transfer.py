# SPDX-License-Identifier: Apache-2.0
"""Transfer of requests' KV between instances: put into a window of the target, page by page.

The target allocates arena pages and a window of host memory.  The source puts full blocks while decoding,
and the rest under the hold; the target copies received KV into the pages between steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from moe_lora.cache.orders import Namespace
from moe_lora.cache.pages import BlockTable
from moe_lora.core.errors import MoveError
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window
from moe_lora.engine.client.messages import KvSent, KvWindow
from moe_lora.engine.sequence import Sequence
from moe_lora.kernels.operands import KvLayout

SLACK_TOKENS = 256
"""Room of a window for tokens generated during the copies."""
STEP_BYTES = 16 << 20
"""Bytes that a target copies between two steps."""
NUM_THREADS = 4
"""Threads that put KV: a stopped target blocks a thread until the transport's timeout."""


@dataclass(eq=False)
class Incoming:
    """KV that arrives in `window`; the first num_taken pages of the sequence's table have it."""

    sequence: Sequence
    table: BlockTable
    window: Window
    num_taken: int = 0


@dataclass(eq=False)
class Outgoing:
    """KV put into a peer's window: num_tokens in these pages of that table; pages from first_page on were
    put last.  adapter: uid of the version that computed the KV.
    """

    descriptor: bytes
    window: RemoteWindow
    adapter: Namespace
    table: BlockTable | None = None
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    first_page: int = 0


class KvTransfer:
    """Both ends, for one engine.

    arena: uint8, of this rank.  open_transport: called at the first use, in the thread of that use; None:
    no KV moves.  Calls that a peer may block run in `threads`: `send`, and the release of a peer's window.
    The rest belongs to the engine's thread, which compares `send`'s reads with the sequence's pages
    afterwards (`sent`).
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
        """Create a window for a sequence with allocated pages."""
        room = min(sequence.limit_tokens, len(sequence.tokens) + SLACK_TOKENS)
        num_bytes = -(-room // self.block_size) * self._layout.page_bytes
        window = self._transport.alloc(f"kv-{next(self._labels)}", num_bytes, 1)
        self._incoming[sequence.request.request_id] = Incoming(sequence, sequence.table, window)

    def window(self, request_id: str) -> KvWindow | None:
        """The window for the source; None: no KV is expected."""
        incoming = self._incoming.get(request_id)
        return None if incoming is None else KvWindow(incoming.window.descriptor(), repr(self._layout))

    def take_in(self) -> None:
        """Copy some received KV; drop windows of requests that have ended or lost their pages."""
        for request_id, incoming in list(self._incoming.items()):
            sequence = incoming.sequence
            if not (sequence.awaits_kv and sequence.table is incoming.table and incoming.table.pages):
                self.forget(request_id)
                continue
            num_there = min(incoming.window.read_signal(0), len(incoming.table.pages))
            most = max(1, STEP_BYTES // self._layout.page_bytes)
            self._copy_in(incoming, min(num_there, incoming.num_taken + most))

    def finish_taking(self, request_id: str, num_tokens: int, first_page: int) -> bool:
        """All KV has arrived, of num_tokens, pages from first_page on anew; True if the sequence has it."""
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

    def send(self, sequence: Sequence, descriptor: bytes, layout: str) -> Outgoing:
        """Put new computed KV into the window: full blocks, and for a held sequence the last block too.

        Runs in one of `threads`. Raises MoveError if the target's pages differ in layout, PeerGoneError,
        PeerUnreachableError.
        """
        if not self.enabled:
            raise MoveError(
                "an instance of several ranks, or of a model with recurrent layers, sends no KV; move the "
                "request by its tokens"
            )
        if layout != repr(self._layout):
            raise MoveError(f"KV lies as {self._layout} here and as {layout} there; move it by tokens")
        outgoing = self._outgoing.pop(sequence.request.request_id, None)
        if outgoing is not None and outgoing.descriptor != descriptor:  # left from an abandoned move
            self._transport.detach(outgoing.window)
            outgoing = None
        if outgoing is None:
            outgoing = Outgoing(descriptor, self._transport.attach(descriptor), sequence.adapter_uid)
        try:
            self._put(outgoing, sequence)
        except BaseException:  # a lost window must not fail later moves
            self._transport.detach(outgoing.window)
            raise
        return outgoing

    def _put(self, outgoing: Outgoing, sequence: Sequence) -> None:
        if outgoing.adapter != sequence.adapter_uid:
            raise MoveError("a new version of the adapter was published during the move")
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
            # A last block put before may have more tokens by now.
            first = min(first, outgoing.num_tokens // size)
        for number in range(first, len(pages)):
            data = self._arena[pages[number]].cpu()
            self._transport.put_signal(outgoing.window, number * page_bytes, data, 0, number + 1)
        self._transport.quiet(outgoing.window)
        outgoing.table, outgoing.pages, outgoing.first_page = table, pages, first
        outgoing.num_tokens = min(num_tokens, len(pages) * size)

    def sent(self, outgoing: Outgoing, sequence: Sequence) -> KvSent:
        """The KV put by `send` and still the sequence's: empty if its pages were freed meanwhile."""
        request_id, pages = sequence.request.request_id, outgoing.pages
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
        """Close the windows of requests that have ended."""
        for request_id in list(self._outgoing):  # `send` may remove entries meanwhile
            if request_id not in request_ids:
                self.drop(request_id)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self._made is not None:
            self._made.close()
