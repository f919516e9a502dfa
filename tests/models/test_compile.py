# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_lora.core.wrong_files import read_config
from moe_lora.families import model_spec
from moe_lora.kernels import ops, reference
from moe_lora.models.causal_lm import CausalLM, DecoderLayer
from moe_lora.models.linear import LoraLinear
from moe_lora.models.quantised_weight import QuantisedWeight, WeightLayout, quantisation_of
from tests.families import BESIDE_FAMILIES, FAMILIES
from tests.grids import with_quick

from .generated_code import assert_one_operation_a_site, assert_sites_in_order, largest_allocation
from .harness import Harness

# Token rows of a step, and whether the graph is for this number alone or for any above one.
BUCKETS = ((1, False), (2, False), (8, False), (2, True))
INT8 = quantisation_of("int8", None, False)
QUICK = (("mixtral", 2, True),)  # a compilation takes 10 s and more
CASES = [
    pytest.param(family, rows, any_rows, marks=() if (family, rows, any_rows) in QUICK else pytest.mark.slow)
    for family in (*FAMILIES, *BESIDE_FAMILIES)
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
    """Two kinds of layers, with a window or a dense MLP or without, three of both; elsewhere one graph."""
    if family == "afmoe":
        return 3
    return 2 if family in ("gpt_oss", *BESIDE_FAMILIES) else 1


@pytest.mark.parametrize("family", with_quick((*FAMILIES, *BESIDE_FAMILIES), ("mixtral", "gpt_oss")))
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


@pytest.mark.parametrize("quantisation", [None, INT8], ids=["plain", "int8"])
def test_dense_layers_are_plain_to_the_compiler_where_torch_computes_them(quantisation, served):
    """On any device but the CPU; meta stands for it.  Quantised ones are one operation each."""
    spec = model_spec(read_config(served("llama").model_dir))
    with torch.device("meta"):
        layer = CausalLM(spec).layers[0]
        if quantisation is not None:
            for module in layer.modules():
                if isinstance(module, LoraLinear):
                    held = QuantisedWeight(module.weight, WeightLayout(quantisation.form))
                    del module.weight
                    module.weight = held
        x, cos = (
            torch.empty(2, layer.attention.qkv.weight.shape[1]),
            torch.empty(2, spec.shape.head_dim // 2),
        )
        live = torch.ones(2, dtype=torch.bool)
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    forward = torch.compile(DecoderLayer.forward, fullgraph=True, dynamic=False, backend=record)
    found = forward(layer, x, torch.zeros(2, dtype=torch.int64, device="meta"), cos, cos, live)
    assert found.shape == x.shape
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    called = Counter(map(str, targets))
    plain = targets.count(torch.nn.functional.linear)
    begins = called["moe_lora.lora_begin"]
    assert begins == called["moe_lora.lora_add_to"] == 4
    assert (plain, called["moe_lora.quantised_linear"]) == ((4, 0) if quantisation is None else (0, 4))
    assert not called["moe_lora.linear"]
    of_sites = [one for one in map(str, targets) if one in ("moe_lora.lora_begin", "moe_lora.lora_add_to")]
    assert of_sites == ["moe_lora.lora_begin", "moe_lora.lora_add_to"] * 4
    products = (torch.nn.functional.linear, "moe_lora.quantised_linear")
    places = [i for i, one in enumerate(targets) if one is products[0] or str(one) == products[1]]
    begin, add = ([i for i, one in enumerate(map(str, targets)) if one == name] for name in of_sites[:2])
    assert all(i < j < k for i, j, k in zip(begin, places, add, strict=True))


def build_no_kernels(monkeypatch):
    """The compiler generates code without a C++ compiler: its kernels leave their buffers as they are."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *source: lambda *buffers: None)
    monkeypatch.setattr(PyCodeCache, "modules_no_attr", {})


@pytest.mark.parametrize(
    ("family", "built"),
    [("llama", False), ("llama", True), ("mixtral", True)],
)
@pytest.mark.slow
def test_plain_dense_layers_stay_between_begin_and_add_to(family, built, served, monkeypatch):
    """Compiled as for a GPU: the base GEMM is torch's.  built: the code's kernels are built and computed."""
    if not built:
        build_no_kernels(monkeypatch)
    monkeypatch.setattr(ops, "linear", reference.linear)
    monkeypatch.setattr(ops, "fuses_sites", lambda x: False)
    model = served(family)
    forward = torch.compile(DecoderLayer.forward, fullgraph=True, dynamic=False)
    (found, harness), codes = run_and_get_code(decode, model, 2, forward)
    (code,) = codes
    assert "extern_kernels" in code
    assert "moe_lora.linear" not in code
    assert_sites_in_order(code, len(harness.model.spec.shape.sites))
    if built:
        assert_as_eager(model, 2, found)


@pytest.mark.parametrize(("family", "rows", "any_rows"), CASES)
def test_compiled_code_keeps_the_order_of_operations_and_the_arena_out(family, rows, any_rows, served):
    model = served(family)
    forward = torch.compile(DecoderLayer.forward, fullgraph=True, dynamic=False)
    if any_rows:
        forward = for_any_rows(forward)
    (found, harness), codes = run_and_get_code(decode, model, rows, forward)
    assert len(codes) == num_graphs(family)
    for code in codes:
        assert_one_operation_a_site(code, harness.model.spec.shape)
        assert largest_allocation(code, rows) < harness.arena.numel() // 16
        assert "uint8" not in code, "the arena's dtype has no business in a graph"
    assert_as_eager(model, rows, found)
    if any_rows:
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_as_eager(model, 8, decode(model, 8, forward)[0])


def test_a_gemm_before_its_begin_is_noticed():
    """The check itself: the right order passes, each wrong one does not."""
    begin = "    torch.ops.moe_lora.lora_begin.default(arg2_1, buf0, None, 0)"
    gemm = "    buf3 = torch.ops.moe_lora.linear.default(buf0, arg3_1, None)\n    buf4 = buf3"
    add = "    torch.ops.moe_lora.lora_add_to.default(arg2_1, buf4, buf0, 0)"
    attention = (
        "    buf9 = torch.ops.moe_lora.paged_attention.default(arg2_1, buf6, buf7, buf8, None, 0.25, 0)"
    )
    assert_sites_in_order("\n".join([begin, gemm, add, attention]), 1)
    for wrong in (
        [gemm, begin, add],
        [begin, add, gemm],
        [begin, gemm],
        [begin, gemm.replace("buf0", "buf5"), add],
        [begin, gemm, add.replace("buf0", "buf5")],
    ):
        with pytest.raises((AssertionError, ValueError)):
            assert_sites_in_order("\n".join([*wrong, attention]), 1)


VIEWS = {"getattr", "getitem", "view", "split", "chunk", "flatten", "unsqueeze", "unbind"}
ONE_EACH = {"linear"}
AT_LEAST = {"llama": 7, "mixtral": 5, "qwen3_moe": 5, "gpt_oss": 5, "dbrx": 5}
"""Launches of a layer that torch's operations are: GEMMs, and one for each run of others."""


def launches_of_torch(graph) -> int:
    """In a layer, if the compiler makes one kernel of all that lies between two operations of other kinds."""
    names = [
        getattr(node.target, "__name__", str(node.target)).removesuffix(".default") for node in graph.nodes
    ]
    starts = [
        i for i, node in enumerate(graph.nodes) if "lora_begin" in str(node.target) and node.args[3] == 0
    ]
    total, in_run = 0, False
    for node, name in list(zip(graph.nodes, names, strict=True))[starts[0] : starts[1]]:
        if "moe_lora" in str(node.target):
            in_run = False
        elif name in ONE_EACH:
            total, in_run = total + 1, False
        elif name not in VIEWS and not in_run:
            total, in_run = total + 1, True
    return total


@pytest.mark.parametrize("family", with_quick(FAMILIES, ("gpt_oss",)))
def test_a_step_on_cuda_is_one_graph_without_breaks(family, served):
    """All layers, head and embedding, on tensors that say they are on CUDA and have no memory."""
    spec = model_spec(read_config(served(family).model_dir))
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    forward = torch.compile(CausalLM.forward, fullgraph=True, dynamic=False, backend=record)
    with FakeTensorMode(), torch.no_grad():
        with torch.device("cuda"):
            model = CausalLM(spec)
            model.inverse_frequencies = torch.empty(spec.shape.head_dim // 2)
            tokens, rows = torch.empty(4, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
            live = torch.empty(4, dtype=torch.bool)
        channels = [torch.empty(2, dtype=torch.int64) for _ in model.layers]
        logits = forward(model, tokens, tokens, live, rows, channels, DecoderLayer.forward)
    assert logits.is_cuda
    assert logits.shape == (3, spec.shape.vocab_size)
    (graph,) = graphs
    called = Counter(str(node.target).removesuffix(".default") for node in graph.graph.nodes)
    num_layers = spec.shape.num_layers
    assert called["moe_lora.rotary_attention"] == num_layers
    assert called["moe_lora.lora_begin"] == num_layers * len(spec.shape.sites)
    experts = ("choose_experts", "gated_expert_linear", "expert_linear")
    assert all(
        called[f"moe_lora.{name}"] == (num_layers if spec.shape.num_experts else 0) for name in experts
    )
    assert not called["moe_lora.sum_experts"], "the sum over experts is the compiler's to join with the rest"
    assert launches_of_torch(graph.graph) == AT_LEAST[family]
