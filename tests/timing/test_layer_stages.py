# SPDX-License-Identifier: Apache-2.0
"""A layer's stages: deltas beside or after the base GEMM, and shares of sites."""

from __future__ import annotations

import pytest

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.timing.layer_stages import decode_layer_s, mlp_sites, prefill_shares, share_of_layer
from tests.dist.lora_server.shapes import model_shape


@pytest.mark.parametrize(
    ("overlap", "adapters", "remote", "seconds"),
    [
        (True, False, True, 5 + 12),
        (True, True, False, 5 + 12 + 3),
        (True, True, True, 5 + max(12, 3 + 16)),
        (False, True, True, 5 + 12 + 3 + 16),
    ],
)
def test_deltas_of_a_server_hide_behind_the_experts(overlap, adapters, remote, seconds):
    profile = StepProfile(
        attention=StageTime(fixed_s=5.0),
        experts=StageTime(fixed_s=4.0, per_row_s=1.0),
        lora=StageTime(fixed_s=3.0),
        transfer=StageTime(per_row_s=2.0),
        overlap=overlap,
    )
    found = decode_layer_s(profile, 8, adapters=adapters, remote=remote)
    assert found == (seconds, 3.0 if adapters else 0.0)


@pytest.mark.parametrize("num_experts", [0, 8])
def test_sites_share_a_layer_in_whole(num_experts):
    shape = model_shape(num_experts)
    assert sum(share_of_layer(site, shape) for site in mlp_sites(shape)) == pytest.approx(1)
    assert sum(prefill_shares(shape)) == pytest.approx(1)
