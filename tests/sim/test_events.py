# SPDX-License-Identifier: Apache-2.0
"""The event queue."""

import math

import pytest

from moe_lora.sim.events import EventQueue


def test_events_of_one_moment_happen_in_the_order_asked_for():
    events, seen = EventQueue(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        events.at(time_s, lambda name=name: seen.append((events.now_s(), name)))
    events.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]


def test_an_event_may_ask_for_another_at_its_own_moment():
    events, seen = EventQueue(), []
    events.at(1.0, lambda: events.at(1.0, lambda: seen.append("later")))
    events.at(1.0, lambda: seen.append("first"))
    events.run()
    assert seen == ["first", "later"]


def test_run_stops_before_later_events_and_goes_on_from_there():
    events, seen = EventQueue(), []
    for time_s in (1.0, 2.0, 3.0):
        events.at(time_s, lambda: seen.append(events.now_s()))
    events.run(until_s=2.0)
    assert seen == [1.0, 2.0]
    events.run()
    assert seen == [1.0, 2.0, 3.0]
    assert events.num_events == 3


@pytest.mark.parametrize("time_s", [0.5, math.inf, math.nan])
def test_times_that_are_past_or_none_are_refused(time_s):
    events = EventQueue()
    events.at(1.0, lambda: None)
    events.run()
    with pytest.raises(ValueError, match="time_s"):
        events.at(time_s, lambda: None)
