# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.cache.leases.residency import ServerPages, fits
from moe_lora.core.errors import ConfigError

lengths = st.lists(st.integers(1, 4), max_size=8)


def test_runs_of_a_rank_lie_one_after_another():
    pages = ServerPages((6, 3))
    assert pages.alloc({0: {0: 2, 4: 3}, 1: {1: 3}}) == {0: {0: (0, 2), 4: (2, 3)}, 1: {1: (0, 3)}}
    assert pages.num_free == (1, 0)


def test_nothing_is_taken_where_one_run_finds_no_place():
    """Rank 1 has four free pages, but not in a row."""
    pages = ServerPages((4, 6))
    first = pages.alloc({1: {0: 2}})
    pages.alloc({1: {0: 2}})
    pages.free(first)
    assert pages.alloc({0: {0: 1}, 1: {0: 1, 1: 3}}) is None
    assert pages.num_free == (4, 4)


def test_refused_adapter_is_told_the_budget_that_all_its_ranks_need():
    pages = ServerPages((4, 4, 4))
    with pytest.raises(ConfigError, match=r"0\.009000 GB on rank 1 .* is 0\.004000 GB; .* 0\.009009 or more"):
        pages.check_fits("a", {0: {0: 5}, 1: {0: 8, 1: 1}, 2: {0: 1}}, 1_000_000)


def test_wanted_runs_take_their_room_from_the_gaps():
    assert fits(6, [(2, 2)], [2, 2])
    assert not fits(6, [(2, 2)], [1, 2, 2])
    assert not fits(6, [(2, 2)], [3])
    assert fits(6, [(4, 2), (0, 2)], [2])


@settings(deadline=None)
@given(lengths, st.sets(st.integers(0, 7)), lengths, st.randoms())
def test_could_alloc_foretells_alloc(held, kept, wanted, rng):
    """Take some runs, give back all but the kept ones: what was foretold before is what happens."""
    pages = ServerPages((12,))
    runs = [run for run in (pages.alloc({0: {0: count}}) for count in held) if run is not None]
    pinned = [run for index, run in enumerate(runs) if index in kept]
    rng.shuffle(pinned)
    shard = {0: dict(enumerate(wanted))}
    foretold = pages.could_alloc(shard, pinned)
    for index, run in enumerate(runs):
        if index not in kept:
            pages.free(run)
    assert (pages.alloc(shard) is not None) == foretold
