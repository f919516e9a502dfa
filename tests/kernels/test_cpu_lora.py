# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from moe_lora.kernels import reference
from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.operands import LoraOperands

from .kernel_cases import (
    DOWN,
    GATE_UP,
    LAYER,
    LORA_RANKS,
    QKV,
    SiteCase,
    lora_batch,
    packed_adapters,
    random,
    strided,
)

KERNELS = ["sgmv", "bgmv", "mbgmv"]
ROWS = [1, 2, 3, 5, 16, 17, 200]


def add_delta(x, ids, site, token_slots, slots, arena, y, kernel="sgmv") -> torch.Tensor:
    """y + delta by the kernels under test, in place."""
    shrunk = cpu.lora_shrink(LoraOperands(x, ids, site, LAYER, token_slots, slots, arena), kernel=kernel)
    cpu.lora_expand(shrunk, y)
    return y


@pytest.mark.parametrize("kind", ["distinct", "uniform", "zipf", "identical"])
@pytest.mark.parametrize("site", [QKV, GATE_UP, DOWN], ids=lambda site: site.name)
def test_delta_agrees_with_reference(isa, dtype, generator, site, kind):
    slots, arena = packed_adapters(generator, site, LORA_RANKS, dtype)
    for rows in ROWS:
        x, ids, token_slots = lora_batch(generator, site, rows, kind, dtype, len(LORA_RANKS))
        y = random(generator, rows if ids is None else ids.numel(), sum(site.out_features), dtype=dtype)
        expected = y + reference.lora_delta(LoraOperands(x, ids, site, LAYER, token_slots, slots, arena))
        actual = add_delta(strided(x), ids, site, token_slots, slots, arena, strided(y))
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("site", [QKV, GATE_UP], ids=lambda site: site.name)
def test_delta_is_taken_off_a_sum_in_fp32_unrounded(isa, dtype, generator, site):
    slots, arena = packed_adapters(generator, site, LORA_RANKS, dtype)
    x, ids, token_slots = lora_batch(generator, site, 17, "uniform", dtype, len(LORA_RANKS))
    operands = LoraOperands(x, ids, site, LAYER, token_slots, slots, arena)
    delta = reference.lora_delta(operands, torch.float32)
    for subtract, sign in ((False, 1), (True, -1)):
        y = torch.ones_like(delta)
        cpu.lora_expand(cpu.lora_shrink(operands), y, subtract=subtract)
        torch.testing.assert_close(y, 1 + sign * delta, rtol=2e-5, atol=2e-5)


def test_row_without_adapter_gets_no_delta(dtype, generator):
    slots, arena = packed_adapters(generator, QKV, LORA_RANKS, dtype)
    x, y = random(generator, 4, 96, dtype=dtype), random(generator, 4, 146, dtype=dtype)
    token_slots = torch.tensor([-1, 3, -1, 0], dtype=torch.int32)  # slot 3 is empty
    out = add_delta(x, None, QKV, token_slots, slots, arena, y.clone())
    assert torch.equal(out[:3], y[:3])
    assert not torch.equal(out[3], y[3])
    untouched = add_delta(x, None, QKV, torch.full_like(token_slots, -1), slots, arena, y.clone())
    assert torch.equal(untouched, y)


def test_modules_that_share_a_get_the_same_delta_as_with_copies(isa, dtype, generator):
    slots, arena = packed_adapters(generator, GATE_UP, [8, 5], dtype, share_a=True)
    x, ids, token_slots = lora_batch(generator, GATE_UP, 12, "distinct", dtype, 2)
    y = torch.zeros(24, 260, dtype=dtype)
    expected = reference.lora_delta(LoraOperands(x, ids, GATE_UP, LAYER, token_slots, slots, arena))
    actual = add_delta(x, ids, GATE_UP, token_slots, slots, arena, y)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_long_segments_are_bit_identical_to_single_rows(isa, dtype, generator):
    site = SiteCase("o", ("o",), 1024, (1500,))
    slots, arena = packed_adapters(generator, site, [72], dtype)
    x, y = random(generator, 230, 1024, dtype=dtype), random(generator, 230, 1500, dtype=dtype)
    token_slots = torch.zeros(230, dtype=torch.int32)
    together = add_delta(x, None, site, token_slots, slots, arena, y.clone())
    torch.set_num_threads(2)
    assert torch.equal(add_delta(x, None, site, token_slots, slots, arena, y.clone()), together)
    for row in (0, 95, 96, 229):
        pick = slice(row, row + 1)
        assert torch.equal(
            add_delta(x[pick], None, site, token_slots[pick], slots, arena, y[pick].clone()), together[pick]
        )


