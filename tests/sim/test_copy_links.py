# SPDX-License-Identifier: Apache-2.0
"""Order of copies on the links between host and device."""

from __future__ import annotations

import pytest

from moe_lora.cache.orders import Copy, LoadAdapter
from moe_lora.sim.adapters import CopyLinks
from moe_lora.sim.events import EventQueue


def order(copy_id, namespace, *, to_device=True):
    return Copy(copy_id, namespace, False, to_device, (1, 2), (3, 4))


@pytest.fixture
def links():
    events, done = EventQueue(), []
    links = CopyLinks(
        events, 100.0, 50, lambda name: 3, lambda i: done.append((events.now_s(), i)), latency_s=0.0
    )
    return links, events, done


def test_each_direction_carries_out_one_order_at_a_time(links):
    links, events, done = links
    links.submit([order(0, "a"), order(1, "a"), order(2, "a", to_device=False)], urgent=True)
    events.run()
    assert done == [(1.0, 0), (1.0, 2), (2.0, 1)]
    assert links.busy_s == [2.0, 1.0]


def test_an_adapters_file_takes_as_long_as_its_pages(links):
    links, events, done = links
    links.submit([LoadAdapter(0, "a", (0,))], urgent=True)
    events.run()
    assert done == [(1.5, 0)]


def test_what_a_request_waits_for_overtakes_what_was_ordered_ahead_of_need(links):
    links, events, done = links
    links.submit([order(0, "a"), order(1, "b"), order(2, "c")], urgent=False)
    links.submit([order(3, "d")], urgent=True)
    links.hurry("c")
    events.run()
    assert [copy_id for _, copy_id in done] == [0, 3, 2, 1]
