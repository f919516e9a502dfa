# SPDX-License-Identifier: Apache-2.0
"""Clusters replayed in the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_lora.core.partition import Layout
from moe_lora.provision.plan import inputs as inputs_module
from moe_lora.provision.plan.checked import place_of
from moe_lora.provision.plan.cluster_size import Cluster
from moe_lora.provision.plan.inputs import SizedCluster
from moe_lora.provision.plan.memory import AdapterMix
from moe_lora.provision.plan.plan import make_plan
from moe_lora.provision.plan.verify import (
    PlannedLoad,
    Replay,
    _under_way,
    planned_load,
    replays,
    step_profile,
    system_of,
)
from moe_lora.workload.replay_plan import PlannedRequest
from moe_lora.workload.traces.records import Trace, TraceRequest
from moe_lora.workload.traces.traces import PARTS, read_trace

from .plans import inputs, prompt_load, zipf

FEW = 1500


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path)


def write_trace(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    rows = [{"arrival_s": i * 0.05, "prompt_tokens": 300, "output_tokens": 20} for i in range(400)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def rates(load: PlannedLoad) -> dict[str, float]:
    return {kind: len(planned) / planned[-1].arrival_s for kind, planned in load.requests.items()}


def test_cluster_is_simulated_as_it_is_written() -> None:
    given = inputs(rate_per_s=60.0)
    plan, cluster = make_plan(given), Cluster(given)
    layout = Layout.parse(plan.layout)
    config = system_of(cluster, SizedCluster(layout, plan.instances), [str(i) for i in range(len(zipf()))])
    assert config.num_instances == plan.instances
    assert config.instance.max_num_seqs == plan.max_num_seqs
    assert config.adapters.capacity == plan.slots
    assert config.adapters.num_stages == layout.pp
    assert config.adapters.prefetched == [str(i) for i in range(plan.slots)]


def test_links_are_those_of_the_fullest_rank() -> None:
    given = inputs()
    config = system_of(Cluster(given), SizedCluster(Layout(ep=1, pp=3), 1), [])
    # 11 of 32 layers over one link of 50 GB/s.
    whole = given.mix.adapter_bytes(given.shape)
    assert config.adapter_bytes == whole
    assert config.adapters.load_bytes_per_s == pytest.approx(5e10 * 32 / 11)


def test_steps_are_those_that_the_plan_predicts() -> None:
    cluster = Cluster(inputs())
    profile, layout = step_profile(cluster, Layout(ep=2), 300), Layout(ep=2)
    for rows in (1, 100, 300):
        served = profile.transfer.seconds(rows) + profile.lora.seconds(rows)
        layer_s = profile.attention.seconds(rows) + max(profile.experts.seconds(rows), served)
        assert 32 * layer_s == pytest.approx(cluster.tpot_s(layout.ep, rows))


def test_requests_come_at_the_planned_rate_and_a_short_trace_is_repeated(trace: Path) -> None:
    given = inputs(output_tokens=20.0, rate_per_s=60.0)
    load = planned_load(given, 60.0, read_trace(trace), num_requests=FEW)
    assert rates(load) == pytest.approx({"scaled": 60.0, "poisson": 60.0}, rel=0.05)
    assert {len(requests) for requests in load.requests.values()} == {FEW}


def test_plan_for_the_peak_is_checked_by_the_traces_own_arrivals_too(trace: Path) -> None:
    given = inputs(output_tokens=20.0, rate_per_s=60.0, trace_rate_per_s=20.0)
    load = planned_load(given, 60.0, read_trace(trace), num_requests=FEW)
    assert rates(load) == pytest.approx({"trace": 20.0, "scaled": 60.0, "poisson": 60.0}, rel=0.05)


def test_a_scaled_trace_loses_the_days_curve_and_keeps_bursts() -> None:
    # Half of the requests at 2 a second, half at 12, each tenth moment with two.
    gaps = [gap * (index % 10 > 0) for gap in (1 / 2, 1 / 12) for index in range(6000)]
    rows = tuple(TraceRequest(at_s, 300, 20) for at_s in np.cumsum(gaps).tolist())
    given = inputs(output_tokens=20.0, rate_per_s=12.0)
    load = planned_load(given, 12.0, Trace("t", "own", rows), num_requests=FEW)
    times = np.array([one.arrival_s for one in load.requests["scaled"]])
    seconds = np.diff(times[:: FEW // 6])
    assert FEW // 6 / seconds == pytest.approx(np.full(5, 12.0), rel=0.02)
    assert np.mean(np.diff(times) < 1e-9) == pytest.approx(0.1, rel=0.1)


def test_a_day_of_steps_has_the_plans_rate_up_to_each_step() -> None:
    """Runs over the trace end where its steps do."""
    gaps = [1 / rate for step in range(12) for rate in [20.0 if step % 2 else 1.0] * 1000]
    rows = tuple(TraceRequest(at_s, 300, 20) for at_s in np.cumsum(gaps).tolist())
    given = inputs(output_tokens=20.0, rate_per_s=12.0)
    load = planned_load(given, 12.0, Trace("t", "own", rows), num_requests=4000)
    times = np.array([one.arrival_s for one in load.requests["scaled"]])
    assert 334 / np.diff(times[::334]) == pytest.approx(np.full(11, 12.0), rel=0.01)


@pytest.mark.parametrize("total", [4003, 6001, 12_000])
def test_each_run_of_a_spread_trace_has_the_plans_rate(total: int) -> None:
    """Runs differ in length; the first request of a run comes after a time of this run."""
    every = [index * PARTS // total for index in range(total)]
    times = np.cumsum([1.0 if run % 2 else 0.05 for run in every])
    rows = tuple(TraceRequest(at_s, 300, 20) for at_s in times.tolist())
    given = inputs(output_tokens=20.0, rate_per_s=12.0)
    load = planned_load(given, 12.0, Trace("t", "own", rows), num_requests=4000)
    gaps = np.diff([one.arrival_s for one in load.requests["scaled"]])
    assert gaps == pytest.approx(np.full(3999, 1 / 12.0), rel=0.002)


def test_other_seeds_draw_other_arrivals_and_adapters(trace: Path) -> None:
    given = inputs(rate_per_s=60.0)
    one, other = (
        planned_load(given, 60.0, read_trace(trace), num_requests=FEW, seed=seed).requests for seed in (0, 1)
    )
    assert [r.arrival_s for r in one["scaled"]] == [r.arrival_s for r in other["scaled"]]
    assert [r.adapter for r in one["scaled"]] != [r.adapter for r in other["scaled"]]
    assert [r.arrival_s for r in one["poisson"]] != [r.arrival_s for r in other["poisson"]]


def test_adapters_are_drawn_unless_the_plan_is_for_the_traces(tmp_path: Path) -> None:
    path = tmp_path / "named.jsonl"
    row = {"arrival_s": 0.0, "prompt_tokens": 3, "output_tokens": 2, "adapter": "named"}
    path.write_text("\n".join(json.dumps(row | {"arrival_s": float(i)}) for i in range(50)))
    for traces, names in ((True, {"named"}), (False, {"0", "1"})):
        given = inputs(probabilities=np.array([0.5, 0.5]), adapters_are_traces=traces)
        load = planned_load(given, 1.0, read_trace(path), num_requests=50)
        assert set(load.popular) == names
        for requests in load.requests.values():
            assert {request.adapter for request in requests} == names


def test_a_moments_requests_are_those_that_run_long() -> None:
    # Half of the requests have 10 tokens, half 90: of those under way nine of ten are long, half done.
    requests = [PlannedRequest(i, float(i), "a", 5, 90 if i % 2 else 10) for i in range(1000)]
    begun = _under_way(requests, 2000)
    assert len(begun) == 2000
    assert {request.arrival_s for request in begun} == {0.0}
    assert len({request.index for request in [*requests, *begun]}) == 3000
    assert np.mean([request.output_tokens for request in begun]) == pytest.approx(41, rel=0.05)


def test_given_global_batch_runs_at_once(trace: Path) -> None:
    given = inputs(output_tokens=20.0, global_batch=50.0, context_tokens=320.0, probabilities=zipf(8))
    plan, cluster = make_plan(given), Cluster(given)
    load = planned_load(given, 50 / (20 * plan.tpot_s), read_trace(trace), num_requests=FEW)
    for found in replays(cluster, place_of(plan), load):
        assert found.mean_tpot_s == pytest.approx(plan.tpot_s, rel=0.1)


@pytest.fixture(scope="module")
def overloaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Replay], list[Replay]]:
    """Replays of a load beyond the cluster: whole, and given up."""
    trace = write_trace(tmp_path_factory.mktemp("overloaded"))
    given = inputs(output_tokens=20.0, rate_per_s=60.0, probabilities=zipf(400, 0.5))
    cluster = Cluster(given)
    load = planned_load(given, 60.0, read_trace(trace), num_requests=FEW)
    whole, part = (replays(cluster, SizedCluster(Layout(), 1), load, to_the_end=end) for end in (True, False))
    return whole, part


def test_replay_that_can_no_longer_hold_is_given_up(overloaded: tuple[list[Replay], list[Replay]]) -> None:
    whole, part = overloaded
    assert not any(one.stopped for one in whole)
    (only,) = part  # the others would not be looked at
    assert only.stopped
    assert only.num_requests < whole[0].num_requests


def test_shares_of_waiting_requests_sum_to_one(overloaded: tuple[list[Replay], list[Replay]]) -> None:
    whole, _ = overloaded
    for one in whole:
        waited = one.admitted_at_once, one.waited_for_adapter, one.waited_for_room
        assert sum(share or 0.0 for share in waited) == pytest.approx(1.0)


def test_bursts_wait_where_their_poisson_twin_does_not(tmp_path: Path) -> None:
    path = tmp_path / "bursts.jsonl"
    names = np.random.default_rng(0).integers(40, size=2000).tolist()
    rows = [
        {"arrival_s": i // 120 * 6.0, "prompt_tokens": 300, "output_tokens": 20, "adapter": f"a{name}"}
        for i, name in enumerate(names)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    given = inputs(
        output_tokens=20.0,
        rate_per_s=20.0,
        context_tokens=320.0,
        probabilities=np.full(40, 1 / 40),
        trace_rate_per_s=20.0,
        adapters_are_traces=True,
        mix=AdapterMix(ranks=((256, 1.0),)),  # 26 of the 40 fit
    )
    load = planned_load(given, 20.0, read_trace(path), num_requests=2000)
    found = {one.arrivals: one for one in replays(Cluster(given), SizedCluster(Layout(ep=2), 1), load)}
    assert (found["trace"].admitted_at_once or 0.0) < (found["poisson"].admitted_at_once or 0.0) - 0.1


def shared_prompt(tmp_path: Path) -> Trace:
    """Two turns of 100 conversations behind one system prompt; each turn ends inside a block."""
    path = tmp_path / "shared.jsonl"
    rows = [
        {"arrival_s": i, "prompt_tokens": 1100, "output_tokens": 9, "hash_ids": ids}
        for i, ids in enumerate([[0, 3 * n, 3 * n + 1] for n in range(1, 101)])
    ]
    rows += [row | {"arrival_s": 100 + i, "hash_ids": [0, 3 * i + 3, 999 + i]} for i, row in enumerate(rows)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_trace(path)


def test_a_system_prompt_joins_no_conversations(tmp_path: Path) -> None:
    given = inputs(rate_per_s=2.0, probabilities=np.full(50, 1 / 50))
    for requests in planned_load(given, 2.0, shared_prompt(tmp_path), num_requests=200).requests.values():
        first, second = ([one.adapter for one in part] for part in (requests[:100], requests[100:]))
        assert len(set(first)) > 25
        assert first == second


def short_turns(num_turns: int) -> Trace:
    """Conversations by turns of 100 tokens; the last block of a prompt is its own."""
    rows = []
    for turn in range(num_turns):
        whole = (turn + 1) * 100 // 512
        for talk in range(20):
            ids = (*range(talk * 99, talk * 99 + whole), 10_000 + len(rows))
            rows.append(TraceRequest(len(rows) / 9, (turn + 1) * 100, 9, hash_ids=ids))
    return Trace("short", "own", tuple(rows))


def test_short_turns_of_a_conversation_have_one_adapter() -> None:
    trace = short_turns(20)
    given = inputs(rate_per_s=2.0, probabilities=np.full(50, 1 / 50))
    for requests in planned_load(given, 2.0, trace, num_requests=400).requests.values():
        assert prompt_load(requests).hit_share == prompt_load(trace.requests).hit_share > 0
        grown = [one.adapter for one in requests[100:]]  # prompts of a whole block
        assert grown == 15 * grown[:20]
        assert len(set(grown)) > 9


def test_many_prompts_that_end_after_one_block_are_no_conversation() -> None:
    rows = tuple(TraceRequest(i / 9, 1000, 9, hash_ids=(0, 1 + i)) for i in range(100))
    given = inputs(rate_per_s=2.0, probabilities=np.full(50, 1 / 50))
    for requests in planned_load(given, 2.0, Trace("t", "own", rows), num_requests=100).requests.values():
        assert len({one.adapter for one in requests}) > 25


def test_named_adapters_of_a_trace_stay(tmp_path: Path) -> None:
    trace = shared_prompt(tmp_path)
    named = tuple(replace(one, adapter=f"a{i % 7}") for i, one in enumerate(trace.requests))
    given = inputs(rate_per_s=2.0, probabilities=np.full(7, 1 / 7), adapters_are_traces=True)
    for requests in planned_load(
        given, 2.0, replace(trace, requests=named), num_requests=200
    ).requests.values():
        assert [one.adapter for one in requests] == [one.adapter for one in named]


def test_prefix_hits_are_of_one_adapter(tmp_path: Path) -> None:
    requests = shared_prompt(tmp_path).requests
    each = [replace(one, adapter=f"a{i}") for i, one in enumerate(requests)]
    assert prompt_load(requests).hit_share > 0
    assert prompt_load(each).hit_share == 0


def test_remembered_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "MOST_BLOCKS", 8)
    again = TraceRequest(0.0, 1024, 1, hash_ids=(0, 1))
    others = [TraceRequest(0.0, 1024, 1, hash_ids=(2 + 2 * i, 3 + 2 * i)) for i in range(20)]
    assert prompt_load([again, *others[:3], again]).hit_share == pytest.approx(1023 / (5 * 1024))
    assert prompt_load([again, *others, again]).hit_share == 0
    count = inputs_module.PromptCount()
    count.add(replace(again, adapter="a name"))
    assert {type(key) for key in count._blocks} == {int}
