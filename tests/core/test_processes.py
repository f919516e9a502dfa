# SPDX-License-Identifier: Apache-2.0
"""Which cores a process may use, and give to those that it starts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_lora.core.processes import allowed_core_numbers, usable_core_numbers


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of threads")
def test_who_runs_on_one_core_may_give_others_away() -> None:
    allowed = allowed_core_numbers()

    def pinned() -> tuple[list[int], list[int], list[int]]:
        os.sched_setaffinity(0, allowed[:1])
        return usable_core_numbers(), allowed_core_numbers(), usable_core_numbers()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(pinned).result() == (allowed[:1], allowed, allowed[:1])
