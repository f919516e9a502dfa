# SPDX-License-Identifier: Apache-2.0
"""The corrected admissibility rate against simulation, exact chains and its own properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.provision.slot_queue import simulate_admission
from moe_lora.provision.admission.admitted import smallest_capacity_of
from moe_lora.provision.admission.corrected import corrected_admissibility_rate, corrected_wait
from moe_lora.workload.popularity import popularity
from tests.grids import diagonal, with_quick

GOAL = 0.02
FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)


def zipf(num_adapters: int, s: float) -> np.ndarray:
    return np.array(popularity.zipf([str(index) for index in range(num_adapters)], s).probabilities)


def two_level(num_adapters: int, num_hot: int, hot_mass: float) -> np.ndarray:
    probabilities = np.full(num_adapters, (1 - hot_mass) / (num_adapters - num_hot))
    probabilities[:num_hot] = hot_mass / num_hot
    return probabilities


def dirichlet(num_adapters: int, concentration: float) -> np.ndarray:
    return np.random.default_rng(11).dirichlet(np.full(num_adapters, concentration))


SHAPES = {
    **{f"zipf {s}": lambda n, s=s: zipf(n, s) for s in (0.6, 1.0, 1.2, 1.5)},
    **{f"dirichlet {a}": lambda n, a=a: dirichlet(n, a) for a in (0.1, 0.3, 1.0, 5.0)},
    "two-level": lambda n: two_level(n, n // 10, 0.9),
    "hot half": lambda n: two_level(n, 1, 0.5),
    "hot 90%": lambda n: two_level(n, 1, 0.9),
}


def assert_near_simulation(probabilities: np.ndarray, global_batch: float, factor: float, num_arrivals: int):
    num_active = -np.expm1(-global_batch * probabilities).sum()
    capacity = min(max(1, round(factor * num_active)), len(probabilities))
    simulated = simulate_admission(probabilities, global_batch, capacity, num_arrivals=num_arrivals, seed=1)
    corrected = corrected_admissibility_rate(probabilities, global_batch, capacity)
    miss = abs(corrected - simulated.immediate_admissibility_rate)
    assert miss <= GOAL + 3 * simulated.standard_error, (capacity, corrected, simulated)


LOADS = [
    (zipf(64, 1.2), 16.0),
    (zipf(512, 0.6), 128.0),
    (two_level(64, 6, 0.9), 16.0),
    (two_level(64, 1, 0.9), 64.0),
    (dirichlet(512, 0.3), 512.0),
]


@pytest.mark.parametrize(("load", "factor"), diagonal(LOADS, FACTORS))
def test_agrees_with_simulation(load: tuple[np.ndarray, float], factor: float) -> None:
    assert_near_simulation(*load, factor, num_arrivals=100_000)


@pytest.mark.slow
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("per_adapter", [0.25, 1.0])
@pytest.mark.parametrize("num_adapters", [64, 512, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_simulation_on_the_whole_grid(shape, num_adapters, per_adapter, factor) -> None:
    global_batch = per_adapter * num_adapters
    num_arrivals = max(400_000, int(200 * global_batch))
    assert_near_simulation(SHAPES[shape](num_adapters), global_batch, factor, num_arrivals)


@pytest.mark.parametrize("num_adapters", [2, 7])
def test_light_load_turns_away_what_meets_a_full_cache(num_adapters: int) -> None:
    """One slot: to first order, the probability that another adapter's request is in service."""
    load = 1e-4
    rate = corrected_admissibility_rate(np.full(num_adapters, 1 / num_adapters), load, 1)
    assert 1 - rate == pytest.approx(load * (1 - 1 / num_adapters), rel=1e-3)


@pytest.mark.parametrize("capacity", [1, 3, 9, 19])
def test_equally_popular_permanent_adapters_share_the_slots(capacity: int) -> None:
    """With 1000 requests each an adapter never lets go of its slot: capacity / N of the requests start."""
    rate = corrected_admissibility_rate(np.full(20, 0.05), 20_000.0, capacity)
    assert rate == pytest.approx(capacity / 20, abs=1e-6)


def test_below_the_cliff_waiting_costs_what_the_simulation_says() -> None:
    """512 adapters, Zipf 1.2, global batch 256: 0.737 and 0.966 in 10^7 simulated arrivals."""
    assert corrected_admissibility_rate(zipf(512, 1.2), 256.0, 71) == pytest.approx(0.737, abs=0.003)
    assert corrected_admissibility_rate(zipf(512, 1.2), 256.0, 92) == pytest.approx(0.966, abs=0.003)


popularities = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12).filter(lambda w: sum(w) > 1e-3)
batches = st.floats(-2.0, 3.0).map(lambda exponent: 10.0**exponent)


