# SPDX-License-Identifier: Apache-2.0
"""Free pages of an arena.

Single pages (KV blocks) come from the top of the arena, contiguous runs (adapter extents) from the bottom,
first fit: runs stay easy to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .orders import Namespace

if TYPE_CHECKING:
    from .node import Node


class PageAllocator:
    """Hands out page numbers 0 .. num_pages - 1, with num_free free now."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        # A byte a page, 1 if it is free: searched by the C library, and quicker than an array's elements.
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
        """First page of the lowest free run of `num_pages`, or None."""
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
        """Give back a page or a run."""
        self.free_pages(range(first, first + num_pages))

    def free_pages(self, pages: Sequence[int]) -> None:
        """Give back pages, wherever they lie."""
        free = self._free
        for page in pages:
            assert not free[page], "page freed twice"
            free[page] = 1
        self._end = max(self._end, max(pages, default=-1) + 1)
        self.num_free += len(pages)


FREE, PRIVATE = -1, -2
"""Owners without a row: free, and a sequence with blocks outside the tree."""


class Tier(PageAllocator):
    """Pages of one tier with owners, rows of `Columns`.

    owner [num_pages] int64: row, `FREE` or `PRIVATE`.  num_kv, num_adapter: pages in use.
    """

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.owner: NDArray[np.int64] = np.full(num_pages, FREE, dtype=np.int64)
        self._owner = self.owner.data  # the same numbers, quicker one at a time
        self.num_kv = self.num_adapter = 0

    def take(self, num_pages: int, owner: int, *, is_adapter: bool = False) -> list[int] | None:
        """Any pages, the highest first; None if too few."""
        pages = self.alloc_pages(num_pages)
        if pages is not None:
            self.hand_over(pages, owner)
            self._count(num_pages, is_adapter)
        return pages

    def take_runs(self, lengths: Sequence[int], owner: int) -> list[int] | None:
        """An adapter's pages: contiguous runs of these lengths from the bottom, preferably in a single
        run; None without fit.
        """
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
        """Change the pages' owner, within the same kind."""
        owners = self._owner
        for page in pages:
            owners[page] = owner

    def give_back(self, pages: Sequence[int], *, is_adapter: bool = False) -> None:
        """The pages are free."""
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
    """Device pages of a sequence: first those shared with the tree.

    salt: limits sharing to the same salt.  tail: the deepest used tree node, pinned with all ancestors.
    num_shared: pages of the tree.  num_matched: tokens found by `UnifiedCache.match`.  arriving: nodes on
    the way to the device at the last check. owns_tail: this sequence made the tail and may lengthen it.
    """

    namespace: Namespace
    salt: str = ""
    tenant: int = 0
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    num_matched: int = 0
    tail: Node | None = None
    owns_tail: bool = False
    arriving: list[Node] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """True if all matched nodes are on the device: required to compute."""
        self.arriving = [node for node in self.arriving if not node.on_device]
        return not self.arriving

    @property
    def lost(self) -> bool:
        """An awaited copy failed: release the table and match again."""
        return any(node.lost for node in self.arriving)
