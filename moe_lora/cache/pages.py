# SPDX-License-Identifier: Apache-2.0
"""Free pages of an arena, and nodes: adapters, and runs of full KV blocks.

KV blocks come from the top of the arena, adapters' runs from the bottom: runs stay easy to find.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .orders import Namespace

TOKEN_BYTES = 8
ENCODED_AT_ONCE = 512
"""Tokens encoded before the first lookup."""


class PageAllocator:
    """Allocates page numbers 0 .. num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        # 1 if free; bytes are quicker than an array.
        self._free = bytearray(b"\1") * num_pages
        self._end = num_pages  # no free page from here on

    def alloc_pages(self, num_pages: int) -> list[int] | None:
        """The highest free pages; None, without allocation, if too few."""
        if num_pages > self.num_free:
            return None
        taken, free, end = [], self._free, self._end
        for _ in range(num_pages):
            end = free.rfind(1, 0, end)
            free[end] = 0
            taken.append(end)
        self._end = end
        self.num_free -= num_pages
        return taken

    def alloc_run(self, num_pages: int) -> int | None:
        """First page of the lowest free run, or None."""
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be 1 or more")
        edges = np.flatnonzero(np.diff(np.frombuffer(self._free, np.int8), prepend=0, append=0))
        starts, ends = edges[::2], edges[1::2]
        long_enough = starts[ends - starts >= num_pages]
        if not long_enough.size:
            return None
        start = int(long_enough[0])
        self._free[start : start + num_pages] = bytes(num_pages)
        self.num_free -= num_pages
        return start

    def free(self, first: int, num_pages: int = 1) -> None:
        """Free a page or a run."""
        self.free_pages(range(first, first + num_pages))

    def free_pages(self, pages: Sequence[int]) -> None:
        """Free any pages."""
        free = self._free
        for page in pages:
            assert not free[page], "page freed twice"
            free[page] = 1
        self._end = max(self._end, max(pages, default=-1) + 1)
        self.num_free += len(pages)


FREE, PRIVATE = -1, -2
"""Free, and a sequence's blocks outside the tree."""


class Tier(PageAllocator):
    """Pages with owners.

    owner: [num_pages] int64, a row of `Columns`, `FREE` or `PRIVATE`.
    """

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.owner: NDArray[np.int64] = np.full(num_pages, FREE, dtype=np.int64)
        self._owner = self.owner.data  # quicker per element
        self.num_kv = self.num_adapter = 0

    def take(self, num_pages: int, owner: int, *, is_adapter: bool = False) -> list[int] | None:
        """The highest pages; None if too few."""
        pages = self.alloc_pages(num_pages)
        if pages is not None:
            self.hand_over(pages, owner)
            self._count(num_pages, is_adapter)
        return pages

    def take_runs(self, lengths: Sequence[int], owner: int) -> list[int] | None:
        """Runs of these lengths from the bottom, preferably one; or None."""
        total = sum(lengths)
        if total > self.num_free:
            return None
        whole = self.alloc_run(total)
        runs = [] if whole is None else [(whole, total)]
        for length in filter(None, lengths if whole is None else ()):
            first = self.alloc_run(length)
            if first is None:
                for run in runs:
                    self.free(*run)
                return None
            runs.append((first, length))
        pages = [page for start, length in runs for page in range(start, start + length)]
        self.hand_over(pages, owner)
        self._count(total, True)
        return pages

    def hand_over(self, pages: Sequence[int], owner: int) -> None:
        """Change the owner, within the same kind."""
        owners = self._owner
        for page in pages:
            owners[page] = owner

    def give_back(self, pages: Sequence[int], *, is_adapter: bool = False) -> None:
        if pages:
            self.free_pages(pages)
            self.hand_over(pages, FREE)
            self._count(-len(pages), is_adapter)

    def _count(self, num_pages: int, is_adapter: bool) -> None:
        if is_adapter:
            self.num_adapter += num_pages
        else:
            self.num_kv += num_pages


@dataclass(eq=False)
class BlockTable:
    """Device pages of a sequence; the tree's come first."""

    namespace: Namespace
    salt: str = ""
    tenant: int = 0
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    num_matched: int = 0
    """Tokens found by `UnifiedCache.match`."""
    tail: Node | None = None
    """Deepest used node, pinned with all ancestors."""
    owns_tail: bool = False
    """This sequence may lengthen the tail."""
    arriving: list[Node] = field(default_factory=list)
    """Nodes under way to the device at the last check."""

    @property
    def ready(self) -> bool:
        """True if matched nodes are on the device."""
        self.arriving = [node for node in self.arriving if not node.on_device]
        return not self.arriving

    @property
    def lost(self) -> bool:
        """A copy failed: release the table and match again."""
        return any(node.lost for node in self.arriving)


