# SPDX-License-Identifier: Apache-2.0
"""The shipped profile of the measured GPU, made from its records."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gpu import device_profile
from moe_lora.provision import device_profile as shipped


def test_the_shipped_profile_is_what_the_records_say() -> None:
    path = Path(shipped.__file__).parent / "profiles" / "h200.json"
    assert json.loads(path.read_text(encoding="utf-8")) == device_profile.profile()


def test_rates_without_a_record_are_left_out() -> None:
    profile = shipped.read_profile("h200")
    assert profile.gpu.load_bytes_per_s is profile.gpu.net_bytes_per_s is None
    assert not {"loads", "LoRA Server", "several GPUs", "chunks"} & set(profile.ran)