@settings(max_examples=30, deadline=None)
@given(popularities, batches)
def test_lies_in_the_unit_interval_rises_with_capacity_and_ends_at_one(weights, global_batch) -> None:
    probabilities = np.array(weights) / sum(weights)
    num_used = int((probabilities > 0).sum())
    rates = [
        corrected_admissibility_rate(probabilities, global_batch, capacity)
        for capacity in range(1, len(weights) + 1)
    ]
    assert all(0 <= rate <= 1 for rate in rates)
    assert all(rate == 1.0 for rate in rates[num_used - 1 :])
    assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(rates))


@settings(max_examples=30, deadline=None)
@given(st.permutations(list(zipf(9, 1.3))), st.integers(1, 9), batches)
def test_order_of_the_adapters_does_not_matter(shuffled, capacity, global_batch) -> None:
    ordered = corrected_admissibility_rate(zipf(9, 1.3), global_batch, capacity)
    assert corrected_admissibility_rate(shuffled, global_batch, capacity) == pytest.approx(ordered, abs=1e-9)


def test_unused_adapters_change_nothing() -> None:
    used = zipf(20, 1.0)
    with_unused = np.concatenate([used, np.zeros(30)])
    rate = corrected_admissibility_rate(used, 10.0, 5)
    assert corrected_admissibility_rate(with_unused, 10.0, 5) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("capacity", with_quick(range(2, 60, 6), range(2, 60, 12)))
def test_merging_near_rates_and_a_coarse_grid_change_less_than_a_tenth_of_a_point(
    monkeypatch, capacity: int
) -> None:
    probabilities = zipf(150, 0.8)
    merged = corrected_admissibility_rate(probabilities, 60.0, capacity)
    monkeypatch.setattr("moe_lora.provision.admission.corrected.MERGE_WIDTH", 1e-9)
    monkeypatch.setattr("moe_lora.provision.admission.corrected.SMALL_RATE", 0.0)
    monkeypatch.setattr("moe_lora.provision.admission.corrected.GRID_RATIO", 1.02)
    assert corrected_admissibility_rate(probabilities, 60.0, capacity) == pytest.approx(merged, abs=1e-3)


def test_rises_with_capacity_over_a_large_cache() -> None:
    rates = [corrected_admissibility_rate(zipf(512, 1.0), 128.0, capacity) for capacity in range(1, 513, 60)]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize("global_batch", [1e-300, 1e-9, 1.0, 1e9, 1e300])
@pytest.mark.parametrize("probabilities", [[1.0], [1.0, 0.0], [1.0, 1e-300], [0.9, 0.1 - 1e-12, 1e-12]])
@pytest.mark.filterwarnings("error")
def test_extremes_give_a_rate(probabilities: list[float], global_batch: float) -> None:
    rate = corrected_admissibility_rate(probabilities, global_batch, 1)
    assert 0 <= rate <= 1
    if len([p for p in probabilities if p > 0]) == 1:
        assert rate == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"popularity": []}, "one probability per adapter"),
        ({"popularity": [[0.5, 0.5]]}, "one probability per adapter"),
        ({"popularity": [0.5, 0.6]}, r"sums to 1\.1"),
        ({"popularity": [1.5, -0.5]}, r"popularity\[1\]=-0\.5"),
        ({"popularity": [float("inf"), 0.5]}, r"popularity\[0\]=inf"),
        ({"global_batch": -1.0}, r"global_batch=-1\.0"),
        ({"global_batch": float("nan")}, "global_batch=nan"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": True}, "capacity=True"),
    ],
)
def test_bad_input_is_refused_by_name(change, message) -> None:
    good = {"popularity": [0.5, 0.5], "global_batch": 1.0, "capacity": 1}
    with pytest.raises(ValueError, match=message):
        corrected_admissibility_rate(**{**good, **change})


@pytest.mark.parametrize(("num_adapters", "batch", "capacity"), [(64, 64, 20), (64, 64, 15), (128, 100, 40)])
def test_wait_of_those_that_wait_agrees_with_simulation(num_adapters: int, batch: int, capacity: int) -> None:
    popularity = zipf(num_adapters, 1.2)
    found = simulate_admission(popularity, batch, capacity, num_arrivals=100_000, seed=1)
    waited = found.mean_wait / (1 - found.immediate_admissibility_rate)
    assert corrected_wait(popularity, batch, capacity) == pytest.approx(waited, rel=0.1)


def test_nobody_waits_where_all_fit() -> None:
    assert corrected_wait(zipf(8, 1.2), 100.0, 8) == 0.0


def test_rate_is_one_only_where_every_adapter_has_a_slot() -> None:
    popularity = zipf(512, 1.2)
    assert corrected_admissibility_rate(popularity, 189.0, 400) < 1.0
    assert smallest_capacity_of("corrected", popularity, 189.0, 1.0) == 512
