# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import os

import pytest
import torch

from moe_lora.kernels import reference
from moe_lora.kernels.cpu import cpu, library
from moe_lora.kernels.operands import AttentionOperands, KvLayout

from .forked import output_of_fork
from .kernel_cases import paged_case, random, strided


def attend(*operands):
    return cpu.paged_attention(AttentionOperands(*operands))


DECODE = [(1, 1), (1, 16), (1, 17), (0, 0), (1, 300)]
MIXED = [(5, 5), (1, 33), (40, 40), (0, 0), (7, 150), (0, 0)]


def operands(generator, layout, sequences, heads, dtype):
    """Step, arena, and q, k, v as parts of one fused buffer."""
    step, arena = paged_case(generator, layout, sequences, dtype)
    rows, dim, kv_heads = int(step.query_start[-1]), layout.head_dim, layout.num_kv_heads
    fused = strided(random(generator, rows, (heads + 2 * kv_heads), dim, dtype=dtype))
    return step, arena, fused.split([heads, kv_heads, kv_heads], dim=1)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (40, 5), (16, 128)])
def test_attention_agrees_with_reference(isa, dtype, generator, group, sequences, head_dim, block_size):
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype)
    step, arena, (q, k, v) = operands(generator, layout, sequences, 2 * group, dtype)
    for window, sinks in ((0, None), (20, random(generator, 2 * group, dtype=dtype))):
        args = (q, k, v, sinks, head_dim**-0.5, window, 1, step, layout)
        expected_arena, actual_arena = arena.clone(), arena.clone()
        expected = reference.paged_attention(AttentionOperands(*args, expected_arena))
        actual = attend(*args, actual_arena)
        assert torch.equal(actual_arena, expected_arena)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=["decode", "mixed"])
def test_keys_that_are_values_too_lie_in_half_of_the_pages(isa, dtype, generator, sequences):
    sizes = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 20, "block_size": 5, "dtype": dtype}
    layout, whole = KvLayout(**sizes, has_values=False), KvLayout(**sizes)
    assert 2 * layout.layer_bytes == whole.layer_bytes
    step, arena, (q, k, _) = operands(generator, layout, sequences, 5, dtype)
    args, before = (q, k, k, None, 0.2, 0, 1, step), arena.clone()
    found = attend(*args, layout, arena)
    expected = reference.paged_attention(AttentionOperands(*args, layout, before))
    assert torch.equal(before, arena)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_rows_after_the_last_sequence_are_zero(dtype, generator):
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=4, dtype=dtype)
    step, arena, (q, k, v) = operands(generator, layout, [(1, 9), (2, 2)], 2, dtype)
    step.seq_lens[1] = 0
    out = attend(q, k, v, None, 0.25, 0, 0, step, layout, arena)
    assert (out[1:] == 0).all()
    assert (out[0] != 0).any()


def test_pages_that_left_the_window_are_not_read(dtype, generator):
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16, dtype=dtype)
    step, arena, (q, k, v) = operands(generator, layout, [(1, 100)], 2, dtype)
    before = attend(q, k, v, None, 0.25, 20, 0, step, layout, arena.clone())
    step.block_tables[0, :5] = 10**6
    assert torch.equal(attend(q, k, v, None, 0.25, 20, 0, step, layout, arena), before)


def test_a_row_is_bit_identical_decoded_or_in_a_prefill_chunk(isa, dtype, generator):
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=32, block_size=16, dtype=dtype)
    step, arena, (q, k, v) = operands(generator, layout, [(150, 150)], 8, dtype)
    together = attend(q, k, v, None, 0.2, 70, 0, step, layout, arena)
    torch.set_num_threads(2)
    assert torch.equal(attend(q, k, v, None, 0.2, 70, 0, step, layout, arena), together)
    for row in (0, 1, 64, 127, 128, 149):
        step.query_start[1], step.seq_lens[0] = 1, row + 1
        one = slice(row, row + 1)
        alone = attend(q[one], k[one], v[one], None, 0.2, 70, 0, step, layout, arena)
        assert torch.equal(alone, together[one])


def test_operands_that_do_not_fit_are_refused(generator):
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=16, block_size=4, dtype=torch.float32)
    step, arena, (q, k, v) = operands(generator, layout, [(1, 9)], 4, torch.float32)

    def attend(q=q, k=k, v=v, sinks=None, scale=0.25, **changed):
        tables = type(step)(**{**step.__dict__, **changed})
        cpu.paged_attention(AttentionOperands(q, k, v, sinks, scale, 0, 0, tables, layout, arena))

    attend()
    refused = [
        lambda: attend(q=q.bfloat16()),
        lambda: attend(q=q[:, :3]),
        lambda: attend(k=k[:, :1]),
        lambda: attend(k=k.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda: attend(scale=0.0),
        lambda: attend(sinks=torch.zeros(3)),
        lambda: attend(block_tables=step.block_tables + 1000),
        lambda: attend(block_tables=step.block_tables[:, :2].contiguous()),
        lambda: attend(seq_lens=step.seq_lens.long()),
        lambda: attend(query_start=torch.tensor([0, 2], dtype=torch.int32)),
    ]
    for call in refused:
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize("name", ["portable", "amx_emulated"])
def test_environment_chooses_the_instruction_set(name, tmp_path):
    def load() -> None:
        """As at the first import."""
        os.environ["MOE_LORA_ISA"] = name
        importlib.reload(library)
        print(cpu.isa())

    assert output_of_fork(load, tmp_path / "out") == f"{name}\n"


def test_the_emulation_of_amx_is_never_chosen_by_itself():
    assert os.environ.get("MOE_LORA_ISA") == "amx_emulated" or cpu.isa() != "amx_emulated"
