# SPDX-License-Identifier: Apache-2.0
"""Prompts beside decode rows in simulated steps, and loads that hold up nobody else, by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from moe_lora.config.optional_parts import StageTime
from moe_lora.core.errors import ConfigError
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import InstanceConfig, LocalConfig, StepRows, SystemConfig
from moe_lora.workload.replay_plan import PlannedRequest

from .systems import asked, flat_profile, server


@dataclass
class Layers:
    """10 ms a decode row, 1 ms a prompt token; the server is busy for `server_s` a step."""

    server_s: float = 0.0
    seen: list[tuple[int, int, int, int]] = field(default_factory=list)

    def layer_s(self, step: StepRows) -> tuple[float, float]:
        self.seen.append((step.num_rows, step.num_prompts, step.num_prompt_tokens, step.num_prompt_pairs))
        return 0.01 * step.num_rows + 0.001 * step.num_prompt_tokens, self.server_s


def system(layers: Layers, adapters=None, num_instances: int = 1, **settings) -> SystemConfig:
    return SystemConfig(
        num_instances=num_instances,
        instance=InstanceConfig(layers=layers, **settings),
        adapters=adapters or LocalConfig(capacity=8),
    )


def test_chunks_share_steps_with_decode_rows() -> None:
    layers = Layers()
    plan = [PlannedRequest(0, 0.0, "a", 4, 4), PlannedRequest(1, 0.001, "a", 10, 1)]
    done = {one.index: one for one in simulate(system(layers, max_num_batched_tokens=6), plan).requests}
    assert layers.seen == [(0, 1, 4, 10), (1, 1, 5, 15), (1, 1, 5, 5 * 5 + 15), (1, 0, 0, 0)]
    assert done[1].first_token_s == pytest.approx(0.004 + 0.015 + 0.015)
    assert done[0].finish_s == pytest.approx(0.004 + 0.015 + 0.015 + 0.01)


def test_ttft_has_the_prompt_and_decode_ttft_has_not() -> None:
    (request,) = simulate(system(Layers()), asked((0.0, "a", 2), prompt_tokens=100)).requests
    assert request.ttft_s == pytest.approx(0.1)
    assert request.decode_ttft_s == pytest.approx(0.01)
    summary = simulate(system(Layers()), asked((0.0, "a", 2), prompt_tokens=100)).summary()
    assert (summary["p95_ttft_s"], summary["p95_decode_ttft_s"]) == pytest.approx((0.1, 0.01))


def test_prompts_elsewhere_leave_one_ttft() -> None:
    config = SystemConfig(
        num_instances=1, instance=InstanceConfig(profile=flat_profile()), adapters=LocalConfig(capacity=1)
    )
    (request,) = simulate(config, asked((0.0, "a", 2), prompt_tokens=100)).requests
    assert request.ttft_s == request.decode_ttft_s == pytest.approx(0.1)


def test_the_server_is_busy_for_prompts_too() -> None:
    config = system(Layers(server_s=0.3), server(4), num_instances=2)
    done = simulate(config, asked((0.0, "a", 1), (0.0, "b", 1), prompt_tokens=100)).requests
    assert max(one.first_token_s for one in done) == pytest.approx(0.6)


def test_a_load_that_does_not_block_holds_up_its_own_requests_only() -> None:
    plan = asked((0.0, "here", 3), (0.0, "away", 1), prompt_tokens=10)
    found = {}
    for blocking in (True, False):
        adapters = LocalConfig(capacity=2, load_bytes_per_s=1.0, blocking=blocking, prefetched=("here",))
        config = SystemConfig(
            num_instances=1, instance=InstanceConfig(layers=Layers()), adapters=adapters, adapter_bytes=5.0
        )
        found[blocking] = {one.adapter: one for one in simulate(config, plan).requests}
    assert found[True]["here"].first_token_s > 5.0
    assert found[False]["here"].finish_s == pytest.approx(0.03)
    assert found[False]["away"].first_token_s == pytest.approx(5.01)
    assert found[False]["away"].at_once


def test_a_request_that_waits_for_tokens_and_then_for_a_slot_waited_for_its_adapter() -> None:
    plan = asked((0.0, "a", 50), (0.001, "a", 1), (0.001, "b", 1), prompt_tokens=6)
    config = system(Layers(), LocalConfig(capacity=1), max_num_batched_tokens=6)
    waited = {one.index: one.waited_for_adapter for one in simulate(config, plan).requests}
    assert waited == {0: False, 1: False, 2: True}


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="give one"):
        InstanceConfig(layers=Layers(), profile=flat_profile())
    with pytest.raises(ConfigError, match="leave prefill out"):
        InstanceConfig(layers=Layers(), prefill=StageTime())
    with pytest.raises(ConfigError, match="prefetched=2 adapters exceed capacity=1"):
        LocalConfig(capacity=1, prefetched=("a", "b"))
