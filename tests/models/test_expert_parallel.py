# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a layer's experts give, bit for bit, what one that holds all of them does."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch._inductor.utils import run_and_get_code

from moe_lora.adapters.packed import entries_of_experts
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import experts_of_rank
from moe_lora.engine.adapters.adapter_store import ShardSizes
from moe_lora.engine.adapters.copies import Arenas, BringAdapter, RankCopier
from moe_lora.engine.ranks.exchange import Exchanges, RowExchange, open_group
from moe_lora.engine.step.execution_context import ExecutionContext
from moe_lora.kernels.operands import KvLayout, SlotTable, StepTables
from moe_lora.lora.local import LocalBackend
from moe_lora.lora.row_routing import local_routing
from moe_lora.models.loader import load_model
from tests.families import MOE_FAMILIES, NUM_EXPERTS, NUM_LAYERS, shard_of

from .generated_code import operations

CPU = torch.device("cpu")
NUM_ROWS = 21
SLOTS = np.array([(-1, 0, 1, 2, 3)[i % 5] for i in range(NUM_ROWS)], dtype=np.int32)
PAGE_BYTES = 1024
QUICK = (
    ("mixtral", 2, torch.float32),
    ("qwen3_moe", 4, torch.bfloat16),
    ("gpt_oss", 2, torch.float32),
    ("dbrx", 4, torch.bfloat16),
)


class RankOfLayers:
    """The MoE half of a checkpoint's layers as one of `size` ranks holds it, with the adapters in slots."""

    def __init__(self, served, dtype, size, dist_rank, exchange=None):
        experts = experts_of_rank(NUM_EXPERTS, size, dist_rank)
        shard = shard_of(served.model_dir, expert_parallel=size, dist_rank=dist_rank)
        self.model = load_model(served.model_dir, dtype, CPU, shard)
        shape = self.model.spec.shape
        packed = [read_adapter(path, shape, dtype) for path in served.adapters]
        by_rank = [experts_of_rank(NUM_EXPERTS, size, other) for other in range(size)]
        kept = [entries_of_experts(shape, held) for held in by_rank]
        sizes = ShardSizes(shape, PAGE_BYTES, kept)
        num_pages = sum(sum(sizes.layer_pages(p.layers)) for p in packed)
        self.arena = torch.zeros(num_pages * PAGE_BYTES, dtype=torch.uint8)
        self.slots = SlotTable(len(packed), shape.num_layers, shape.num_entries, CPU)
        by_hash = {p.content_hash: p for p in packed}
        mine = entries_of_experts(shape, experts)
        arenas = Arenas(self.arena, None, PAGE_BYTES)
        copier = RankCopier(arenas, self.slots, shape, mine, by_hash.__getitem__)
        page = 0
        for slot, adapter in enumerate(packed):
            firsts = []
            for length in sizes.layer_pages(adapter.layers):
                firsts.append(page)
                page += length
            copier.carry_out(BringAdapter(slot, adapter.content_hash, tuple(firsts), None))
        layout = KvLayout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
        backend = LocalBackend(shape, self.arena, self.slots)
        self.context = ExecutionContext(self.arena, layout, backend, Exchanges(exchange))

    @torch.inference_mode()
    def run(self, x):
        """Each layer's MoE half on the rows x; the last row is padding."""
        empty = torch.zeros(1, 1, dtype=torch.int32)
        self.context.begin_step(
            StepTables(query_start=torch.zeros(2, dtype=torch.int32), seq_lens=empty[0], block_tables=empty),
            local_routing(self.model.spec.shape, SLOTS),
        )
        live = torch.arange(len(x)) < len(x) - 1
        layers = zip(self.model.layers, self.context.channels, strict=True)
        return [layer.mlp(x.clone(), channel, live) for layer, channel in layers]


