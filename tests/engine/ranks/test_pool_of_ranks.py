# SPDX-License-Identifier: Apache-2.0
"""A pool's instances of several ranks: each rank loads its part of what another instance holds."""

from __future__ import annotations

import pickle
import shutil
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lora.adapters.host_store import HostStore, without_data
from moe_lora.adapters.packed import entries_of_experts
from moe_lora.adapters.peft.reader import bare_layers, read_adapter
from moe_lora.api import InProcessClient
from moe_lora.cache.orders import Copy
from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.core.request import EngineStats
from moe_lora.core.shard import ModelShard
from moe_lora.core.wrong_files import read_config
from moe_lora.engine.adapters.adapter_store import ShardSizes
from moe_lora.engine.adapters.copies import Arenas, BringAdapter, ClearSlot, RankCopier
from moe_lora.engine.client.messages import PoolEntry
from moe_lora.engine.ranks.followers import HOST_STORE, BeginOrder
from moe_lora.engine.step.step_batch import packed_message
from moe_lora.families import shape_of
from moe_lora.kernels.operands import SlotTable
from tests.engine.adapters.test_pool_calls import call
from tests.engine.test_host_assisted import SLOW, ask_client, expected_of, pool_engines
from tests.models.conftest import served  # noqa: F401  (the fixture)
from tests.models.test_oracle import SLOTS

PAGE_BYTES = 1024
TABLES = ("lora_rank", "a_offset", "b_offset", "scale")
TENSOR, EXPERTS = {"tensor_parallel": 2}, {"expert_parallel": 2}
FEW_SLOTS = {"max_loras": 2}
"""Adapters take turns."""


def load(holder: InProcessClient, others: list[InProcessClient], path: Path) -> PoolEntry:
    entry: PoolEntry = call(holder, "pool_load", path.name, str(path), False, 1)
    for other in others:
        call(other, "pool_know", entry.facts, "nowhere", False, 1, [entry.source])
    return entry


def stats(client: InProcessClient) -> EngineStats:
    return call(client, "stats")


def files(client: InProcessClient) -> list[Path]:
    return list((client.core.transfers.followers.directory / HOST_STORE).glob("*.safetensors"))


