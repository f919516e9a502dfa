# SPDX-License-Identifier: Apache-2.0
"""Instances whose steps are timed by a performance model, by hand."""

from __future__ import annotations

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.provision.replayed.system import simulate
from moe_lora.provision.replayed.system_config import InstanceConfig, LocalConfig, SystemConfig
from moe_lora.timing.step_model import StepModel

from .systems import asked, flat_profile, server


def steps(kernel: str) -> StepModel:
    """A decode step takes 1 s and 10 ms a rank row; a prefill 0.1 s a token and 1 ms a rank row."""
    ranks = "padded_ranks" if kernel == "bgmv" else "ranks"
    return StepModel(
        kernel=kernel,
        form="toppings",
        expert_share=1.0,
        decode_s={"step": 1.0, ranks: 0.01},
        prefill_s={"tokens": 0.1, ranks: 0.001},
    )


def system(kernel: str, **settings) -> SystemConfig:
    return SystemConfig(
        num_instances=1,
        instance=InstanceConfig(steps=steps(kernel), **settings),
        adapters=LocalConfig(capacity=4),
        lora_ranks={"low": 10, "high": 100},
    )


@pytest.mark.parametrize(("kernel", "both_s"), [("bgmv", 1 + 2 * 100 * 0.01), ("sgmv", 1 + 110 * 0.01)])
def test_steps_go_by_the_ranks_in_them(kernel, both_s):
    done = simulate(system(kernel), asked((0.0, "low", 4), (0.0, "high", 2), prompt_tokens=5)).requests
    high, low = done
    prompts_s = 10 * 0.1 + (10 * 100 if kernel == "bgmv" else 5 * 110) * 0.001
    assert low.first_token_s == high.first_token_s == pytest.approx(prompts_s)
    assert high.finish_s == pytest.approx(prompts_s + both_s)
    assert low.finish_s == pytest.approx(prompts_s + both_s + 2 * (1 + 10 * 0.01))


def test_a_prompt_lengthens_the_step_of_those_that_decode():
    plan = asked((0.0, "low", 3), (0.5, "high", 1), prompt_tokens=10)
    low = next(request for request in simulate(system("bgmv"), plan).requests if request.adapter == "low")
    alone_s = 10 * 0.1 + 10 * 10 * 0.001
    beside_s = 1 + 10 * 0.01 + 10 * 0.1 + 10 * 100 * 0.001
    assert low.finish_s == pytest.approx(alone_s + beside_s + 1 + 10 * 0.01)


def test_long_prompts_are_cut_and_the_base_model_has_no_rank():
    plan = asked((0.0, None, 2), prompt_tokens=10)
    (request,) = simulate(system("bgmv", max_num_batched_tokens=4), plan).requests
    assert request.first_token_s == pytest.approx(10 * 0.1)
    assert request.finish_s == pytest.approx(2.0)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match="give one"):
        InstanceConfig()
    with pytest.raises(ConfigError, match="give one"):
        InstanceConfig(steps=steps("bgmv"), profile=flat_profile())
    with pytest.raises(ConfigError, match="leave prefill and num_layers out"):
        InstanceConfig(steps=steps("bgmv"), num_layers=2)
    with pytest.raises(ConfigError, match="with a LoRA Server give a profile"):
        SystemConfig(num_instances=1, instance=InstanceConfig(steps=steps("bgmv")), adapters=server(2))
