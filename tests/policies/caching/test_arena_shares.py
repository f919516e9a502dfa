# SPDX-License-Identifier: Apache-2.0
"""Tenants that fill a cache: what is beyond a share goes before what is within one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.policies.caching.arena_shares import PRESENT_S, ArenaShares
from moe_lora.policies.caching.caching import NOBODY

MOST = 60


def shares_of(**weights: float) -> ArenaShares:
    """Tenants 1, 2, ... who have just asked."""
    found = ArenaShares()
    for number, (tenant, weight) in enumerate(weights.items(), 1):
        assert found.ask(tenant, weight, 0.0) == number
    return found


def order_of(shares: ArenaShares, nodes: list[tuple[int, int, float]], now_s: float = 0.0) -> list[int]:
    """nodes: owner, pages and value of each."""
    owners, amounts = (np.array([node[i] for node in nodes], np.int64) for i in (0, 1))
    values = np.array([node[2] for node in nodes])
    held = shares.held(owners, amounts)
    return shares.eviction_order(held, owners, amounts, values, MOST, now_s).tolist()


def test_who_alone_filled_the_cache_gives_back_the_least_valued():
    """Of 60 pages 20 are its own.  Of its 50 it gives up 30, and for itself as much as enters besides."""
    nodes = [(1, 10, value) for value in (5.0, 1.0, 2.0, 4.0, 3.0)] + [(2, 10, 0.0)]
    shares = shares_of(a=1, b=2)
    assert order_of(shares, nodes) == [1, 0, 0, 1, 0, 2]
    shares.make_room_for(1, 0.0)
    assert order_of(shares, nodes) == [1, 0, 0, 0, 0, 2]


def test_who_has_one_node_keeps_it_though_two_are_more_than_its_share():
    shares = shares_of(greedy=1, modest=1, **{f"other{number}": 1 for number in range(6)})
    shares.make_room_for(1, 0.0)
    eighth = 12 * MOST // 96  # 7.5 pages
    assert order_of(shares, [(1, 5, 9.0)] * 11 + [(2, eighth - 2, 0.0)])[-1] == 2
    assert order_of(shares, [(1, 40, 9.0), (2, eighth, 0.0)]) == [0, 2]


def test_who_has_less_than_its_share_gives_up_nothing_first():
    nodes = [(1, 5, 1.0)] * 5 + [(2, 10, 9.0)] * 3
    assert order_of(shares_of(a=1, b=1), nodes) == [2] * 5 + [0, 1, 1]


def test_a_tenant_that_asks_for_nothing_has_no_share_after_a_while():
    shares = shares_of(a=1, b=1)
    assert shares.is_divided(PRESENT_S)
    shares.ask("a", 1, PRESENT_S + 1)
    assert not shares.is_divided(PRESENT_S + 1)
    shares.ask("c", 1, PRESENT_S + 1)
    nodes = [(1, 10, 1.0), (2, 10, 9.0), (3, 5, 0.0), (NOBODY, 5, 9.0)]
    assert order_of(shares, nodes, PRESENT_S + 1) == [2, 0, 2, 0]


@settings(max_examples=150, deadline=None)
@given(
    nodes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(0, 9).map(float)), max_size=30
    ),
    weights=st.tuples(*[st.floats(0.1, 10)] * 3),
    asking=st.integers(NOBODY, 3),
)
def test_a_tenant_loses_what_it_has_beyond_its_share_and_hardly_more(nodes, weights, asking):
    shares = shares_of(a=weights[0], b=weights[1], c=weights[2])
    shares.make_room_for(asking, 0.0)
    found = order_of(shares, nodes)
    for number, weight in enumerate(weights, 1):
        own = [(node, order) for node, order in zip(nodes, found, strict=True) if node[0] == number]
        share, held = weight / sum(weights) * MOST, sum(node[1] for node, _ in own)
        largest = max((node[1] for node, _ in own), default=0)
        enters = largest if number == asking else 0
        first = [node for node, order in own if order == 0]
        if held + enters <= share * (1 - 1e-9):
            assert {order for _, order in own} <= {2}
        elif held + enters > share * (1 + 1e-9):
            assert {order for _, order in own} <= {0, 1}
            left = held - sum(node[1] for node in first)
            assert left <= max(0.0, share - enters) + 1e-6
            assert not left or left > share - enters - largest - 1e-6
            dearest = max(node[2] for node in first)
            assert all(node[2] >= dearest for node, order in own if order)
