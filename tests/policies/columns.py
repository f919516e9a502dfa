# SPDX-License-Identifier: Apache-2.0
"""Columns for policies, a node per mapping."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_lora.policies.caching.caching import NodeColumns

DEFAULTS: dict[str, Any] = {
    "is_adapter": False,
    "pages": 1,
    "visits": 1.0,
    "recent": 1.0,
    "idle_s": 0.0,
    "backed": False,
    "first_token": 0,
    "num_tokens": 16,
    "turn": 1,
    "wanted": 0,
    "adapter_ready": True,
}


def columns(*nodes: dict[str, Any]) -> NodeColumns:
    """What is not given is as in `DEFAULTS`."""
    return NodeColumns(
        **{name: np.array([node.get(name, default) for node in nodes]) for name, default in DEFAULTS.items()}
    )
