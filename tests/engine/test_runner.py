"""What the runner says of where a step's deltas come from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moe_lora.engine.adapters.adapter_store import AdapterVersion
from moe_lora.engine.runner import ModelRunner
from moe_lora.lora.row_routing import Lease, Source
from tests.dist.lora_server.shapes import model_shape

CPU = SimpleNamespace(type="cpu")


def adapter(uid: int, *targets: str) -> AdapterVersion:
    packed = SimpleNamespace(content_hash=f"{uid:064}", targets=targets)
    return AdapterVersion(uid, 1, packed, None, slot=uid, lease=Lease(uid, 7))


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
    plan = [SimpleNamespace(sequence=SimpleNamespace(adapter=one)) for one in adapters]
    routing = runner._routing(plan, [1] * len(plan))
    assert routing.sources == [{Source.LOCAL} if plan else set(), {Source.LEASED} if leased else set()]
    found = routing.terms_from(Source.LEASED, 1)
    assert [i for i, term in enumerate(found) if term["slot"] >= 0] == leased
    assert runner.lora_rows()["lora_rows_leased"] == len(plan) * shape.num_layers
