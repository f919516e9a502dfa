# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.cache.pages import PageAllocator


def test_pages_come_from_the_top_and_runs_from_the_bottom():
    pages = PageAllocator(8)
    assert [pages.alloc_pages(1), pages.alloc_pages(1)] == [[7], [6]]
    assert pages.alloc_run(3) == 0
    assert pages.alloc_run(3) == 3
    assert pages.alloc_run(1) is None
    assert pages.num_free == 0


def test_run_takes_the_lowest_gap_that_is_long_enough():
    pages = PageAllocator(10)
    first, second, third = pages.alloc_run(2), pages.alloc_run(3), pages.alloc_run(2)
    pages.free(first, 2)
    pages.free(second, 3)
    assert third == 5
    assert pages.alloc_run(4) == 0
    assert pages.alloc_run(2) == 7


def test_empty_run_is_refused():
    with pytest.raises(ValueError, match="num_pages=0"):
        PageAllocator(4).alloc_run(0)


@given(st.lists(st.one_of(st.just(0), st.integers(1, 4), st.integers(-10, -1)), max_size=60))
def test_no_page_is_ever_owned_twice_or_lost(operations):
    """0 takes a page, n > 0 a run of n, n < 0 gives back the (-n mod held)-th holding."""
    pages = PageAllocator(16)
    held: list[tuple[int, int]] = []
    for operation in operations:
        if operation < 0 and held:
            pages.free(*held.pop(-operation % len(held)))
        elif operation >= 0:
            first = pages.alloc_run(operation) if operation else (pages.alloc_pages(1) or [None])[0]
            if first is not None:
                highest = max(set(range(16)) - {page for run in held for page in range(run[0], sum(run))})
                assert operation or first == highest
                held.append((first, max(operation, 1)))
        owned = [page for first, count in held for page in range(first, first + count)]
        assert len(owned) == len(set(owned))
        assert all(0 <= page < 16 for page in owned)
        assert pages.num_free == 16 - len(owned)
    for first, count in held:
        pages.free(first, count)
    assert sorted(page for _ in range(16) for page in pages.alloc_pages(1)) == list(range(16))


def test_several_pages_are_taken_at_once_or_none():
    pages = PageAllocator(6)
    assert pages.alloc_run(2) == 0
    assert pages.alloc_pages(5) is None
    assert pages.alloc_pages(3) == [5, 4, 3]
    pages.free_pages([5, 3])
    pages.free(0, 2)
    assert pages.num_free == 5
    assert pages.alloc_pages(5) == [5, 3, 2, 1, 0]
    assert pages.alloc_pages(1) is None
