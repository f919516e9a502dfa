# SPDX-License-Identifier: Apache-2.0
"""States of the controller: written down, and recovered by another that numbers instances otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from moe_lora.config import FrontEndConfig
from moe_lora.dist.cluster.controller.cluster_state import ClusterState, ClusterStateLog
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.instances import InstanceRegistry, Served, ServedVersion
from moe_lora.dist.cluster.standing_orders import StandingOrders
from moe_lora.engine.client.messages import DrainOrder, PauseScope
from tests.dist.cluster.fleet_parts import CountingEngine, cluster_config, fleet_client
from tests.patience import PATIENCE_S


class Kept:
    """A state_log, and instances that enter by name."""

    def __init__(self, *names: str) -> None:
        self.instance_registry = InstanceRegistry((), [("a", "p")])
        self.routes = make_routes(cluster_config(FrontEndConfig(placement="loraserve")))
        fleet = fleet_client(self.instance_registry, self.routes.router)
        self.placement = self.routes.placement(fleet)
        self.state_log = ClusterStateLog(self.instance_registry, self.routes, self.placement)
        for name in names:
            client = CountingEngine()
            instance = self.instance_registry.enter(name, client)
            process = f"process of {name}"
            assert asyncio.run(
                self.instance_registry.join(instance, client, self.instance_registry.adapters, set(), process)
            )


def test_each_change_has_a_number_of_its_own():
    kept = Kept("x")
    assert kept.state_log.write()
    assert not kept.state_log.write()
    kept.instance_registry.recover(Served.of({"b": ServedVersion("q", 1)}))
    assert kept.state_log.write()
    kept.instance_registry.lose(
        kept.instance_registry.instances[0], kept.instance_registry.instances[0].client
    )
    assert kept.state_log.write()
    assert (kept.state_log.state.number, kept.state_log.state.holdings) == (3, {})


async def record(orders: StandingOrders, verb: str, args: Sequence[Any]) -> None:
    async with orders.recording(verb, args):
        pass


@pytest.mark.parametrize(
    ("order", "end"),
    [
        (("pause_requests", (PauseScope(), "keep", PATIENCE_S)), ("resume_requests", (None,))),
        (("sleep", (("weights",), True, "abort", 1.0)), ("wake_up", (("weights",),))),
        (("pause_requests", (PauseScope(), "keep", 0.0)), None),
    ],
)
def test_a_state_says_while_an_order_stands(order, end):
    kept = Kept("x")
    kept.state_log.write()
    orders = kept.instance_registry.standing_orders()
    for one, stands in ((order, end is not None), (end, False)):
        if one is not None:
            asyncio.run(record(orders, *one))
            assert bool(kept.state_log.write()) is (end is not None)
            assert kept.state_log.state.ordered is stands


def test_a_table_is_that_of_the_same_instances_whatever_their_numbers():
    first = Kept("x", "y")
    first.routes.router.swap({"a": [(0, 0.75), (1, 0.25)]})
    first.placement.resume({"a": 12.0})
    first.state_log.write()
    second = Kept("z", "y")
    second.state_log.recover(first.state_log.state)
    assert second.routes.router.table == {"a": [(2, 0.75), (1, 0.25)]}
    assert second.routes.router.version == 1
    assert second.placement.demand == {"a": 12.0}
    second.state_log.write()
    assert second.state_log.state.number == first.state_log.state.number + 1
    assert second.state_log.state.table == first.state_log.state.table


def test_of_several_front_ends_the_newest_table_counts_in_any_order():
    old = ClusterState(number=4, table={"a": (("x", 1.0),)}, table_version=2)
    new = ClusterState(number=9, table={"a": (("y", 1.0),)}, table_version=3)
    for states in ((old, new), (new, old)):
        kept = Kept("x", "y")
        for state in states:
            kept.state_log.recover(state)
        kept.state_log.write()
        assert (kept.state_log.state.table, kept.state_log.state.table_version) == (new.table, 3)
        assert kept.state_log.state.number == 10


def test_of_orders_that_come_late_those_count_to_instances_that_have_none():
    kept = Kept("x", "y", "z")
    drains = kept.instance_registry.drains
    drains.order("y", drained=False)
    kept.state_log.learn_orders(ClusterState(number=9, drains=dict.fromkeys("xy", DrainOrder(True, 5))))
    assert kept.instance_registry.drained == {"x"}
    assert drains.order("z", drained=True).number == 6


def test_of_each_instance_the_latest_order_counts_and_nobody_is_being_restarted():
    x, y, undrained = DrainOrder(True, 1), DrainOrder(True, 2), DrainOrder(False, 3)
    old = ClusterState(number=4, drains={"x": x, "y": y})
    new = ClusterState(number=9, drains={"x": undrained, "y": y}, restarting=("x",))
    for states in ((old, new), (new, old)):
        kept = Kept("x", "y")
        for state in states:
            kept.state_log.recover(state)
        assert kept.instance_registry.drained == {"y"}
        assert kept.instance_registry.drains.order("x", drained=True).number == 4
