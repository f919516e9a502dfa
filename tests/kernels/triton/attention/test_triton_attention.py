# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from bench.gpu.engine_parts import attention_case, attention_error
from moe_lora.kernels import reference
from moe_lora.kernels.operands import AttentionOperands, KvLayout, Rotation, StepTables
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.attention import triton_attention as attention
from moe_lora.kernels.triton.attention.triton_attention import AttentionTiles
from moe_lora.kernels.triton.configs import interpreted
from tests.kernels.kernel_cases import paged_case, random, strided

DECODE = [(1, 1), (1, 17), (0, 0), (1, 0), (1, 70)]
MIXED = [(5, 5), (1, 33), (0, 0), (7, 40), (2, 0), (1, 66)]
LONG = [(5, 5), (1, 33), (40, 40), (0, 0), (7, 90), (2, 0), (1, 300), (1, 16)]
SMALL = AttentionTiles(block_m=16, block_n=16, num_warps=4, num_stages=2, part_tokens=32)
"""Several blocks, tiles and parts in a small step."""


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def make(generator, device, layout, sequences, heads, *, window=0, sinks=False):
    """Operands of which q, k and v are parts of one fused buffer."""
    dtype, kv_heads = layout.dtype, layout.num_kv_heads
    step, arena = paged_case(generator, layout, sequences, dtype)
    rows = int(step.query_start[-1])
    fused = strided(random(generator, rows, heads + 2 * kv_heads, layout.head_dim, dtype=dtype))
    q, k, v = fused.to(device).split([heads, kv_heads, kv_heads], dim=1)
    sink = random(generator, heads, dtype=dtype).to(device) if sinks else None
    scale = layout.head_dim**-0.5
    return AttentionOperands(q, k, v, sink, scale, window, 1, step.to(device), layout, arena.to(device))


def layout_of(head_dim=64, block_size=16, dtype=torch.float32, num_kv_heads=2):
    return KvLayout(
        num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )


def on_host(operands):
    step = operands.step
    tables = {name: getattr(step, name).cpu() for name in ("query_start", "seq_lens", "block_tables")}
    moved = [one.cpu() if isinstance(one, torch.Tensor) else one for one in operands]
    return AttentionOperands(*moved)._replace(step=StepTables(**tables), arena=operands.arena.cpu().clone())


def assert_agrees(operands, tiles=SMALL):
    expected_operands = on_host(operands)
    expected = reference.paged_attention(expected_operands)
    actual = attention.paged_attention(operands, single=tiles, several=tiles)
    tolerance = 1e-5 if operands.q.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)
    assert torch.equal(operands.arena.cpu(), expected_operands.arena)


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GRID = list(itertools.product((64, 128), (1, 2, 4, 8), (5, 16, 128), DTYPES))


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"),
    [(40, 1, 16, "fp32"), (64, 8, 5, "bf16")],
)
def test_attention_agrees_with_reference(device, generator, head_dim, group, block_size, dtype):
    layout = layout_of(head_dim, block_size, DTYPES[dtype])
    for sequences, window, sinks in ((DECODE, 20, True), (MIXED, 0, False)):
        assert_agrees(make(generator, device, layout, sequences, 2 * group, window=window, sinks=sinks))


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "block_size", "dtype"), GRID)
def test_attention_agrees_with_reference_over_the_grid(device, generator, head_dim, group, block_size, dtype):
    layout = layout_of(head_dim, block_size, DTYPES[dtype])
    for sequences, window, sinks in itertools.product((DECODE, LONG), (0, 20), (False, True)):
        assert_agrees(make(generator, device, layout, sequences, 2 * group, window=window, sinks=sinks))


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_the_launches_of_an_engine_agree_with_reference(device, generator, dtype):
    for sequences, window in (([(1, 300), (1, 20)], 0), ([(1, 270), (35, 80)], 128)):
        operands = make(generator, device, layout_of(dtype=dtype), sequences, 8, window=window, sinks=True)
        assert_agrees(operands, None)


