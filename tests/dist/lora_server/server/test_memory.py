from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.lora_server.protocol.partition import Layout, Partition
from moe_lora.dist.lora_server.server.leases import LeaseTable
from moe_lora.dist.lora_server.server.rank_memory import check_share, plan_memory, shard_pages
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
        rf"lora_server.memory_gb=1e-06 is too small for one adapter; a rank of {partition.layout} needs at "
        r"least ([0-9.]+)",
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
