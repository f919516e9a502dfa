# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

from moe_lora.policies.admission.admission import least_recently_used


@dataclass
class Resident:
    name: str
    num_running: int
    num_waiting: int
    last_used_s: float


def test_oldest_idle_adapter_leaves():
    residents = [Resident("new", 0, 0, 9.0), Resident("old", 0, 0, 1.0), Resident("busy", 2, 0, 0.0)]
    assert least_recently_used(residents).name == "old"


def test_adapter_that_requests_wait_for_leaves_last():
    residents = [Resident("wanted", 0, 3, 1.0), Resident("unwanted", 0, 0, 9.0)]
    assert least_recently_used(residents).name == "unwanted"


def test_running_adapters_never_leave():
    assert least_recently_used([Resident("busy", 1, 0, 0.0)]) is None
