# SPDX-License-Identifier: Apache-2.0
"""Times of copies: one formula for links, pages, adapters and costs of the cache."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.timing.host_times import CacheCosts, HostTimes, LinkTime, PartTime

rates = st.floats(1.0, 1e12)
sizes = st.integers(0, 1 << 40)


@given(rates, st.floats(0, 1), sizes)
def test_link_takes_the_latency_and_the_bytes_by_the_rate(rate, latency_s, num_bytes):
    assert LinkTime(rate, latency_s).seconds(num_bytes) == latency_s + num_bytes / rate
    assert LinkTime(rate).seconds(num_bytes) == num_bytes / rate


def test_link_without_a_limit_takes_no_time():
    assert LinkTime(math.inf).seconds(1e12) == 0.0


@given(rates, rates, st.integers(1, 1 << 30), st.lists(st.integers(0, 1 << 20), min_size=1))
def test_cache_counts_pages_as_one_copy_of_a_link_each_alone_or_in_a_column(rate, disk, page_bytes, pages):
    costs = CacheCosts(page_bytes=page_bytes, transfer_bytes_per_s=rate, disk_bytes_per_s=disk)
    for seconds, per_s in ((costs.move_s, rate), (costs.load_s, disk)):
        column = seconds(np.array(pages))
        assert column.tolist() == [seconds(number) for number in pages]
        assert seconds(pages[0]) == costs.transfer_s + pages[0] * (page_bytes / per_s)
        assert seconds(pages[0]) == LinkTime(per_s, costs.transfer_s).of_parts(pages[0], page_bytes)


@given(rates, st.floats(0, 1), st.integers(1, 256))
def test_adapter_loads_over_the_link_of_the_measured_host(rate, fixed_s, lora_rank):
    times = HostTimes(
        worker={"q+k+v": PartTime(per_token_s=1e-6)},
        device=PartTime(fixed_s=1e-3),
        num_layers=2,
        load_fixed_s=fixed_s,
        load_bytes_per_s=rate,
        bytes_per_rank=1e6,
        max_tokens=8,
        max_rank=256,
    )
    adapter = times.adapter(lora_rank)
    assert times.load_s(adapter) == fixed_s + lora_rank * 1e6 / rate
