# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.policies.caching.caching import (
    CACHING_POLICIES,
    CacheLoad,
    lru,
    make_caching_policy,
    static_partition,
)
from moe_lora.timing.host_times import CacheCosts

from .columns import columns

COSTS = CacheCosts(page_bytes=1 << 20)
nodes = st.fixed_dictionaries(
    {
        "is_adapter": st.booleans(),
        "pages": st.integers(1, 10_000),
        "visits": st.floats(0, 1e6),
        "recent": st.floats(0, 1e6),
        "idle_s": st.floats(0, 1e7),
        "backed": st.booleans(),
        "first_token": st.integers(0, 1 << 20),
        "num_tokens": st.integers(0, 1 << 20),
        "wanted": st.integers(0, 100),
        "adapter_ready": st.booleans(),
    }
)


def test_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'fifo' is unknown; choose one of .*fastlibra"):
        make_caching_policy("fifo", COSTS)


@pytest.mark.parametrize("name", CACHING_POLICIES)
@settings(max_examples=40, deadline=None)
@given(some=st.lists(nodes, min_size=1, max_size=10), batch_size=st.floats(0, 1000))
def test_values_are_numbers_that_can_be_summed(name, some, batch_size):
    load = CacheLoad(
        num_queries=10, adapter_visits=np.array([1.0, 9.0]), batch_size=batch_size, num_adapters=0
    )
    values = make_caching_policy(name, COSTS).values(columns(*some), load)
    assert values.shape == (len(some),)
    assert np.isfinite(values).all()
    assert (values >= 0).all()


def test_lru_lets_the_oldest_go_first():
    load = CacheLoad(num_queries=1, adapter_visits=np.zeros(0), batch_size=0.0, num_adapters=0)
    new, old = lru().values(columns({"idle_s": 1.0}, {"idle_s": 2.0, "visits": 100, "pages": 9}), load)
    assert old < new


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_partition_must_leave_room_for_both(share):
    with pytest.raises(ValueError, match="adapter_share"):
        static_partition(share)
