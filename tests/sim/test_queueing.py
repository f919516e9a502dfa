# SPDX-License-Identifier: Apache-2.0
"""Against queueing theory, and against the bare process of slots that the IAR is about."""

import numpy as np
import pytest

from bench.provision.slot_queue import simulate_admission
from moe_lora.provision.replayed.system import simulate
from moe_lora.workload.popularity.popularity import zipf
from moe_lora.workload.replay_plan import PlannedRequest
from tests.grids import with_quick

from .systems import asked, coupled, flat_profile, served, server

TOKEN_S = 0.002


@pytest.mark.parametrize("load", with_quick([0.3, 0.7, 0.85], [0.7]))
def test_one_request_at_a_time_waits_as_in_m_d_1(load):
    """Mean wait = load x service / (2 (1 - load))."""
    rng = np.random.default_rng(3)
    num_arrivals = 60_000 if load > 0.8 else 25_000
    arrivals = np.cumsum(rng.exponential(0.1 / load, num_arrivals))
    found = simulate(coupled(1, max_num_seqs=1), asked(*[(float(t), None, 1) for t in arrivals]))
    wait_s = float(np.mean(found.column("admitted_s") - found.column("arrival_s")))
    assert wait_s == pytest.approx(load * 0.1 / (2 * (1 - load)), rel=0.06)


def test_running_requests_are_poisson_without_limits():
    """M/G/inf: as many as the load on average, with a variance of the same."""
    rng = np.random.default_rng(4)
    arrivals = np.cumsum(rng.exponential(1 / 20.0, 30_000))
    lengths = np.ceil(rng.exponential(1.0, 30_000) / TOKEN_S)
    requests = asked(*[(float(t), None, int(n)) for t, n in zip(arrivals, lengths, strict=True)])
    found = simulate(coupled(1, profile=flat_profile(TOKEN_S), max_num_seqs=10**6), requests)
    starts, ends = (np.sort(found.column(name)) for name in ("admitted_s", "finish_s"))
    moments = np.linspace(arrivals[1000], arrivals[-1], 4000)
    running = np.searchsorted(starts, moments, "right") - np.searchsorted(ends, moments, "right")
    assert running.mean() == pytest.approx(20.0, rel=0.03)
    assert running.var() == pytest.approx(20.0, rel=0.12)


@pytest.mark.parametrize(
    ("num_instances", "capacity"),
    [
        (3, 26),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((1, 26), (1, 28), (1, 30), (3, 28), (3, 30))
        ),
    ],
)
def test_small_steps_and_no_other_limit_leave_the_process_of_slots(capacity, num_instances):
    rng = np.random.default_rng(5)
    num_requests, num_adapters, batch = 20_000, 64, 64.0
    arrivals = np.cumsum(rng.exponential(1 / batch, num_requests))
    services = rng.exponential(1.0, num_requests)
    popularity = zipf([f"adapter-{i}" for i in range(num_adapters)], 1.0)
    adapters = popularity.sample(num_requests, rng)
    requests = [
        PlannedRequest(i, float(arrivals[i]), adapters[i], 1, max(1, round(services[i] / TOKEN_S)))
        for i in range(num_requests)
    ]
    limits = {"profile": flat_profile(TOKEN_S), "max_num_seqs": 10**6}
    place = server(capacity, starvation_s=float("inf"))
    found = simulate(served(place, num_instances=num_instances, **limits), requests)
    expected = simulate_admission(popularity.probabilities, batch, capacity, num_arrivals=60_000, seed=1)
    at_once = found.column("at_once", since_s=20.0).mean()
    assert at_once == pytest.approx(expected.immediate_admissibility_rate, abs=0.02)
