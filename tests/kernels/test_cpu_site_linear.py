# SPDX-License-Identifier: Apache-2.0
"""A LoRA site in one call of the library against shrink, linear layer and expand one after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_lora.kernels import ops
from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.cpu.site_linear import NO_ROWS, SiteLinear, lora_rows
from moe_lora.kernels.operands import LoraOperands
from moe_lora.kernels.quantised import QuantisedOperand, format_of

from .kernel_cases import DOWN, GATE_UP, LAYER, LORA_RANKS, QKV, lora_batch, packed_adapters, random, strided
from .test_cpu_quantised import held, ident, random_held

ZEROS = format_of("int4", 96)  # with zeros, and scales in fp32
FORMS = [
    None,
    format_of("int8"),
    format_of("int4", 32),
    format_of("int8-dynamic"),
    format_of("int4-dynamic", 32),
    format_of("fp8"),
    format_of("mxfp4", 32),
    ZEROS,
]
SITES = [replace(site, in_features=96) for site in (QKV, GATE_UP, DOWN)]
FIRST_EXPERT, HELD_EXPERTS = 1, 2


def weights_of(site, form, dtype, generator):
    """Weights, of experts 1 and 2 of 4 where the site has experts, and biases."""
    experts = (HELD_EXPERTS,) if site.num_experts else ()
    sizes = sum(site.out_features), site.in_features
    weight = random(generator, *experts, *sizes, dtype=dtype)
    if (form is not None and form.name in ("fp8", "mxfp4")) or form == ZEROS:
        made = random_held(
            form, HELD_EXPERTS, *sizes[::-1], generator, zero=form == ZEROS, wide=True, dtype=dtype
        )
        parts = made[1:] if experts else [None if one is None else one[0] for one in made[1:]]
        return QuantisedOperand(form, *parts), random(generator, *experts, sizes[0], dtype=dtype)
    bias = random(generator, *experts, sum(site.out_features), dtype=dtype)
    return (weight if form is None else held(form, weight)), bias


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "plain" if form is None else ident(form))
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_one_call_has_the_bits_of_three(dtype, generator, site, form):
    weight, bias = weights_of(site, form, dtype, generator)
    slots, arena = packed_adapters(generator, site, LORA_RANKS, dtype)
    num_out = sum(site.out_features)
    first = FIRST_EXPERT if site.num_experts else None
    linear = SiteLinear(LAYER, dtype, weight, bias, site.in_features, num_out, first)
    for rows in (1, 3, 8):
        x, ids, token_slots = lora_batch(generator, site, rows, "uniform", dtype, len(LORA_RANKS))
        x = strided(x)
        here = None
        if ids is not None:
            ids = torch.where((ids >= FIRST_EXPERT) & (ids < FIRST_EXPERT + HELD_EXPERTS), ids, -1).int()
            here = torch.where(ids < 0, ids, ids - FIRST_EXPERT)
        base = ops.multiply(x, weight, bias, here, num_out)
        assert torch.equal(linear(x, ids, NO_ROWS), base)
        expected = base.clone()
        operands = LoraOperands(x, ids, site, LAYER, token_slots, slots, arena)
        cpu.lora_expand(cpu.lora_shrink(operands), expected)
        for kernel in cpu.KERNELS:
            assert torch.equal(linear(x, ids, lora_rows(site, token_slots, slots, arena, kernel)), expected)


def test_what_it_is_not_made_for_is_left_to_others(generator):
    dense, moe = SITES[0], SITES[1]
    weight, bias = weights_of(dense, None, torch.float32, generator)
    linear = SiteLinear(LAYER, torch.float32, weight, bias, 96, sum(dense.out_features), None)
    many = random(generator, cpu.LINEAR_MAX_ROWS[torch.float32] + 1, 96)
    assert linear(many[:2], None, NO_ROWS) is not None
    assert linear(many, None, NO_ROWS) is None, "torch multiplies as many rows faster"
    assert linear(many[:2].bfloat16(), None, NO_ROWS) is None
    assert linear(many[:2, :95], None, NO_ROWS) is None
    assert linear(many[:96].T[:2], None, NO_ROWS) is None
    assert linear(many[:2], torch.zeros(2, 2).int(), NO_ROWS) is None
    slots, arena = packed_adapters(generator, dense, LORA_RANKS, torch.float32)
    rows = lora_rows(dense, torch.zeros(3).int(), slots, arena)
    assert linear(many[:2], None, rows) is None, "rows of another step"
    weight, bias = weights_of(moe, None, torch.float32, generator)
    linear = SiteLinear(LAYER, torch.float32, weight, bias, 96, sum(moe.out_features), FIRST_EXPERT)
    assert linear(many[:2], torch.ones(2, 2).int(), NO_ROWS) is not None
    for ids in (torch.ones(2, 2), torch.ones(3, 2).int(), torch.full((2, 2), 3).int(), None):
        assert linear(many[:2], ids, NO_ROWS) is None


def test_a_slot_that_is_none_is_refused(generator):
    site = SITES[0]
    slots, arena = packed_adapters(generator, site, LORA_RANKS, torch.float32)
    weight, bias = weights_of(site, None, torch.float32, generator)
    linear = SiteLinear(LAYER, torch.float32, weight, bias, 96, sum(site.out_features), None)
    rows = lora_rows(site, torch.tensor([99, 0]).int(), slots, arena)
    assert linear(random(generator, 2, 96), None, rows) is None
    assert (
        SiteLinear(2, torch.float32, weight, bias, 96, sum(site.out_features), None)(
            random(generator, 2, 96), None, lora_rows(site, torch.zeros(2).int(), slots, arena)
        )
        is None
    ), "a layer that the slot table has not"
    for other in (replace(site, in_features=95), replace(site, out_features=(80, 33, 34)), SITES[1]):
        there, memory = packed_adapters(generator, other, LORA_RANKS, torch.float32)
        rows = lora_rows(other, torch.zeros(2).int(), there, memory)
        assert linear(random(generator, 2, 96), None, rows) is None, "rows of another site"
    with pytest.raises(ValueError, match="entries"):
        lora_rows(replace(site, entry_base=50), torch.zeros(2).int(), slots, arena)
    for broken in (weight[:, ::2], weight.T, weight.bfloat16(), weight[1:]):
        with pytest.raises(ValueError, match="weight"):
            SiteLinear(LAYER, torch.float32, broken, bias, 96, sum(site.out_features), None)
    with pytest.raises(ValueError, match="bias"):
        SiteLinear(LAYER, torch.float32, weight, bias[1:], 96, sum(site.out_features), None)
    small = held(FORMS[1], weight[1:])
    with pytest.raises(ValueError, match="int8 weights"):
        SiteLinear(LAYER, torch.float32, small, None, 96, sum(site.out_features), None)
    with pytest.raises(ValueError, match="arena"):
        lora_rows(site, torch.zeros(2).int(), slots, arena.short())
