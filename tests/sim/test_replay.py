"""A capacity checked by replay, and what it reports."""

import subprocess
import sys

import numpy as np
import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.sim.config import LocalConfig, LoraServerConfig, SystemConfig
from moe_lora.sim.replay import replay_capacity
from moe_lora.sim.result import SimResult
from moe_lora.sim.system import simulate
from tests.sim.systems import asked, coupled, instance, served, server


def requests_of(num_requests=1500):
    rng = np.random.default_rng(2)
    arrivals = np.cumsum(rng.exponential(0.05, num_requests))
    names = rng.integers(0, 25, num_requests)
    return asked(*[(float(t), f"adapter-{i}", 8) for t, i in zip(arrivals, names, strict=True)])


def test_replays_at_less_than_the_capacity_at_it_and_at_more():
    points = replay_capacity(served(server(99)), requests_of(), 10, spread=0.2)
    assert [point.capacity for point in points] == [8, 10, 12]
    assert all(point.kind == "simulated" and point.num_requests == 1500 for point in points)
    at_once = [point.admitted_at_once for point in points]
    assert at_once == sorted(at_once)
    assert at_once[0] < at_once[-1]


def test_slots_of_coupled_instances_are_replaced_alike():
    (one, two) = replay_capacity(coupled(5), requests_of(300), 1)
    assert (one.capacity, two.capacity) == (1, 2)
    assert one.p95_ttft_s > two.p95_ttft_s


def test_room_for_all_adapters_admits_all_at_once():
    points = replay_capacity(served(server(1)), requests_of(), 30, since_s=10.0)
    assert points[1].admitted_at_once == 1.0
    assert points[1].mean_tpot_s == pytest.approx(0.1)
    assert 0 < points[1].num_requests < 1500


def test_a_result_says_that_it_is_simulated_and_what_nothing_averages_to():
    result = simulate(coupled(1), asked((0.0, "a", 1)))
    assert result.summary() == {
        "kind": "simulated",
        "num_requests": 1,
        "admitted_at_once": 1.0,
        "waited_for_adapter": 0.0,
        "waited_for_room": 0.0,
        "mean_ttft_s": pytest.approx(0.1),
        "p50_ttft_s": pytest.approx(0.1),
        "p95_ttft_s": pytest.approx(0.1),
        "mean_tpot_s": None,
    }
    empty = SimResult(requests=[], num_events=0, num_steps=0, num_loads=0, end_s=0.0)
    assert empty.summary()["p95_ttft_s"] is None


def test_settings_that_make_no_system_are_refused_with_the_way_out():
    for make, words in (
        (lambda: LocalConfig(capacity=0), "capacity=0 must be 1 or more"),
        (lambda: LocalConfig(capacity=1, load_bytes_per_s=0.0), "load_bytes_per_s=0.0"),
        (lambda: LocalConfig(capacity=1, starvation_s=-1.0), "starvation_s=-1.0"),
        (lambda: LoraServerConfig(capacity=1, num_stages=0), "num_stages=0"),
        (lambda: instance(max_num_seqs=0), "max_num_seqs=0"),
        (lambda: instance(kv_tokens=float("nan")), "kv_tokens=nan"),
        (lambda: SystemConfig(num_instances=0, instance=instance(), adapters=server(1)), "num_instances=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()


def test_the_simulator_starts_without_torch():
    code = "import sys, moe_lora.sim.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
