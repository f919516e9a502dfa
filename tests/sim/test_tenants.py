# SPDX-License-Identifier: Apache-2.0
"""A cluster's instance, simulated: a tenant that asks for ten times its share, beside one that does not."""

from __future__ import annotations

import numpy as np
import pytest

from bench.sim.cached_runs import simulate_cached
from moe_lora.policies.caching.caching import lru
from moe_lora.sim.instance import CachedConfig
from moe_lora.workload.replay_plan import TurnRequest

from .test_cached_instance import EVEN_STEPS

DURATION_S, STEP_S, SEQS, ANSWER = 40.0, 0.1, 16, 20
CAPACITY_PER_S = SEQS / (ANSWER * STEP_S)
"""Requests that the instance can serve."""


def arrivals(tenant: str, per_s: float, seed: int) -> list[tuple[float, str]]:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / per_s, int(2 * per_s * DURATION_S)))
    return [(float(at_s), tenant) for at_s in times if at_s < DURATION_S]


def ttft_p95(asked: list[tuple[float, str]], *, tenants: bool) -> float:
    """Of the modest tenant, in seconds.  tenants: the instance can tell them apart."""
    random = np.random.default_rng(0)
    requests = [
        TurnRequest(
            index,
            at_s,
            f"a{int(random.integers(4))}",
            tuple(random.integers(10**6, size=30).tolist()),
            (7,) * ANSWER,
            tenant=tenant if tenants else "",
        )
        for index, (at_s, tenant) in enumerate(sorted(asked))
    ]
    names = {index: tenant for index, (_, tenant) in enumerate(sorted(asked))}
    config = CachedConfig(
        time=EVEN_STEPS,
        adapter_pages={f"a{number}": 4 for number in range(4)},
        num_device_pages=400,
        num_host_pages=100,
        link_bytes_per_s=1e6,
        block_size=10,
        max_num_seqs=SEQS,
        max_num_batched_tokens=512,
    )
    done = simulate_cached(config, lru(), requests).done
    return float(np.percentile([one.ttft_s for one in done if names[one.planned.index] == "modest"], 95))


def test_a_tenant_at_ten_times_its_share_hardly_delays_another():
    """Than beside one that asks for its share."""
    share_per_s = CAPACITY_PER_S / 2
    modest = arrivals("modest", 0.5 * share_per_s, 1)
    at_share = ttft_p95([*modest, *arrivals("greedy", share_per_s, 2)], tenants=True)
    at_ten = ttft_p95([*modest, *arrivals("greedy", 10 * share_per_s, 2)], tenants=True)
    untold = ttft_p95([*modest, *arrivals("greedy", 10 * share_per_s, 2)], tenants=False)
    assert untold > 50 * at_ten, (at_share, at_ten, untold)
    assert at_ten < 1.2 * at_share, (at_share, at_ten, untold)
    assert at_ten < 3 * STEP_S, "a slot is returned, not waited for"


def cold_share(*, tenants: bool) -> float:
    """Share of a tenant's requests for its 6 adapters that waited for them, beside a tenant that asks
    for another one of a thousand each time.  tenants: the instance can tell them apart.
    """
    modest = [(at_s, f"own{index % 6}", "modest") for index, at_s in enumerate(np.arange(0.5, 60, 0.5))]
    greedy = [(at_s, f"cold{index}", "greedy") for index, at_s in enumerate(np.arange(0.0, 60, 0.06))]
    asked = sorted([*modest, *greedy])
    requests = [
        TurnRequest(index, at_s, name, (index,) * 5, (7,) * 2, tenant=tenant if tenants else "")
        for index, (at_s, name, tenant) in enumerate(asked)
    ]
    config = CachedConfig(
        time=EVEN_STEPS,
        adapter_pages={name: 4 for _, name, _ in asked},
        num_device_pages=80,
        num_host_pages=0,
        link_bytes_per_s=1e5,
        block_size=10,
    )
    done = simulate_cached(config, lru(), requests).done
    own = [one for one in done if one.planned.adapter.startswith("own")]
    return float(np.mean([one.adapter_cold_s > 0 for one in own]))


@pytest.mark.slow
def test_a_thousand_cold_adapters_leave_another_tenants_on_the_device():
    assert cold_share(tenants=True) <= 6 / 119, "each is loaded once"
    assert cold_share(tenants=False) > 0.9
