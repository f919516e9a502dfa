# SPDX-License-Identifier: Apache-2.0
"""One simulated instance from its first request to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_lora.policies.caching.caching import CachingPolicy
from moe_lora.sim.instance import CachedConfig, CachedInstance
from moe_lora.workload.replay_plan import TurnRequest


def simulate_cached(
    config: CachedConfig, policy: CachingPolicy, requests: Sequence[TurnRequest], *, max_waiting: int = 10**9
) -> CachedInstance:
    """The instance after every request's last token.  Deterministic.

    requests: by arrival; each answer has at least one token.  max_waiting: stop at more waiting requests (far
    above saturation).  Raises CapacityError for a request that never finds room.
    """
    instance = CachedInstance(replace(config, max_waiting=max_waiting), policy, requests)
    instance.events.run()
    return instance
