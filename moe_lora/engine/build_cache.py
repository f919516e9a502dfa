"""From an `EngineConfig` to the cache of a rank 0 and what carries out its orders."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from moe_lora.adapters.host_store import HostStore
from moe_lora.cache.unified import UnifiedCache
from moe_lora.config import EngineConfig
from moe_lora.core.clock import Clock
from .ranks import exchange
from moe_lora.policies.caching import CacheCosts, CachingPolicy
from moe_lora.policies.caching_policies import make_caching_policy
from moe_lora.policies.fastlibra import FastLibra
from moe_lora.policies.recency import Recency

from moe_lora.engine.adapters.adapter_room import AdapterRoom
from moe_lora.engine.ranks.followers import HOST_STORE, Followers, Report
from moe_lora.engine.adapters.kept_adapters import KeptAdapters, ShardSizes
from moe_lora.engine.adapters.local_loader import LocalPlacement
from moe_lora.engine.adapters.mover import Mover
from moe_lora.engine.adapters.adapter_loader import Placement
from moe_lora.engine.adapters.pool_store import PoolAdapters
from moe_lora.engine.ranks.rank import Rank
from moe_lora.engine.adapters.remote_loader import RemotePlacement, SharedPlacement
from .arena_size import ArenaSize
from moe_lora.engine.adapters.transfers import Ranks, Transfers


def build_cache(
    config: EngineConfig,
    rank: Rank,
    size: ArenaSize,
    sizes: ShardSizes,
    followers: Followers | None,
    clock: Clock,
    lasting: HostStore | None = None,
    pool: PoolAdapters | None = None,
) -> tuple[UnifiedCache, Placement, Transfers]:
    """The cache, what brings adapters in, and what carries out the cache's orders.

    lasting: a store that has every adapter that is read.  pool: what keeps adapters; None: all are kept here.
    """
    cache = UnifiedCache(
        num_device_pages=size.num_pages,
        num_host_pages=size.num_host_pages,
        block_size=config.block_size,
        policy=caching_policy(config, size, rank.layout.page_bytes),
        max_kv_pages=size.max_kv_pages,
        max_adapters=config.max_loras,
        prefix_caching=config.prefix_caching,
        upper=config.swap_out_above,
        lower=config.swap_in_below,
    )
    kept = _kept_adapters(rank, size, followers, lasting) if pool is None else pool
    ranks = Ranks(rank.copier(kept.find, pool), rank.layout.page_bytes, followers)
    local = LocalPlacement(
        cache,
        kept,
        sizes,
        clock,
        room=AdapterRoom(
            num_slots=config.max_loras,
            num_pages=size.num_pages - size.request_pages,
            page_bytes=rank.layout.page_bytes,
        ),
        clear=lambda order: ranks.begin(order)(),
    )
    transfers = Transfers(
        cache,
        ranks,
        clock,
        translate=local.translate,
        on_done=local.arrived,
        make_mover=partial(
            Mover,
            rank.device,
            bytes_per_s=None if (rate := config.emulation.load_gb_per_s) is None else rate * 1e9,
        ),
        interval_s=config.swap_interval_s,
    )
    if rank.lora_server is None:
        return cache, local, transfers
    return cache, SharedPlacement(local, RemotePlacement(rank.lora_server)), transfers


def caching_policy(config: EngineConfig, size: ArenaSize, page_bytes: int) -> CachingPolicy:
    """The policy of the settings.  A static partition is moved until either part has room for a request."""
    costs = CacheCosts(page_bytes=page_bytes)
    if config.emulation.load_gb_per_s is not None:
        rate = config.emulation.load_gb_per_s * 1e9
        costs = replace(costs, transfer_bytes_per_s=rate, disk_bytes_per_s=rate)
    policy = make_caching_policy(config.cache_policy, costs)
    if isinstance(policy, FastLibra) and config.swap_time_unit_s is not None:
        return replace(policy, time_unit_s=config.swap_time_unit_s)
    if isinstance(policy, Recency) and policy.traits.adapter_share is not None:
        num_pages = round(policy.traits.adapter_share * size.num_pages)
        if config.kv_cache_gb is not None:
            num_pages = size.num_pages - size.max_kv_pages
        num_pages = min(max(num_pages, size.adapter_pages), size.num_pages - size.request_pages)
        share = (num_pages + 0.5) / size.num_pages  # half a page more, because whole ones are counted
        return replace(policy, traits=replace(policy.traits, adapter_share=share))
    return policy


def _kept_adapters(
    rank: Rank, size: ArenaSize, followers: Followers | None, lasting: HostStore | None
) -> KeptAdapters:
    """Adapters in files where other processes read them, or where the host arena is what memory is for."""
    if followers is not None:

        def all_read() -> None:
            followers.tell(Report())
            followers.settle(exchange.TIMEOUT_S)

        return KeptAdapters(store=HostStore(followers.directory / HOST_STORE), before_removal=all_read)
    # With a LoRA Server they are mapped already, from its store.
    return KeptAdapters(in_files=rank.lora_server is None and size.num_host_pages > 0, lasting=lasting)
