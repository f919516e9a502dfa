# SPDX-License-Identifier: Apache-2.0
"""Shards of a packed adapter hold exactly what they keep; the host store gives back what was put."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import entries_of_experts, shard_layer
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import AdapterError
from tests.families import FAMILIES, make_adapter

from .dense import packed_deltas, shard_adapter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_of_a_layer_together_hold_every_matrix_once(family, checkpoint, shape_of, tmp_path):
    shape = shape_of(family)
    packed = read_adapter(make_adapter(family, checkpoint(family), tmp_path / "a", 5), shape, torch.float32)
    mask = np.arange(shape.num_entries) % 3 == 0
    parts = [shard_adapter(packed, shape, [kept] * len(packed.layers)) for kept in (mask, ~mask)]
    whole, first, second = (packed_deltas(adapter, shape) for adapter in (packed, *parts))
    assert whole.keys() == first.keys() | second.keys()
    for key, delta in whole.items():
        found = [part[key] for part in (first, second) if key in part]
        assert sum(part.abs().sum() > 0 for part in found) == (1 if delta.abs().sum() > 0 else 0)
        assert torch.equal(sum(found), delta)


def test_keeping_all_entries_is_one_copy_of_the_same_bytes(checkpoint, shape_of, tmp_path):
    shape = shape_of("mixtral")
    path = make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a")
    for layer in read_adapter(path, shape, torch.bfloat16).layers:
        shard = shard_layer(layer, shape, np.ones(shape.num_entries, dtype=bool))
        assert shard.copies == ((0, 0, layer.data.numel()),)
        assert torch.equal(shard.table, layer.table)
        assert torch.equal(shard.scale, layer.scale)


@pytest.mark.parametrize("family", ["qwen3_moe", "dbrx"])
def test_ranks_keep_dense_entries_all_and_each_expert_once(family, shape_of):
    shape = shape_of(family)
    halves = np.stack([entries_of_experts(shape, experts) for experts in (range(2), range(2, 4))])
    for site in shape.sites:
        entries = halves[:, site.entry_base : site.entry_base + site.num_entries]
        if site.num_experts:
            assert entries.sum(1).tolist() == [site.num_entries // 2] * 2
        assert entries.sum(0).tolist() == [1 if site.num_experts else 2] * site.num_entries
    for num_ranks in (1, 2):
        per_expert = shape.adapter_bytes(4, ("gate_up", "down"), expert_parallel=num_ranks)
        assert per_expert * num_ranks == shape.adapter_bytes(4, ("gate_up", "down"))
        assert shape.adapter_bytes(4, ("qkv",), expert_parallel=num_ranks) == shape.adapter_bytes(4, ("qkv",))


def test_nothing_kept_needs_no_memory(checkpoint, shape_of, tmp_path):
    shape = shape_of("mixtral")
    packed = read_adapter(
        make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a"), shape, torch.float32
    )
    empty = shard_adapter(packed, shape, [np.zeros(shape.num_entries, dtype=bool)] * len(packed.layers))
    assert empty.nbytes == 0
    assert not any(layer.table.any() for layer in empty.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_gives_back_what_was_put(dtype, checkpoint, shape_of, tmp_path):
    shape = shape_of("qwen3_moe")
    packed = read_adapter(make_adapter("qwen3_moe", checkpoint("qwen3_moe"), tmp_path / "a"), shape, dtype)
    store = HostStore(tmp_path / "store")
    assert packed.content_hash not in store
    store.put(packed)
    store.put(packed)
    assert packed.content_hash in store
    again = HostStore(tmp_path / "store").get(packed.content_hash, "b")
    assert dataclasses.replace(again, layers=(), name=packed.name) == dataclasses.replace(packed, layers=())
    for got, put in zip(again.layers, packed.layers, strict=True):
        for name in ("data", "table", "scale"):
            assert torch.equal(getattr(got, name), getattr(put, name))
    assert [path.name for path in store.directory.iterdir()] == [store.path(packed.content_hash).name]
    store.remove(packed.content_hash)
    assert packed.content_hash not in store


def test_missing_or_damaged_files_are_refused(checkpoint, shape_of, tmp_path):
    shape = shape_of("mixtral")
    packed = read_adapter(
        make_adapter("mixtral", checkpoint("mixtral"), tmp_path / "a"), shape, torch.float32
    )
    store = HostStore(tmp_path / "store")
    with pytest.raises(AdapterError, match="packed adapter"):
        store.get(packed.content_hash, "a")
    store.put(packed)
    path = store.path(packed.content_hash)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="packed adapter"):
        store.get(packed.content_hash, "a")