def encode(tokens: Sequence[int]) -> bytes:
    """The ids as int64 in the machine's order."""
    return struct.pack(f"{len(tokens)}q", *tokens)


def encode_more(encoded: bytes, tokens: Sequence[int], most: int, num_bytes: int) -> bytes:
    """Lengthen `encoded`, a prefix of the first `most` tokens, to at least `num_bytes` within them.

    In doubling steps: a long prompt is seldom looked up whole.
    """
    done = len(encoded) // TOKEN_BYTES
    upto = min(most, max(2 * done, ENCODED_AT_ONCE, num_bytes // TOKEN_BYTES))
    return encoded + encode(tokens[done:upto]) if upto > done else encoded


@dataclass(eq=False, slots=True)
class Node:
    """An adapter (layer_pages given), or a run of full KV blocks after the parent's (tokens given)."""

    namespace: Namespace
    row: int
    num_pages: int
    parent: Node | None = None
    adapter: Node | None = None
    layer_pages: tuple[int, ...] | None = None
    tokens: bytes = b""
    first_token: int = 0
    """Earlier prompt tokens."""
    recalled: int = 0
    """Bytes of tokens with found ghosts."""
    device_pages: list[int] | None = None
    host_pages: list[int] | None = None
    moving_in: bool = False
    moving_out: bool = False
    leaves: bool = False
    """Device pages go after the copy."""
    pins: int = 0
    """Pinned nodes and ancestors stay on the device."""
    num_children: int = 0
    num_device_children: int = 0
    heir: Node | None = None
    """Last found or added child."""
    gone: bool = False
    """Not findable; freed with the last user."""
    lost: bool = False
    """Gone for lack of bytes."""
    failed: bool = False
    """The last load failed; only a request loads again."""
    reachable: bool = True
    """False: neither here nor on the LoRA Server."""
    is_whole: bool = False
    """KV, never cut."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_adapter(self) -> bool:
        return self.layer_pages is not None

    @property
    def may_be_cut(self) -> bool:
        return not (self.is_adapter or self.is_whole)

    @property
    def dying(self) -> bool:
        """True if the node or its adapter is gone."""
        return self.gone or (self.adapter is not None and self.adapter.gone)

    @property
    def moving(self) -> bool:
        return self.moving_in or self.moving_out

    @property
    def on_device(self) -> bool:
        """True if usable on the device."""
        return self.device_pages is not None and not self.moving_in and not self.lost


HAS_DEVICE_PAGES, BACKED, READY = 1, 2, 4
CAN_LEAVE, CAN_ENTER, CAN_LEAVE_HOST, CAN_BACK_UP, DYING = 8, 16, 32, 64, 128
"""BACKED: on the host.  READY: usable on the device or, without pages, on the LoRA Server.  CAN_LEAVE: device
leaves without pins.  CAN_ENTER: host roots.  CAN_LEAVE_HOST: independent host pages.  CAN_BACK_UP: idle
device KV without a host copy.  DYING: not findable.
"""
ONLY_IDLE = CAN_LEAVE | CAN_BACK_UP
"""Bits of unpinned nodes only."""


def flags_of(node: Node, *, keeps_dependencies: bool) -> int:
    """Flag bits; keeps_dependencies: see `Traits`."""
    device, host = node.device_pages is not None, node.host_pages is not None
    is_adapter, dying = node.layer_pages is not None, node.dying
    flags = DYING if dying else 0
    if host and not node.moving_out:
        flags |= BACKED
    if device:
        flags |= HAS_DEVICE_PAGES
        if node.reachable and not (node.moving_in or node.lost):
            flags |= READY
    if node.moving_in or node.moving_out or not node.num_pages:
        return flags
    if host and (device or is_adapter or not node.num_children):
        flags |= CAN_LEAVE_HOST
    if not device:
        parent = node.parent
        follows = parent is None or parent.device_pages is not None  # or on its way
        if parent is not None and parent.is_adapter and not keeps_dependencies:
            follows = True
        if (host or (is_adapter and not node.failed)) and not dying and follows:
            flags |= CAN_ENTER
    elif not node.pins:
        if not node.num_device_children or (is_adapter and not keeps_dependencies):
            flags |= CAN_LEAVE
        if not (host or is_adapter or dying):
            flags |= CAN_BACK_UP
    return flags
