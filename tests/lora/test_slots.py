# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
import torch

from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.families import shape_of
from moe_lora.kernels.operands import LoraOperands, SlotTable
from moe_lora.kernels.reference import arena_rows, lora_delta
from tests.families import make_adapter, make_checkpoint
from tests.slots import write_slot

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shape_and_adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots")
    base = make_checkpoint("mixtral", folder / "base")
    paths = [
        make_adapter("mixtral", base, folder / "small", 3, ("qkv", "down"), form="per_expert"),
        make_adapter("mixtral", base, folder / "large", 8, seed=1),
    ]
    return shape_of(json.loads((base / "config.json").read_text())), paths


def put(shape, packed, first_bytes, slots, slot, arena, gap=192):
    """Layers with gaps between them and in reverse order, as free extents may lie."""
    offsets, offset = [0] * len(packed.layers), first_bytes
    for number in reversed(range(len(packed.layers))):
        offsets[number] = offset
        offset += -(-packed.layers[number].nbytes // 64) * 64 + gap
    write_slot(slots, slot, arena, packed, offsets)
    return offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_entry_leads_to_its_matrices(shape_and_adapters, dtype):
    shape, paths = shape_and_adapters
    packed = [read_adapter(path, shape, dtype) for path in paths]
    arena = torch.full((2 * sum(p.nbytes for p in packed) + 4096,), 0x7F, dtype=torch.uint8)
    slots = SlotTable(3, shape.num_layers, shape.num_entries, CPU)
    end = put(shape, packed[1], 640, slots, 2, arena)
    put(shape, packed[0], end, slots, 0, arena)
    num_checked = 0
    for slot, adapter in ((0, packed[0]), (2, packed[1])):
        for number, layer in enumerate(adapter.layers):
            for site in shape.sites:
                for module, width in enumerate(site.out_features):
                    for expert in range(max(1, site.num_experts)):
                        entry = site.entry(module, expert)
                        a_start, b_start, lora_rank = layer.table[entry].tolist()
                        assert int(slots.lora_rank[slot, number, entry]) == lora_rank
                        if lora_rank == 0:
                            continue
                        assert float(slots.scale[slot, number, entry]) == float(layer.scale[entry])
                        for offsets, start, size in (
                            (slots.a_offset, a_start, site.in_features),
                            (slots.b_offset, b_start, width),
                        ):
                            found = arena_rows(
                                arena, int(offsets[slot, number, entry]), lora_rank, size, dtype
                            )
                            expected = layer.data[start : start + lora_rank * size].view(lora_rank, size)
                            assert torch.equal(found, expected)
                            num_checked += 1
    assert num_checked > 50
    assert not slots.lora_rank[1].any(), "a slot that was not written has no deltas"


def test_writing_a_slot_again_leaves_nothing_of_the_old_adapter(shape_and_adapters):
    shape, paths = shape_and_adapters
    small, large = (read_adapter(path, shape, torch.float32) for path in paths)
    x = torch.randn(2, shape.hidden_size, generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(2, dtype=torch.int32)

    def deltas(*adapters):
        arena = torch.zeros(2 * (small.nbytes + large.nbytes), dtype=torch.uint8)
        slots = SlotTable(1, shape.num_layers, shape.num_entries, CPU)
        for adapter in adapters:
            put(shape, adapter, 0, slots, 0, arena)
        sites = [site for site in shape.sites if site.in_features == shape.hidden_size]
        ids = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
        return [
            lora_delta(LoraOperands(x, ids if site.num_experts else None, site, 1, rows, slots, arena))
            for site in sites
        ]

    for found, expected in zip(deltas(large, small), deltas(small), strict=True):
        assert torch.equal(found, expected)
    assert any(not torch.equal(a, b) for a, b in zip(deltas(large), deltas(small), strict=True))


def test_a_table_is_checked_as_it_is_written_and_keeps_the_largest_ranks(shape_and_adapters):
    shape, paths = shape_and_adapters
    layer = read_adapter(paths[1], shape, torch.float32).layers[0]
    where = range(640, 640 + layer.nbytes)
    slots = SlotTable(2, shape.num_layers, shape.num_entries, CPU)

    def write(number=0, ranks=layer.table[:, 2], shift=0, where=where):
        table = torch.cat([layer.table[:, :2] + shift, ranks[:, None]], 1)
        slots.write_layer(1, number, table, layer.scale, 4, where)

    for wrong in (
        {"shift": 1},
        {"shift": -16},
        {"shift": layer.data.numel()},
        {"where": range(640, 704)},
        {"ranks": torch.where(layer.table[:, 2] > 0, 513, 0)},
        {"ranks": -layer.table[:, 2]},
    ):
        with pytest.raises(ValueError):
            write(**wrong)
    assert not slots.lora_rank.any()
    assert not slots.ranks.any()
    write(0)
    write(1, layer.table[:, 2] // 2)
    assert slots.ranks[1].tolist() == layer.table[:, 2].tolist()
    assert slots.end_bytes == where.stop
    assert max(map(slots.largest_rank, shape.sites)) == int(layer.table[:, 2].max()) > 0
    slots.clear(1)
    assert not any(map(slots.largest_rank, shape.sites))
