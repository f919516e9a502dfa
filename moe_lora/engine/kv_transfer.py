"""KV of requests on its way between instances: put into a window of the target, page by page.

The target takes pages of its arena and a window of host memory.  The source puts full blocks while it decodes
on, and the rest when the request is held; the target copies what has come into its pages between steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from moe_lora.cache.pages import BlockTable
from moe_lora.core.errors import MoveError
from moe_lora.dist.transport.contract import RemoteWindow, Transport, Window
from moe_lora.engine.client.messages import KvWindow
from moe_lora.kernels.operands import KvLayout

from .sequence import Sequence

SLACK_TOKENS = 256
"""Room of a window for tokens that come while blocks are copied."""
STEP_BYTES = 16 << 20
"""Of what a target copies between two steps."""


@dataclass(eq=False)
class Incoming:
    """KV that comes into `window`; the first num_taken pages of the sequence's table have it."""

    sequence: Sequence
    table: BlockTable
    window: Window
    num_taken: int = 0


@dataclass(eq=False)
class Outgoing:
    """KV that was put into a peer's window: that of these pages, in order, of that table."""

    table: BlockTable
    window: RemoteWindow
    pages: list[int]


class KvTransfer:
    """Both ends, for one engine.

    arena: uint8, of this rank.  open_transport: called at the first use, in the thread of that; None: KV is
    neither sent nor taken.  All but `send` belongs to the engine's thread; what `send` read meanwhile is
    compared with the pages at the end (`finish`).
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

    # -- the target's end

    def expect(self, sequence: Sequence) -> None:
        """Make a window for the KV of a sequence whose pages were taken."""
        room = min(sequence.limit_tokens, len(sequence.tokens) + SLACK_TOKENS)
        num_bytes = -(-room // self.block_size) * self._layout.page_bytes
        window = self._transport.alloc(f"kv-{next(self._labels)}", num_bytes, 1)
        self._incoming[sequence.request.request_id] = Incoming(sequence, sequence.table, window)

    def window(self, request_id: str) -> KvWindow | None:
        """How the source finds the window; None: the request takes its KV from nobody."""
        incoming = self._incoming.get(request_id)
        return None if incoming is None else KvWindow(incoming.window.descriptor(), repr(self._layout))

    def take_in(self) -> None:
        """Copy what has come, a little; give up windows whose request has ended or lost its pages."""
        for request_id, incoming in list(self._incoming.items()):
            sequence = incoming.sequence
            if not (sequence.awaits_kv and sequence.table is incoming.table and incoming.table.pages):
                self.forget(request_id)
                continue
            num_there = min(incoming.window.read_signal(0), len(incoming.table.pages))
            most = max(1, STEP_BYTES // self._layout.page_bytes)
            self._copy_in(incoming, min(num_there, incoming.num_taken + most))

    def finish_taking(self, request_id: str, num_tokens: int, first_page: int) -> bool:
        """All KV has come, of so many tokens, pages from first_page on anew; whether the sequence has it."""
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

    # -- the source's end

    def send(self, sequence: Sequence, descriptor: bytes, layout: str) -> Outgoing:
        """Put the full blocks that are there into the window; any thread.

        Raises MoveError if the target's pages are of another kind, PeerGoneError, PeerUnreachableError.
        """
        if not self.enabled:
            raise MoveError("an instance of several ranks sends no KV; move the request by its tokens")
        if layout != repr(self._layout):
            raise MoveError(f"KV lies as {self._layout} here and as {layout} there; move it by tokens")
        table, num_full = sequence.table, sequence.num_computed // self.block_size
        outgoing = Outgoing(table, self._transport.attach(descriptor), [])
        try:
            self._put(outgoing, table.pages[:num_full], 0)
        except BaseException:
            self._transport.detach(outgoing.window)
            raise
        return outgoing

    def sent(self, request_id: str, outgoing: Outgoing) -> None:
        """What `send` returned; `finish` or `drop` comes next."""
        self.drop(request_id)
        self._outgoing[request_id] = outgoing

    def finish(self, sequence: Sequence) -> tuple[int, int]:
        """Put what was not sent, or lies elsewhere by now; (tokens whose KV is there, first page put now).

        For a sequence that is held.  Raises PeerGoneError.
        """
        outgoing = self._outgoing.pop(sequence.request.request_id, None)
        if outgoing is None:
            return 0, 0
        size = self.block_size
        num_tokens = min(sequence.num_computed, outgoing.window.num_bytes // self._layout.page_bytes * size)
        pages = sequence.table.pages[: -(-num_tokens // size)]
        first = 0
        if sequence.table is outgoing.table:
            same = (before == now for before, now in zip(outgoing.pages, pages, strict=False))
            first = sum(itertools.takewhile(bool, same))
        try:
            self._put(outgoing, pages, first)
        finally:  # a window that is gone is not to fail later moves too
            self._transport.detach(outgoing.window)
        return num_tokens, first

    def drop(self, request_id: str) -> None:
        outgoing = self._outgoing.pop(request_id, None)
        if outgoing is not None:
            self._transport.detach(outgoing.window)

    def drop_all_but(self, request_ids: Container[str]) -> None:
        """Let go of the windows of requests that have ended."""
        for request_id in [one for one in self._outgoing if one not in request_ids]:
            self.drop(request_id)

    def _put(self, outgoing: Outgoing, pages: list[int], first: int) -> None:
        page_bytes = self._layout.page_bytes
        for number in range(first, len(pages)):
            data = self._arena[pages[number]].cpu()
            self._transport.put_signal(outgoing.window, number * page_bytes, data, 0, number + 1)
        self._transport.quiet(outgoing.window)
        outgoing.pages = list(pages)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
