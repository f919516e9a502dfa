# SPDX-License-Identifier: Apache-2.0
"""The scheduler starts requests of several tenants by what each was given."""

from __future__ import annotations

import random

import pytest

from .parts import Parts


def test_who_asks_for_ten_times_as_much_gets_its_half():
    parts = Parts(num_pages=200, max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(100):
        parts.add(f"greedy{number}", range(8), num_answer=4, tenant="greedy")
    for number in range(10):
        parts.add(f"modest{number}", range(100, 108), num_answer=4, tenant="modest")
    started: dict[str, int] = {}
    for step in range(60):
        for name in parts.step():
            started.setdefault(name, step)
        if all(f"modest{number}" in started for number in range(10)):
            break
    greedy = sum(name.startswith("greedy") for name in started)
    assert 9 <= greedy <= 14
    counters = parts.scheduler.tenants.counter.counters
    assert abs(counters["greedy"] - counters["modest"]) <= 2 * 4 * 4 + 8 + 64


def test_requests_that_come_together_after_a_while_start_before_anothers_however_short_steps_are():
    parts = Parts(num_pages=200, max_num_seqs=4, max_num_batched_tokens=8)
    for number in range(100):
        parts.add(f"greedy{number}", range(8), num_answer=4, tenant="greedy")
    for _ in range(40):
        parts.step()
    waited = set(parts.names()[2])
    for number in range(6):
        parts.add(f"modest{number}", range(100, 108), num_answer=4, tenant="modest")
    started: list[str] = []
    while "modest5" not in started:
        started += parts.step()
    assert len(waited & set(started)) <= 1, "one for a slot beyond modest's share"


def test_shares_weigh():
    parts = Parts(num_pages=200, max_num_seqs=2, max_num_batched_tokens=64)
    randomness = random.Random(1)
    for number in range(90):
        for tenant, share in (("one", 1.0), ("two", 2.0)):
            prompt = range(start := randomness.randrange(10**6), start + 8)
            parts.add(f"{tenant}{number}", prompt, num_answer=4, tenant=tenant, share=share)
    names: set[str] = set()
    for _ in range(200):
        names |= set(parts.step())
    num = {tenant: sum(name.startswith(tenant) for name in names) for tenant in ("one", "two")}
    assert num["two"] / num["one"] == pytest.approx(2, rel=0.1)


def test_a_prompt_that_was_found_in_the_cache_costs_nothing():
    parts = Parts(num_pages=50)
    parts.add("first", range(9), num_answer=1, tenant="a")
    parts.step()
    parts.add("again", range(9), num_answer=1, tenant="b")
    parts.step()
    counters = parts.scheduler.tenants.counter.counters
    assert counters["a"] == 9 + 2
    assert counters["b"] == 1 + 2, "one token of the prompt, and one generated"


def test_a_preempted_request_goes_first_and_is_not_charged_again():
    parts = Parts(num_pages=6, max_num_seqs=2)
    parts.add("old", range(8), num_answer=12, tenant="a")
    parts.add("young", range(50, 58), num_answer=12, tenant="b")
    parts.add("other", range(80, 84), num_answer=2, tenant="c")
    while not parts.scheduler.num_preemptions:
        parts.step()
    charged = parts.scheduler.tenants.counter.counters["b"]
    assert parts.names()[2][0] == "young"
    while "young" in parts.names()[2]:
        assert "other" not in parts.step()
    assert parts.scheduler.tenants.counter.counters["b"] <= charged + 2


def test_priority_orders_a_tenants_own():
    parts = Parts(max_num_seqs=1)
    for name, priority in (("low", 5), ("usual", 0), ("urgent", -1)):
        parts.add(name, range(4), num_answer=1, priority=priority)
    assert [next(iter(parts.step())) for _ in range(3)] == ["urgent", "usual", "low"]


def test_slots_that_a_tenant_has_beyond_its_share_are_returned_at_once():
    parts = Parts(num_pages=200, max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(6):
        parts.add(f"greedy{number}", range(100 * number, 100 * number + 8), num_answer=50, tenant="greedy")
    parts.step()
    for number in range(3):
        parts.add(
            f"modest{number}", range(1000 + 10 * number, 1008 + 10 * number), num_answer=50, tenant="modest"
        )
    for _ in range(6):
        computed = set(parts.step())
    assert computed == {"greedy0", "greedy1", "modest0", "modest1"}, "half for each, and no more"
    assert parts.scheduler.num_preemptions == 2
    assert parts.names()[2][:2] == ["greedy2", "greedy3"]
    for name in ("modest0", "modest1", "modest2"):
        known = (*parts.scheduler.running, *parts.scheduler.waiting)
        parts.scheduler.finish(next(one for one in known if parts._names[one] == name))
    assert {"greedy0", "greedy1", "greedy2", "greedy3"} == set(parts.step()), "they go on before new ones"
    assert not any(one.gave_way for one in parts.scheduler.running)


def test_one_tenant_preempts_nobody():
    parts = Parts(num_pages=200, max_num_seqs=2)
    for number in range(6):
        parts.add(f"r{number}", range(10 * number, 10 * number + 8), num_answer=20)
    for _ in range(30):
        parts.step()
    assert parts.scheduler.num_preemptions == 0


def test_nobody_gives_way_to_who_waits_for_an_adapters_place():
    parts = Parts({"a": 2, "b": 2}, num_pages=200, max_num_seqs=2, max_adapters=1)
    for number in range(4):
        parts.add(f"a{number}", range(10 * number, 10 * number + 8), "a", num_answer=30, tenant="a")
    parts.step()
    parts.add("b", range(8), "b", num_answer=2, tenant="b")
    for _ in range(10):
        parts.step()
    assert parts.scheduler.num_preemptions == 1, "then it was known that a slot is not what lacks"
    for _ in range(100):
        parts.step()
    assert not parts.names()[2]
    assert parts.scheduler.num_preemptions <= 5


def test_as_many_give_way_as_lately_made_room():
    """Of four requests that wait, one adapter at a time finds a place, while others' requests end."""
    adapters = {"base": 2, "b0": 2, "b1": 2, "b2": 2, "b3": 2}
    parts = Parts(adapters, num_pages=400, max_num_seqs=8, max_num_batched_tokens=64, max_adapters=2)
    for number in range(60):
        prompt = range(10 * number, 10 * number + 8)
        parts.add(f"a{number}", prompt, "base", num_answer=8 + number % 8, tenant="a")
    parts.step()
    for number in range(4):
        prompt = range(1000 + 10 * number, 1008 + 10 * number)
        parts.add(f"b{number}", prompt, f"b{number}", num_answer=40, tenant="b")
    started = {name for _ in range(60) for name in parts.step()}
    num_ended = sum(name.startswith("a") for name in started) - 7
    assert {"b0", "b1"} <= started
    assert num_ended > 20
    assert 4 < parts.scheduler.num_preemptions <= 4 + num_ended, "four at first, then one at a time"


def test_the_first_to_start_is_the_first_in_line():
    """If it can never start, the others' requests aren't refused in its place."""
    parts = Parts()
    parts.add("usual", range(4))
    urgent = parts.add("urgent", range(4), priority=-1)
    assert parts.scheduler.oldest is urgent
