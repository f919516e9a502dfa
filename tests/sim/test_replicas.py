# SPDX-License-Identifier: Apache-2.0
"""Several simulated instances: requests are routed, adapters preloaded, requests move, nothing is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.config.front_end import MigrationConfig
from moe_lora.core.errors import ConfigError
from moe_lora.policies.admission.host_start import HostStart
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.policies.migration.problem import MigrationPlan, MigrationProblem
from moe_lora.policies.migration.programs import plan_exact
from moe_lora.policies.routing.model_routing import CostModel, ShortestPendingTime
from moe_lora.policies.routing.routers import PhiRouting
from moe_lora.policies.routing.routing import RoundRobin
from moe_lora.sim.instance import CachedConfig
from moe_lora.sim.replicas import Replicas, ReplicasConfig, SimMigration
from moe_lora.timing.host_times import HostTimes, PartTime
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.replay_plan import TurnRequest

TIME = TransformerTime(
    num_params=1e6,
    num_layers=1,
    hidden_size=0,
    kv_token_bytes=1,
    flops_per_s=1e10,
    bytes_per_s=2e8,
)
"""A step: 10 ms; a prompt's token: 0.2 ms."""
INSTANCE = CachedConfig(
    time=TIME,
    adapter_pages={"a": 1, "b": 1},
    num_device_pages=60,
    num_host_pages=10,
    link_bytes_per_s=1e4,
    block_size=16,
    max_num_seqs=2,
)

GOLDEN = Path(__file__).parent / "golden_moves.json"
EAGER = MigrationConfig(migration="dlora", migration_interval_s=0.1, migration_queue_s=0.05)


def config(**changes) -> ReplicasConfig:
    common = {
        "num_replicas": 2,
        "instance": INSTANCE,
        "caching": lambda: make_caching_policy("lru", INSTANCE.costs()),
        "router": lambda: PhiRouting({"a": [(0, 1.0)], "b": [(1, 1.0)]}),
    }
    return ReplicasConfig(**common | changes)


def requests(adapters: str, gap_s: float = 0.0, num_tokens: int = 40) -> list[TurnRequest]:
    return [
        TurnRequest(i, i * gap_s, adapter, tuple(range(100 * i, 100 * i + 4)), (7,) * num_tokens)
        for i, adapter in enumerate(adapters)
    ]


def everything(replicas: Replicas) -> dict[int, tuple[int, ...]]:
    return {request.planned.index: tuple(request.tokens) for request in replicas.done}


def test_requests_go_where_the_router_says() -> None:
    found = Replicas(config(router=RoundRobin), requests("aaaa"))
    assert [instance.num_steps > 0 for instance in found.instances] == [True, True]
    alone = Replicas(config(), requests("aaaa"))
    assert [instance.num_steps > 0 for instance in alone.instances] == [True, False]
    assert found.events.now_s() <= alone.events.now_s()


def test_a_start_on_the_host_lets_a_request_leave_where_its_adapter_is() -> None:
    """A load takes 1 s, the first request 0.4 s; the worker is quicker than the device's 10 ms."""
    times = HostTimes(
        worker={"o": PartTime(per_token_s=1e-4)},
        device=PartTime(fixed_s=0.01),
        num_layers=1,
        load_fixed_s=0.0,
        load_bytes_per_s=16.0,
        bytes_per_rank=16.0,
        max_tokens=100,
        max_rank=1,
    )
    host = HostStart(times=times, num_workers=1, tokens_per_worker=100)
    instance = replace(INSTANCE, link_bytes_per_s=16.0, host=host)
    asked = [replace(one, arrival_s=5.0 + one.arrival_s) for one in requests("aa", gap_s=0.1)]
    rows, firsts = {}, {}
    for name, known in (("load", None), ("host", host)):
        cost = CostModel(steps=TIME.step_model(1.0, 0.0), adapter_load_s_per_rank=1.0, host=known)
        router = partial(ShortestPendingTime, cost, {"a": 1}, INSTANCE.max_num_seqs)
        found = Replicas(config(instance=instance, router=router, preloaded=[["a"], []]), asked)
        rows[name] = [one.num_host_tokens for one in found.instances]
        firsts[name] = {one.planned.index: one.first_token_s for one in found.done}
    assert rows == {"load": [0, 0], "host": [0, 4]}
    assert firsts["host"][1] == pytest.approx(5.1 + 0.01, abs=0.005)


def test_a_preloaded_adapter_costs_nobody_its_load() -> None:
    late = requests("b", gap_s=0.0)
    late = [TurnRequest(0, 5.0, "b", late[0].prompt, late[0].answer)]
    cold, warm = Replicas(config(), late), Replicas(config(preloaded=[["a"], ["b"]]), late)
    page_s = 20e-6 + 16 / 1e4
    assert cold.done[0].adapter_cold_s == pytest.approx(page_s)
    assert warm.done[0].adapter_cold_s == 0
    assert warm.instances[0].cache.counters.adapter_loads == 1, "a was loaded there, ahead of need"
    with pytest.raises(ConfigError, match="preloaded names 1 replicas"):
        config(preloaded=[["a"]])


