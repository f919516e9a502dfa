from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from moe_lora.models.causal_lm import DecoderLayer
from tests.families import FAMILIES

from .generated_code import assert_sites_in_order, largest_allocation
from .harness import Harness

# Token rows of a step, and whether the graph is for this number alone or for any above one.
BUCKETS = ((1, False), (2, False), (8, False), (2, True))
QUICK = (("mixtral", 2, False), ("mixtral", 2, True))  # a compilation takes 10 s and more
CASES = [
    pytest.param(family, rows, any_rows, marks=() if (family, rows, any_rows) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for rows, any_rows in BUCKETS
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def decode(model, rows, layer_forward):
    """Logits of a decode step of `rows` rows (of 8, one is padding) after an eager prefill; the harness."""
    harness = Harness(model.model_dir, model.adapters, max_sequences=8)
    padding = 1 if rows == 8 else 0
    slots = [(1, -1, 3)[i % 3] for i in range(rows - padding)]
    streams, _ = harness.prefill([[5 + i, 40, 7][: 1 + i % 3] for i in range(len(slots))], slots)
    harness.layer_forward = layer_forward
    logits = harness.step([(stream, [9 + i]) for i, stream in enumerate(streams)], padding)
    return torch.cat(logits), harness


def for_any_rows(forward):
    """The layer with its rows marked as of unknown number."""

    def run(layer, x, channel, *per_row):
        for tensor in (x, *per_row):
            torch._dynamo.mark_dynamic(tensor, 0)
        return forward(layer, x, channel, *per_row)

    return run


def assert_as_eager(model, rows, found):
    expected, _ = decode(model, rows, DecoderLayer.forward)
    assert (found - expected).abs().max() < 1e-4


def num_graphs(family):
    """GPT-OSS has layers with and without a window; elsewhere all layers share one graph."""
    return 2 if family == "gpt_oss" else 1


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_share_one_graph_without_breaks(family, served):
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    forward = torch.compile(DecoderLayer.forward, fullgraph=True, dynamic=False, backend=record)
    model = served(family)
    found, _ = decode(model, 2, forward)
    assert torch.equal(found, decode(model, 2, DecoderLayer.forward)[0])
    assert len(graphs) == num_graphs(family)


@pytest.mark.parametrize(("family", "rows", "any_rows"), CASES)
def test_compiled_code_keeps_the_order_of_operations_and_the_arena_out(family, rows, any_rows, served):
    model = served(family)
    forward = torch.compile(DecoderLayer.forward, fullgraph=True, dynamic=False)
    if any_rows:
        forward = for_any_rows(forward)
    (found, harness), codes = run_and_get_code(decode, model, rows, forward)
    assert len(codes) == num_graphs(family)
    for code in codes:
        assert_sites_in_order(code, len(harness.model.spec.shape.sites))
        assert largest_allocation(code, rows) < harness.arena.numel() // 16
        assert "uint8" not in code, "the arena's dtype has no business in a graph"
    assert_as_eager(model, rows, found)
    if any_rows:
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_as_eager(model, 8, decode(model, 8, forward)[0])


def test_a_gemm_before_its_begin_is_noticed():
    """The check itself: the right order passes, each wrong one does not."""
    begin = "    buf1 = torch.ops.moe_lora.lora_begin.default(arg2_1, buf0, None, 0)\n    buf2 = buf1"
    gemm = "    buf3 = torch.ops.moe_lora.linear.default(buf0, arg3_1, None)\n    buf4 = buf3"
    add = "    torch.ops.moe_lora.lora_add_to.default(arg2_1, buf2, buf4)"
    attention = (
        "    buf9 = torch.ops.moe_lora.paged_attention.default(arg2_1, buf6, buf7, buf8, None, 0.25, 0)"
    )
    assert_sites_in_order("\n".join([begin, gemm, add, attention]), 1)
    for wrong in (
        [gemm, begin, add],
        [begin, add, gemm],
        [begin, gemm],
        [begin, gemm.replace("buf0", "buf5"), add],
    ):
        with pytest.raises((AssertionError, ValueError)):
            assert_sites_in_order("\n".join([*wrong, attention]), 1)
