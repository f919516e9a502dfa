# SPDX-License-Identifier: Apache-2.0
"""Conditions of steps launched before the tokens of the step before are read (see `EngineCore.step`)."""

from __future__ import annotations

from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.engine.adapters.adapter_store import AdapterStore
from moe_lora.engine.ranks.rank import Rank


def schedules_ahead(config: EngineConfig, rank: Rank, store: AdapterStore) -> bool:
    """True if steps are launched before the tokens of the step before are read.

    Raises ConfigError if required but impossible.
    """
    reason = check_ahead(config, host=store.host is not None, merges=rank.merges)
    wanted = config.async_scheduling == "on" or (
        config.async_scheduling == "auto" and rank.device.type == "cuda"
    )
    return wanted and reason is None


def check_ahead(config: EngineConfig, *, host: bool, merges: bool) -> str | None:
    """Reason against steps ahead, or None.  host: with host workers; merges: weights may carry an adapter.

    Raises ConfigError if steps ahead are required.
    """
    reasons = {
        "several ranks, all but one of which are told of tokens": config.num_ranks > 1,
        "a LoRA Server, whose answers a step waits for": config.lora_server is not None,
        "host_workers, whose answers a step waits for": host,
        f"batching={config.batching!r}, which times steps": merges,
        "an emulated step_profile": config.emulation.step_profile is not None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if config.async_scheduling == "on" and reason is not None:
        raise ConfigError(
            f"async_scheduling='on' does not go together with {reason}; use 'auto' or 'off', or do without it"
        )
    return reason
