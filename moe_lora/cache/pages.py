"""Which pages of the arena are free.

Single pages (KV blocks) are taken from the top of the arena, contiguous runs (adapter extents) from the
bottom, first fit: the two grow towards each other, so that runs stay easy to find.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PageAllocator:
    """Hands out page numbers 0 .. num_pages - 1; knows nothing of what they hold."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_free = num_pages
        # A byte a page, 1 if it is free: searched by the C library, and quicker than an array's elements.
        self._free = bytearray(b"\1") * num_pages
        self._end = num_pages  # no free page from here on

    @property
    def num_free(self) -> int:
        return self._num_free

    def alloc_page(self) -> int | None:
        """The highest free page, or None if all are taken."""
        pages = self.alloc_pages(1)
        return pages[0] if pages else None

    def alloc_pages(self, num_pages: int) -> list[int] | None:
        """The highest free pages, or None (and none taken) if there are too few."""
        if num_pages > self._num_free:
            return None
        taken, free, end = [], self._free, self._end
        for _ in range(num_pages):
            end = free.rfind(1, 0, end)
            free[end] = 0
            taken.append(end)
        self._end = end
        self._num_free -= num_pages
        return taken

    def alloc_run(self, num_pages: int) -> int | None:
        """First page of the lowest free run of `num_pages`, or None if there is none that long."""
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be 1 or more")
        edges = np.flatnonzero(np.diff(np.frombuffer(self._free, np.int8), prepend=0, append=0))
        starts, ends = edges[::2], edges[1::2]
        long_enough = starts[ends - starts >= num_pages]
        if not long_enough.size:
            return None
        start = int(long_enough[0])
        self._free[start : start + num_pages] = bytes(num_pages)
        self._num_free -= num_pages
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
        self._num_free += len(pages)
