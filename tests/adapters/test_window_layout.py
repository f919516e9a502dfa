# SPDX-License-Identifier: Apache-2.0
"""An adapter in one piece of memory, and what stands for it where its bytes are not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from moe_lora.adapters.host_store import (
    adapter_in,
    adapter_without_data,
    facts_of,
    has_data,
    is_intact,
    layout_of,
    without_data,
    write_adapter,
)
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.adapters.peft.reader import bare_layers, read_adapter
from moe_lora.core.shape import ModelShape
from moe_lora.families import shape_of
from tests.families import make_adapter, make_checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, ModelShape]:
    folder = tmp_path_factory.mktemp("window")
    base = make_checkpoint("mixtral", folder / "base")
    shape = shape_of(json.loads((base / "config.json").read_text()))
    return make_adapter("mixtral", base, folder / "a", 5), shape


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def packed(place, request) -> PackedAdapter:
    path, shape = place
    return read_adapter(path, shape, request.param, "a")


def same(one: PackedAdapter, other: PackedAdapter) -> bool:
    parts = ("data", "table", "scale")
    return facts_of(one) == facts_of(other) and all(
        torch.equal(getattr(left, part), getattr(right, part))
        for left, right in zip(one.layers, other.layers, strict=True)
        for part in parts
    )


def test_what_is_written_is_what_lies_there(packed):
    layout = layout_of(facts_of(packed))
    memory = torch.full((layout.num_bytes,), 0x7F, dtype=torch.uint8)
    write_adapter(packed, memory)
    there = adapter_in(pickle.loads(pickle.dumps(facts_of(packed))), memory)
    assert same(there, packed)
    assert is_intact(there)
    starts = [start for start, _ in layout.data]
    assert not [start for start in (layout.scales, *starts) if start % 64]
    assert there.layers[1].data.data_ptr() == memory.data_ptr() + starts[1], "no copy"


def test_one_changed_byte_is_noticed(packed):
    layout = layout_of(facts_of(packed))
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    write_adapter(packed, memory)
    for place in (0, layout.scales, layout.data[-1][0]):
        memory[place] ^= 1
        assert not is_intact(adapter_in(facts_of(packed), memory))
        memory[place] ^= 1
    assert is_intact(adapter_in(facts_of(packed), memory))


def test_without_data_the_facts_stay_and_take_no_memory(packed):
    bare = adapter_without_data(facts_of(packed))
    assert facts_of(bare) == facts_of(packed)
    assert (has_data(packed), has_data(bare)) == (True, False)
    assert [layer.nbytes for layer in bare.layers] == [layer.nbytes for layer in packed.layers]
    assert all(layer.data.is_meta and layer.table.is_meta for layer in bare.layers)
    with_tables = without_data(packed)
    assert not has_data(with_tables)
    for layer, other in zip(with_tables.layers, packed.layers, strict=True):
        assert torch.equal(layer.table, other.table)
        assert torch.equal(layer.scale, other.scale)
        assert layer.table.data_ptr() != other.table.data_ptr()


def test_layers_are_measured_as_they_will_be(place, packed):
    path, shape = place
    dtype = packed.layers[0].data.dtype
    sizes = [[layer.nbytes for layer in bare_layers(path, shape, dtype, tables=one)] for one in (True, False)]
    assert sizes == [[layer.nbytes for layer in packed.layers]] * 2