@pytest.mark.parametrize("site", [QKV, GATE_UP, DOWN], ids=lambda site: site.name)
def test_adding_a_delta_that_was_computed_apart_gives_the_same_bits(isa, dtype, generator, site):
    slots, arena = packed_adapters(generator, site, LORA_RANKS, dtype)
    slots.scale.neg_()
    for rows in (1, 2, 40):
        x, ids, token_slots = lora_batch(generator, site, rows, "uniform", dtype, len(LORA_RANKS))
        x[0], token_slots[0] = 0, 0  # a delta of -0.0 before it is normalised
        if ids is not None:
            ids[0] = 0
        num_rows = rows if ids is None else ids.numel()
        y = random(generator, num_rows, sum(site.out_features), dtype=dtype)
        y[0] = -0.0
        together = add_delta(x, ids, site, token_slots, slots, arena, y.clone())
        into_zeros = add_delta(x, ids, site, token_slots, slots, arena, torch.zeros_like(y))
        delta = strided(torch.full_like(y, float("nan")))
        cpu.lora_delta(LoraOperands(x, ids, site, LAYER, token_slots, slots, arena), delta)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal((y + into_zeros).view(bits), together.view(bits))
        assert torch.equal(delta.contiguous().view(bits), into_zeros.view(bits))


def test_a_row_without_adapter_has_a_zero_delta(dtype, generator):
    slots, arena = packed_adapters(generator, QKV, LORA_RANKS, dtype)
    x, out = random(generator, 3, 96, dtype=dtype), torch.full((3, 146), float("nan"), dtype=dtype)
    token_slots = torch.tensor([-1, 3, 0], dtype=torch.int32)  # slot 3 is empty
    cpu.lora_delta(LoraOperands(x, None, QKV, LAYER, token_slots, slots, arena), out)
    assert (out[:2] == 0).all()
    assert (out[2] != 0).any()


@pytest.mark.parametrize("kernel", ["bgmv", "mbgmv"])
@pytest.mark.parametrize("site", [QKV, GATE_UP, DOWN], ids=lambda site: site.name)
def test_the_baselines_give_the_same_bits(isa, dtype, generator, site, kernel):
    slots, arena = packed_adapters(generator, site, LORA_RANKS, dtype)
    for rows in (1, 7, 60):
        x, ids, token_slots = lora_batch(generator, site, rows, "uniform", dtype, len(LORA_RANKS))
        num_rows = rows if ids is None else ids.numel()
        y = random(generator, num_rows, sum(site.out_features), dtype=dtype)
        ours = add_delta(x, ids, site, token_slots, slots, arena, y.clone())
        assert torch.equal(add_delta(x, ids, site, token_slots, slots, arena, y.clone(), kernel), ours)


@pytest.mark.parametrize("share_a", [False, True])
def test_bgmv_discards_what_lies_beside_a_matrix_even_nan_and_stays_in_the_arena(
    isa, dtype, generator, share_a
):
    """The low-rank adapter comes last, so that padding it to the largest rank would run out of the arena."""
    slots, arena = packed_adapters(generator, GATE_UP, [40, 40, 3], dtype, share_a=share_a)
    used = int(slots.a_offset[2, LAYER, 1])
    arena[:used] = 255  # NaN in both dtypes
    slots.lora_rank[1] = 0
    x, ids = random(generator, 2, 70, dtype=dtype), torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
    token_slots = torch.tensor([2, 0], dtype=torch.int32)
    y = torch.zeros(4, 260, dtype=dtype)
    exact = arena[used:].clone()
    padded = add_delta(x, ids, GATE_UP, token_slots, slots, arena, y.clone(), "bgmv")
    assert padded[2:].isnan().all()
    slots.a_offset -= used
    slots.b_offset -= used
    token_slots[1] = -1
    alone = add_delta(x, ids, GATE_UP, token_slots, slots, exact, y.clone())
    assert torch.equal(padded[:2], alone[:2])
    assert (alone[:2] != 0).any()


def test_a_shrunk_is_redeemed_once_and_outlives_its_operands(dtype, generator):
    slots, arena = packed_adapters(generator, QKV, [8], dtype)
    x, token_slots = random(generator, 4, 96, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    expected = add_delta(x, None, QKV, token_slots, slots, arena, torch.zeros(4, 146, dtype=dtype))
    shrunk = cpu.lora_shrink(LoraOperands(x, None, QKV, LAYER, token_slots, slots, arena))
    del x, token_slots, slots, arena
    y = torch.zeros(4, 146, dtype=dtype)
    with pytest.raises(ValueError, match=r"y must be .* 4 rows"):
        cpu.lora_expand(shrunk, y[:3])
    cpu.lora_expand(shrunk, y)
    assert torch.equal(y, expected)
    with pytest.raises(ValueError, match="expanded before"):
        cpu.lora_expand(shrunk, y)
    assert torch.equal(y, expected)


def test_several_sites_may_wait_for_their_expand_at_once(generator):
    slots, arena = packed_adapters(generator, QKV, [8, 4], torch.float32)
    token_slots = torch.tensor([0, 1, 0], dtype=torch.int32)
    xs = [random(generator, 3, 96) for _ in range(7)]
    expected = [add_delta(x, None, QKV, token_slots, slots, arena, torch.zeros(3, 146)) for x in xs]
    waiting = [cpu.lora_shrink(LoraOperands(x, None, QKV, LAYER, token_slots, slots, arena)) for x in xs]
    token_slots.fill_(-1)
    del waiting[3], expected[3]
    for shrunk, delta in zip(reversed(waiting), reversed(expected), strict=True):
        y = torch.zeros(3, 146)
        cpu.lora_expand(shrunk, y)
        assert torch.equal(y, delta)
