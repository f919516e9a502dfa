# SPDX-License-Identifier: Apache-2.0
"""What one rank copies: pages both ways, adapters from files, whole ones and parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.adapters.packed import entries_of_experts
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.cache.orders import Copy
from moe_lora.engine.adapters.adapter_store import AdapterStore, ShardSizes
from moe_lora.engine.adapters.copies import Arenas, BringAdapter, ClearSlot, RankCopier, _runs
from moe_lora.families import shape_of
from moe_lora.kernels.operands import SlotTable
from moe_lora.kernels.reference import arena_rows
from tests.families import make_adapter, make_checkpoint

CPU, PAGE_BYTES = torch.device("cpu"), 1024


@pytest.fixture(scope="module")
def shape_and_adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    base = make_checkpoint("mixtral", folder / "base")
    shape = shape_of(json.loads((base / "config.json").read_text()))
    return shape, read_adapter(make_adapter("mixtral", base, folder / "a", 5), shape, torch.float32)


def page_copy(device_pages: tuple[int, ...], host_pages: tuple[int, ...], *, to_device: bool) -> Copy:
    return Copy(0, 1, False, to_device, device_pages, host_pages)


pages = st.lists(st.integers(0, 30), max_size=12, unique=True)


@given(pages, st.randoms())
def test_runs_are_the_pairs_in_order(first, rng):
    second = sorted(range(len(first)), key=lambda _: rng.random() < 0.3)
    found = [(page + i, other + i) for page, other, count in _runs(first, second) for i in range(count)]
    assert found == list(zip(first, second, strict=True))


def test_pages_go_to_the_host_and_back():
    device = torch.randint(0, 255, (8 * PAGE_BYTES,), dtype=torch.uint8)
    host = torch.zeros(5 * PAGE_BYTES, dtype=torch.uint8)
    before = device.clone().view(8, PAGE_BYTES)
    slots = SlotTable(1, 1, 1, CPU)
    copier = RankCopier(Arenas(device, host, PAGE_BYTES), slots, None, np.ones(1, bool), lambda _: None)
    copier.carry_out(page_copy((6, 7, 2), (1, 2, 4), to_device=False))
    assert torch.equal(host.view(5, PAGE_BYTES)[[1, 2, 4]], before[[6, 7, 2]])
    copier.carry_out(page_copy((0, 1, 3), (4, 1, 2), to_device=True))
    assert torch.equal(device.view(8, PAGE_BYTES)[[0, 1, 3]], before[[2, 6, 7]])


@pytest.mark.parametrize("experts", [range(4), range(2, 4)])
@pytest.mark.parametrize("through_host", [False, True])
def test_every_kept_entry_leads_to_its_matrices(experts, through_host, shape_and_adapter):
    shape, packed = shape_and_adapter
    kept = entries_of_experts(shape, experts)
    layer_pages = ShardSizes(shape, PAGE_BYTES, [kept]).layer_pages(packed.layers)
    total = sum(layer_pages)
    device = torch.full((2 * total * PAGE_BYTES,), 0x7F, dtype=torch.uint8)
    host = torch.zeros(total * PAGE_BYTES, dtype=torch.uint8)
    slots = SlotTable(2, shape.num_layers, shape.num_entries, CPU)
    copier = RankCopier(Arenas(device, host, PAGE_BYTES), slots, shape, kept, lambda _: packed)
    firsts = (total, total + layer_pages[0])
    copier.carry_out(BringAdapter(0, "hash", firsts, None))
    if through_host:
        there, back = tuple(range(total, 2 * total)), tuple(range(total))
        scattered = tuple(reversed(range(total)))
        copier.carry_out(page_copy(there, scattered, to_device=False))
        copier.carry_out(ClearSlot(0))
        assert not slots.lora_rank.any()
        device.fill_(0x7F)
        pages = page_copy(back, scattered, to_device=True)
        copier.carry_out(BringAdapter(0, "hash", (0, layer_pages[0]), pages))
    num_checked = 0
    for number, layer in enumerate(packed.layers):
        for site in shape.sites:
            for entry in range(site.entry_base, site.entry_base + site.num_entries):
                a_start, _, lora_rank = layer.table[entry].tolist()
                expected_rank = lora_rank if kept[entry] else 0
                assert int(slots.lora_rank[0, number, entry]) == expected_rank
                if not expected_rank:
                    continue
                offset = int(slots.a_offset[0, number, entry])
                found = arena_rows(device, offset, lora_rank, site.in_features, torch.float32)
                size = lora_rank * site.in_features
                assert torch.equal(found.reshape(-1), layer.data[a_start : a_start + size])
                num_checked += 1
    assert num_checked > 10


def test_adapter_in_a_file_is_mapped_and_leaves_no_file(shape_and_adapter, tmp_path, monkeypatch):
    _, packed = shape_and_adapter
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = AdapterStore(in_files=True)
    stored = kept.keep(packed)
    assert list(tmp_path.iterdir()) == []
    assert stored.layers[0].data.data_ptr() != packed.layers[0].data.data_ptr()
    assert torch.equal(stored.layers[1].data, packed.layers[1].data)
    assert kept.find(packed.content_hash) is stored
    prepared = kept.prepare(packed)
    assert kept.keep(prepared) is prepared
    assert list(tmp_path.iterdir()) == []
    kept.forget(stored)
    assert len(kept) == 1
    kept.forget(stored)
    assert len(kept) == 0
    with pytest.raises(KeyError):
        kept.find(packed.content_hash)