@pytest.mark.parametrize(
    ("heads", "num_kv_heads", "head_dim", "dtype", "clip", "norms", "rotated"),
    [
        (4, 1, 40, "fp32", None, True, 40),
        pytest.param(9, 9, 16, "fp32", 0.7, False, 16, marks=pytest.mark.slow),
        (20, 10, 64, "bf16", None, False, 64),
        (2, 2, 128, "bf16", 0.7, True, 128),
        pytest.param(4, 2, 40, "fp32", None, True, 20, marks=pytest.mark.slow),
        pytest.param(3, 3, 24, "fp32", None, False, 2, marks=pytest.mark.slow),
        (4, 1, 64, "bf16", 0.7, True, 48),
        (9, 3, 24, "fp32", None, False, -24),
        (2, 1, 40, "fp32", None, True, -20),
        (4, 2, 24, "fp32", None, True, 0),
        pytest.param(4, 1, 64, "bf16", None, True, 0, marks=pytest.mark.slow),
    ],
)
def test_q_and_k_are_rotated_as_they_are_written(
    device, generator, heads, num_kv_heads, head_dim, dtype, clip, norms, rotated
):
    """And clamped and normed; rotated below 0: pairs of neighbours;
    heads of more than one program, sequences of one row and of several.
    """
    of = DTYPES[dtype]
    decode, mixed = [(1, 17), (0, 0), (1, 0)], [(2, 5), (1, 9)]
    for sequences, window, sinks in ((decode, 5, True), (mixed, 0, False)):
        layout = layout_of(head_dim, 5, of, num_kv_heads)
        operands = make(generator, device, layout, sequences, heads, window=window, sinks=sinks)
        rows = operands.q.shape[0]
        angle = 9 * random(generator, rows, abs(rotated) // 2)
        weights = [random(generator, head_dim, dtype=of) for _ in "qk"] if norms else [None] * 2
        rotation = Rotation(angle.cos(), angle.sin(), *weights, 1e-5, clip, head_dim, rotated < 0)
        fused = torch.cat([operands.q, operands.k, operands.v], 1).flatten(1).cpu()
        q, k, v = reference.rotated_heads(fused, num_kv_heads, rotation)
        expected = on_host(operands)._replace(q=q, k=k, v=v)
        expected_out = reference.paged_attention(expected)
        moved = [one.to(device) if isinstance(one, torch.Tensor) else one for one in rotation]
        out = attention.paged_attention(operands, Rotation(*moved), single=SMALL, several=SMALL)
        tolerance = 1e-5 if dtype == "fp32" else 2e-2
        torch.testing.assert_close(out.cpu(), expected_out, rtol=tolerance, atol=tolerance)
        written, others = operands.arena.cpu().view(of), expected.arena.view(of)
        torch.testing.assert_close(written, others, rtol=tolerance, atol=tolerance, equal_nan=True)
        if interpreted() and not norms:  # where a product and a sum are rounded apart
            assert torch.equal(operands.arena.cpu(), expected.arena)


def test_rotations_that_do_not_fit_are_refused(device, generator):
    operands = make(generator, device, layout_of(), [(1, 9)], 4)
    angle, weight = torch.ones(1, 32, device=device), torch.ones(64, device=device)
    for wrong in (
        (angle.bfloat16(), angle, None, None),
        (angle, angle[:, 1:], None, None),
        (angle, angle, weight, None),
        (angle, angle, weight, weight[1:]),
    ):
        with pytest.raises(ValueError, match=r"needed|fit"):
            attention.paged_attention(operands, Rotation(*wrong, 1e-5, None))


def test_a_decoding_sequence_has_the_same_bits_whatever_is_beside_it(device, generator):
    """Of one part or several, alone or beside longer ones and chunks of prompts."""
    layout = layout_of(dtype=torch.bfloat16)
    together = make(generator, device, layout, [(1, 30), (1, 70), (3, 9), (1, 130)], 2, sinks=True)
    out = attention.paged_attention(together, single=SMALL, several=SMALL)
    for seq, row in ((0, 0), (1, 1), (3, 5)):
        one = slice(row, row + 1)
        lens = together.step.seq_lens[seq : seq + 1].contiguous()
        tables = together.step.block_tables[seq : seq + 1].contiguous()
        step = StepTables(
            query_start=torch.tensor([0, 1], dtype=torch.int32), seq_lens=lens.cpu(), block_tables=tables
        )
        alone = together._replace(
            q=together.q[one], k=together.k[one], v=together.v[one], step=step.to(device)
        )
        assert torch.equal(attention.paged_attention(alone, single=SMALL), out[one])


def test_a_row_of_a_prompt_has_the_same_bits_in_any_chunk(device, generator):
    whole = make(generator, device, layout_of(dtype=torch.bfloat16), [(40, 40)], 2, window=20)
    out = attention.paged_attention(whole, several=SMALL)
    for first, end in ((10, 33), (38, 40)):
        rows = slice(first, end)
        step = StepTables(
            query_start=torch.tensor([0, end - first], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=whole.step.block_tables,
        )
        chunk = whole._replace(q=whole.q[rows], k=whole.k[rows], v=whole.v[rows], step=step.to(device))
        assert torch.equal(attention.paged_attention(chunk, several=SMALL), out[rows])


def test_pages_that_left_the_window_are_not_read(device, generator):
    operands = make(generator, device, layout_of(), [(1, 100), (2, 90)], 2, window=20)
    before = attention.paged_attention(operands, single=SMALL, several=SMALL)
    operands.step.block_tables[:, :4] = 10**6
    assert torch.equal(attention.paged_attention(operands, single=SMALL, several=SMALL), before)


def test_bounds_above_a_steps_lengths_change_nothing(device, generator):
    """As a captured step has them."""
    operands = make(generator, device, layout_of(), [(1, 100), (1, 30)], 2)
    before = attention.paged_attention(operands, single=SMALL)
    for above in ({"longest_single": 150}, {"single_tokens": 999}, {"single_tokens": None}):
        step = replace(operands.step, bounds=operands.step.bounds._replace(**above))
        assert torch.equal(attention.paged_attention(operands._replace(step=step), single=SMALL), before)


def test_parts_of_many_sequences_find_their_own(device, generator, monkeypatch):
    """More than are counted at once, of none to three parts, some of them prompts."""
    count = 133
    if interpreted():
        import triton.language as tl

        count = 11
        monkeypatch.setattr(configs.kernels("attention.attention_kernels"), "_SEQUENCES", tl.constexpr(4))
    lens = [5 + i * 37 % 90 for i in range(count)]
    sequences = [
        (0, 0) if i % 7 == 3 else (2, length) if i % 5 == 4 else (1, length) for i, length in enumerate(lens)
    ]
    layout = layout_of(head_dim=16, num_kv_heads=1)
    for window in (0, 40):
        assert_agrees(make(generator, device, layout, sequences, 1, window=window, sinks=True))


def test_workspace_has_as_many_parts_as_there_are_tokens_for(generator, monkeypatch):
    """64 sequences of which one is long: 13 MB, where 64 of the longest would take 537."""
    lens = [131072, *[1024] * 63]
    step = StepTables(
        query_start=torch.arange(65, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=torch.zeros(64, 8192, dtype=torch.int32),
    )
    q, k = torch.empty(64, 32, 128), torch.empty(64, 4, 128)
    layout = layout_of(128, 16, num_kv_heads=4)
    arena = torch.empty(layout.page_bytes, dtype=torch.uint8)
    launched = {}
    monkeypatch.setattr(
        configs, "start", lambda kernel, *given, **_: launched.update({kernel.fn.__name__: given})
    )
    attention.launch(AttentionOperands(q, k, k, None, 1.0, 0, 0, step, layout, arena), q)
    programs, sums = launched["join_parts"][:2]
    parts = [-(-one // attention.PART_TOKENS) for one in lens]
    assert programs == 64 * 32
    assert sum(parts) <= sums.shape[0] <= sum(parts) + 64
    assert sums.nbytes < 15e6 < 64 * max(parts) * sums[0].nbytes == 536870912
    assert launched["attend"][0] == 4 * sums.shape[0]


def test_cases_of_the_first_run_on_a_gpu_agree_with_reference(device):
    for sequences in ((2, 1, 33), (1, 20, 20)):
        assert 0 < attention_error(attention_case(*sequences, 4, 2, 64, 0, str(device))) < 0.05


def test_operands_that_do_not_fit_are_refused(device, generator):
    operands = make(generator, device, layout_of(), [(1, 9)], 4)
    q, k, step = operands.q, operands.k, operands.step
    attention.paged_attention(operands)
    for changed in (
        {"q": q.bfloat16()},
        {"q": q[:, :3]},
        {"k": k[:, :1]},
        {"k": k.transpose(1, 2).contiguous().transpose(1, 2)},
        {"scale": 0.0},
        {"layer": 2},
        {"sinks": torch.zeros(3, device=device)},
        {"step": replace(step, seq_lens=step.seq_lens.long())},
        {"step": replace(step, query_start=step.query_start[:1])},
    ):
        with pytest.raises(ValueError):
            attention.paged_attention(operands._replace(**changed))
