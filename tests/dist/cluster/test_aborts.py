# SPDX-License-Identifier: Apache-2.0
"""Orders to end requests in a controller's state."""

from __future__ import annotations

from moe_lora.dist.cluster.adapter_calls import MAX_ABORTS, latest_aborts
from moe_lora.engine.client.messages import AbortOrder, PauseScope


def test_orders_of_ids_displace_each_other_before_orders_of_scopes():
    everything = AbortOrder(PauseScope(), 0)
    orders: tuple[AbortOrder, ...] = (everything,)
    for number in range(1, 2 * MAX_ABORTS):
        orders = latest_aborts((*orders, AbortOrder(PauseScope(ids=("a",)), number)))
    assert [one.number for one in orders] == [0, *range(MAX_ABORTS + 1, 2 * MAX_ABORTS)]
    for number in range(100, 100 + MAX_ABORTS):
        orders = latest_aborts((*orders, AbortOrder(PauseScope(), number)))
    assert [one.number for one in orders] == [*range(100, 100 + MAX_ABORTS)]
