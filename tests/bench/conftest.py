# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from bench.harness.records import ALLOW_DIRTY


@pytest.fixture(scope="session", autouse=True)
def _benches_may_run_from_a_changed_tree():
    """These tests try benches and write outside of bench/results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOW_DIRTY, "1")
        yield
