# SPDX-License-Identifier: Apache-2.0
"""What arena_mb, host_arena_mb and the older bounds come to."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.config import CACHE_POLICIES, EmulationConfig, EngineConfig
from moe_lora.config.devices import DeviceShare
from moe_lora.core.errors import ConfigError
from moe_lora.engine import arena_size as sizing
from moe_lora.engine.arena_size import ArenaSize, arena_size, caching_policy
from moe_lora.engine.ranks.rank import Rank
from moe_lora.families import shape_of
from moe_lora.kernels.operands import KvLayout
from moe_lora.policies.caching.caching import CACHING_POLICIES
from tests.engine.refusals import least_of
from tests.families import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = shape_of(tiny_config("mixtral").to_dict())
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)
FREE = 1 << 30
SITES = [site.name for site in SHAPE.sites]


def size_of(adapter_pages=(9,), device=CPU, sites=SITES, free=FREE, **settings) -> ArenaSize:
    config = EngineConfig(model_dir="", max_model_len=160, **settings)
    return arena_size(config, SHAPE, LAYOUT, adapter_pages, device, free, sites)


def test_one_arena_of_the_given_size_without_a_split():
    size = size_of(arena_mb=1.0)
    assert (size.num_pages, size.max_kv_pages) == (1_000_000 // LAYOUT.page_bytes, size.num_pages)
    assert (size.request_pages, size.adapter_pages) == (10, 9)


def test_original_weights_are_taken_off_what_is_free():
    config = EngineConfig(model_dir="", max_model_len=160)
    with_merging, without = (
        arena_size(
            EngineConfig(model_dir="", max_model_len=160), SHAPE, LAYOUT, (9,), CPU, 10**6, SITES, kept
        )
        for kept in (600_000, 0)
    )
    assert with_merging.num_pages < without.num_pages
    config = EngineConfig(model_dir="", batching="auto")
    assert [sizing.kept_originals(config, *of, 100) for of in ((50, 200), (None, 200))] == [50, 200]
    with pytest.raises(ConfigError, match="batching='auto' keeps the original weights"):
        sizing.kept_originals(config, 101, 50, 100)


def test_a_device_of_its_own_is_all_its_own_and_the_cpu_is_divided():
    two = [
        size_of(device=one, num_instances=2, max_num_seqs=4096, max_num_batched_tokens=4096).num_pages
        for one in (CUDA, CPU)
    ]
    alone = size_of(device=CUDA, max_num_seqs=4096, max_num_batched_tokens=4096).num_pages
    assert two[0] == alone
    assert two[1] < alone


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 5))
def test_parts_of_a_shared_device_fit_it_together(held, others, num_sharers):
    """In whatever order its sharers start: each has what it holds and what is left of its share."""
    total = 100 * num_sharers
    left = sizing.share_left(total - held - others, total, held, num_sharers)
    if num_sharers > 1:
        assert left + held <= max(held, total // num_sharers)
    else:
        assert left == total - held - others


def test_weights_that_take_a_whole_share_are_refused_unless_the_size_is_given():
    shares = {"device_shares": (DeviceShare(0), DeviceShare(1, 2)), "expert_parallel": 2}
    with pytest.raises(
        ConfigError, match=r"2 ranks share a device, and the weights take all .* give arena_mb"
    ):
        size_of(device=CUDA, free=0, **shares)
    assert size_of(device=CUDA, free=0, host_arena_mb=0, arena_mb=1.0, **shares).num_pages
    config = EngineConfig(model_dir="", **shares)
    assert sizing.most_sharers(config) == 2, "arenas are alike on all ranks"
    assert sizing.most_sharers(EngineConfig(model_dir="")) == 1


def test_kv_cache_gb_bounds_kv_within_the_arena():
    size = size_of(arena_mb=1.0, kv_cache_gb=0.0005)
    assert size.max_kv_pages == 500_000 // LAYOUT.page_bytes
    assert size_of(arena_mb=1.0, kv_cache_gb=1.0).max_kv_pages == size.num_pages


def test_without_arena_mb_both_bounds_make_up_the_arena():
    size = size_of(kv_cache_gb=0.001, lora_memory_gb=0.002)
    page = LAYOUT.page_bytes
    assert size.num_pages == 1_000_000 // page + 2_000_000 // page
    assert size.max_kv_pages == 1_000_000 // page
    assert size_of().max_kv_pages == size_of().num_pages
    assert size_of(sites=[]).num_pages < size_of().num_pages


def test_smallest_arena_is_named_and_works():
    least = least_of(lambda: size_of(arena_mb=0.001), r"arena_mb=0.001 is too small for one request of")
    assert size_of(arena_mb=least).num_pages == 10 + 9
    with pytest.raises(ConfigError, match="at least"):
        size_of(arena_mb=least - LAYOUT.page_bytes / 1e6)


@pytest.mark.parametrize("settings", [{"arena_mb": 1.0}, {"lora_memory_gb": 0.0005}, {}])
def test_an_adapter_that_has_grown_too_large_does_not_count_where_bad_ones_are_left_out(settings):
    sizes = (9, 100_000)
    if settings:
        with pytest.raises(ConfigError, match="at least"):
            size_of(sizes, **settings)
    size = size_of(sizes, leave_out_bad=True, **settings)
    assert size == size_of(sizes[:1] if settings else sizes, **settings)
    with pytest.raises(ConfigError, match=r"arena_mb=0\.001"):
        size_of(sizes, leave_out_bad=True, arena_mb=0.001)


def test_host_arena_is_by_default_where_it_is_other_memory(monkeypatch):
    assert size_of(arena_mb=1.0).num_host_pages == 0
    assert size_of(arena_mb=1.0, host_arena_mb=2.0).num_host_pages == 2_000_000 // LAYOUT.page_bytes
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 4_000_000)
    on_cuda = size_of(arena_mb=3.0, device=CUDA)
    assert on_cuda.num_host_pages == 1_000_000 // LAYOUT.page_bytes
    assert size_of(arena_mb=0.5, device=CUDA).num_host_pages == 500_000 // LAYOUT.page_bytes
    assert size_of(arena_mb=3.0, host_arena_mb=0, device=CUDA).num_host_pages == 0


def test_host_arena_of_less_than_a_page_is_refused():
    refusal = r"host_arena_mb=0\.0001 is less than one page; give at least"
    least = least_of(lambda: size_of(arena_mb=1.0, host_arena_mb=1e-4), refusal)
    assert size_of(arena_mb=1.0, host_arena_mb=least).num_host_pages == 1


def test_memory_that_cannot_be_had_is_blamed_on_settings_that_were_given():
    config = EngineConfig(model_dir="", arena_mb=1e12)
    rank = SimpleNamespace(config=config, shape=SHAPE, layout=LAYOUT, device=CPU)
    with pytest.raises(ConfigError, match="lower arena_mb=1e") as refusal:
        Rank.allocate(rank, 10**18 // LAYOUT.page_bytes, 0)
    assert "None" not in str(refusal.value)
    assert "kv_cache_gb" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"arena_mb": 0}, "arena_mb=0 must be positive"),
        ({"host_arena_mb": -1}, "host_arena_mb=-1 must be 0"),
        ({"host_arena_mb": math.inf}, "host_arena_mb=inf must be 0"),
        ({"arena_mb": math.inf}, "arena_mb=inf must be positive and finite"),
        ({"kv_cache_gb": math.inf}, "kv_cache_gb=inf must be positive and finite"),
        ({"swap_interval_s": math.inf}, "swap_interval_s=inf must be positive and finite"),
        ({"swap_interval_s": 1e12}, "swap_interval_s=1000000000000.0 is too large; choose at most"),
        ({"cache_policy": "mru"}, "cache_policy='mru' is not known; choose one of"),
        ({"swap_interval_s": 0}, "swap_interval_s=0 must be positive"),
        ({"arena_mb": 9, "lora_memory_gb": 1}, "leave one of them out"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(model_dir="", **settings)


def test_names_of_policies_are_those_there_are():
    assert sorted(CACHE_POLICIES) == sorted(CACHING_POLICIES)


def test_policies_take_the_settings_that_concern_them():
    size = size_of(arena_mb=1.0)
    config = EngineConfig(model_dir="", swap_time_unit_s=7.0, emulation=EmulationConfig(load_gb_per_s=3.0))
    policy = caching_policy(config, size, LAYOUT.page_bytes)
    assert (policy.time_unit_s, policy.costs.transfer_bytes_per_s) == (7.0, 3e9)
    static = EngineConfig(model_dir="", cache_policy="static")
    tight = size_of(arena_mb=20 * LAYOUT.page_bytes / 1e6)
    share = caching_policy(static, tight, LAYOUT.page_bytes).traits.adapter_share
    assert int(share * tight.num_pages) == 9


def test_a_share_of_the_memory_is_for_kv_and_adapters_beside_the_weights(monkeypatch):
    monkeypatch.setattr(sizing, "host_memory_bytes", lambda: 1000)
    monkeypatch.setattr(sizing, "resident_bytes", lambda: 100)

    def left(share, free=10_000, **settings):
        config = EngineConfig(model_dir="", memory_utilization=share, **settings)
        return sizing.within_share(config, CPU, free)

    assert left(None) == 10_000
    assert left(0.9) == 800
    assert left(0.9, free=50) == 50
    assert left(0.9, num_instances=2) == 700
    assert left(0.9, tensor_parallel=2) == 350
    with pytest.raises(ConfigError, match=r"arena_mb=1 is a size.*memory_utilization=0\.9 has no meaning"):
        left(0.9, arena_mb=1)
    with pytest.raises(ConfigError, match=r"memory_utilization=0\.1 of .* leaves nothing .* raise it"):
        left(0.1)


def test_with_a_share_kv_takes_three_quarters_and_adapters_a_quarter():
    config = EngineConfig(model_dir="", max_model_len=160, max_num_seqs=2048, memory_utilization=1.0)
    free = 400 * LAYOUT.page_bytes
    size = arena_size(config, SHAPE, LAYOUT, (9,), CPU, free, SITES)
    assert size.num_pages == 400
    assert size_of(max_num_seqs=1, memory_utilization=1.0).num_pages < FREE // LAYOUT.page_bytes


def test_the_share_holds_on_the_device_of_an_instance(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    config = EngineConfig(model_dir="", memory_utilization=0.5)
    assert sizing.within_share(config, CUDA, 600) == 200
    shared = EngineConfig(model_dir="", memory_utilization=0.8, device_shares=(DeviceShare(0, 2),))
    assert sizing.within_share(shared, CUDA, 200) == 100, "0.8 of the half of 1000, beside 300"
