# SPDX-License-Identifier: Apache-2.0
"""Instances with the real scheduler and cache beside a LoRA Server: hand-worked stamps, and progress."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.policies.caching.caching import make_caching_policy
from moe_lora.policies.routing.routing import RoundRobin
from moe_lora.sim.instance import CachedConfig
from moe_lora.sim.lora_server import SimServerConfig
from moe_lora.sim.replicas import Replicas, ReplicasConfig
from moe_lora.sim.requests import StepCounts
from moe_lora.timing.step_model import TransformerTime
from moe_lora.workload.replay_plan import TurnRequest

LAYER_S, LOAD_S = 0.05, 0.2
WEIGHED = TransformerTime(
    num_params=1.0,
    num_layers=2,
    hidden_size=0,
    kv_token_bytes=10,
    flops_per_s=1e6,
    bytes_per_s=math.inf,
)


def even_layers(step: StepCounts) -> tuple[float, float]:
    return LAYER_S, 0.0


def replicas(num_replicas: int = 1, layers=even_layers, names: str = "abc", **server) -> ReplicasConfig:
    """Two layers of 0.05 s; a layer of an adapter loads in 0.2 s."""
    given = {"capacity": 4, "num_layers": 2, "layer_load_s": LOAD_S, "control_s": 0.0} | server
    instance = CachedConfig(
        time=WEIGHED,
        adapter_pages=dict.fromkeys(names, 0),
        num_device_pages=100,
        num_host_pages=0,
        link_bytes_per_s=1e9,
        block_size=10,
        layers=layers,
        num_layers=2,
    )
    return ReplicasConfig(
        num_replicas=num_replicas,
        instance=instance,
        caching=lambda: make_caching_policy("cost-aware", instance.costs()),
        router=RoundRobin,
        server=SimServerConfig(**given),
    )


def asked(*rows: tuple[float, str | None, int]) -> list[TurnRequest]:
    """(arrival_s, adapter, number of answer tokens); prompts of one token."""
    ids = itertools.count()
    return [
        TurnRequest(index, arrival_s, adapter, (next(ids),), tuple(itertools.islice(ids, num_tokens)))
        for index, (arrival_s, adapter, num_tokens) in enumerate(rows)
    ]


def stamps(config: ReplicasConfig, requests: Sequence[TurnRequest]) -> list[tuple[float, float]]:
    """First and last token of each request."""
    done = sorted(Replicas(config, requests).done, key=lambda one: one.planned.index)
    return [(one.first_token_s, one.finish_s) for one in done]


def test_a_step_waits_for_each_layer_of_an_adapter_under_way():
    # Layer 0 is there at 0.2 and done at 0.25, layer 1 at 0.4 and 0.45; the next step waits for nothing.
    assert stamps(replicas(), asked((0.0, "a", 2))) == [pytest.approx((0.45, 0.55))]


def test_stages_load_their_layers_side_by_side():
    assert stamps(replicas(num_stages=2), asked((0.0, "a", 1))) == [pytest.approx((0.3, 0.3))]


def test_adapters_under_way_load_a_layer_each_in_turn():
    # a0 0.2, b0 0.4, a1 0.6, b1 0.8.
    found = stamps(replicas(2), asked((0.0, "a", 1), (0.0, "b", 1)))
    assert found == [pytest.approx((0.65, 0.65)), pytest.approx((0.85, 0.85))]


def test_requests_of_the_base_model_and_of_resident_adapters_wait_for_no_load():
    requests = asked((0.0, None, 1), (1.0, "a", 1))
    assert stamps(replicas(prefetched=["a"]), requests) == [
        pytest.approx((0.1, 0.1)),
        pytest.approx((1.1, 1.1)),
    ]


def test_a_lease_is_known_a_round_trip_later():
    assert stamps(replicas(prefetched=["a"], control_s=0.03), asked((0.0, "a", 1))) == [
        pytest.approx((0.13, 0.13))
    ]


def test_one_adapter_is_loaded_once_for_all_instances():
    found = Replicas(replicas(2), asked((0.0, "a", 1), (0.0, "a", 1)))
    assert found.server is not None
    assert found.server.loads.num_loads == 1
    assert [one.finish_s for one in found.done] == pytest.approx([0.45, 0.45])


def test_another_adapter_waits_for_the_only_slot_until_the_lease_ends():
    # b's lease comes at 0.3; layer 0 at 0.5, layer 1 at 0.7.
    config = replicas(2, capacity=1, prefetched=["a"])
    first, second = stamps(config, asked((0.0, "a", 3), (0.0, "b", 1)))
    assert first == pytest.approx((0.1, 0.3))
    assert second == pytest.approx((0.75, 0.75))


def test_a_busy_stage_lengthens_the_layers_of_all_its_instances():
    """Deltas keep the server busy for 0.04 s of each instance's layer: three of them share one stage."""
    requests = asked((0.0, "a", 2), (0.0, "a", 2), (0.0, "a", 2))

    def layers(step: StepCounts) -> tuple[float, float]:
        return LAYER_S, 0.04

    last = stamps(replicas(3, layers, prefetched=["a"]), requests)[-1]
    assert last[0] == pytest.approx(2 * 0.12)
    apart = stamps(replicas(3, layers, prefetched=["a"], num_stages=2), requests)[-1]
    assert apart[0] == pytest.approx(2 * 0.06)


def test_prompts_share_steps_with_decode_rows_and_count_their_tokens():
    seen: list[tuple[int, ...]] = []

    def layers(step: StepCounts) -> tuple[float, float]:
        seen.append((step.num_rows, step.num_prompts, step.num_prompt_tokens, step.num_prompt_pairs))
        return LAYER_S, 0.0

    decoding, prompt = asked((0.0, "a", 4), (0.05, "b", 1))
    prompt = TurnRequest(1, 0.05, "b", tuple(range(100, 103)), (1,))
    stamps(replicas(1, layers, prefetched=["a", "b"]), [decoding, prompt])
    # The lease of b is requested when the second step begins, and b's prompt computes in the third.
    assert seen == [(0, 1, 1, 1), (1, 0, 0, 0), (1, 1, 3, 6), (1, 0, 0, 0)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("capacity", "num_replicas"), [(1, 3), (2, 2), (3, 4)])
def test_every_request_ends_however_few_adapters_fit(seed, capacity, num_replicas):
    rng = random.Random(seed)
    arrivals = sorted(rng.uniform(0, 5) for _ in range(60))
    requests = asked(*((arrival_s, rng.choice("abcdef"), rng.randint(1, 8)) for arrival_s in arrivals))
    config = replicas(
        num_replicas, names="abcdef", capacity=capacity, layer_load_s=0.02, control_s=0.001, starvation_s=0.5
    )
    found = Replicas(config, requests)
    assert sorted(one.planned.index for one in found.done) == list(range(60))
    assert all(one.queue_s >= -1e-9 and one.first_token_s <= one.finish_s for one in found.done)
    assert stamps(config, requests) == stamps(config, requests)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 3}, "num_stages=3 of 2 layers; choose 1 to 2"),
        ({"layer_load_s": math.inf}, "layer_load_s=inf must be finite"),
        ({"prefetched": list("abcde")}, "prefetched=5 adapters exceed capacity=4"),
        ({"layers": None}, "give instances layers"),
    ],
)
def test_servers_that_can_not_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replicas(**changes)
