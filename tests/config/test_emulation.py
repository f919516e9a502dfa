# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from moe_lora.config.optional_parts import StageTime
from moe_lora.core.errors import ConfigError


def test_stage_takes_its_line_but_at_least_its_floor_and_nothing_without_rows():
    stage = StageTime(fixed_s=1.0, per_row_s=0.5, least_s=3.0)
    assert [stage.seconds(rows) for rows in (0, 1, 4, 10)] == [0.0, 3.0, 3.0, 6.0]


def test_negative_times_are_refused():
    with pytest.raises(ConfigError, match="per_row_s=-1"):
        StageTime(per_row_s=-1)
