# SPDX-License-Identifier: Apache-2.0
"""Which captured graph, if any, computes a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from moe_lora.engine.step.step_batch import StepBatch, StepBuffer
from moe_lora.engine.step.step_graphs import StepGraphs
from moe_lora.engine.step.step_pieces import StepCapture
from moe_lora.kernels.operands import StepTables
from moe_lora.lora.row_routing import TERM, RowRouting, Source, local_routing, on_merged_weights
from tests.dist.lora_server.shapes import model_shape

from .on_device import Recorder

SHAPE = model_shape()
ROWS = 6


def graphs(kv_tokens: int = 1 << 10) -> StepGraphs:
    return StepGraphs(
        StepBuffer(torch.device("cpu")),
        StepCapture(Recorder()),
        lambda slots: [0] * len(SHAPE.sites),
        rows=[ROWS],
        max_tokens=64,
        block_size=4,
        kv_tokens=kv_tokens,
        places=((int(Source.LOCAL), 0),),
    )


def batch(routing: RowRouting, lengths: tuple[int, ...] = (1,) * ROWS) -> StepBatch:
    return StepBatch(
        tokens=torch.ones(ROWS, dtype=torch.int64),
        positions=torch.zeros(ROWS, dtype=torch.int64),
        live=torch.ones(ROWS) > 0,
        logit_rows=torch.arange(ROWS),
        tables=StepTables(
            query_start=torch.arange(ROWS + 1, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.zeros(ROWS, 16, dtype=torch.int32),
            decode=True,
        ),
        routing=routing,
        compiled=False,
        any_rows=False,
    )


def test_tokens_of_all_sequences_are_bounded_by_the_arena_unless_they_share_pages():
    """Attention's programs and workspace are as many as these tokens ask for, not as the longest for each."""
    base = local_routing(SHAPE, np.full(ROWS, -1, dtype=np.int32))
    for kv_tokens, lengths, expected in (
        (100, (1, 2, 3, 0, 0, 0), 100),
        (100, (50, 50, 0, 0, 0, 0), 100),
        (100, (50, 50, 1, 0, 0, 0), ROWS * 64),
        (1000, (64,) * ROWS, ROWS * 64),
    ):
        made = graphs(kv_tokens)
        shape = made.shape_of(batch(base, lengths))
        assert shape is not None
        assert shape.tokens == expected
        assert made._bounds(shape).single_tokens == expected >= sum(lengths)


def test_a_step_on_merged_weights_is_no_other_steps_graph():
    """Its own rows have deltas where the weights do not carry the adapter yet; all others subtract it."""
    shape, known = SHAPE, graphs()
    rows = np.zeros(ROWS, dtype=np.int32)
    plain = local_routing(shape, rows)
    whole = known.shape_of(batch(plain))
    assert whole is not None
    assert whole.places == ((Source.LOCAL, 0),)
    subtracted = np.array([(-Source.LOCAL, -1, 0, 0)], TERM)

    def shape_on(num_carried: int, rows: np.ndarray):
        """Where weights carry the adapter in that many layers."""
        sites_of = [(int(layer < num_carried),) * len(shape.sites) for layer in range(shape.num_layers)]
        routing = replace(plain, row_route=rows)
        merged = on_merged_weights(routing, sites_of, 0, subtracted, len(rows))
        return known.shape_of(batch(merged))

    assert shape_on(shape.num_layers, rows) == whole._replace(places=())
    assert shape_on(1, rows) is None, "its deltas in the other layers are not those of all layers"
    assert shape_on(shape.num_layers, np.array([0, 0, -1, 0, 0, 0], dtype=np.int32)) is None
