# SPDX-License-Identifier: Apache-2.0
"""Operands that don't fit are refused by name, and nothing is written."""

from __future__ import annotations

import pytest
import torch

from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.operands import LoraOperands

from .kernel_cases import GATE_UP, LAYER, QKV, SiteCase, packed_adapters

I32 = torch.int32


@pytest.fixture
def operands(dtype, generator):
    slots, arena = packed_adapters(generator, GATE_UP, [4, 4], dtype)
    return {
        "x": torch.zeros(3, 70, dtype=dtype),
        "ids": torch.zeros(3, 2, dtype=I32),
        "site": GATE_UP,
        "layer": LAYER,
        "token_slots": torch.zeros(3, dtype=I32),
        "slots": slots,
        "arena": arena,
        "out": torch.full((6, 260), 7.0, dtype=dtype),
    }


def delta(out, kernel="sgmv", **operands):
    cpu.lora_delta(LoraOperands(**operands), out, kernel=kernel)


REFUSED = {
    "x must be .*70": lambda o: {"x": o["x"][:, :60]},
    "x must be .*not of shape": lambda o: {"x": o["x"][0]},
    "x has 4 rows": lambda o: {"x": o["x"].new_zeros(4, 70)},
    "not torch.float16": lambda o: {"x": o["x"].half()},
    "on meta": lambda o: {"x": o["x"].to("meta")},
    "rows must be contiguous": lambda o: {"x": o["x"].new_zeros(70, 3).T},
    "ids hold an expert": lambda o: {"ids": o["ids"] + 4},
    "ids hold": lambda o: {"ids": o["ids"] - 2},
    "ids must be .*int32": lambda o: {"ids": o["ids"].long()},
    r"ids must be \[T, K\]": lambda o: {"ids": o["ids"].flatten()},
    "ids must be .*meta": lambda o: {"ids": o["ids"].to("meta")},
    "no ids given": lambda o: {"ids": None},
    "ids given": lambda o: {"site": SiteCase("dense", ("d",), 70, (130,))},
    "layer=2": lambda o: {"layer": 2},
    "layer=-1": lambda o: {"layer": -1},
    "entries": lambda o: {"site": SiteCase("gate_up", ("gate", "up"), 70, (130, 130), 4, entry_base=9)},
    "token_slots holds a slot": lambda o: {"token_slots": o["token_slots"] + 2},
    "token_slots holds": lambda o: {"token_slots": o["token_slots"] - 2},
    "token_slots must be .*int64": lambda o: {"token_slots": o["token_slots"].long()},
    "token_slots must be .*3 elements": lambda o: {"token_slots": o["token_slots"][:2]},
    "arena must be": lambda o: {"arena": o["arena"].view(torch.int8)},
    "arena must be .*contiguous": lambda o: {"arena": o["arena"].repeat_interleave(2)[::2]},
    "out must be .*260 columns": lambda o: {"out": o["out"][:, :259]},
    "out must be .*6 rows": lambda o: {"out": o["out"][:5]},
    "out must be .*float64": lambda o: {"out": o["out"].double()},
    "out must be .*meta": lambda o: {"out": o["out"].to("meta")},
    "out must be .*shape": lambda o: {"out": o["out"][0]},
}


@pytest.mark.parametrize("named", REFUSED)
def test_operands_that_do_not_fit(operands, named):
    changed = {**operands, **REFUSED[named](operands)}
    with pytest.raises(ValueError, match=named):
        delta(**changed)
    assert (operands["out"] == 7).all()
    delta(**operands)
    assert (operands["out"] == 0).all()


def test_an_unknown_kernel(operands):
    with pytest.raises(ValueError, match="kernel='gemm' is unknown; choose one of sgmv, bgmv, mbgmv"):
        delta(**operands, kernel="gemm")


@pytest.mark.parametrize("kernel", ["sgmv", "bgmv", "mbgmv"])
@pytest.mark.parametrize("table", ["a_offset", "b_offset"])
@pytest.mark.parametrize("where", ["negative", "odd", "one too far", "after the end", "far"])
def test_a_matrix_outside_the_arena(operands, kernel, table, where):
    width = 70 if table == "a_offset" else 130
    num_bytes = 4 * width * operands["x"].element_size()
    end = operands["arena"].numel()
    offset = {
        "negative": -64,
        "odd": 1,
        "one too far": end - num_bytes + operands["x"].element_size(),
        "after the end": end,
        "far": 2**62,
    }[where]
    entry = GATE_UP.entry(1, 0)
    offsets = getattr(operands["slots"], table)
    kept = int(offsets[0, LAYER, entry])
    offsets[0, LAYER, entry] = offset
    with pytest.raises(ValueError, match=rf"{table}\[0, 1, {entry}\]={offset}: {num_bytes} bytes"):
        delta(**operands, kernel=kernel)
    assert (operands["out"] == 7).all()
    offsets[0, LAYER, entry] = kept
    delta(**operands, kernel=kernel)
    assert (operands["out"] == 0).all()


def test_a_matrix_that_ends_with_the_arena_is_taken(dtype, generator):
    slots, arena = packed_adapters(generator, QKV, [4], dtype)
    last = int(slots.b_offset[0, LAYER, QKV.entry(2)]) + 4 * 33 * dtype.itemsize
    out = torch.zeros(1, 146, dtype=dtype)
    x, token_slots = torch.ones(1, 96, dtype=dtype), torch.zeros(1, dtype=I32)
    cpu.lora_delta(LoraOperands(x, None, QKV, LAYER, token_slots, slots, arena[:last].clone()), out)
    assert (out[:, -33:] != 0).any()
    with pytest.raises(ValueError, match="b_offset"):
        cpu.lora_delta(LoraOperands(x, None, QKV, LAYER, token_slots, slots, arena[: last - 2].clone()), out)
