# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.patient_workers import workers_have_time


@pytest.fixture(scope="session", autouse=True)
def patient_workers() -> Iterator[None]:
    """An LLM on a busy machine computes no rows in place of its host workers."""
    with workers_have_time():
        yield
