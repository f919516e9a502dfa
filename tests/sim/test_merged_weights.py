# SPDX-License-Identifier: Apache-2.0
"""Policies of merging in a simulated instance: what steps cost by hand, and that each mode is met."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.sim.cached_runs import simulate_cached
from moe_lora.cache.orders import Readiness
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.policies.merging.merging import BATCHINGS, Batching, MergingPolicy, make_merging_policy
from moe_lora.policies.merging.merging_costs import MergingCosts
from moe_lora.sim.adapters import LoraWork, SimMergedWeights, SimMerging
from moe_lora.sim.instance import CachedConfig, CachedInstance
from moe_lora.sim.requests import CachedRequest
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.replay_plan import TurnRequest
from tests.virtual_clock import VirtualClock

MERGE_S = 0.03
TIME = TransformerTime(
    num_params=1e6,
    num_layers=1,
    hidden_size=0,
    kv_token_bytes=1,
    flops_per_s=1e12,
    bytes_per_s=2e8,
    delta_row_s=0.001,
)
"""A decode step of the base model: 10 ms; each delta: 1 ms."""


def costs() -> MergingCosts:
    moved = {None: 0.0}
    return MergingCosts(
        TIME.step_model(8, 0.0),
        lambda uid: 8,
        lambda before, after: sum(moved.get(uid, MERGE_S) for uid in (before, after)),
    )


def config(name: str) -> CachedConfig:
    return CachedConfig(
        time=TIME,
        adapter_pages={"a": 1, "b": 1, "c": 1},
        num_device_pages=200,
        num_host_pages=10,
        link_bytes_per_s=1e6,
        block_size=16,
        max_num_seqs=4,
        merging=SimMerging(policy=lambda: make_merging_policy(name, costs()), merge_s=MERGE_S),
    )


def requests(adapters: str, gap_s: float = 0.0, num_tokens: int = 40) -> list[TurnRequest]:
    return [
        TurnRequest(
            index, index * gap_s, adapter, tuple(range(100 * index, 100 * index + 4)), (7,) * num_tokens
        )
        for index, adapter in enumerate(adapters)
    ]


def simulate(name: str, adapters: str, **more: float) -> CachedInstance:
    found = config(name)
    policy = make_caching_policy("lru", found.costs())
    return simulate_cached(found, policy, requests(adapters, **more))


class Fixed:
    """merge and only, as they are set."""

    def __init__(self) -> None:
        self.batching = Batching()

    def decide(self, view) -> Batching:
        self.view = view
        return self.batching

    def took(self, *measured) -> None:
        self.measured = measured

    def forget(self, uid) -> None:
        """Nothing."""


class Ready:
    """Adapters, all there."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def readiness(self, adapter: str):
        return Readiness.READY

    def acquire(self, adapter: str):
        self.held.append(adapter)
        return self.readiness(adapter)

    def release(self, adapter: str) -> None:
        self.held.remove(adapter)


def weights(policy: MergingPolicy, swap_steps: int = 4) -> tuple[SimMergedWeights, Ready]:
    adapters = Ready()
    made = SimMerging(policy=lambda: policy, merge_s=1.0, swap_steps=swap_steps)
    return SimMergedWeights(made, adapters, 4, VirtualClock()), adapters  # type: ignore[arg-type]


def test_what_others_compute_on_merged_weights_is_not_found_again() -> None:
    """One prompt, time and again, of the adapter in the weights and of another."""
    prompt = tuple(range(48))
    asked = [TurnRequest(i, 1.0 * i, adapter, prompt, (7,) * 4) for i, adapter in enumerate("abab")]

    def cached_tokens(merge: str | None) -> dict[str, list[int]]:
        policy = Fixed()
        policy.batching = Batching(merge, at_once=True)
        found = replace(config("merged"), merging=SimMerging(policy=lambda: policy, merge_s=MERGE_S))
        done = simulate_cached(found, make_caching_policy("lru", found.costs()), asked).done
        return {name: [one.num_cached for one in done if one.adapter == name] for name in "ab"}

    assert cached_tokens(None) == {"a": [0, 32], "b": [0, 32]}
    assert cached_tokens("a") == {"a": [0, 32], "b": [0, 0]}


def test_deltas_of_a_step_by_hand() -> None:
    policy = Fixed()
    merged, adapters = weights(policy)
    one = [CachedRequest(request) for request in requests("a")]
    merged.decide(one, held_back=False)
    assert merged.lora_work({"a": 2, "b": 1, None: 1}) == LoraWork(3, {"a": 1.0, "b": 1.0})
    policy.batching = Batching("a", at_once=True)
    merged.decide(one, held_back=False)
    assert merged.lora_work({"a": 2}) == LoraWork(0, {"a": 0.0})
    assert merged.lora_work({"a": 2, "b": 1, None: 1}) == LoraWork(3, {"a": 1.0, "b": 1.0})
    assert merged.took({"a": 2}, 0.5) == 1.0
    assert policy.measured == (policy.batching, "merged", 2, 1.5, 1.0)
    assert adapters.held == ["a"]


def test_a_swap_is_spread_over_steps_unless_wanted_at_once() -> None:
    policy = Fixed()
    merged, adapters = weights(policy)
    one = [CachedRequest(request) for request in requests("a")]
    policy.batching = Batching("a")
    for share in (0.25, 0.5, 0.75, 1.0):
        merged.decide(one, held_back=False)
        assert (policy.view.merged, policy.view.swapping) == (None, share > 0.25)
        assert merged.lora_work({"a": 4}).rows == 4 * (1 - share)
        assert merged.took({"a": 4}, 0.5) == 0.25
    merged.decide(one, held_back=False)
    assert (policy.view.merged, policy.view.swapping) == ("a", False)
    policy.batching = Batching("b", at_once=True)
    merged.decide(one, held_back=False)
    assert merged.took({"b": 4}, 0.5) == 2.0
    assert adapters.held == ["b"]
    merged.decide(one, held_back=True)
    assert adapters.held == [], "others wait for its place and nobody asks for it"
    assert dict(merged.num_steps) == {"mixed": 3, "merged": 2}


@pytest.mark.parametrize("name", BATCHINGS)
def test_everybody_is_served_in_every_mode(name: str) -> None:
    found = simulate(name, "aaabaacaaab", gap_s=0.01)
    assert sorted(request.planned.index for request in found.done) == list(range(11))
    assert all(len(request.tokens) == 44 for request in found.done)
    assert found.weights is not None
    modes = set(found.weights.num_steps)  # where none of one adapter can compute, everybody does: mixed
    least = {
        "unmerged": {"unmerged"},
        "merged": {"merged"},
        "dlora": {"merged", "unmerged"},
        "auto": {"merged", "mixed", "unmerged"},
    }
    assert modes >= least[name]
    assert name != "unmerged" or modes == {"unmerged"}
    assert (found.weights.num_merges > 0) == (name != "unmerged")
    assert sum(found.weights.num_steps.values()) == found.num_steps


def test_a_run_by_hand() -> None:
    """Two requests of one adapter at once: a prompt step, then 39 of decode."""
    unmerged, merged = (
        max(request.finish_s for request in simulate(name, "aa").done) for name in ("unmerged", "merged")
    )
    step_s = 2e6 / 2e8
    load_s = 20e-6 + 16 / 1e6
    assert unmerged == pytest.approx(load_s + 40 * step_s + (8 + 39 * 2) * 0.001, rel=1e-3)
    assert merged == pytest.approx(load_s + 40 * step_s + MERGE_S, rel=1e-3)
