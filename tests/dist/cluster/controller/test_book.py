"""States of the controller: written down, and recovered by another that numbers instances otherwise."""

from __future__ import annotations

import asyncio

from moe_lora.config import RoutingConfig
from moe_lora.core.clock import VirtualClock
from moe_lora.dist.cluster.controller.cluster_state import ClusterState, StateBook
from moe_lora.dist.cluster.controller.placement_controller import make_routes
from moe_lora.dist.cluster.instances import Roster, Served, ServedAdapter
from moe_lora.dist.cluster.routing_client import FleetClient
from tests.dist.cluster.fleet_parts import CountingEngine


class Kept:
    """A book, and instances that enter by name."""

    def __init__(self, *names: str) -> None:
        self.roster = Roster((), [("a", "p")])
        self.routes = make_routes(RoutingConfig(placement="loraserve"), 8, "sgmv")
        fleet = FleetClient(self.roster, self.routes.router, VirtualClock())
        self.placement = self.routes.placement(fleet)
        self.book = StateBook(self.roster, self.routes, self.placement)
        for name in names:
            client = CountingEngine()
            instance = self.roster.enter(name, client)
            process = f"process of {name}"
            assert asyncio.run(self.roster.join(instance, client, self.roster.adapters, set(), process))


def test_each_change_has_a_number_of_its_own():
    kept = Kept("x")
    assert kept.book.write()
    assert not kept.book.write()
    kept.roster.recover(Served.of({"b": ServedAdapter("q", 1)}))
    assert kept.book.write()
    kept.roster.lose(kept.roster.instances[0], kept.roster.instances[0].client)
    assert kept.book.write()
    assert (kept.book.state.number, kept.book.state.holdings) == (3, {})


def test_a_table_is_that_of_the_same_instances_whatever_their_numbers():
    first = Kept("x", "y")
    first.routes.router.swap({"a": [(0, 0.75), (1, 0.25)]})
    first.placement.resume({"a": 12.0})
    first.book.write()
    second = Kept("z", "y")
    second.book.recover(first.book.state)
    assert second.routes.router.table == {"a": [(2, 0.75), (1, 0.25)]}
    assert second.routes.router.version == 1
    assert second.placement.demand == {"a": 12.0}
    second.book.write()
    assert second.book.state.number == first.book.state.number + 1
    assert second.book.state.table == first.book.state.table


def test_of_several_front_ends_the_newest_table_counts_in_any_order():
    old = ClusterState(number=4, table={"a": (("x", 1.0),)}, table_version=2)
    new = ClusterState(number=9, table={"a": (("y", 1.0),)}, table_version=3)
    for states in ((old, new), (new, old)):
        kept = Kept("x", "y")
        for state in states:
            kept.book.recover(state)
        kept.book.write()
        assert (kept.book.state.table, kept.book.state.table_version) == (new.table, 3)
        assert kept.book.state.number == 10
