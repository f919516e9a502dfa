# SPDX-License-Identifier: Apache-2.0
"""The lower bound, by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from moe_lora.core.shape import ModelShape
from moe_lora.provision import lower_bound as module
from moe_lora.provision.lower_bound import Work, WorkSum, lower_bound

SHAPE = ModelShape(
    family="mixtral",
    num_layers=2,
    hidden_size=4,
    intermediate_size=8,
    num_experts=4,
    num_experts_per_token=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    vocab_size=16,
    max_position=64,
    dtype_bytes=2,
)
ATTENTION, EXPERTS = 2 * 2 * 4 * 2 * (2 + 1), 2 * 4 * 3 * 4 * 8
TOKEN_FLOP = 2 * (2 * 4 * (4 + 2 + 2 + 4) + 2 * 2 * 3 * 4 * 8)  # q, k, v, o; three matrices of two experts


def bound(work: Work, **changes):
    given = {
        "rate_per_s": 3.0,
        "adapter_rank": 0.0,
        "flop_per_s": 1000.0,
        "bytes_per_s": 1e12,
        "weight_bits": (8.0, 4.0),
        "memory_bytes": 1e4,
    }
    return lower_bound(SHAPE, work, **given | changes)


def work_of(lengths: list[tuple[int, int, int]]) -> Work:
    total = WorkSum()
    for one in lengths:
        total.add(*one)
    return total.mean()


def test_work_is_that_of_tokens_and_of_what_they_attend_to() -> None:
    # 3 prompt tokens attend to 1 + 2 + 3, two outputs become inputs and attend to 4 and 5 (themselves
    # included).
    work = work_of([(3, 0, 3)])
    assert work == Work(computed_tokens=5, prompt_pairs=6, decode_pairs=9)
    hit = work_of([(3, 2, 3)])
    assert hit == Work(computed_tokens=3, prompt_pairs=3, decode_pairs=9)
    assert work_of([(3, 0, 3), (3, 2, 3)]).computed_tokens == 4


def test_operations_of_tokens_pairs_and_deltas() -> None:
    tokens = Work(computed_tokens=10, prompt_pairs=0, decode_pairs=0)
    assert bound(tokens).flop_gpus == pytest.approx(3 * 10 * TOKEN_FLOP / 1000)
    pairs = Work(computed_tokens=0, prompt_pairs=7, decode_pairs=1)
    assert bound(pairs).flop_gpus == pytest.approx(3 * 8 * (4 * 2 * 2 * 2) / 1000)
    with_adapters = bound(tokens, adapter_rank=5.0).flop_gpus - bound(tokens).flop_gpus
    assert with_adapters == pytest.approx(3 * 10 * 2 * 2 * 2 * (2 * 4 + 3 * 8) * 5 / 1000)


def test_the_largest_term_is_rounded_up() -> None:
    work = Work(computed_tokens=0, prompt_pairs=0, decode_pairs=100)
    kv = 2 * 2 * 1 * 2 * 2
    found = bound(work, bytes_per_s=1000.0, flop_per_s=1e12)
    assert found.byte_gpus == pytest.approx(3 * 100 * kv / 1000)
    assert found.gpus == 5
    assert bound(Work(computed_tokens=0, prompt_pairs=0, decode_pairs=0)).gpus == 1
    in_memory = bound(work, memory_bytes=50.0, flop_per_s=1e12)
    assert in_memory.memory_gpus == pytest.approx((ATTENTION + EXPERTS / 2) / 50)
    assert in_memory.gpus == 10
    assert found.text.startswith("5 GPUs at peak rates")


def test_the_bound_shares_no_code_with_the_sizing() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in names if name.startswith("moe_lora")] == ["moe_lora.core.shape"]
