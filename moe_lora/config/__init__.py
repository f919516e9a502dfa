# SPDX-License-Identifier: Apache-2.0
"""Settings of each role, stated once: type, default, range, option and meaning (see `settings`)."""

from .engine import CACHE_POLICIES, DEVICES, DTYPES, LORA_KERNELS, QUEUES, EngineConfig
from .front_end import (
    AUTO,
    CONTROLLER,
    CONTROLLERS,
    ONE_FRONT_END,
    PERFORMANCE_FORMS,
    PLACEMENTS,
    RANK_AWARE_COSTS,
    ROUTINGS,
    ControllerConfig,
    FrontEndConfig,
    FrontEndPlace,
    LeadershipConfig,
    LimitsConfig,
    ProvisionConfig,
    RegistryConfig,
    RoutingConfig,
)
from .optional_parts import TRANSPORTS, EmulationConfig, LoraServerConfig, PoolConfig
from .settings import MAX_COUNT

__all__ = [
    "AUTO",
    "CACHE_POLICIES",
    "CONTROLLER",
    "CONTROLLERS",
    "DEVICES",
    "DTYPES",
    "LORA_KERNELS",
    "MAX_COUNT",
    "ONE_FRONT_END",
    "PERFORMANCE_FORMS",
    "PLACEMENTS",
    "QUEUES",
    "RANK_AWARE_COSTS",
    "ROUTINGS",
    "TRANSPORTS",
    "ControllerConfig",
    "EmulationConfig",
    "EngineConfig",
    "FrontEndConfig",
    "FrontEndPlace",
    "LeadershipConfig",
    "LimitsConfig",
    "LoraServerConfig",
    "PoolConfig",
    "ProvisionConfig",
    "RegistryConfig",
    "RoutingConfig",
]
