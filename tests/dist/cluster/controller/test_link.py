"""A front end's link, message by message."""

from __future__ import annotations

import asyncio

import pytest

from moe_lora.core.address import Address
from moe_lora.core.errors import ControllerAwayError
from moe_lora.dist.cluster.controller.cluster_state import ClusterState, Figures, FrontEndReport
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.directed import DirectedInstanceRegistry
from moe_lora.dist.cluster.instances import Served, ServedVersion


class Follower:
    def __init__(self) -> None:
        self.states: list[int] = []

    def follow(self, state: ClusterState) -> None:
        self.states.append(state.number)

    def show(self, figures: Figures) -> None:
        raise AssertionError("there are none")

    def report(self) -> FrontEndReport | None:
        return None


@pytest.fixture
def link() -> ControllerLink:
    made = ControllerLink(Address(path="/nowhere"), None, "one")
    made.follower = Follower()
    return made


def test_states_that_come_late_or_again_are_ignored(link):
    for number in (3, 5, 4, 5, 3, 6):
        link.receive(ClusterState(number=number))
    assert link.follower.states == [3, 5, 6]
    assert link.state.number == 6


def test_what_is_asked_while_nobody_is_there_is_refused(link):
    with pytest.raises(ControllerAwayError):
        asyncio.run(link.call("load_adapter", "a", "path", False))


def test_what_is_served_is_taken_over_whole():
    instance_registry = DirectedInstanceRegistry((), [("start", "places/start")])
    served = Served({"new": ServedVersion("places/new", 4, pinned=True)}, {"start": 2, "new": 4})
    instance_registry.follow(served, {})
    assert instance_registry.served == served
    assert instance_registry.next_version("start") == 3
