# SPDX-License-Identifier: Apache-2.0
"""Who is drained: the later order counts, from wherever it is heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_lora.dist.cluster.drains import MAX_UNDRAINED, Drains
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.engine.client.messages import DrainOrder

ORDERS = st.lists(st.tuples(st.sampled_from("xyz"), st.booleans()), min_size=1, max_size=12)


@given(ORDERS, st.lists(st.tuples(st.integers(0, 11), st.sampled_from("xyz")), max_size=12))
def test_a_successor_that_hears_of_each_last_order_ends_with_it_whatever_older_it_hears(orders, heard):
    """Accounts of every age, in any order, of one instance each: as front ends and instances tell them."""
    first, accounts = Drains(), []
    for name, drained in orders:
        first.order(name, drained=drained)
        accounts.append(first.orders)
    told = [(name, accounts[age % len(accounts)].get(name)) for age, name in heard]
    told.insert(len(told) // 2, ("x", first.orders.get("x")))
    told[len(told) // 3 : 0] = [(name, first.orders.get(name)) for name in "yz"]
    second = Drains()
    for name, order in told:
        if order is not None:
            second.learn({name: order})
    assert second.orders == first.orders
    assert second.by_operator == first.by_operator
    assert second.order("x", drained=True).number > max(one.number for one in first.orders.values())


def test_of_instances_that_come_and_go_the_drains_and_the_latest_other_orders_are_kept():
    drains, before = Drains(), {}
    drains.order("drained for ever", drained=True)
    for number in range(2 * MAX_UNDRAINED):
        drains.order(str(number), drained=True)
        before |= drains.orders
        drains.order(str(number), drained=False)
    assert len(drains.orders) == 1 + MAX_UNDRAINED
    assert drains.by_operator == {"drained for ever"}
    last = [str(number) for number in range(MAX_UNDRAINED, 2 * MAX_UNDRAINED)]
    drains.learn({name: before[name] for name in last})
    assert drains.by_operator == {"drained for ever"}, "who comes late brings none of them back"
    newest = max(one.number for one in drains.orders.values())
    assert drains.order("another", drained=False).number == newest + 1 == 4 * MAX_UNDRAINED + 2
    assert "another" in drains.orders
    assert len(drains.orders) == 1 + MAX_UNDRAINED


def test_of_equal_orders_only_as_many_are_forgotten_as_are_too_many():
    drains = Drains()
    drains.learn({str(number): DrainOrder(False, max(2, number)) for number in range(1, MAX_UNDRAINED + 2)})
    assert len(drains.orders) == MAX_UNDRAINED


def test_what_drains_is_said_once_and_a_restart_leaves_orders_alone():
    said: list[frozenset[str]] = []
    drains = Drains(said.append)
    drains.order("x", drained=True)
    drains.restart({"x", "y"})
    drains.restart(())
    drains.order("x", drained=True)
    assert said == [{"x"}, {"y"}]
    assert drains.names == {"x"}


def test_an_instance_is_not_believed_where_a_controller_has_spoken():
    registry = InstanceRegistry(())
    registry.hear_drain("x", DrainOrder(True, 3))
    assert registry.drained == {"x"}
    registry.follow({}, {}, {})
    registry.drains.follow({"x": DrainOrder(False, 2)}, ())
    registry.hear_drain("x", DrainOrder(True, 3))
    assert registry.drained == frozenset()
