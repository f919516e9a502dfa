# SPDX-License-Identifier: Apache-2.0
"""Simulation of a cache with too few slots: hand-worked steps, and facts known from queueing theory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.provision.slot_queue import SlotQueue, simulate_admission
from moe_lora.workload.popularity import popularity


def zipf(num_adapters: int, s: float) -> np.ndarray:
    return np.array(popularity.zipf([str(index) for index in range(num_adapters)], s).probabilities)


def test_waiting_requests_start_when_the_slot_frees() -> None:
    slots = SlotQueue(num_adapters=3, capacity=1)
    assert slots.arrive(0)
    assert slots.arrive(0)  # its adapter holds the slot
    assert [slots.arrive(adapter) for adapter in (1, 2, 1)] == [False, False, False]
    assert slots.arrive(0)  # passes those that wait
    assert (slots.num_active, slots.num_waiting, list(slots.queue)) == (1, 3, [1, 2])
    for _ in range(3):
        assert slots.in_service[0] == 0
        slots.finish(0)
    assert slots.in_service == [1, 1]  # the head's slot serves both requests of adapter 1, passing adapter 2
    assert (slots.num_active, slots.num_waiting, list(slots.queue)) == (1, 1, [2])
    assert slots.arrive(1)
    assert not slots.arrive(2)
    for _ in range(3):
        slots.finish(0)
    assert slots.in_service == [2, 2]
    slots.finish(1)
    slots.finish(0)
    assert (slots.num_active, slots.num_waiting, slots.in_service) == (0, 0, [])
    assert slots.arrive(1)  # the slot is free again


def test_an_adapter_queues_again_behind_those_that_came_before() -> None:
    slots = SlotQueue(num_adapters=3, capacity=1)
    slots.arrive(0)
    slots.arrive(1)
    slots.arrive(2)
    slots.finish(0)  # adapter 1 starts
    assert not slots.arrive(0)
    assert list(slots.queue) == [2, 0]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 10**6)), max_size=200),
)
def test_no_request_is_lost_and_no_slot_stays_free_while_one_waits(capacity, events) -> None:
    slots = SlotQueue(num_adapters=7, capacity=capacity)
    num_here = 0
    for arrives, adapter, pick in events:
        if arrives:
            slots.arrive(adapter)
            num_here += 1
        elif slots.in_service:
            slots.finish(pick % len(slots.in_service))
            num_here -= 1
        assert len(slots.in_service) + slots.num_waiting == num_here
        assert slots.num_active == len(set(slots.in_service)) <= capacity
        assert slots.num_active == capacity or not slots.num_waiting
        assert not set(slots.queue) & set(slots.in_service)


def test_a_slot_for_each_adapter_turns_nothing_away() -> None:
    result = simulate_admission(zipf(30, 1.0), 10.0, 30, num_arrivals=20_000, seed=1)
    assert result.immediate_admissibility_rate == 1.0
    assert result.mean_waiting == result.mean_wait == 0


def test_with_room_the_means_are_those_of_independent_queues() -> None:
    probabilities, global_batch = zipf(200, 1.2), 50.0
    result = simulate_admission(probabilities, global_batch, 200, num_arrivals=200_000, seed=2)
    assert result.mean_in_service == pytest.approx(global_batch, rel=0.02)
    assert result.mean_active == pytest.approx(np.sum(1 - np.exp(-global_batch * probabilities)), rel=0.01)


def test_one_adapter_with_one_slot_always_starts() -> None:
    result = simulate_admission([1.0], 3.0, 1, num_arrivals=1000, seed=3)
    assert result.immediate_admissibility_rate == 1.0
    assert result.standard_error == 0.0


def test_two_rare_adapters_with_one_slot_meet_as_seldom_as_expected() -> None:
    """At a small load, a request is turned away if the other adapter is in service: half of the load."""
    result = simulate_admission([0.5, 0.5], 0.02, 1, num_arrivals=400_000, seed=4)
    assert 1 - result.immediate_admissibility_rate == pytest.approx(0.01, rel=0.1)


def test_one_slot_and_two_adapters_agree_with_the_solved_markov_chain() -> None:
    """States: (slot free) or (requests in service of one, requests that wait of the other), truncated."""
    load = 0.5  # of each adapter
    states = [(0, 0)] + [(running, waiting) for running in range(1, 16) for waiting in range(16)]
    index = {state: number for number, state in enumerate(states)}
    flows = np.zeros((len(states), len(states)))

    def flow(state, to, rate):
        if to in index:
            flows[index[state], index[to]] += rate

    flow((0, 0), (1, 0), 2 * load)
    for running, waiting in states[1:]:
        flow((running, waiting), (running + 1, waiting), load)
        flow((running, waiting), (running, waiting + 1), load)
        flow((running, waiting), (running - 1, waiting) if running > 1 else (waiting, 0), running)
    generator = flows - np.diag(flows.sum(axis=1))
    equations = np.vstack([generator.T, np.ones(len(states))])
    stationary = np.linalg.lstsq(equations, np.append(np.zeros(len(states)), 1.0), rcond=None)[0]
    expected = stationary[0] + (1 - stationary[0]) / 2
    result = simulate_admission([0.5, 0.5], 2 * load, 1, num_arrivals=400_000, seed=5)
    assert result.immediate_admissibility_rate == pytest.approx(expected, abs=5 * result.standard_error)
    assert result.mean_active == pytest.approx(1 - stationary[0], abs=0.01)


def test_repeats_within_half_a_point() -> None:
    rates = [
        simulate_admission(
            zipf(512, 1.2), 256.0, 71, num_arrivals=100_000, seed=seed
        ).immediate_admissibility_rate
        for seed in range(4)
    ]
    assert max(rates) - min(rates) < 0.01
    assert np.mean(rates) == pytest.approx(0.737, abs=0.005)


def test_standard_error_covers_the_spread_of_seeds() -> None:
    results = [
        simulate_admission(zipf(64, 1.0), 16.0, 11, num_arrivals=40_000, seed=seed) for seed in range(12)
    ]
    spread = np.std([result.immediate_admissibility_rate for result in results], ddof=1)
    typical = np.mean([result.standard_error for result in results])
    assert 0.4 < spread / typical < 2.5


def test_same_seed_same_result() -> None:
    first, second = (
        simulate_admission(zipf(20, 1.0), 10.0, 5, num_arrivals=5000, seed=6, warm_up=1.0) for _ in range(2)
    )
    assert dataclasses.asdict(first) == dataclasses.asdict(second)


def test_requests_wait_no_less_with_fewer_slots() -> None:
    waits = [
        simulate_admission(zipf(64, 1.0), 32.0, capacity, num_arrivals=50_000, seed=7).mean_wait
        for capacity in (12, 18, 24, 40)
    ]
    assert waits == sorted(waits, reverse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"popularity": []}, "one probability per adapter"),
        ({"popularity": [0.5, 0.6]}, r"sums to 1\.1"),
        ({"popularity": [1.5, -0.5]}, r"popularity\[1\]=-0\.5"),
        ({"popularity": [1.0, float("nan")]}, r"popularity\[1\]=nan"),
        ({"global_batch": 0.0}, "global_batch=0"),
        ({"global_batch": float("inf")}, "global_batch=inf"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 1.5}, r"capacity=1\.5"),
        ({"num_arrivals": 19}, "num_arrivals=19"),
        ({"warm_up": -1.0}, r"warm_up=-1\.0"),
    ],
)
def test_bad_input_is_refused_by_name(change, message) -> None:
    good = {"popularity": [0.5, 0.5], "global_batch": 1.0, "capacity": 1, "num_arrivals": 100, "seed": 0}
    with pytest.raises(ValueError, match=message):
        simulate_admission(**{**good, **change})
