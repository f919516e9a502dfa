# SPDX-License-Identifier: Apache-2.0
"""The least size that a refusal names."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from moe_lora.core.errors import ConfigError


def least_of(start: Callable[[], object], match: str = "at least") -> float:
    """The size after "at least", in the refused setting's unit."""
    with pytest.raises(ConfigError, match=match) as refusal:
        start()
    return float(re.findall(r"at least ([0-9.]*[0-9])", str(refusal.value))[0])
