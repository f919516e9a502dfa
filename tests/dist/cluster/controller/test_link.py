# SPDX-License-Identifier: Apache-2.0
"""A front end's link, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from moe_lora.core.address import Address
from moe_lora.core.errors import ControllerAwayError
from moe_lora.dist.cluster.controller.cluster_state import ClusterState, StateChange
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.instances import Holding, InstanceRegistry, Served, ServedVersion
from moe_lora.dist.net.codec import Message, decoder_of, encode
from moe_lora.engine.client.messages import AbortOrder, Alias, DrainOrder, PauseScope
from tests.dist.cluster.fleet_parts import CountingEngine, cluster_config


def new_link(
    instance_registry: InstanceRegistry | None = None, places: Mapping[str, Address] | None = None
) -> ControllerLink:
    registry, routes = instance_registry or InstanceRegistry(()), make_routes(cluster_config())
    places = places or {"controller": Address(path="/nowhere")}
    return ControllerLink(places, None, "one", registry, routes)


@pytest.fixture
def link() -> ControllerLink:
    return new_link()


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


def test_routers_hear_with_the_drain_where_the_adapters_of_a_leaving_instance_are():
    registry = InstanceRegistry((client := CountingEngine(), client, client))
    link = new_link(registry)
    before, heard = ClusterState(number=1), []
    registry.on_drain = lambda instance: heard.append([list(one.load.recent) for one in registry.instances])
    warmed = {"0": {"most": ("1", "2"), "less": ("1", "gone")}}
    drained = replace(before, number=2, drains={"0": DrainOrder(True, 1)}, warmed=warmed)
    link.receive(before)
    link.receive(sent(StateChange.between(before, drained)))
    assert heard == [[[], ["less", "most"], ["most"]]], "before requests move"
    link.receive(StateChange.between(drained, replace(drained, number=3, warmed={})))
    assert len(heard) == 1


def test_what_is_served_is_taken_over_whole():
    instance_registry = InstanceRegistry((), [("start", "places/start")])
    link = new_link(instance_registry)
    served = Served({"new": ServedVersion("places/new", 4, pinned=True)}, {"start": 2, "new": 4})
    link.receive(ClusterState(number=1, served=served))
    assert instance_registry.served == served
    assert instance_registry.next_version("start") == 3


DECODE = decoder_of((ClusterState, StateChange))


def sent(message: Message) -> Message:
    return DECODE(encode(message))


NAMES = st.sampled_from("abc")
SERVED_VERSIONS = st.builds(ServedVersion, st.just("place"), st.integers(1, 3), st.booleans())
STATES = st.builds(
    ClusterState,
    number=st.just(0),
    served=st.builds(
        Served, st.dictionaries(NAMES, SERVED_VERSIONS), st.dictionaries(NAMES, st.integers(1, 3))
    ),
    ranks=st.dictionaries(NAMES, st.integers(1, 3)),
    holdings=st.dictionaries(NAMES, st.builds(Holding, NAMES, st.frozensets(NAMES))),
    drains=st.dictionaries(NAMES, st.builds(DrainOrder, st.booleans(), st.integers(1, 3))),
    restarting=st.tuples(NAMES),
    aliases=st.dictionaries(NAMES, st.builds(Alias, NAMES)),
    ordered=st.booleans(),
    table=st.dictionaries(NAMES, st.just((("0", 1.0),))),
    table_version=st.integers(0, 3),
    demand=st.dictionaries(NAMES, st.floats(0, 3)),
)


@given(STATES, st.lists(STATES, max_size=4))
def test_changes_lead_to_the_controller_s_states(first, later):
    """As messages; what the front end routes by is what a front end has that dials in then."""
    changed, joined = new_link(), new_link()
    states = [replace(state, number=number) for number, state in enumerate((first, *later), 1)]
    changed.receive(sent(states[0]))
    for before, now in pairwise(states):
        changed.receive(sent(StateChange.between(before, now)))
        assert changed.state == now
    joined.receive(sent(states[-1]))
    for link in (changed, joined):
        registry = link._instance_registry
        assert (registry.served, link.ranks) == (states[-1].served, states[-1].ranks)
        assert registry.aliases == states[-1].aliases
    assert changed._instance_registry.drained == joined._instance_registry.drained


def test_a_change_of_one_adapter_has_bytes_for_one_adapter():
    adapters = {f"adapter-{number}": ServedVersion(f"places/{number}", 1) for number in range(1000)}
    before = ClusterState(number=1, served=Served.of(adapters), ranks=dict.fromkeys(adapters, 8))
    served = Served.of({**adapters, "new": ServedVersion("places/new", 1)})
    now = replace(before, number=2, served=served, ranks={**before.ranks, "new": 8})
    assert len(encode(now)) > 50_000
    assert len(encode(StateChange.between(before, now))) < 500
