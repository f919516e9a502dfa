# SPDX-License-Identifier: Apache-2.0
"""What only a CUDA device can show: the compiled pipelines at real sizes, and graph capture."""

from __future__ import annotations

import pytest
import torch

from moe_lora.kernels.triton.lora import triton_lora as lora
from moe_lora.kernels.triton.lora.segments import build_segments
from tests.kernels.kernel_cases import SiteCase

from .gpu_cases import LAYER, assert_delta, make_batch

pytestmark = pytest.mark.gpu

QKV = SiteCase("qkv", ("q", "k", "v"), 4096, (4096, 1024, 1024))
GATE_UP = SiteCase("gate_up", ("gate", "up"), 2048, (768, 768), num_experts=8)
DOWN = SiteCase("down", ("down",), 768, (2048,), num_experts=8)
ODD = SiteCase("o", ("o",), 1001, (515,))
RANKS = [8, 64, 1, 130, 0, 512, 16, 37]


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("tokens", "kind"), [(1, "distinct"), (7, "uniform"), (64, "identical"), (600, "zipf")]
)
@pytest.mark.parametrize("site", [QKV, GATE_UP, DOWN, ODD], ids=lambda site: site.name)
@pytest.mark.parametrize("algorithm", ["wgmma", "vector"])
def test_delta_agrees_with_fp64_at_real_sizes_with_the_same_bits_in_both_phases(
    cuda, algorithm, site, kind, tokens
):
    batch = make_batch(site, torch.bfloat16, kind, cuda, tokens=tokens, lora_ranks=RANKS)
    outs = [batch.output(), batch.output()]
    for decode, out in zip((True, False), outs, strict=True):
        lora.lora_delta(batch.operands(), out, decode=decode, algorithm=algorithm)
    assert_delta(outs[0], batch)
    assert torch.equal(*outs)


@pytest.mark.parametrize("algorithm", ["wgmma", "vector"])
def test_less_aligned_x_and_y_give_the_same_bits(cuda, algorithm):
    batch = make_batch(QKV, torch.bfloat16, "uniform", cuda, tokens=9, lora_ranks=RANKS)
    y = torch.zeros_like(batch.output())
    lora.lora_expand(lora.lora_shrink(batch.operands(), decode=True, algorithm=algorithm), y)
    wide_x, wide_y = (torch.zeros(9, t.shape[1] + 3, dtype=t.dtype, device=cuda) for t in (batch.x, y))
    shifted_x, shifted_y = wide_x[:, 1 : 1 + batch.x.shape[1]], wide_y[:, 1 : 1 + y.shape[1]]
    shifted_x.copy_(batch.x)
    batch.x = shifted_x
    lora.lora_expand(lora.lora_shrink(batch.operands(), decode=True, algorithm=algorithm), shifted_y)
    assert torch.equal(shifted_y, y)


@pytest.mark.parametrize("site", [QKV, DOWN], ids=lambda site: site.name)
@pytest.mark.parametrize("algorithm", ["wgmma", "vector"])
def test_row_is_bit_identical_alone_and_in_a_large_batch(cuda, algorithm, site):
    batch = make_batch(site, torch.bfloat16, "zipf", cuda, tokens=300, lora_ranks=RANKS)
    together, per_token = batch.output(), batch.num_rows // 300
    lora.lora_delta(batch.operands(), together, decode=False, algorithm=algorithm)
    for token in range(0, 300, 23):
        alone = batch.tokens([token])
        out = alone.output()
        lora.lora_delta(alone.operands(), out, decode=False, algorithm=algorithm)
        assert torch.equal(out, together[token * per_token : (token + 1) * per_token])


@pytest.mark.parametrize("algorithm", ["wgmma", "vector"])
def test_captured_step_follows_new_rows_and_new_adapters(cuda, algorithm):
    batch = make_batch(GATE_UP, torch.bfloat16, "uniform", cuda, tokens=32, lora_ranks=RANKS)
    y = torch.zeros_like(batch.output())

    def step() -> None:
        segments = build_segments(batch.token_slots, batch.ids, batch.slots.num_slots, GATE_UP.num_experts)
        given = {"decode": True, "segments": segments, "algorithm": algorithm, "max_lora_rank": 512}
        y.zero_()
        lora.lora_expand(lora.lora_shrink(batch.operands(), **given), y)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batch.token_slots.copy_(batch.token_slots.flip(0))
    batch.ids.copy_(batch.ids.roll(3, 0))
    batch.x.mul_(0.5)
    batch.slots.lora_rank[1, LAYER] //= 2
    graph.replay()
    assert_delta(y, batch)
