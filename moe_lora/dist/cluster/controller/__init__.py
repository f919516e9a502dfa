# SPDX-License-Identifier: Apache-2.0
"""Decisions for a whole cluster: adapters, placement, capacity."""

from __future__ import annotations

import os
from pathlib import Path

ALIVE, READY = "MOE_LORA_ALIVE", "MOE_LORA_READY"
"""Variables with paths of files.  A live controller sets the first's time.  A leader, or a standby with an
answer of the store, sets the second's."""


def set_times(*variables: str) -> None:
    """Set the times of the files in variables, if any."""
    for variable in variables:
        if (path := os.environ.get(variable)) is not None:
            Path(path).touch()
