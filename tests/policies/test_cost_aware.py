# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_lora.policies.caching.caching import NUM_BINS, NUM_CLASSES, CacheLoad, CostAware, ReuseRates
from moe_lora.timing.host_times import CacheCosts

from .columns import columns

COSTS = CacheCosts(
    page_bytes=1_000_000,
    transfer_bytes_per_s=1e9,
    transfer_s=0.0,
    disk_bytes_per_s=1e8,
    prefill_tokens_per_s=1000.0,
    attention_s_per_token2=1e-6,
    wait_s=0.0,
)
"""1 ms per page from the host, 10 ms from disk, 1 ms to compute a token plus 1 us per token before it."""
USES_PER_S = 0.01


def load_of(per_s: float = USES_PER_S, later_per_s: float = USES_PER_S) -> CacheLoad:
    """Nodes bring so many uses per second when they are new, and after being idle for long."""
    rates = np.full((NUM_CLASSES, NUM_BINS), later_per_s)
    rates[:, 0] = per_s
    return CacheLoad(
        num_queries=1,
        adapter_visits=np.zeros(0),
        batch_size=1.0,
        num_adapters=1,
        reuse=ReuseRates(rates),
    )


LOAD = load_of()


def values(*nodes: dict[str, object]) -> list[float]:
    return CostAware(costs=COSTS, queue_s=1.0, behind_per_s=0.0).values(columns(*nodes), LOAD).tolist()


def test_value_is_time_saved_per_page_and_second():
    """16 tokens at the start: 16 ms + 16 x 8 us, once per 100 s."""
    assert values({}) == pytest.approx([(0.016 + 16 * 8e-6) / 100])


def test_blocks_deep_in_a_prompt_are_worth_more():
    shallow, deep = values({}, {"first_token": 100_000})
    assert deep > shallow


def test_what_the_host_has_is_worth_the_copy_at_most():
    assert values({"backed": True}) == pytest.approx([0.001 / 100])


def test_short_prefix_that_is_quicker_to_compute_is_worth_that():
    only, backed = values({"num_tokens": 1, "pages": 10}, {"num_tokens": 1, "pages": 10, "backed": True})
    assert only == backed


def test_adapter_on_disk_is_worth_more_than_one_on_the_host():
    disk, host = values({"is_adapter": True}, {"is_adapter": True, "backed": True})
    assert disk == pytest.approx(10 * host)


def test_queued_request_outweighs_past_visits():
    visited, wanted = values({}, {"wanted": 1})
    assert wanted > visited


def test_what_was_learned_of_the_age_decides():
    policy, nodes = CostAware(costs=COSTS, behind_per_s=0.0), columns({"idle_s": 0.0}, {"idle_s": 20.0})
    new, old = policy.values(nodes, load_of(0.01, 0.04))
    assert old == pytest.approx(4 * new)


def test_adapter_never_used_is_worth_nothing():
    assert values({"is_adapter": True, "recent": 0.0, "num_tokens": 0}) == [0.0]


def test_waiting_counts_once_per_request():
    """A prefix of two nodes is worth one wait together, its adapter one by itself."""
    policy = CostAware(costs=replace(COSTS, wait_s=0.5), behind_per_s=0.0)
    nodes = columns(
        {"is_adapter": True, "backed": True, "num_tokens": 0},
        {"backed": True},
        {"backed": True, "first_token": 16},
    )
    adapter, first, second = (policy.values(nodes, LOAD) / USES_PER_S - 0.001).tolist()
    assert adapter == pytest.approx(0.5)
    assert (first, second) == (pytest.approx(0.5), pytest.approx(0.25))


def test_host_copy_is_worth_what_computing_takes_longer():
    policy = CostAware(costs=COSTS, behind_per_s=0.0)
    kv, adapter, short = policy.host_values(
        columns({}, {"is_adapter": True}, {"num_tokens": 1, "pages": 10}), LOAD
    ).tolist()
    assert kv == pytest.approx((0.016 + 16 * 8e-6 - 0.001) * USES_PER_S)
    assert adapter == pytest.approx((0.01 - 0.001) * USES_PER_S)
    assert short == 0.0


def test_size_does_not_count_per_page():
    """Twice the pages and twice the tokens at no attention: the same value per page."""
    linear = CacheCosts(page_bytes=1, attention_s_per_token2=0.0, wait_s=0.0)
    nodes = columns({"pages": 1, "num_tokens": 16}, {"pages": 2, "num_tokens": 32})
    one, two = CostAware(costs=linear, behind_per_s=0.0).values(nodes, LOAD)
    assert one == pytest.approx(two)


def test_kv_of_an_adapter_that_is_not_ready_counts_less():
    ready, unready = values({}, {"adapter_ready": False})
    assert unready == pytest.approx(ready / 2)


def test_long_prefixes_are_loaded_and_short_ones_computed():
    policy = CostAware(costs=COSTS, behind_per_s=0.0)
    assert policy.worth_loading(0, 160, 10)
    assert not policy.worth_loading(0, 5, 10)


def test_computing_counts_by_how_many_wait_behind_it():
    """100 tokens take 100 ms, with attention off; at 10 per s one more waits for as long."""
    costs = replace(COSTS, attention_s_per_token2=0.0)
    nodes = columns({"num_tokens": 100}, {"num_tokens": 200, "pages": 2})
    alone = CostAware(costs=costs, behind_per_s=0.0).values(nodes, LOAD)
    crowded = CostAware(costs=costs, behind_per_s=10.0).values(nodes, LOAD)
    assert alone.tolist() == pytest.approx([0.1 * USES_PER_S, 0.1 * USES_PER_S])
    assert crowded.tolist() == pytest.approx([0.2 * USES_PER_S, 0.3 * USES_PER_S])


def test_copying_is_not_in_the_way_of_others():
    nodes = columns({"backed": True, "num_tokens": 100}, {"is_adapter": True, "num_tokens": 0})
    alone = CostAware(costs=COSTS, behind_per_s=0.0).values(nodes, LOAD)
    assert CostAware(costs=COSTS, behind_per_s=10.0).values(nodes, LOAD).tolist() == alone.tolist()
