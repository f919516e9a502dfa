"""Loads of adapters by Che's approximation, against a simulated LRU cache."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from moe_lora.provision.loading import loads_per_s
from moe_lora.workload.popularity import zipf


def simulated_misses(probabilities: np.ndarray, slots: int, num_requests: int) -> float:
    """Share of requests that an LRU cache of `slots` does not hold, from a warm start on."""
    rng = np.random.default_rng(0)
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    drawn = rng.choice(len(probabilities), size=2 * num_requests, p=probabilities).tolist()
    for number, adapter in enumerate(drawn):
        if adapter in cache:
            cache.move_to_end(adapter)
            continue
        misses += number >= num_requests
        cache[adapter] = None
        if len(cache) > slots:
            cache.popitem(last=False)
    return misses / num_requests


@pytest.mark.parametrize(("s", "slots"), [(1.2, 29), (1.2, 120), (0.6, 64), (0.0, 100)])
def test_loads_are_those_of_an_lru_cache(s: float, slots: int) -> None:
    probabilities = np.array(zipf([str(i) for i in range(256)], s).probabilities)
    expected = 60.0 * simulated_misses(probabilities, slots, 40_000)
    assert loads_per_s(probabilities, 60.0, slots) == pytest.approx(expected, rel=0.03)


def test_nothing_is_loaded_where_every_adapter_has_a_slot() -> None:
    assert loads_per_s(np.array([0.5, 0.5, 0.0]), 10.0, 2) == 0.0


def test_more_slots_need_fewer_loads() -> None:
    probabilities = np.array(zipf([str(i) for i in range(64)], 1.0).probabilities)
    found = [loads_per_s(probabilities, 5.0, slots) for slots in range(1, 65)]
    assert found == sorted(found, reverse=True)
    assert found[0] < 5.0
