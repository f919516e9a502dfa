# SPDX-License-Identifier: Apache-2.0
"""The store of an engine's adapters: beside the weights, in a pool, or leased."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.config import EngineConfig
from moe_lora.core.shape import rank_limit
from moe_lora.engine.arena_size import ArenaSize
from moe_lora.engine.ranks.followers import HOST_STORE, Followers
from moe_lora.engine.ranks.rank import Rank

from .adapter_store import AdapterStore, ShardSizes

if TYPE_CHECKING:
    from moe_lora.dist.host_workers.workers import HostWorkers
    from moe_lora.dist.transport.contract import Transport

PEER_TIMEOUT_S = 10.0
"""Time limit for a layer; then the next holder is tried."""


def make_contents(config: EngineConfig, rank: Rank) -> AdapterContents:
    """Contents of adapters, in a LoRA Server's store if any."""
    store: HostStore | None = None
    if rank.lora_server is not None:
        store = rank.lora_server.store
    elif config.contents_dir is not None:
        store = HostStore(config.contents_dir)
    return AdapterContents(
        rank.shape,
        rank.dtype,
        store,
        root=config.adapter_root,
        max_lora_rank=rank_limit(config.max_lora_rank, [rank.device.type]),
        base_dir=None if config.load_format == "dummy" else Path(config.model_dir),
        computed_by=_computed_by(config, rank),
    )


def _computed_by(config: EngineConfig, rank: Rank) -> str:
    if rank.lora_server is not None:
        return "lora_server"
    is_quantised = rank.device.type == "cpu" and config.quantize not in ("checkpoint", "none")
    return "quantised" if is_quantised else rank.device.type


def make_store(
    config: EngineConfig,
    rank: Rank,
    size: ArenaSize,
    followers: Followers,
    contents: AdapterContents,
    sizes: ShardSizes,
    undo: ExitStack,
) -> AdapterStore:
    """Adapters in files if other processes read them, or if memory is for the host arena."""

    def started(where: HostStore | None) -> HostWorkers | None:
        if not config.host_workers:
            return None
        host = rank.host.workers(rank, where)
        if host is not None:
            undo.callback(host.close)
        return host

    store = contents.store if config.pool is None else None
    if config.num_ranks > 1:
        store = HostStore(followers.directory / HOST_STORE)
    host = started(store)

    def all_read() -> bool:
        if host is not None:
            host.settle()
        return followers.all_answered()

    options: dict[str, Any] = {}
    if config.num_ranks > 1:
        options = {"store": store, "others_counts": followers.counts}
        if host is not None or config.pool is None:  # all ranks read a pool's file within a load
            options["before_removal"] = all_read
    elif host is not None:
        options = {"store": host.store, "before_removal": all_read if store is None else None}
    elif config.pool is None and rank.lora_server is None and size.num_host_pages:
        options = {"in_files": True, "store": store}
    if host is not None:
        options["host"] = host
    if config.pool is not None:
        from .pool_store import PoolAdapters

        def read(path: str, name: str, content: str) -> PackedAdapter:
            return contents.read(name, path, content, loads=False)

        transport = instance_transport(config, config.instance)
        return PoolAdapters(transport, read, sizes=sizes if config.num_ranks > 1 else None, **options)
    if rank.lora_server is None:
        return AdapterStore(**options)
    from .leased_adapters import LeasedAdapters

    leased = LeasedAdapters(rank.lora_server, **options)
    contents.delete, leased.is_served = leased.delete, contents.is_served
    return leased


def instance_transport(config: EngineConfig, name: str) -> Transport:
    """Transport of one-sided copies between instances, of the pool's kind if any."""
    from moe_lora.dist.transport.contract import make_transport

    options: dict[str, Any] = {}
    if config.pool is not None and config.pool.transport == "gloo":
        options = {"host": config.pool.host or "127.0.0.1", "timeout_s": PEER_TIMEOUT_S}
    return make_transport("shm" if config.pool is None else config.pool.transport, name=name, **options)
