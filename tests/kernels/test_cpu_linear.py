# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.kernels import reference
from moe_lora.kernels.cpu import cpu

from .kernel_cases import random, strided

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ROWS = [1, 2, 3, 5, 16, 17, 64, 200]
WIDTHS = [(64, 32), (77, 13), (33, 1), (256, 70), (7, 5)]


@pytest.mark.parametrize(("width", "num_out"), WIDTHS)
def test_linear_agrees_with_fp64(isa, dtype, generator, width, num_out):
    weight = random(generator, num_out, width, dtype=dtype)
    for rows, bias in itertools.product(ROWS, [None, random(generator, num_out, dtype=dtype)]):
        x = strided(random(generator, rows, width, dtype=dtype))
        expected = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
        actual = cpu.linear(x, weight, bias)
        assert actual.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * width**0.5)


def test_linear_of_no_rows_is_empty(dtype):
    assert cpu.linear(torch.zeros(0, 8, dtype=dtype), torch.zeros(4, 8, dtype=dtype), None).shape == (0, 4)


def test_nan_and_infinity_stay_visible(isa, dtype):
    x = torch.ones(3, 40, dtype=dtype)
    x[0, 3], x[1, 39] = float("nan"), float("inf")
    out = cpu.linear(x, torch.ones(6, 40, dtype=dtype), None)
    assert out[0].isnan().all()
    assert out[1].isinf().all()
    assert (out[2] == 40).all()


@pytest.mark.parametrize("row_per_output", [False, True])
def test_expert_linear_agrees_with_reference(isa, dtype, generator, row_per_output):
    experts, top_k, width, num_out = 6, 2, 70, 37
    weight = random(generator, experts, num_out, width, dtype=dtype) / width**0.5
    for rows, bias in itertools.product(ROWS, [None, random(generator, experts, num_out, dtype=dtype)]):
        ids = torch.randint(-1, experts - 1, (rows, top_k), generator=generator).int()
        x = strided(random(generator, rows * (top_k if row_per_output else 1), width, dtype=dtype))
        wide_bias = None if bias is None else bias.double()
        expected = reference.expert_linear(x.double(), weight.double(), wide_bias, ids)
        actual = cpu.expert_linear(x, weight, bias, ids)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
        assert (actual[ids.flatten() == -1] == 0).all()


def test_all_rows_at_one_expert_and_rows_all_padding(dtype, generator):
    x, weight = random(generator, 5, 16, dtype=dtype), random(generator, 3, 8, 16, dtype=dtype)
    ids = torch.full((5, 1), 2, dtype=torch.int32)
    assert torch.equal(cpu.expert_linear(x, weight, None, ids), cpu.linear(x, weight[2], None))
    assert (cpu.expert_linear(x, weight, None, ids * 0 - 1) == 0).all()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 150),
    num_out=st.integers(1, 40),
    bf16=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_row_is_bit_identical_in_any_batch(rows, width, num_out, bf16, seed):
    generator, dtype = torch.Generator().manual_seed(seed), torch.bfloat16 if bf16 else torch.float32
    x, weight = random(generator, rows, width, dtype=dtype), random(generator, num_out, width, dtype=dtype)
    together = cpu.linear(x, weight, None)
    alone = torch.cat([cpu.linear(row[None], weight, None) for row in x])
    assert torch.equal(together, alone)


def test_wide_layers_are_bit_identical_in_any_batch_on_any_number_of_threads(isa, dtype, generator):
    """Wide enough that rows and weights are cut in blocks and shared out to threads."""
    x, weight = random(generator, 64, 1024, dtype=dtype), random(generator, 515, 1024, dtype=dtype)
    together = cpu.linear(x, weight, None)
    torch.set_num_threads(2)
    for rows in (1, 2, 5, 16, 40):
        assert torch.equal(cpu.linear(x[:rows], weight, None), together[:rows])


def test_operands_that_do_not_fit_are_refused():
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    bank, ids = torch.zeros(3, 4, 8), torch.zeros(2, 2, dtype=torch.int32)
    refused = [
        lambda: cpu.linear(x.half(), weight.half(), None),
        lambda: cpu.linear(x.bfloat16(), weight, None),
        lambda: cpu.linear(x, torch.zeros(4, 9), None),
        lambda: cpu.linear(x, torch.zeros(8, 4).T, None),
        lambda: cpu.linear(torch.zeros(8, 2).T, weight, None),
        lambda: cpu.linear(x, weight, torch.zeros(5)),
        lambda: cpu.linear(x, weight, torch.zeros(4).bfloat16()),
        lambda: cpu.expert_linear(x, bank, None, ids + 3),
        lambda: cpu.expert_linear(x, bank, None, ids - 2),
        lambda: cpu.expert_linear(x, bank, None, ids.long()),
        lambda: cpu.expert_linear(torch.zeros(3, 8), bank, None, ids),
        lambda: cpu.expert_linear(x, bank, torch.zeros(4), ids),
    ]
    for call in refused:
        with pytest.raises(ValueError):
            call()
