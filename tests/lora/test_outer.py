# SPDX-License-Identifier: Apache-2.0
"""Deltas of the embedding: the order of sums, and rows without a trained token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_lora.adapters.packed import Pair, assemble, num_table_entries, pack_layer
from moe_lora.adapters.peft.replaced import ReplacedRows, replaced_pair
from moe_lora.core.wrong_files import read_config
from moe_lora.families import shape_of
from moe_lora.kernels.operands import SlotTable, StepTables
from moe_lora.lora.outer import OuterDeltas
from moe_lora.lora.row_routing import local_routing
from tests.families import make_checkpoint
from tests.slots import write_slot

ROWS = torch.tensor([5, 9, 7, 5, 30, 71, 9, 0])
SLOTS = np.array([0, 0, -1, 1, 1, 0, 1, 0], dtype=np.int32)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    return shape_of(read_config(make_checkpoint("llama", tmp_path_factory.mktemp("base") / "base")))


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def plain_pair(shape, lora_rank, scale):
    """A LoRA pair of the embedding; the file never trained tokens 30 and 71."""
    a = random(1, lora_rank, shape.vocab_size)
    a[:, :, [30, 71]] = 0
    _, embedding = shape.outer_sites
    expands = (random(1, lora_rank, shape.hidden_size),)
    return Pair(
        site=embedding, modules=(0,), experts=range(1), shrink=a, expands=expands, scale=scale, source="a"
    )


def token_pair(shape, *tokens):
    rows = ReplacedRows(key="a", site="embedding", tokens=tokens, lora_rank=len(tokens))
    return replaced_pair(rows, random(len(tokens), shape.hidden_size), shape)


def deltas(shape, pairs):
    """`OuterDeltas` of adapters with these pairs in slots 0, 1 ..., at a step of ROWS and SLOTS."""
    num_layers, num_entries = shape.num_layers + 1, num_table_entries(shape, shape.num_layers + 1)
    slots = SlotTable(len(pairs), num_layers, num_entries, torch.device("cpu"))
    arena, offset = torch.zeros(1 << 17, dtype=torch.uint8), 0
    for slot, pair in enumerate(pairs):
        of_layers = [*([[]] * shape.num_layers), [pair]]
        layers = [pack_layer(one, num_entries, torch.float32, "a") for one in of_layers]
        write_slot(slots, slot, arena, assemble("a", layers, shape), [offset] * num_layers)
        offset += layers[-1].nbytes
    outer = OuterDeltas(shape.outer_sites, shape.num_layers, arena, slots, "auto")
    num = len(ROWS)
    lengths = torch.ones(num, dtype=torch.int32)
    step = StepTables(
        query_start=torch.arange(num + 1, dtype=torch.int32),
        seq_lens=lengths,
        block_tables=lengths.unsqueeze(1),
        decode=True,
    )
    outer.begin_step(step, replace(local_routing(shape, SLOTS), outer=0), torch.arange(num))
    return outer


def test_a_plain_pair_sums_over_ranks_in_order_bit_for_bit(shape):
    pairs = [plain_pair(shape, 6, -0.7), plain_pair(shape, 9, 1.3)]
    x = random(len(ROWS), shape.hidden_size)
    x[5, ::2] = -0.0
    expected = x.clone()
    for row, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            total = torch.zeros(shape.hidden_size)
            for a, b in zip(pairs[slot].shrink[0, :, ROWS[row]], pairs[slot].expands[0][0], strict=True):
                total.addcmul_(a, b)
            expected[row] += total * pairs[slot].scale
    deltas(shape, pairs).add_to_embedding(x, ROWS)
    assert torch.equal(x.view(torch.int32), expected.view(torch.int32))


class Counted(TorchDispatchMode):
    """Calls of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_trained_tokens_outside_the_step_cost_no_operation(shape):
    pairs = [token_pair(shape, *range(10, 40)), token_pair(shape, *range(5, 35))]
    x = random(len(ROWS), shape.hidden_size)
    expected = x.clone()
    for row, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            expected[row] += pairs[slot].shrink[0, :, ROWS[row]] @ pairs[slot].expands[0][0]
    outer = deltas(shape, pairs)
    with Counted() as counted:
        outer.add_to_embedding(x, ROWS)
    assert torch.equal(x, expected)
    assert counted.calls["addcmul_.default"] == 3  # tokens 5, 30 and 9 of slot 1
