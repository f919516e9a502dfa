# SPDX-License-Identifier: Apache-2.0
"""What leaves the device soon: found among all nodes now and then, the more seldom the more there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.cache import ranking as ranking_module
from moe_lora.cache.pages import CAN_BACK_UP, CAN_LEAVE
from moe_lora.cache.ranking import LEAVING_SHARE, Ranking
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.timing.host_times import CacheCosts

from .test_unified_adapters import leave_history

PERIOD_S = 0.5
Use = tuple[int, int]
"""A tenant and one of its prompts."""
USES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=30)


def cache_of(policy: str) -> UnifiedCache:
    costs = CacheCosts(page_bytes=1 << 20, prefill_tokens_per_s=100.0)
    policies = make_caching_policy(policy, costs)
    return UnifiedCache(num_device_pages=60, num_host_pages=60, block_size=4, policy=policies)


def use(cache: UnifiedCache, uses: list[Use], now_s: float) -> float:
    for tenant, prompt in uses:
        now_s += 0.001
        cache.count_for(f"tenant-{tenant}", 1.0 + tenant, now_s)
        leave_history(cache, None, [100 * tenant + prompt] * 4 * (1 + prompt % 3), now_s)
    return now_s


def idle(ranking: Ranking) -> list[int]:
    return ranking.columns.where(CAN_LEAVE | CAN_BACK_UP).tolist()


def by_looking_at_all(ranking: Ranking, now_s: float) -> list[tuple[int, float, int]]:
    """Of each node that leaves soon its eviction order, its value and its pages, one after the other."""
    rows = np.array(idle(ranking), dtype=np.int64)
    values = ranking.values(rows, now_s)
    order = ranking.eviction_order(rows, values, now_s)
    pages = ranking.columns.pages[rows]
    found, left = [], int(LEAVING_SHARE * ranking.mover.device.num_pages)
    for place in sorted(range(len(rows)), key=lambda place: (order[place], values[place], place)):
        if left <= 0:
            break
        found.append((int(order[place]), float(values[place]), int(pages[place])))
        left -= found[-1][-1]
    return found


@pytest.mark.parametrize("policy", ["cost-aware", "lru"])
@settings(max_examples=40, deadline=None)
@given(before=USES, after=USES)
def test_what_leaves_soon_is_what_all_nodes_say_and_until_the_next_look_what_is_left_of_it(
    policy, before, after
):
    cache = cache_of(policy)
    ranking = cache._ranking
    now_s = use(cache, before, 1.0)
    first = ranking.leaving_soon(now_s).tolist()
    all_say = by_looking_at_all(ranking, now_s)
    # of two alike either may be the last
    assert [entry[:2] for entry in all_say] == [entry[:2] for entry in entries(ranking, first, now_s)]
    assert ranking.leaving_soon(now_s).tolist() == first

    used_s = ranking.columns.last_used_s[first].tolist()
    ranking._soon_until_s = now_s + PERIOD_S
    asking = ranking.asking
    now_s = use(cache, after, now_s)
    if ranking.shares is not None:
        ranking.shares.asking = asking
    unused = [
        row for row, used in zip(first, used_s, strict=True) if ranking.columns.last_used_s[row] == used
    ]
    assert ranking.leaving_soon(now_s).tolist() == [row for row in unused if row in idle(ranking)]

    now_s += PERIOD_S
    later = ranking.leaving_soon(now_s).tolist()
    assert [entry[:2] for entry in by_looking_at_all(ranking, now_s)] == [
        entry[:2] for entry in entries(ranking, later, now_s)
    ]


def entries(ranking: Ranking, rows: list[int], now_s: float) -> list[tuple[int, float]]:
    everything = np.array(idle(ranking), dtype=np.int64)
    values = ranking.values(everything, now_s)
    order = ranking.eviction_order(everything, values, now_s)
    known = {row: (int(order[at]), float(values[at])) for at, row in enumerate(everything.tolist())}
    return [known[row] for row in rows]


def test_the_more_nodes_there_are_the_more_seldom_all_are_looked_at(monkeypatch):
    monkeypatch.setattr(ranking_module, "SOON_S_PER_NODE", 0.05)
    cache = cache_of("cost-aware")
    ranking, looks = cache._ranking, []
    eviction_order = ranking.eviction_order
    monkeypatch.setattr(
        ranking, "eviction_order", lambda *args, **words: looks.append(1) or eviction_order(*args, **words)
    )
    for num_nodes in (10, 20):
        now_s = use(
            cache, [(0, prompt) for prompt in range(10)] + [(1, 3)] * (num_nodes > 10), 10.0 * num_nodes
        )
        looks.clear()
        for tick in range(100):
            ranking.leaving_soon(now_s + 0.1 * tick)
        assert len(looks) == -(-10.0 // (0.05 * len(idle(ranking))))
