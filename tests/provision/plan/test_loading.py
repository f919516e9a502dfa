# SPDX-License-Identifier: Apache-2.0
"""Loads of adapters: misses against a simulated LRU cache, the queue against the simulator."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.core.partition import Layout
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.memory import STEPS_TO_FIRST_TOKEN, LoadQueue, miss_share
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import InstanceConfig, SimLoraServerConfig, SystemConfig
from moe_lora.workload.popularity.popularity import zipf
from moe_lora.workload.replay_plan import PlannedRequest
from tests.grids import diagonal

from .plans import inputs

LAYERS, STEP_S = 32, 0.025


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


def shares(num_adapters: int, s: float) -> np.ndarray:
    return np.array(zipf([str(i) for i in range(num_adapters)], s).probabilities)


def queue_at(busy: float, load_s: float) -> LoadQueue:
    """Every request loads."""
    return LoadQueue(loads_per_s=busy / load_s, load_s=load_s, misses=1.0)


def simulated(queue: LoadQueue, num_instances: int) -> tuple[float, float]:
    """Mean TPOT and P95 TTFT of requests with an adapter each; a step alone takes STEP_S."""
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / queue.loads_per_s, 3000)).tolist()
    requests = [PlannedRequest(i, arrival_s, str(i), 10, 30) for i, arrival_s in enumerate(arrivals)]
    config = SystemConfig(
        num_instances=num_instances,
        instance=InstanceConfig(
            profile=StepProfile(attention=StageTime(fixed_s=STEP_S / LAYERS)),
            num_layers=LAYERS,
            max_num_seqs=10_000,
        ),
        adapters=SimLoraServerConfig(capacity=len(requests), load_bytes_per_s=1 / queue.load_s),
        adapter_bytes=1.0,
    )
    found = simulate(config, requests).summary(arrivals[-1] / 10)
    return found["mean_tpot_s"], found["p95_ttft_s"]


@pytest.mark.parametrize(("s", "slots"), [(1.2, 29), (1.2, 120), (0.6, 64), (0.0, 100)])
def test_misses_are_those_of_an_lru_cache(s: float, slots: int) -> None:
    probabilities = shares(256, s)
    assert miss_share(probabilities, slots) == pytest.approx(
        simulated_misses(probabilities, slots, 40_000), rel=0.03
    )


def test_nothing_is_loaded_where_every_adapter_has_a_slot() -> None:
    assert miss_share(np.array([0.5, 0.5, 0.0]), 2) == 0.0
    queue = Cluster(inputs(probabilities=np.array([0.5, 0.5]))).load_queue(Layout(), 100.0)
    assert queue.step_s(STEP_S, 2, LAYERS) == STEP_S
    assert queue.p95_ttft_s(STEP_S, 2) == STEPS_TO_FIRST_TOKEN * STEP_S


def test_more_slots_need_fewer_loads() -> None:
    found = [miss_share(shares(64, 1.0), slots) for slots in range(1, 65)]
    assert found == sorted(found, reverse=True)
    assert found[0] < 1.0


def test_requests_for_the_base_model_load_nothing() -> None:
    cluster = Cluster(inputs(probabilities=shares(64, 1.0), adapter_share=0.25))
    misses = miss_share(shares(64, 1.0), cluster.slots(Layout()))
    assert cluster.load_queue(Layout(), 40.0).loads_per_s == pytest.approx(10 * misses)
    assert misses > 0


def test_backlog_decays_by_lundbergs_exponent() -> None:
    queue = queue_at(0.5, 0.02)
    assert queue.loads_per_s * math.expm1(queue.decay_per_s * 0.02) == pytest.approx(queue.decay_per_s)
    assert queue.wait_s == pytest.approx(0.5 * 0.02 / (2 * 0.5))


@pytest.mark.parametrize(
    ("load", "num_instances"), diagonal([(0.5, 0.01), (0.5, 0.02), (0.7, 0.02), (0.8, 0.01)], [1, 2, 6])
)
def test_steps_and_first_tokens_are_near_those_of_the_simulator(
    load: tuple[float, float], num_instances: int
) -> None:
    queue = queue_at(*load)
    tpot_s, ttft_s = simulated(queue, num_instances)
    step_s = queue.step_s(STEP_S, num_instances, LAYERS)
    assert step_s == pytest.approx(tpot_s, rel=0.12)
    assert queue.p95_ttft_s(step_s, num_instances) == pytest.approx(ttft_s, rel=0.3)


def test_loads_beyond_the_links_have_no_finite_step() -> None:
    queue = queue_at(1.0, 0.02)
    assert queue.step_s(STEP_S, 1, LAYERS) == math.inf
    assert queue.p95_ttft_s(math.inf, 1) == math.inf
    assert queue.wait_s == math.inf