@pytest.mark.parametrize(
    ("family", "size", "dtype"),
    [
        pytest.param(family, size, dtype, marks=() if (family, size, dtype) in QUICK else pytest.mark.slow)
        for family in MOE_FAMILIES
        for size in (2, 4)
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_sums_over_experts_are_the_same_bits(family, size, dtype, served, tmp_path):
    model = served(family)
    x = torch.randn(NUM_ROWS, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = RankOfLayers(model, dtype, 1, 0).run(x)

    def run(dist_rank):
        group = open_group(tmp_path / "meet", dist_rank, size, CPU)
        return RankOfLayers(model, dtype, size, dist_rank, RowExchange(group, NUM_EXPERTS)).run(x)

    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(run, range(size)):
            for ours, full in zip(found, expected, strict=True):
                assert torch.equal(ours, full)
    assert (expected[0][0] - expected[1][0]).abs().max() > 1e-3


def test_ranks_know_the_same_ranks_of_adapters_whatever_they_hold_of_them(served):
    """They decide what steps are captured for, which all have to decide alike."""
    ranks = [RankOfLayers(served("mixtral"), torch.float32, 4, dist_rank) for dist_rank in range(4)]
    sites = ranks[0].model.spec.shape.sites
    known = [one.slots.site_ranks(np.arange(one.slots.num_slots), sites) for one in ranks]
    assert known == [known[0]] * 4
    assert max(known[0]) > 0
    held = [int((one.slots.lora_rank > 0).sum()) for one in ranks]
    assert max(held) < int((RankOfLayers(served("mixtral"), torch.float32, 1, 0).slots.lora_rank > 0).sum())


@pytest.mark.slow
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_compiled_code_exchanges_rows_once_their_deltas_are_added(family, served):
    class NobodyElse:
        def fill(self, y, ids):
            pass

    def run(compiled):
        torch._dynamo.reset()
        rank = RankOfLayers(served(family), torch.float32, 2, 1, NobodyElse())
        for layer in rank.model.layers if compiled else ():
            layer.mlp.forward = torch.compile(layer.mlp.forward, fullgraph=True)
        return rank.run(torch.randn(NUM_ROWS, 32, generator=torch.Generator().manual_seed(0)))

    found, codes = run_and_get_code(run, True)
    for ours, eager in zip(found, run(False), strict=True):
        assert (ours - eager).abs().max() < 1e-4
    for code in codes:
        calls = operations(code)
        [exchange] = [call for call in calls if call.name == "exchange_experts"]
        sites = [call for call in calls if call.name == "lora_linear"]
        assert len(sites) == 3
        assert sites[-1].result == exchange.operands[1]
        assert sites[-1].position < exchange.position


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_rank_holds_its_experts_and_all_of_the_rest(family, served):
    full = dict(load_model(served(family).model_dir, torch.float32, CPU).named_parameters())
    for dist_rank in range(2):
        experts = experts_of_rank(NUM_EXPERTS, 2, dist_rank)
        shard = shard_of(served(family).model_dir, expert_parallel=2, dist_rank=dist_rank)
        part = dict(load_model(served(family).model_dir, torch.float32, CPU, shard).named_parameters())
        assert part.keys() == full.keys()
        for name, weight in part.items():
            per_expert = ".mlp.gate_up." in name or ".mlp.down." in name
            whole = full[name][experts.start : experts.stop] if per_expert else full[name]
            assert torch.equal(weight, whole), name


def test_checkpoint_with_another_number_of_experts_is_refused_by_ranks_too(served, tmp_path):
    folder = shutil.copytree(served("dbrx").model_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["ffn_config"]["moe_num_experts"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="asks for"):
        load_model(folder, torch.float32, CPU, shard_of(folder, expert_parallel=2))


def test_experts_that_cannot_be_dealt_out_are_refused_with_what_can():
    with pytest.raises(
        ConfigError, match="expert_parallel=3 does not divide num_experts=8; choose 1, 2, 4 or 8"
    ):
        experts_of_rank(8, 3, 0)
    with pytest.raises(ConfigError, match="this one is dense; choose 1"):
        experts_of_rank(0, 2, 0)
    assert [experts_of_rank(8, 4, r) for r in (0, 3)] == [range(0, 2), range(6, 8)]
    assert experts_of_rank(0, 1, 0) == range(0)
