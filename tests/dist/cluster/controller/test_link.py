# SPDX-License-Identifier: Apache-2.0
"""A front end's link, message by message."""

from __future__ import annotations

import asyncio

import pytest

from moe_lora.core.address import Address
from moe_lora.core.errors import ControllerAwayError
from moe_lora.dist.cluster.controller.cluster_state import ClusterState
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.instances import InstanceRegistry, Served, ServedVersion
from moe_lora.engine.client.messages import AbortOrder, PauseScope
from tests.dist.cluster.fleet_parts import cluster_config


@pytest.fixture
def link() -> ControllerLink:
    routes = make_routes(cluster_config())
    return ControllerLink(Address(path="/nowhere"), None, "one", InstanceRegistry(()), routes)


def test_states_that_come_late_or_again_are_ignored(link):
    followed = []
    for number in (3, 5, 4, 5, 3, 6):
        link.receive(ClusterState(number=number, ranks={"a": number}))
        followed.append((link.state.number, link.ranks["a"]))
    assert followed == [(3, 3), (5, 5), (5, 5), (5, 5), (5, 5), (6, 6)]


def test_what_is_asked_while_nobody_is_there_is_refused(link):
    with pytest.raises(ControllerAwayError, match="the controller is away") as refused:
        asyncio.run(link.call("load_adapter", "a", "path", False))
    assert "/nowhere" not in str(refused.value), "tenants read the error"


def test_aborts_reach_waiting_requests_once(link):
    ended: list[str] = []
    link._instance_registry.on_abort = lambda scope: ended.append(scope.owner)
    old, *orders = [AbortOrder(PauseScope(name), number) for number, name in enumerate("-abc")]
    for number in (1, 2, 3, 4):
        link.receive(ClusterState(number=number, aborts=(old, *orders[: number - 1])))
    link.receive(ClusterState(number=5, aborts=tuple(orders)))
    assert ended == ["a", "b", "c"], "an abort of before this front end's requests ends none"


def test_what_is_served_is_taken_over_whole():
    instance_registry = InstanceRegistry((), [("start", "places/start")])
    served = Served({"new": ServedVersion("places/new", 4, pinned=True)}, {"start": 2, "new": 4})
    instance_registry.follow(served, {})
    assert instance_registry.served == served
    assert instance_registry.next_version("start") == 3
