"""Pages of one arena, device or host: which are free, and whose the others are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .pages import PageAllocator

FREE, PRIVATE = -1, -2
"""Owners that are no rows: nobody, and a sequence whose blocks are not in the tree."""


class Tier:
    """Takes pages for rows of `Columns` and gives them back.

    owner [num_pages] int64: row, `FREE` or `PRIVATE`.  num_kv, num_adapter: pages in use for each.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.owner: NDArray[np.int64] = np.full(num_pages, FREE, dtype=np.int64)
        self._owner = self.owner.data  # the same numbers, quicker one at a time
        self.num_kv = self.num_adapter = 0
        self._allocator = PageAllocator(num_pages)

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def take(self, num_pages: int, owner: int, *, is_adapter: bool = False) -> list[int] | None:
        """Any pages, the highest ones first; None if there are too few."""
        pages = self._allocator.alloc_pages(num_pages)
        if pages is not None:
            self.hand_over(pages, owner)
            self._count(num_pages, is_adapter)
        return pages

    def take_runs(self, lengths: Sequence[int], owner: int) -> list[int] | None:
        """An adapter's pages: contiguous runs of these lengths, each from the bottom; None if they don't fit.

        All of them in one run where there is one, so that few gaps are searched and made.
        """
        total = sum(lengths)
        if total > self.num_free:
            return None
        whole = self._allocator.alloc_run(total)
        runs = self._separate_runs(lengths) if whole is None else [(whole, total)]
        if runs is None:
            return None
        pages = [page for start, length in runs for page in range(start, start + length)]
        self.hand_over(pages, owner)
        self._count(total, True)
        return pages

    def _separate_runs(self, lengths: Sequence[int]) -> list[tuple[int, int]] | None:
        runs: list[tuple[int, int]] = []
        for length in filter(None, lengths):
            first = self._allocator.alloc_run(length)
            if first is None:
                for run in runs:
                    self._allocator.free(*run)
                return None
            runs.append((first, length))
        return runs

    def hand_over(self, pages: Sequence[int], owner: int) -> None:
        """The pages are another owner's of the same kind now."""
        owners = self._owner
        for page in pages:
            owners[page] = owner

    def give_back(self, pages: Sequence[int], *, is_adapter: bool = False) -> None:
        """The pages are free."""
        if pages:
            self._allocator.free_pages(pages)
            self.hand_over(pages, FREE)
            self._count(-len(pages), is_adapter)

    def _count(self, num_pages: int, is_adapter: bool) -> None:
        if is_adapter:
            self.num_adapter += num_pages
        else:
            self.num_kv += num_pages
