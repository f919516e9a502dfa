# SPDX-License-Identifier: Apache-2.0
"""Two queues with rules against starvation, an instance's and the LoRA Server's: nobody waits for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.core.errors import CapacityError
from moe_lora.core.request import BACKGROUND
from tests.virtual_clock import VirtualClock

from .leased_parts import LeasedParts, TableServer

TICK_S = 0.1


def test_request_behind_a_starving_one_uses_the_lease_that_the_starving_one_waits_for():
    """The lease goes back when its last running request ends though another waits: the table's queue has the
    second adapter first then, the instance's queue the first one.
    """
    clock = VirtualClock()
    server = TableServer(clock, capacity=1, starvation_s=1.0)
    parts = LeasedParts(server, clock, "i", max_num_seqs=1, starvation_s=1.0)
    first, second = parts.adapters(0, 0)
    ran = parts.add("ran", range(3), first)
    parts.add("starving", range(3), first)
    parts.add("behind", range(3), second)
    assert parts.step() == {}
    parts.client.hand_on()
    assert set(parts.step()) == {"ran"}
    clock.advance(2.0)
    parts.scheduler.finish(ran)
    parts.client.hand_on()
    assert set(parts.step()) == {"behind"}
    parts.scheduler.finish(parts.scheduler.running[0])
    parts.step()
    parts.client.hand_on()
    assert set(parts.step()) == {"starving"}


def test_a_lease_is_asked_for_in_the_name_of_the_tenant_whose_request_needs_it():
    """So of two places the one that another tenant's idle adapter has stays its own."""
    clock = VirtualClock()
    server = TableServer(clock, capacity=2, starvation_s=1.0)
    parts = LeasedParts(server, clock, "i")
    modest, *greedy = parts.adapters(0, 0, 0)
    parts.add("modest", range(3), modest, tenant="acme")
    parts.step()
    parts.client.hand_on()
    parts.step()
    parts.scheduler.finish(parts.scheduler.running[0])
    for number, adapter in enumerate(greedy):
        parts.add(f"greedy {number}", range(3), adapter, tenant="globex")
    parts.step()
    parts.client.hand_on()
    assert set(parts.step()) == {"greedy 0"}
    assert {one.adapter_id for one in server.table.residents()} == {
        adapter.packed.content_hash for adapter in (modest, greedy[0])
    }


def test_parked_background_requests_neither_hold_nor_await_leases():
    """One background request runs, another awaits a lease, as another request arrives."""
    clock = VirtualClock()
    server = TableServer(clock, capacity=1, starvation_s=1.0)
    parts = LeasedParts(server, clock, "i")
    first, second, other = parts.adapters(0, 0, 0)
    for name, adapter in (("back 1", first), ("back 2", second)):
        parts.add(name, range(3), adapter, priority=BACKGROUND)
    parts.step()
    parts.client.hand_on()
    assert set(parts.step()) == {"back 1"}
    now = parts.add("now", range(3), other)
    parts.step()
    parts.client.hand_on()
    assert (server.table.stats().num_leases, server.table.stats().num_waiting) == (1, 0)
    assert set(parts.step()) == {"now"}
    assert [one.num_waiting for one in (first, second)] == [1, 1], "versions stay"
    parts.scheduler.finish(now)
    for name in ("back 1", "back 2"):
        parts.step()
        parts.client.hand_on()
        assert set(parts.step()) == {name}
        parts.scheduler.finish(parts.scheduler.running[0])
    parts.client.hand_on()
    assert (server.table.stats().num_leases, server.table.stats().num_waiting) == (0, 0)


def test_an_aborted_request_of_a_parked_adapter_leaves_no_lease_behind():
    """Its adapter's background request is parked, and the adapter of a third request waits for the place."""
    clock = VirtualClock()
    server = TableServer(clock, capacity=1, starvation_s=1.0)
    parts = LeasedParts(server, clock, "i")
    parked, running, third = parts.adapters(0, 0, 0)

    def step() -> set[str]:
        clock.advance(0.5)
        plan = set(parts.step())
        parts.client.hand_on()
        return plan

    parts.add("back", range(3), parked, priority=BACKGROUND)
    step()
    assert step() == {"back"}
    first = parts.add("first", range(3), running)
    step()
    assert step() == {"first"}
    aborted, other = (parts.add(name, range(3), parked) for name in ("aborted", "other"))
    step()
    parts.scheduler.finish(other)
    parts.client.hand_on()
    assert server.table.stats().num_waiting == 1, "another request waits for the lease"
    parts.scheduler.finish(aborted)
    parts.client.hand_on()
    assert server.table.stats().num_waiting == 0
    parts.add("third", range(3), third)
    step()
    parts.scheduler.finish(first)
    for _ in range(3):
        found = step()
    assert found == {"third"}


