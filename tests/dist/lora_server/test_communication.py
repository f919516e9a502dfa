# SPDX-License-Identifier: Apache-2.0
"""The counted metrics beside the closed forms of InfiniLoRA's table 1 and the text of section 4.1."""

from __future__ import annotations

import pytest

from moe_lora.core.partition import (
    Layout,
    Partition,
    activation_counts,
    communication_metrics,
    uniform_routing,
)
from tests.dist.lora_server.shapes import model_shape

B, K, E, NUM_LAYERS = 64, 2, 8, 8
"""b and k of the table; the batch divides evenly over experts and slots."""

LAYOUTS = ["DP1", "DP2", "DP4", "DP8", "PP2", "PP4", "PP8", "EP2", "EP4", "EP8"]
LAYOUTS += ["EP2-PP2", "EP2-PP4", "EP4-PP2", "EP8-PP8"]


def closed_forms(layout: Layout, p: int) -> tuple[float, float, float, float, int]:
    """(peer volume, peers of a client: table, peers of a server: text, compute volume, sync scope)."""
    m, x = layout.num_ranks, layout.ep
    if layout.dp > 1:
        return B * K / (p * m), m, p, B * K / m, m
    if layout.ep == 1:
        return B * K / p, 1, p, B * K, 1
    return B * K / max(p, x), max(x / p, 1), max(p / x, 1), B * K / x, x


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("text", LAYOUTS)
def test_uniform_batch_costs_what_table_1_says(text, p):
    part = Partition(model_shape(E, NUM_LAYERS), Layout.parse(text), p)
    batch = uniform_routing(B, K, E, part.layout.num_ranks)
    for layer in range(NUM_LAYERS):
        got = communication_metrics(part, *batch, layer)
        assert (
            got.peer_volume,
            got.servers_per_client,
            got.clients_per_server,
            got.compute_volume,
            got.sync_scope,
        ) == closed_forms(part.layout, p)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("text", LAYOUTS)
def test_uniform_batch_loads_every_pair_alike(text, p):
    part = Partition(model_shape(E, NUM_LAYERS), Layout.parse(text), p)
    counts = activation_counts(part, *uniform_routing(B, K, E, part.layout.num_ranks))
    pairs = {(c, rank) for c in range(p) for rank in part.servers_of_client(c, 0, 3)}
    assert set(counts) == pairs
    assert len(set(counts.values())) == 1


def test_skewed_batch_is_counted_where_it_goes():
    """Three rows, all of expert 0 and one other; the averages stay, one rank has most of the work."""
    part = Partition(model_shape(4), Layout.parse("EP2-PP1"), 2)
    ids, slots = [[0, 1], [0, 2], [0, 1]], [0, 0, 1]
    assert activation_counts(part, ids, slots) == {(0, 0): 5, (1, 1): 1}
    metrics = communication_metrics(part, ids, slots)
    assert metrics.peer_volume == metrics.compute_volume == 3


def test_pipeline_sends_a_layer_to_its_stage():
    part = Partition(model_shape(4), Layout.parse("PP4"), 2)
    ids, slots = [[0, 3]], [0]
    assert activation_counts(part, ids, slots, layer=2) == {(0, 2): 1, (1, 2): 1}
