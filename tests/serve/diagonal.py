# SPDX-License-Identifier: Apache-2.0
"""Grids of parameters: the default run has each value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def diagonal(*factors: Sequence[Any]) -> list[Any]:
    """Every combination of a value of each factor; those off the diagonal are slow.  Short factors repeat."""
    quick = {tuple(row % len(one) for one in factors) for row in range(max(map(len, factors)))}
    return [
        pytest.param(
            *(one[place] for one, place in zip(factors, places, strict=True)),
            marks=() if places in quick else pytest.mark.slow,
        )
        for places in product(*(range(len(one)) for one in factors))
    ]