def test_starving_request_gets_the_lease_though_requests_for_the_one_in_use_keep_coming():
    clock = VirtualClock()
    server = TableServer(clock, capacity=1, starvation_s=1.0)
    parts = LeasedParts(server, clock, "i", starvation_s=1.0)
    hot, cold = parts.adapters(0, 0)
    parts.add("hot 1", range(3), hot)
    parts.step()
    parts.client.hand_on()
    assert set(parts.step()) == {"hot 1"}
    parts.add("cold", range(3), cold)
    parts.add("hot 2", range(3), hot)
    assert set(parts.step()) == {"hot 1", "hot 2"}
    clock.advance(2.0)
    parts.add("hot 3", range(3), hot)
    for expected in ({"hot 1", "hot 2"}, {"hot 2"}, set()):
        assert set(parts.step()) == expected
        if parts.scheduler.running:
            parts.scheduler.finish(parts.scheduler.running[0])
    parts.client.hand_on()
    assert set(parts.step()) == {"cold"}


def test_adapter_that_the_lora_server_computes_all_of_cannot_be_pinned_and_takes_no_slot():
    clock = VirtualClock()
    parts = LeasedParts(TableServer(clock, 1, 1.0), clock, "i", max_loras=2)
    remote, local = parts.adapters(0, 1)
    with pytest.raises(CapacityError, match="the LoRA Server computes all of it"):
        parts.manager.pin(remote)
    assert not remote.pinned
    parts.manager.pin(local)
    assert parts.manager.info(local).residency == "device"


@dataclass(frozen=True)
class Mix:
    """Requests as (tick, instance, adapter or None, prompt tokens, answer tokens), and what serves them."""

    seed: int
    requests: list[tuple[int, int, int | None, int, int]]
    capacity: int
    table_starvation_s: float
    pages: tuple[int, ...]
    limits: list[dict]


LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 3),
        "max_num_batched_tokens": st.sampled_from([4, 16]),
        "max_loras": st.integers(1, 3),
        "num_pages": st.sampled_from([11, 15]),
        "room_pages": st.just(4),
        "starvation_s": st.sampled_from([0.0, 0.5, 100.0]),
        "prompt": st.booleans(),
        "shortest_first": st.booleans(),
    }
)
REQUEST = st.tuples(
    st.integers(0, 15),
    st.integers(0, 1),
    st.sampled_from([None, 0, 0, 1, 1, 2, 3]),
    st.integers(1, 16),
    st.integers(1, 10),
)


def by_tick(rows: list) -> list:
    return sorted(rows, key=lambda row: row[0])


MIXES = st.builds(
    Mix,
    seed=st.integers(0, 2**32),
    requests=st.lists(REQUEST, min_size=4, max_size=30).map(by_tick),
    capacity=st.integers(1, 3),
    table_starvation_s=st.sampled_from([0.0, 0.5, 100.0]),
    pages=st.tuples(*[st.integers(0, 3)] * 4),
    limits=st.lists(LIMITS, min_size=2, max_size=2),
)


@settings(max_examples=40, deadline=None)
@given(mix=MIXES)
def test_every_request_of_every_instance_ends_within_a_bounded_number_of_steps(mix):
    assert_all_end(mix)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(mix=MIXES)
def test_every_request_of_many_mixes_ends(mix):
    assert_all_end(mix)


def assert_all_end(mix: Mix) -> None:
    rng, clock = random.Random(mix.seed), VirtualClock()
    server = TableServer(clock, mix.capacity, mix.table_starvation_s)
    instances = [
        LeasedParts(server, clock, str(number), **limits) for number, limits in enumerate(mix.limits)
    ]
    adapters = [parts.adapters(*mix.pages) for parts in instances]
    answers = {str(number): row[4] for number, row in enumerate(mix.requests)}
    to_come = list(enumerate(mix.requests))
    num_left = len(to_come)
    work = sum(prompt + answer for *_, prompt, answer in mix.requests)
    for tick in range(mix.requests[-1][0] + 3 * work + 20 * num_left):
        while to_come and to_come[0][1][0] <= tick:
            number, (_, instance, adapter, prompt, _) = to_come.pop(0)
            version = None if adapter is None else adapters[instance][adapter]
            instances[instance].add(str(number), range(100 * number, 100 * number + prompt), version)
        clock.advance(TICK_S)
        for parts in rng.sample(instances, rng.randint(0, 2)):
            parts.client.hand_on()
        for parts in rng.sample(instances, 2):
            parts.step()
            parts.mover.work(rng.randint(0, 2))
            num_left -= len(parts.finish_after(answers))
        assert server.table.stats().num_resident <= mix.capacity
        if not num_left:
            break
    assert not num_left
    for parts in instances:
        parts.client.hand_on()
    assert (server.table.stats().num_leases, server.table.stats().num_waiting) == (0, 0)
