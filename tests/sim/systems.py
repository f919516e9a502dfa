# SPDX-License-Identifier: Apache-2.0
"""Small systems and requests for the tests of the simulator."""

from __future__ import annotations

from typing import Any

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.provision.replayed.system_config import (
    InstanceConfig,
    LocalConfig,
    SimLoraServerConfig,
    SystemConfig,
)
from moe_lora.workload.replay_plan import PlannedRequest

STEP_S = 0.1


def flat_profile(step_s: float = STEP_S) -> StepProfile:
    """One layer that takes step_s, however many rows there are."""
    return StepProfile(attention=StageTime(fixed_s=step_s))


def instance(**settings: Any) -> InstanceConfig:
    return InstanceConfig(**{"profile": flat_profile(), "num_layers": 1} | settings)


def coupled(capacity: int, *, num_instances: int = 1, load_s: float = 0.0, **settings: Any) -> SystemConfig:
    return SystemConfig(
        num_instances=num_instances,
        instance=instance(**settings),
        adapters=LocalConfig(capacity=capacity, load_bytes_per_s=1.0),
        adapter_bytes=load_s,
    )


def served(
    server: SimLoraServerConfig, *, num_instances: int = 1, load_s: float = 0.0, **settings: Any
) -> SystemConfig:
    """The server loads 1 byte/s."""
    return SystemConfig(
        num_instances=num_instances, instance=instance(**settings), adapters=server, adapter_bytes=load_s
    )


def server(capacity: int, **settings: Any) -> SimLoraServerConfig:
    return SimLoraServerConfig(**{"capacity": capacity, "load_bytes_per_s": 1.0, "control_s": 0.0} | settings)


def asked(*requests: tuple[float, str | None, int], prompt_tokens: int = 1) -> list[PlannedRequest]:
    """From (arrival_s, adapter, output tokens)."""
    return [
        PlannedRequest(index, arrival_s, adapter, prompt_tokens, output_tokens)
        for index, (arrival_s, adapter, output_tokens) in enumerate(requests)
    ]
