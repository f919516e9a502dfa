# SPDX-License-Identifier: Apache-2.0
"""Decisions for a whole cluster: adapters, placement, capacity."""

from __future__ import annotations

import os
from pathlib import Path

ALIVE = "MOE_LORA_ALIVE"
"""Variable with the path of a file; a live controller sets the file's time."""


def set_alive() -> None:
    """Set the time of the file in ALIVE, if any."""
    if (path := os.environ.get(ALIVE)) is not None:
        Path(path).touch()
