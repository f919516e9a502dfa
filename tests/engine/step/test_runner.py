# SPDX-License-Identifier: Apache-2.0
"""What the runner says of where a step's deltas come from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.lora.row_routing import Lease, Source
from tests.dist.lora_server.shapes import model_shape

CPU = SimpleNamespace(type="cpu")


def adapter(uid: int, *targets: str) -> AdapterVersion:
    packed = SimpleNamespace(
        name="a", content_hash=f"{uid:064}", targets=targets, layers=(), has_columns=False
    )
    return AdapterVersion(uid, 1, packed, None, slot=uid, lease=Lease(uid, 7))


@pytest.mark.parametrize(
    ("max_tokens", "sizes"), [(1, []), (2, [2]), (12, [2, 4, 8, 12]), (16, [2, 4, 8, 16])]
)
def test_prompts_of_each_size_are_run_on_cuda_before_the_first(max_tokens, sizes, monkeypatch):
    """Of the base model, of adapters of up to rank 64, and of larger ones."""
    shape = model_shape()
    model = SimpleNamespace(spec=SimpleNamespace(shape=shape))
    context = SimpleNamespace(channels=[None] * shape.num_layers)
    sources = [Source.LEASED if site.num_experts else Source.LOCAL for site in shape.sites]
    runner = ModelRunner(model, context, torch.device("cpu"), sources, eager=False, decode_buckets=(4,))
    runner._device = SimpleNamespace(type="cuda")
    found = []
    monkeypatch.setattr(runner, "execute", found.append)
    ranks = [8, 100, *[0] * (len(sources) - 2)]
    runner.warm_up(ranks, max_tokens)
    prompts, decode = [batch for batch in found if not batch.tables.decode], found[-1]
    assert decode.compiled
    assert len(found) == len(prompts) + 1
    assert [len(batch.tokens) for batch in prompts] == [size for size in sizes for _ in range(3)]
    for batch in prompts:
        assert not batch.compiled
        assert not batch.live.any()
        assert batch.tables.query_start.tolist() == [0, len(batch.tokens)]
        assert batch.tables.seq_lens.tolist() == [0], "nothing is written to pages"
        with_deltas = batch.routing.site_ranks is not None
        assert batch.routing.sources == [{Source.LOCAL} if with_deltas else set(), set()]
        for slots in batch.routing.slots_here().values():
            assert (slots == -1).all()
    asked = [batch.routing.site_ranks for batch in prompts[:3]]
    assert asked == [None, [8, 64, *ranks[2:]], ranks][: len(prompts)]


@pytest.mark.parametrize(
    ("targets", "leased"),
    [([("q",)], []), ([("q",), ("q", "down")], [1]), ([("gate",), ("up", "o")], [0, 1]), ([], [])],
)
def test_an_adapter_without_deltas_at_the_servers_sites_asks_it_for_none(targets, leased):
    shape = model_shape()
    sources = [Source.LEASED if site.num_experts else Source.LOCAL for site in shape.sites]
    model = SimpleNamespace(spec=SimpleNamespace(shape=shape))
    context = SimpleNamespace(channels=[None] * shape.num_layers)
    runner = ModelRunner(model, context, CPU, sources, eager=True, decode_buckets=())
    adapters = [adapter(number, *of) for number, of in enumerate(targets)]
    fields = {"num_computed": 0, "base_tokens": 0}
    plan = [SimpleNamespace(sequence=SimpleNamespace(adapter=one, **fields)) for one in adapters]
    routing = runner._routing(plan, [1] * len(plan))
    assert routing.sources == [{Source.LOCAL} if plan else set(), {Source.LEASED} if leased else set()]
    found = routing.terms_from(Source.LEASED, 1)
    assert [i for i, term in enumerate(found) if term["slot"] >= 0] == leased
    assert runner.lora_rows()["lora_rows_leased"] == len(plan) * shape.num_layers
