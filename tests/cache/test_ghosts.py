# SPDX-License-Identifier: Apache-2.0
"""Dropped nodes count on: what comes back late is told from what never does."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.cache.columns import Columns, Ghosts, ReuseAges
from moe_lora.cache.pages import Node, encode
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import Recency, Traits

from .test_unified_adapters import leave_history

BLOCK = 4


class Noted(ReuseAges):
    """What was noted, in order: uses, depth, age, visited."""

    def __init__(self) -> None:
        super().__init__()
        self.intervals: list[tuple[float, int, float, bool]] = []

    def note(self, uses: float, depth: int, age_s: float, *, visited: bool) -> None:
        self.intervals.append((uses, depth, age_s, visited))


def node_of(first_token: int, tokens: list[int], namespace: object = "a") -> Node:
    encoded = encode(tokens)
    return Node(namespace, 0, len(tokens) // BLOCK, tokens=encoded, first_token=first_token)


def test_what_is_computed_again_ends_its_interval_with_a_visit():
    """Dropped at 30 s, 20 s after its last use, asked for at 100 s: an interval of 90 s."""
    noted = Noted()
    ghosts = Ghosts(noted, BLOCK)
    ghosts.add(node_of(8, [1] * 8), 3.0, 10.0, 30.0)
    assert noted.intervals == []
    assert ghosts.recall(node_of(8, [1] * 12), 100.0) == 3.0
    assert noted.intervals == [(3.0, 16, 90.0, True)]
    assert len(ghosts) == 0
    assert not ghosts.uses.any()


def test_a_new_node_recalls_all_that_lay_in_its_place():
    """8 tokens and 4 after them were dropped apart, from below; they come back as one run."""
    noted = Noted()
    ghosts = Ghosts(noted, BLOCK)
    ghosts.add(node_of(8, [2] * 4), 1.0, 0.0, 5.0)
    ghosts.add(node_of(0, [1] * 8), 2.0, 0.0, 6.0)
    assert ghosts.recall(node_of(0, [1] * 8 + [2] * 8), 50.0) == 1.0
    assert noted.intervals == [(2.0, 8, 50.0, True), (1.0, 12, 50.0, True)]


def test_what_comes_back_in_chunks_recalls_all_that_was_dropped():
    """12 tokens, then 8: three ghosts, the second of which begins in the first chunk and ends in the next."""
    policy = Recency(traits=Traits(learns_reuse=True))
    cache = UnifiedCache(num_device_pages=9, block_size=BLOCK, policy=policy)
    columns = cache._tree.columns
    tokens = list(range(100, 121))
    for end_s, num_tokens in enumerate((8, 16, 20)):
        leave_history(cache, None, tokens[:num_tokens], float(end_s))
    leave_history(cache, None, [7] * 36, 10.0)  # takes the place of all
    assert len(columns.ghosts) == 3
    table = cache.match(None, tokens, 20.0)
    for num_computed in (12, 20):
        assert cache.grow(table, num_computed, 20.0)
        cache.publish(table, tokens, num_computed, 20.0)
    left = columns.ghosts.last_used_s[columns.ghosts.uses > 0]
    assert (left == 10.0).all()  # of what made room for it


@pytest.mark.parametrize(
    "asked", [node_of(0, [9] * 8), node_of(4, [1] * 8), node_of(0, [1] * 8, namespace="b")]
)
def test_another_prompt_place_or_adapter_recalls_nothing(asked):
    ghosts = Ghosts(Noted(), BLOCK)
    ghosts.add(node_of(0, [1] * 8), 1.0, 0.0, 5.0)
    assert ghosts.recall(asked, 50.0) == 0.0
    assert len(ghosts) == 1


def test_the_first_dropped_is_forgotten_first_and_without_a_visit():
    noted = Noted()
    ghosts = Ghosts(noted, BLOCK, max_ghosts=2)
    for number in range(3):
        ghosts.add(node_of(0, [number] * 4), 1.0, float(number), 10.0)
    assert noted.intervals == [(1.0, 4, 10.0, False)]
    assert ghosts.recall(node_of(0, [0] * 4), 20.0) == 0.0
    assert ghosts.recall(node_of(0, [1] * 4), 20.0) == 1.0


def test_nothing_is_expected_of_a_forgotten_adapter():
    noted = Noted()
    ghosts = Ghosts(noted, BLOCK)
    for namespace in ("a", "b"):
        ghosts.add(node_of(0, [1] * 4, namespace), 1.0, 0.0, 10.0)
    ghosts.forget("a", 30.0)
    assert noted.intervals == [(1.0, 4, 30.0, False)]
    assert ghosts.recall(node_of(0, [1] * 4, "b"), 40.0) == 1.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "recall", "forget"]),
            st.integers(0, 2),
            st.integers(0, 3),
            st.integers(1, 3),
        ),
        max_size=60,
    )
)
def test_memory_is_bounded_and_every_interval_ends_once(steps):
    noted, num_added = Noted(), 0
    ghosts = Ghosts(noted, BLOCK, max_ghosts=4)
    for now_s, (step, place, content, num_blocks) in enumerate(steps):
        node = node_of(place * BLOCK, [content] * (num_blocks * BLOCK))
        if step == "add":
            ghosts.add(node, 1.0, float(now_s), float(now_s))
            num_added += 1
        elif step == "recall":
            ghosts.recall(node, float(now_s))
        else:
            ghosts.forget("a", float(now_s))
        assert len(ghosts) == np.count_nonzero(ghosts.uses) <= 4
        assert num_added == len(ghosts) + len(noted.intervals)


@cache
def after_ten_minutes(max_ghosts: int) -> Columns:
    """60 prompts of a block that all come back every 60 s, in a cache that keeps six of them."""
    policy = Recency(traits=Traits(learns_reuse=True))
    cache = UnifiedCache(num_device_pages=7, block_size=BLOCK, policy=policy)
    columns = cache._tree.columns
    columns.ghosts = Ghosts(columns.reuse, BLOCK, max_ghosts=max_ghosts)
    for second in range(600):
        leave_history(cache, None, [second % 60 + 1] * (BLOCK + 1), float(second))
        columns.refresh_reuse(float(second))
    return columns


def rate_of(columns: Columns, uses: float, age_s: float) -> float:
    return columns.reuse.rates.of(np.array([uses]), np.array([BLOCK]), np.array([age_s])).item()


def test_what_comes_back_after_it_was_dropped_is_not_taken_for_worthless():
    """No node lives to see its next use; but its ghost does, 57 s after the age of 3 s."""
    remembering, forgetful = after_ten_minutes(100), after_ten_minutes(1)
    assert rate_of(remembering, 8.0, 3.0) == pytest.approx(1 / 57, rel=0.3)
    assert rate_of(forgetful, 1.0, 3.0) < rate_of(remembering, 8.0, 3.0) / 3


def test_ghosts_of_a_cache_are_what_was_dropped_and_not_asked_for_since():
    columns = after_ten_minutes(100)
    nodes = [node for node in columns.nodes if node is not None and not node.is_adapter]
    assert len(columns.ghosts) + len(nodes) == 60
    assert {int(columns.turn[node.row]) for node in nodes} == {10}  # the tenth time around
