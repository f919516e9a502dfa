# SPDX-License-Identifier: Apache-2.0
"""Plans of these tests ask for the same shares again: each share is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_lora.provision.admission.admitted import ADMITTED
from moe_lora.provision.admission.corrected import corrected_admissibility_rate


@cache
def _admitted(probabilities: bytes, global_batch: float, capacity: int) -> float:
    return corrected_admissibility_rate(np.frombuffer(probabilities), global_batch, capacity)


def admitted_once(probabilities: NDArray[np.float64], global_batch: float, capacity: int) -> float:
    """`corrected_admissibility_rate`, kept for later tests."""
    return _admitted(np.asarray(probabilities, dtype=np.float64).tobytes(), global_batch, capacity)


@pytest.fixture(autouse=True, scope="module")
def shares_computed_once() -> Iterator[None]:
    with mock.patch.dict(ADMITTED, corrected=admitted_once):
        yield
