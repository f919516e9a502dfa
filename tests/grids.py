# SPDX-License-Identifier: Apache-2.0
"""Parameters of tests: the default run has some cells of a grid, `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def with_quick(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Every value; those outside `quick` are slow."""
    return [pytest.param(one, marks=() if one in quick else pytest.mark.slow) for one in values]


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