@pytest.mark.parametrize(
    ("family", "numbers", "transport"),
    [
        pytest.param("llama", TENSOR, "gloo", marks=pytest.mark.slow),
        ("mixtral", EXPERTS, "shm"),
        pytest.param("qwen3_moe", TENSOR | EXPERTS, "shm", marks=pytest.mark.slow),
        pytest.param("gpt_oss", TENSOR, "shm", marks=pytest.mark.slow),
        pytest.param("dbrx", TENSOR, "shm", marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, "gloo", marks=pytest.mark.slow),
        pytest.param("mixtral", {"tensor_parallel": 4, "expert_parallel": 4}, "shm", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_peft_whoever_holds_the_adapters(family, numbers, transport, served):  # noqa: F811
    model = served(family)
    with pool_engines(model, transport, numbers, numbers | FEW_SLOTS) as (holder, other):
        for path in model.adapters:
            load(holder, [other], path)
        for client in (holder, other):
            for _ in range(2):
                answered = ask_client(client, model)
                assert answered == expected_of(model, answered)
            assert files(client) == [], "on the device an adapter needs no file"
        found = stats(other)
        sizes = [
            {one.name: (one.device_bytes, one.nbytes) for one in call(client, "list_adapters")}
            for client in (holder, other)
        ]
    assert found.pool_peer_fetches >= len(model.adapters)
    assert found.pool_disk_fetches == found.pool_adapters == 0
    assert found.adapter_evictions > 0
    assert sizes[0] == sizes[1], "a rank has room for its part alone, before it has seen the adapter too"


def test_host_workers_of_ranks_compute_what_is_fetched(served):  # noqa: F811
    model = served("mixtral")
    host = TENSOR | SLOW | {"host_workers": 1, "host_tokens_per_worker": 8}
    with pool_engines(model, "shm", TENSOR, host) as (holder, other):
        for path in model.adapters:
            load(holder, [other], path)
        answered = ask_client(other, model)
        assert answered == expected_of(model, answered)
        assert files(other) == []
        found = stats(other)
    assert found.lora_rows_host > 0
    assert found.lora_rows_local > 0
    assert found.host_fallback_rows == 0


def test_a_full_disk_ends_a_load_and_the_next_one_succeeds(served, monkeypatch):  # noqa: F811
    model, left = served("llama"), [2]
    put = HostStore.put

    def full(store: HostStore, packed) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise StorageError("no room")
        put(store, packed)

    with pool_engines(model, "shm", TENSOR) as (engine,):
        monkeypatch.setattr(HostStore, "put", full)
        for path in model.adapters:
            load(engine, [], path)
        answered = ask_client(engine, model)
        assert answered == expected_of(model, answered)
        assert files(engine) == []
    assert left[0] < 0


@pytest.mark.parametrize("numbers", [pytest.param({}, marks=pytest.mark.slow), EXPERTS])
def test_instances_of_other_ranks_are_told_apart(numbers, served):  # noqa: F811
    model = served("mixtral")
    with pool_engines(model, "shm", numbers, TENSOR) as (holder, other):
        with pytest.raises(AdapterError, match="give all instances of a pool the same tensor_parallel"):
            load(holder, [other], model.adapters[0])
        for path in model.adapters:
            load(other, [], path)
        answered = ask_client(other, model)
        assert answered == expected_of(model, answered)


def test_an_adapter_that_is_nowhere_fails_alone(served, tmp_path):  # noqa: F811
    model = served("llama")
    gone, *stay = model.adapters
    copy = Path(shutil.copytree(gone, tmp_path / gone.name))
    with pool_engines(model, "shm", TENSOR, TENSOR) as (holder, other):
        load(holder, [other], copy)
        call(holder, "unload_adapter", gone.name)
        for content_hash in call(holder, "pool_orphans"):
            call(holder, "pool_free", content_hash)
        shutil.rmtree(copy)
        for path in stay:
            load(holder, [other], path)
        answered = ask_client(other, model)
        assert [number for number, tokens in enumerate(answered) if not tokens] == [
            number for number, slot in enumerate(SLOTS) if slot == 0
        ]
        assert files(other) == []
        call(other, "unload_adapter", gone.name)
        load(holder, [other], gone)
        answered = ask_client(other, model)
        assert answered == expected_of(model, answered)


@pytest.mark.parametrize("dist_rank", [0, 1])
def test_a_rank_takes_its_pages_back_without_the_file(dist_rank, served):  # noqa: F811
    model = served("mixtral")
    shape = shape_of(read_config(model.model_dir))
    shards = [ModelShard(shape, 2, dist_rank=number) for number in range(2)]
    kept = [entries_of_experts(shape, shard.experts) for shard in shards]
    packed = read_adapter(model.adapters[0], shape, torch.float32)
    layer_pages = ShardSizes(shape, PAGE_BYTES, kept, shards[0]).layer_pages(packed.layers)
    pages = tuple(range(sum(layer_pages)))
    firsts = (0, *accumulate(layer_pages[:-1]))
    arena, host = (torch.zeros(len(pages) * PAGE_BYTES, dtype=torch.uint8) for _ in range(2))
    slots = SlotTable(1, shape.num_layers, shape.num_entries, torch.device("cpu"))
    found = {packed.content_hash: packed}
    places = Arenas(arena, host, PAGE_BYTES), slots, shape, kept[dist_rank]
    copier = RankCopier(*places, found.pop, shard=shards[dist_rank])
    copier.carry_out(BringAdapter(0, packed.content_hash, firsts, None))
    bytes_before, tables_before = arena.clone(), [getattr(slots, name).clone() for name in TABLES]
    assert tables_before[0].any()
    copier.carry_out(Copy(0, 1, True, False, pages, pages))
    copier.carry_out(ClearSlot(0))
    arena.zero_()
    back = Copy(1, 1, True, True, pages, pages)
    order = BringAdapter(0, packed.content_hash, firsts, back, tables=without_data(packed))
    copier.carry_out(pickle.loads(packed_message(BeginOrder(1, order))).order)
    assert torch.equal(arena, bytes_before)
    for name, before in zip(TABLES, tables_before, strict=True):
        assert torch.equal(getattr(slots, name), before), name


@pytest.mark.parametrize(
    ("family", "numbers"), [("llama", (2, 1)), ("mixtral", (1, 2)), ("qwen3_moe", (2, 2))]
)
def test_files_tell_the_pages_of_a_rank_before_their_values_are_read(family, numbers, served):  # noqa: F811
    model = served(family)
    shape = shape_of(read_config(model.model_dir))
    shards = [ModelShard(shape, *numbers, dist_rank) for dist_rank in range(max(numbers))]
    kept = [entries_of_experts(shape, shard.experts) for shard in shards]
    sizes = ShardSizes(shape, 64, kept, shards[0] if numbers[0] > 1 else None)
    for path in model.adapters:
        packed = read_adapter(path, shape, torch.float32)
        pages = sizes.layer_pages(bare_layers(path, shape, torch.float32))
        assert pages == sizes.layer_pages(packed.layers)
        whole = ShardSizes(shape, 64, [np.ones(1, bool)]).layer_pages(packed.layers)
        assert sum(pages) < sum(whole)
