# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.policies.caching.caching import CacheLoad, FastLibra, adapter_reward, required_adapters
from moe_lora.timing.host_times import CacheCosts

from .columns import columns

COSTS = CacheCosts(page_bytes=1_000_000, transfer_bytes_per_s=1e9, transfer_s=0.0)
"""1 ms per page."""


def load(visits: list[float], batch_size: float, num_adapters: int = 1, num_queries: int = 10) -> CacheLoad:
    return CacheLoad(
        num_queries=num_queries,
        adapter_visits=np.array(visits, dtype=float),
        batch_size=batch_size,
        num_adapters=num_adapters,
    )


def test_required_adapters_of_equation_3():
    """Half of the requests use one adapter, half the other; in a batch of 2 each is there 3 times of 4."""
    assert required_adapters(load([5, 5], 2)) == pytest.approx(1.5)


def test_no_batch_requires_no_adapter():
    assert required_adapters(load([5, 5], 0)) == 0


@given(st.lists(st.floats(0, 10), max_size=20), st.floats(0, 100))
def test_never_more_adapters_required_than_there_are(visits, batch_size):
    assert 0 <= required_adapters(load(visits, batch_size)) <= len(visits)


def test_reward_of_equation_4_is_what_is_missing_and_never_below_one():
    assert adapter_reward(load([5, 5], 2, num_adapters=1)) == pytest.approx(1.5)
    assert adapter_reward(load([5, 5], 2, num_adapters=2)) == 1


def test_value_of_equations_5_and_6():
    """4 ms x 3 / 10 x (1 - sigmoid(1)); an adapter's times 1.5."""
    nodes = columns(
        {"pages": 4, "visits": 3, "idle_s": 60.0},
        {"is_adapter": True, "pages": 4, "visits": 3, "idle_s": 60.0},
    )
    kv = 0.004 * 0.3 * (1 - 1 / (1 + math.exp(-1)))
    assert FastLibra(costs=COSTS).values(nodes, load([5, 5], 2)) == pytest.approx([kv, 1.5 * kv])


def test_without_the_reward_the_other_node_goes_first():
    """WOL: the adapter is worth a little less than the KV, unless adapters are scarce."""
    nodes = columns({"pages": 4, "visits": 4}, {"is_adapter": True, "pages": 4, "visits": 3})
    scarce = load([5, 5], 2)
    assert np.argmin(FastLibra(costs=COSTS).values(nodes, scarce)) == 0
    assert np.argmin(FastLibra(costs=COSTS, rewards_adapters=False).values(nodes, scarce)) == 1


def test_with_enough_adapters_the_reward_changes_nothing():
    nodes = columns({"pages": 4, "visits": 4}, {"is_adapter": True, "pages": 4, "visits": 3})
    enough = load([5, 5], 2, num_adapters=5)
    full, wol = (FastLibra(costs=COSTS, rewards_adapters=rewards) for rewards in (True, False))
    np.testing.assert_array_equal(full.values(nodes, enough), wol.values(nodes, enough))


def test_long_unused_nodes_still_have_an_order():
    nodes = columns({"idle_s": 3600.0}, {"idle_s": 7200.0})
    recent, old = FastLibra(costs=COSTS).values(nodes, load([], 1))
    assert recent > old >= 0


def test_only_wom_lets_kv_stay_without_its_adapter():
    assert FastLibra(costs=COSTS).traits.keeps_dependencies
    assert not FastLibra(costs=COSTS, keeps_dependencies=False).traits.keeps_dependencies
