from __future__ import annotations

import numpy as np
import pytest

from moe_lora.policies.caching import CacheCosts, CacheLoad
from moe_lora.policies.cost_aware import CostAware

from .columns import columns

COSTS = CacheCosts(
    page_bytes=1_000_000,
    transfer_bytes_per_s=1e9,
    transfer_s=0.0,
    disk_bytes_per_s=1e8,
    prefill_tokens_per_s=1000.0,
    attention_s_per_token2=1e-6,
)
"""1 ms per page from the host, 10 ms from disk, 1 ms to compute a token plus 1 us per token before it."""
LOAD = CacheLoad(num_queries=1, adapter_visits=np.zeros(0), batch_size=1.0, num_adapters=1)


def values(*nodes: dict[str, object]) -> list[float]:
    return (
        CostAware(costs=COSTS, recent_s=100.0, adapter_recent_s=100.0, queue_s=1.0)
        .values(columns(*nodes), LOAD)
        .tolist()
    )


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
    visited, wanted = values({"recent": 20.0}, {"wanted": 1})
    assert wanted > visited


def test_visits_are_forgotten():
    new, old = values({"recent": 3.0}, {"recent": 3.0, "idle_s": 100.0})
    assert old == pytest.approx(new / np.e)


def test_size_does_not_count_per_page():
    """Twice the pages and twice the tokens at no attention: the same value per page."""
    linear = CacheCosts(page_bytes=1, attention_s_per_token2=0.0)
    nodes = columns({"pages": 1, "num_tokens": 16}, {"pages": 2, "num_tokens": 32})
    one, two = CostAware(costs=linear).values(nodes, LOAD)
    assert one == pytest.approx(two)


def test_kv_of_an_adapter_that_is_not_ready_counts_less():
    ready, unready = values({}, {"adapter_ready": False})
    assert unready == pytest.approx(ready / 2)


def test_long_prefixes_are_loaded_and_short_ones_computed():
    policy = CostAware(costs=COSTS)
    assert policy.worth_loading(0, 160, 10)
    assert not policy.worth_loading(0, 5, 10)


def test_adapters_are_remembered_for_longer_than_conversations():
    policy = CostAware(costs=COSTS, recent_s=10.0, adapter_recent_s=1000.0)
    new, old = ({"is_adapter": True, "idle_s": idle_s} for idle_s in (0.0, 100.0))
    kv_new, kv_old = ({"idle_s": idle_s} for idle_s in (0.0, 100.0))
    adapter, old_adapter, kv, old_kv = policy.values(columns(new, old, kv_new, kv_old), LOAD)
    assert old_adapter / adapter > old_kv / kv