def test_migration_moves_requests_that_wait_and_ends_sooner() -> None:
    crowd = requests("aaaaaaaa")
    stay = Replicas(config(), crowd)
    move = Replicas(config(migration=SimMigration(settings=EAGER, planner=plan_exact)), crowd)
    assert not stay.num_moves
    assert move.num_moves["waiting"] > 0
    assert everything(move) == everything(stay)
    assert move.done[-1].finish_s < 0.8 * stay.done[-1].finish_s
    assert move.instances[1].num_steps > 0


@given(
    st.text("ab", min_size=1, max_size=12),
    st.integers(0, 2**16),
    st.floats(0, 0.05),
    st.sampled_from([1.0, 1e3, 1e9]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_moves_everybody_gets_every_token_once(adapters, seed, gap_s, bytes_per_s) -> None:
    """A planner that throws requests about, running ones and waiting ones."""

    def plan(problem: MigrationProblem) -> MigrationPlan:
        moves = tuple(
            (request.request_id, request.replica, 1 - request.replica)
            for request in problem.requests
            if (request.request_id * 7919 + seed) % 3
        )
        return MigrationPlan(moves, (), 0.0, 0.0)

    eager = replace(
        EAGER, migration_interval_s=0.06, migration_queue_s=0.0, migration_bytes_per_s=bytes_per_s
    )
    thrown = SimMigration(settings=eager, planner=plan, check_s=0.06, plan_s=0.003)
    found = Replicas(config(migration=thrown, router=RoundRobin), requests(adapters, gap_s))
    assert sorted(everything(found)) == list(range(len(adapters)))
    assert all(len(tokens) == 44 for tokens in everything(found).values())
    for instance in found.instances:
        assert not instance.unfinished
        assert not instance.load.num_requests
        assert instance.cache.usage()["device_kv_used"] == 0


def burst(seed: int = 3, num: int = 60) -> list[TurnRequest]:
    """Four fifths of the requests, and the long ones, are for one adapter."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(0.06, num)).tolist()
    return [
        TurnRequest(
            i,
            at_s[i],
            "a" if rng.random() < 0.8 else "b",
            tuple(range(100 * i, 100 * i + int(rng.integers(4, 40)))),
            (7,) * int(rng.integers(5, 60)),
        )
        for i in range(num)
    ]


def queueing_s(replicas: Replicas) -> float:
    return float(np.mean([request.queue_s for request in replicas.done]))


@pytest.mark.parametrize("seed", range(3))
def test_queueing_falls_with_migration_when_load_is_uneven(seed) -> None:
    stay = Replicas(config(migration=SimMigration(settings=replace(EAGER, migration="off"))), burst(seed))
    move = Replicas(config(migration=SimMigration(settings=EAGER)), burst(seed))
    assert stay.policy is None
    assert not stay.num_moves
    assert move.policy is not None
    assert move.num_moves.total() > 0
    assert queueing_s(move) < 0.7 * queueing_s(stay)
    assert everything(move) == everything(stay)


@pytest.mark.parametrize(("bytes_per_s", "kind", "other"), [(1e9, "kv", "tokens"), (10.0, "tokens", "kv")])
def test_running_requests_move_by_what_takes_less_time(bytes_per_s, kind, other) -> None:
    """All start at once; when the short answers of one replica have ended, only running ones can move."""
    settings = replace(EAGER, migration_free_share=0.99, migration_bytes_per_s=bytes_per_s)
    wide = replace(INSTANCE, max_num_seqs=8, time=replace(TIME, delta_row_s=0.01))
    both = [*requests("aaaa", num_tokens=80), *requests("aaaabbbb", num_tokens=5)[4:]]
    stay = Replicas(config(instance=wide), both)
    migration = SimMigration(settings=settings, check_s=0.6)
    move = Replicas(config(instance=wide, migration=migration), both)
    assert move.num_moves[kind] > 0
    assert not move.num_moves[other]
    assert everything(move) == everything(stay)
    assert move.done[-1].finish_s < stay.done[-1].finish_s


def golden_run() -> list[list[float]]:
    found = Replicas(config(migration=SimMigration(settings=EAGER), preloaded=[["a"], ["b"]]), burst())
    assert found.num_moves["waiting"] > 0
    return [
        [
            request.planned.index,
            *(round(s, 9) for s in (request.queue_s, request.first_token_s, request.finish_s)),
        ]
        for request in found.done
    ]


def test_a_fixed_workload_with_moves_gives_the_recorded_stamps() -> None:
    assert golden_run() == json.loads(GOLDEN.read_text())
