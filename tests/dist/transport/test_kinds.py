# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from moe_lora.config import TRANSPORTS
from moe_lora.dist.transport import KINDS


def test_settings_name_the_transports_that_exist():
    assert set(TRANSPORTS) == set(KINDS)
