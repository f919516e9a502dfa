# SPDX-License-Identifier: Apache-2.0
"""A row's delta has the same bits in any batch and phase, with the committed tables' configurations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_lora.kernels.triton.configs import interpreted
from moe_lora.kernels.triton.lora import triton_lora as lora
from tests.kernels.kernel_cases import SiteCase

from .gpu_cases import DOWN, GATE_UP, QKV, assert_delta, make_batch

WIDE = SiteCase("o", ("o",), 2048, (1032,))
WIDE_EXPERTS = SiteCase("gate_up", ("gate", "up"), 2048, (256, 256), num_experts=2)
TOKENS = 45
CASES = st.sampled_from([("sgmv", "wgmma"), ("sgmv", "vector"), ("bgmv", None), ("mbgmv", None)])


def deltas(batch, *, decode=False, kernel="sgmv", algorithm=None) -> torch.Tensor:
    out = batch.output()
    lora.lora_delta(batch.operands(), out, kernel=kernel, algorithm=algorithm, decode=decode)
    return out


@pytest.mark.parametrize(
    ("site", "dtype"),
    [
        pytest.param(WIDE_EXPERTS, torch.bfloat16, id="gate_up-bf16"),
        pytest.param(WIDE, torch.float32, id="o-fp32", marks=pytest.mark.slow),
        pytest.param(WIDE, torch.bfloat16, id="o-bf16", marks=pytest.mark.slow),
        pytest.param(WIDE_EXPERTS, torch.float32, id="gate_up-fp32", marks=pytest.mark.slow),
    ],
)
def test_row_alone_in_decode_has_the_bits_of_a_step_with_a_prefill_chunk(device, site, dtype):
    """Through the default table, as an engine's steps and a LoRA Server's requests are computed."""
    batch = make_batch(site, dtype, "zipf", device, tokens=12, lora_ranks=[8, 70, 3])
    mixed, per_token = deltas(batch), batch.num_rows // 12
    assert_delta(mixed, batch)
    # Another order of sums shows in a few of many bf16 values: compare them all, then rows that are alone.
    assert torch.equal(deltas(batch, decode=True), mixed)
    for token in (0, 11):
        alone = deltas(batch.tokens([token]), decode=True)
        assert torch.equal(alone, mixed[token * per_token : (token + 1) * per_token])


def test_segment_of_several_tiles(device, small_blocks):
    """All rows have one adapter; the last tile is not full."""
    batch = make_batch(QKV, torch.bfloat16, "identical", device, tokens=TOKENS, lora_ranks=[16])
    together = deltas(batch, algorithm="wgmma")
    assert_delta(together, batch)
    assert torch.equal(deltas(batch.tokens([TOKENS - 1]), algorithm="wgmma"), together[-1:])


@settings(
    max_examples=2 if interpreted() else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    case=CASES,
    site=st.sampled_from([QKV, GATE_UP, DOWN]),
    kind=st.sampled_from(["uniform", "zipf", "identical"]),
    seed=st.integers(0, 2**16),
    tokens=st.integers(2, 8),
    data=st.data(),
)
def test_any_order_company_and_split_of_experts(device, small_blocks, case, site, kind, seed, tokens, data):
    options = dict(zip(("kernel", "algorithm"), case, strict=True))
    ranks = [8, 1, 70, 0, 3]
    batch = make_batch(site, torch.bfloat16, kind, device, tokens=tokens, lora_ranks=ranks, seed=seed)
    together = deltas(batch, **options).unflatten(0, (tokens, -1))
    pick = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=8))
    some = deltas(batch.tokens(pick), decode=True, **options).unflatten(0, (len(pick), -1))
    assert torch.equal(some, together[pick])
    if batch.ids is not None:
        all_ids, shares = batch.ids, []
        for half in (0, 1):
            batch.ids = torch.where(all_ids % 2 == half, all_ids, -1)
            shares.append(deltas(batch, **options))
        even = (all_ids.flatten() % 2 == 0)[:, None]
        assert torch.equal(torch.where(even, *shares), together.flatten(0, 1))
