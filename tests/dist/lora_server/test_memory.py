# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from moe_lora.cache.leases.leases import LeaseTable
from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.partition import Layout, Partition
from moe_lora.dist.lora_server.rank_memory import check_share, plan_memory, shard_pages, spare_bytes
from tests.dist.lora_server.cluster import random_adapter
from tests.dist.lora_server.shapes import model_shape

SHAPE = model_shape()
CONFIG = LoraServerConfig(address="/nowhere", store_dir="/nowhere", capacity=3)


@pytest.mark.parametrize("layout", ["EP1-PP1", "EP2-PP2", "EP4-PP1", "DP2"])
@pytest.mark.parametrize("lora_rank", [1, 8, 64])
def test_too_little_memory_is_refused_with_the_least_that_works(layout, lora_rank):
    partition = Partition(SHAPE, Layout.parse(layout), 1)
    adapter = random_adapter("a", SHAPE, lora_rank)
    with pytest.raises(ConfigError) as caught:
        plan_memory(replace(CONFIG, memory_gb=1e-6), partition, torch.float32, [adapter])
    found = re.fullmatch(
        rf"lora_server.memory_gb=1e-06 is too small for adapter 'a' of [0-9.]+ GB; a rank of "
        rf"{partition.layout} needs at least ([0-9.]+)",
        str(caught.value),
    )
    assert found
    memory = plan_memory(replace(CONFIG, memory_gb=float(found[1])), partition, torch.float32, [adapter])
    table = LeaseTable(memory.capacity, memory.num_pages, memory.page_bytes, starvation_s=1.0)
    table.register("a", shard_pages(adapter, partition, memory.page_bytes))
    assert table.acquire("i", "a", 0.0) is not None


def test_default_memory_holds_capacity_times_the_largest_adapter():
    partition = Partition(SHAPE, Layout.parse("EP2-PP2"), 1)
    adapters = [
        random_adapter(name, SHAPE, lora_rank) for name, lora_rank in (("a", 2), ("b", 16), ("c", 16))
    ]
    memory = plan_memory(CONFIG, partition, torch.float32, adapters)
    table = LeaseTable(memory.capacity, memory.num_pages, memory.page_bytes, starvation_s=1.0)
    for adapter in adapters:
        table.register(adapter.name, shard_pages(adapter, partition, memory.page_bytes))
        assert table.acquire("i", adapter.name, 0.0) is not None


@pytest.mark.parametrize("layout", ["EP1-PP1", "EP2-PP2", "DP2"])
def test_default_memory_holds_a_large_adapter_that_comes_after_a_small_one(layout):
    """Knowing a small adapter leaves as much room as knowing none."""
    partition = Partition(SHAPE, Layout.parse(layout), 1)
    small = random_adapter("small", SHAPE, 1, SHAPE.sites[0].modules[:1])
    known = plan_memory(CONFIG, partition, torch.float32, [small])
    unknown = plan_memory(CONFIG, partition, torch.float32, [])
    rooms = [[pages * memory.page_bytes for pages in memory.num_pages] for memory in (known, unknown)]
    assert min(rooms[0]) >= 0.9 * min(rooms[1])
    table = LeaseTable(known.capacity, known.num_pages, known.page_bytes, starvation_s=1.0)
    large = random_adapter("large", SHAPE, 16)
    for adapter in (small, large):
        table.register(adapter.name, shard_pages(adapter, partition, known.page_bytes))
        assert table.acquire("i", adapter.name, 0.0) is not None


def test_room_for_usual_adapters_takes_no_more_than_is_spare():
    partition = Partition(SHAPE, Layout.parse("EP1-PP1"), 1)
    config = replace(CONFIG, capacity=1000)
    small, large = random_adapter("small", SHAPE, 1), random_adapter("large", SHAPE, 64)
    budgets = {
        name: memory.num_pages[0] * memory.page_bytes
        for name, packed in (("none", []), ("small", [small]), ("large", [large]))
        for memory in [plan_memory(config, partition, torch.float32, packed, 10_000_000)]
    }
    assert 9_000_000 < budgets["none"] <= 10_000_000
    assert 1000 * small.nbytes <= budgets["small"]
    assert 1000 * large.nbytes <= budgets["large"], "capacity times the largest known, whatever is spare"
    one = plan_memory(config, partition, torch.float32, [], 0)
    assert one.num_pages[0] * one.page_bytes >= random_adapter("usual", SHAPE, 16).nbytes


def test_spare_memory_is_the_same_at_each_start():
    assert spare_bytes(torch.device("cpu"), 1) == spare_bytes(torch.device("cpu"), 1) > 0
    assert spare_bytes(torch.device("cpu"), 4) == spare_bytes(torch.device("cpu"), 1) // 4


@pytest.mark.parametrize("memory_gb", [0.5, 40.0, 2000.0])
def test_pages_are_few_enough_to_be_searched_and_small_enough_for_small_adapters(memory_gb):
    partition = Partition(SHAPE, Layout.parse("EP2-PP1"), 1)
    large = random_adapter("large", SHAPE, 400)
    memory = plan_memory(replace(CONFIG, memory_gb=memory_gb), partition, torch.float32, [large])
    assert 0.999 * memory_gb * 1e9 <= memory.num_pages[0] * memory.page_bytes <= memory_gb * 1e9
    assert memory.num_pages[0] <= 1 << 18
    if memory_gb < 1:
        small = random_adapter("small", SHAPE, 16)
        pages = shard_pages(small, partition, memory.page_bytes)
        assert all(count > 1 for layers in pages.values() for count in layers.values())


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("capacity", 0, "lora_server.capacity=0"),
        ("max_rows", 0, "lora_server.max_rows=0"),
        ("depth", 0, "lora_server.depth=0"),
        ("memory_gb", 0.0, "memory_gb=0.0"),
        ("load_gb_per_s", -1.0, "load_gb_per_s=-1.0"),
        ("lease_timeout_s", 0.0, "lease_timeout_s=0.0"),
        ("sites", "some", "lora_server.sites='some'"),
    ],
)
def test_setting_that_can_not_work_is_named(field, value, reason):
    with pytest.raises(ConfigError, match=reason):
        replace(CONFIG, **{field: value})


def test_an_arena_larger_than_its_part_of_a_shared_device_is_refused():
    check_share(CONFIG, 50, 100, 2)
    check_share(CONFIG, 100, 100, 1)
    check_share(replace(CONFIG, memory_gb=1.0), 51, 100, 2)
    with pytest.raises(
        ConfigError, match=r"lora_server\.capacity=.* with 2 ranks, .* give lora_server\.memory_gb"
    ):
        check_share(replace(CONFIG, memory_gb=None), 51, 100, 2)
