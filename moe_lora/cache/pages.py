"""Which pages of the arena are free.

Single pages (KV blocks) are taken from the top of the arena, contiguous runs (adapter extents) from the
bottom, first fit: the two grow towards each other, so that runs stay easy to find.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


class PageAllocator:
    """Hands out page numbers 0 .. num_pages - 1; knows nothing of what they hold."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = np.ones(num_pages, dtype=bool)
        self._num_free = num_pages
        self._from_top = [-page for page in range(num_pages - 1, -1, -1)]
        self._listed = np.ones(num_pages, dtype=bool)

    @property
    def num_free(self) -> int:
        return self._num_free

    def alloc_page(self) -> int | None:
        """The highest free page, or None if all are taken."""
        while self._from_top:
            page = -heapq.heappop(self._from_top)
            self._listed[page] = False
            if self._free[page]:
                self._free[page] = False
                self._num_free -= 1
                return page
        return None

    def alloc_pages(self, num_pages: int) -> list[int] | None:
        """The highest free pages, or None (and none taken) if there are too few."""
        if num_pages > self._num_free:
            return None
        taken: list[int] = []
        while len(taken) < num_pages:
            page = -heapq.heappop(self._from_top)
            self._listed[page] = False
            if self._free[page]:
                taken.append(page)
        self._free[taken] = False
        self._num_free -= num_pages
        return taken

    def alloc_run(self, num_pages: int) -> int | None:
        """First page of the lowest free run of `num_pages`, or None if there is none that long."""
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be 1 or more")
        edges = np.flatnonzero(np.diff(np.concatenate(([0], self._free.view(np.int8), [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end - start >= num_pages:
                self._free[start : start + num_pages] = False
                self._num_free -= num_pages
                return int(start)
        return None

    def free(self, first: int, num_pages: int = 1) -> None:
        """Give back a page or a run."""
        assert not self._free[first : first + num_pages].any(), "page freed twice"
        self._free[first : first + num_pages] = True
        self._num_free += num_pages
        # Pages taken in a run are still listed; listed again each time, they would pile up.
        for page in np.flatnonzero(~self._listed[first : first + num_pages]).tolist():
            heapq.heappush(self._from_top, -(first + page))
        self._listed[first : first + num_pages] = True

    def free_pages(self, pages: Sequence[int]) -> None:
        """Give back pages, wherever they lie."""
        numbers = np.asarray(pages)
        assert not self._free[numbers].any(), "page freed twice"
        self._free[numbers] = True
        self._num_free += len(numbers)
        for page in numbers[~self._listed[numbers]].tolist():
            heapq.heappush(self._from_top, -page)
        self._listed[numbers] = True
