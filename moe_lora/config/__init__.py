# SPDX-License-Identifier: Apache-2.0
"""Settings of each role, stated once: type, default, range, option and meaning (see `settings`)."""

from .emulation import EmulationConfig
from .engine import CACHE_POLICIES, DEVICES, DTYPES, LORA_KERNELS, QUEUES, EngineConfig
from .front_end import (
    CONTROLLER,
    ONE_FRONT_END,
    PERFORMANCE_FORMS,
    PLACEMENTS,
    RANK_AWARE_COSTS,
    ROUTINGS,
    ControllerConfig,
    FrontEndConfig,
    FrontEndPlace,
    ProvisionConfig,
    RegistryConfig,
    RoutingConfig,
)
from .limits import LimitsConfig
from .lora_server import TRANSPORTS, LoraServerConfig
from .pool import PoolConfig
from .settings import MAX_COUNT

__all__ = [
    "CACHE_POLICIES",
    "CONTROLLER",
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
    "LimitsConfig",
    "LoraServerConfig",
    "PoolConfig",
    "ProvisionConfig",
    "RegistryConfig",
    "RoutingConfig",
]
