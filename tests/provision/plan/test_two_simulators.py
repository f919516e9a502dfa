# SPDX-License-Identifier: Apache-2.0
"""Both simulators replay one plan with equal requests, and stay together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_lora.core.partition import Layout
from moe_lora.provision.plan import two_simulators, verify
from moe_lora.provision.plan.inputs import PlanInputs, SizedCluster
from moe_lora.provision.plan.two_simulators import FAST, REAL, Latencies, both, num_replayed
from moe_lora.workload.replay_plan import HASH_BLOCK_TOKENS
from moe_lora.workload.traces.records import Trace
from moe_lora.workload.traces.traces import read_trace
from tests.grids import with_quick

from .plans import inputs, prompt_load, zipf

RATE_PER_S = 20.0
COUPLED = SizedCluster(None, 3, slots=36)
SERVED = SizedCluster(Layout(ep=2), 2)
APART = SizedCluster(None, 4, slots=36, prefill_instances=2, step_tokens=2496)
AT_SERVER = SizedCluster(Layout(ep=2), 4, slots=36, prefill_instances=2, step_tokens=768)
FARTHEST = {"p50_ttft_s": 0.1, "p95_ttft_s": 0.15, "mean_tpot_s": 0.03, "p95_tpot_s": 0.08}
"""Of REAL from FAST, as parts (docs/explanation/simulator.md says why)."""
FARTHEST_IN_SLO = 0.01


def chats(tmp_path: Path, num_requests: int = 1000, **more: list[int]) -> Trace:
    """Log-normal lengths, means of 500 prompt and 190 output tokens, as chats have them."""
    rng = np.random.default_rng(5)
    columns = zip(
        np.cumsum(rng.exponential(0.1, num_requests)).tolist(),
        np.maximum(8, rng.lognormal(5.9, 0.8, num_requests)).astype(int).tolist(),
        np.maximum(2, rng.lognormal(5.0, 0.7, num_requests)).astype(int).tolist(),
        strict=True,
    )
    path = tmp_path / "chats.jsonl"
    rows = [
        {"arrival_s": at, "prompt_tokens": prompt, "output_tokens": output} for at, prompt, output in columns
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_trace(path)


def planned(trace: Trace, hit_share: float | None = None) -> PlanInputs:
    prompts = prompt_load(trace.requests, hit_share)
    return inputs(
        probabilities=zipf(512),
        rate_per_s=RATE_PER_S,
        output_tokens=prompts.output_tokens,
        context_tokens=prompts.prompt_tokens + prompts.output_tokens,
        prompts=prompts,
        slo_ttft_s=2.0,
        slo_tpot_s=0.1,
    )


def replayed(
    given: PlanInputs,
    place: SizedCluster,
    trace: Trace,
    num_requests: int = 640,
    rate_per_s: float = RATE_PER_S,
) -> list[Latencies]:
    return both(given, place, rate_per_s, trace, num_requests=num_requests, seed=1)


@pytest.mark.parametrize("place", [COUPLED, SERVED, APART, AT_SERVER], ids=str)
def test_both_simulators_agree_on_a_plan(place: SizedCluster, tmp_path: Path) -> None:
    trace = chats(tmp_path)
    fast, real = replayed(planned(trace), place, trace)
    assert (fast.simulator, real.simulator) == (FAST, REAL)
    assert fast.num_requests == real.num_requests > 500
    for name, most in FARTHEST.items():
        assert getattr(real, name) == pytest.approx(getattr(fast, name), rel=most), name
    assert real.in_slo == pytest.approx(fast.in_slo, abs=FARTHEST_IN_SLO)


@pytest.mark.parametrize("place", with_quick([COUPLED, SERVED], [SERVED]), ids=str)
def test_overload_misses_the_slos_on_both(place: SizedCluster, tmp_path: Path) -> None:
    trace = chats(tmp_path)
    fast, real = replayed(planned(trace), place, trace, num_requests=300, rate_per_s=4 * RATE_PER_S)
    assert fast.in_slo is not None
    assert real.in_slo is not None
    assert max(fast.in_slo, real.in_slo) < 0.9


def test_equal_block_hashes_are_equal_tokens_of_one_adapter(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    # Three turns of 100 conversations; each turn has the blocks of the turn before.
    rows = [
        {
            "timestamp": 1000 * index,
            "input_length": HASH_BLOCK_TOKENS * (1 + index // 100),
            "output_length": 20,
            "hash_ids": [index % 100 * 3 + block for block in range(1 + index // 100)],
        }
        for index in range(300)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    fast, real = replayed(planned(trace), COUPLED, trace, num_requests=300)
    assert fast.prefix_hits is not None
    assert fast.prefix_hits > 0.1  # the router spreads conversations over the instances
    assert real.prefix_hits == pytest.approx(fast.prefix_hits, abs=0.05)


def test_a_stated_share_is_a_prefix_that_each_adapter_computes_once(tmp_path: Path) -> None:
    trace = chats(tmp_path)
    given = replace(planned(trace, hit_share=0.4), probabilities=np.ones(2) / 2)
    fast, real = replayed(given, replace(COUPLED, slots=2), trace)
    assert fast.prefix_hits == pytest.approx(0.4, abs=0.01)
    assert real.prefix_hits == pytest.approx(0.4, abs=0.03)


def test_long_requests_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = replace(planned(chats(tmp_path)), output_tokens=150.0)
    assert num_replayed(given) == two_simulators.NUM_REQUESTS
    assert num_replayed(replace(given, output_tokens=1000.0)) == pytest.approx(400, rel=0.02)
    assert num_replayed(replace(given, output_tokens=1e6)) == two_simulators.LEAST_REQUESTS
    monkeypatch.setattr(verify, "NUM_REQUESTS", 300)
    assert num_replayed(given) == 300


def test_progress_ends_with_all_requests(tmp_path: Path) -> None:
    trace, seen = chats(tmp_path), []
    both(
        planned(trace),
        COUPLED,
        RATE_PER_S,
        trace,
        num_requests=50,
        seed=1,
        show=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1))
