# SPDX-License-Identifier: Apache-2.0
"""Placements made while simulated requests come: tables, what hosts keep, what is fetched."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import LocalConfig, PlacementConfig

from .systems import STEP_S, asked, coupled, served, server


class Turning:
    """Every adapter on the next instance each time; remembers what it was told."""

    def __init__(self, *names: str) -> None:
        self.names, self.told = names, []

    def __call__(self, tokens, length_s):
        self.told.append((dict(tokens), length_s))
        return {name: [((len(self.told) - 1) % 2, 1.0)] for name in self.names}


def turning(planner: Turning, **settings):
    return replace(
        coupled(4, num_instances=2),
        adapters=LocalConfig(capacity=4, **settings),
        adapter_bytes=2.0,
        router=PhiRouting,
        placement=PlacementConfig(planner=lambda: planner, interval_s=10.0),
    )


def test_requests_follow_the_table_of_their_time_and_the_planner_hears_of_their_tokens():
    planner = Turning("a", "b")
    plan = asked((1.0, "a", 3), (5.0, "b", 2), (11.0, "a", 4), (21.0, "a", 1), prompt_tokens=10)
    result = simulate(turning(planner), plan)
    assert [request.instance for request in result.requests] == [0, 0, 1, 0]
    assert planner.told == [({}, 0.0), ({"a": 13, "b": 12}, 10.0), ({"a": 14}, 10.0)]
    assert result.held == [[2, 0], [0, 2], [2, 0]]


def test_an_adapter_that_moved_is_fetched_once_and_delays_its_first_request():
    planner = Turning("a")
    plan = asked((1.0, "a", 1), (11.0, "a", 1), (15.0, "a", 1))
    result = simulate(turning(planner, fetch_bytes_per_s=1.0), plan)
    assert result.num_fetches == 1
    waits_s = [request.first_token_s - request.arrival_s for request in result.requests]
    assert waits_s == pytest.approx([STEP_S, 2.0 + STEP_S, STEP_S])


def test_a_host_that_dropped_an_adapter_fetches_it_again():
    planner = Turning("a", "b", "c", "d", "e")
    names = "abcde"  # more than slots, so that the device has forgotten them
    plan = asked(*((at_s + 0.1 * i, name, 1) for at_s in (1.0, 11.0, 21.0) for i, name in enumerate(names)))
    result = simulate(turning(planner, fetch_bytes_per_s=1e6), plan)
    assert result.num_fetches == 10  # to the second, back to the first
    stays = replace(
        turning(planner), placement=PlacementConfig(planner=lambda: lambda *_: {n: [(0, 1.0)] for n in names})
    )
    assert simulate(stays, plan).num_fetches == 0


def test_who_gives_up_sees_no_more_requests():
    seen = Counter()

    def late(request):
        seen[request.index] += 1
        return len(seen) == 3

    result = simulate(coupled(1), asked(*((float(i), None, 1) for i in range(9))), late)
    assert result.stopped
    assert len(result.requests) == 3 == len(seen)
    assert not simulate(coupled(1), asked((0.0, None, 1))).stopped


def test_what_can_not_follow_a_placement_is_refused():
    config = turning(Turning("a"))
    with pytest.raises(ConfigError, match="give router=PhiRouting"):
        simulate(replace(config, router=coupled(1).router), [])
    with pytest.raises(ConfigError, match="leave the placement out"):
        replace(served(server(2)), placement=config.placement)
    with pytest.raises(ConfigError, match="interval_s=0 must be"):
        PlacementConfig(planner=lambda: Turning(), interval_s=0)
    with pytest.raises(ConfigError, match="fetch_bytes_per_s=0 brings nothing"):
        LocalConfig(capacity=1, fetch_bytes_per_s=0)


def test_a_queue_is_demand_from_the_moment_its_requests_come():
    planner = Turning("a", "b")
    config = replace(turning(planner), instance=replace(turning(planner).instance, max_num_seqs=1))
    plan = asked(*((1.0, "a", 40) for _ in range(5)), (35.0, "b", 1), prompt_tokens=10)
    simulate(config, plan)
    first = planner.told[1][0]["a"]
    assert first > 5 * (10 + 40), "two of five requests are done, and answers were expected to be longer"
    assert sum(tokens.get("a", 0) for tokens, _ in planner.told) == 5 * (10 + 40)
