"""From an `EngineConfig` to a running engine core."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.config import EngineConfig
from moe_lora.core.clock import WallClock
from moe_lora.core.expert_parallel import check_expert_parallel
from moe_lora.core.hf_config import read_config
from moe_lora.core.request import ModelInfo
from moe_lora.core.shape import ModelShape
from moe_lora.dist.transport.make import make_transport
from moe_lora.scheduling.scheduler import Scheduler

from .build_cache import build_cache
from .cache_figures import CacheFigures
from .core import EngineCore
from moe_lora.engine.ranks.followers import Allocate, Followers, Report, start_followers
from moe_lora.engine.adapters.kept_adapters import ShardSizes
from moe_lora.engine.adapters.pool_store import PoolAdapters
from moe_lora.engine.ranks.rank import Rank
from moe_lora.engine.adapters.manager import Residency
from .runner import ModelRunner
from .sequence import Sequence
from .arena_size import arena_size, max_model_len
from moe_lora.engine.text.text import read_eos_token_ids

logger = logging.getLogger(__name__)

PEER_TIMEOUT_S = 10.0
"""An instance that does not give a layer of an adapter in this time is left for the next holder."""


def build_engine(config: EngineConfig, followers: Followers | None = None) -> EngineCore:
    """Load the model and the adapters, allocate the arena, compile the decode step.

    followers: the instance's other ranks; None = start them if the settings ask for some.  They end with
    the engine, or if it can't be built.  Raises ConfigError or AdapterError for anything that can be known
    at start.
    """
    try:
        hf_config = read_config(Path(config.model_dir))
        check_expert_parallel(ModelShape.from_hf_config(hf_config).num_experts, config.expert_parallel)
        if config.expert_parallel > 1:
            followers = followers or start_followers(config)
            followers.set_up(config)
        return _build(config, followers)
    except BaseException:
        if followers is not None:
            followers.close()
        raise


def _build(config: EngineConfig, followers: Followers | None) -> EngineCore:
    rank = Rank(config)
    shape, dtype, layout = rank.shape, rank.dtype, rank.layout
    if followers is not None:
        followers.settle()
    contents = _contents(config, rank)
    adapters = []
    if config.pool is None:
        adapters = contents.read_all(
            config.adapters, dict(config.contents), leave_out_bad=config.leave_out_bad
        )
    kept = [rank.kept_entries(other) for other in range(config.expert_parallel)]
    sizes = ShardSizes(shape, layout.page_bytes, kept)
    adapter_pages = [sum(sizes.layer_pages(packed)) for packed, _ in adapters]
    if config.pool is not None:
        measured = contents.layer_bytes(config.adapters, leave_out_bad=config.leave_out_bad)
        adapter_pages = [sum(map(sizes.num_pages, layers)) for layers in measured]
    size = arena_size(config, shape, layout, adapter_pages, rank.device, rank.free_bytes(), rank.local_sites)
    if followers is not None:
        followers.tell(Allocate(size.num_pages, size.num_host_pages))
    rank.allocate(size.num_pages, size.num_host_pages)
    if followers is not None:
        followers.settle()
    runner = _runner(rank, followers)
    clock = WallClock()
    pool = _pool(config, contents)
    cache, placement, transfers = build_cache(
        config, rank, size, sizes, followers, clock, contents.store, pool
    )
    residency = Residency(placement, clock)
    for packed, path in adapters:
        residency.add(packed, path)
        contents.serve(packed.name, packed.content_hash)
    runner.warm_up()
    if followers is not None:
        followers.tell(Report())
        followers.settle()
    scheduler: Scheduler[Sequence] = Scheduler(
        cache,
        residency,
        clock,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        starvation_s=config.starvation_s,
        shortest_first=config.queue == "sjf-oracle",
    )
    info = model_info(config, shape, dtype)
    logger.info(
        "engine ready: %s, %d adapters, arenas of %.1f MB on %s and %.1f MB on the host, %d processes",
        *(info.name, len(adapters), size.num_pages * layout.page_bytes / 1e6, rank.device),
        *(size.num_host_pages * layout.page_bytes / 1e6, config.expert_parallel),
    )
    figures = CacheFigures(cache, layout.page_bytes, size.max_kv_pages)
    parts = (scheduler, runner, residency, transfers, figures, contents, clock)
    return EngineCore(info, shape, dtype, *parts, config.seed, followers, pool)


def _contents(config: EngineConfig, rank: Rank) -> AdapterContents:
    """With a LoRA Server its store has the contents, which are not this instance's to remove."""
    if rank.lora_server is not None:
        return AdapterContents(rank.shape, rank.dtype, rank.lora_server.store, owned=False)
    store = None if config.contents_dir is None else HostStore(config.contents_dir)
    return AdapterContents(rank.shape, rank.dtype, store)


def _pool(config: EngineConfig, contents: AdapterContents) -> PoolAdapters | None:
    """This instance's part of the adapter pool, if there is one."""
    if config.pool is None:
        return None
    options: dict[str, Any] = {}
    if config.pool.transport == "gloo":
        options = {"host": config.pool.host or "127.0.0.1", "timeout_s": PEER_TIMEOUT_S}
    transport = make_transport(config.pool.transport, name=config.instance, **options)
    return PoolAdapters(transport, lambda path, name, content: contents.read(name, path, content))


def _runner(rank: Rank, followers: Followers | None) -> ModelRunner:
    """What computes steps, on this rank alone or on all of them."""
    if followers is None:
        return rank.runner()
    runner = rank.runner(rank.join(followers.directory), followers.tell)
    followers.settle()
    return runner


def model_info(config: EngineConfig, shape: ModelShape, dtype: torch.dtype) -> ModelInfo:
    """What front ends are told of the engine; end tokens outside the vocabulary can't be met."""
    model_dir = Path(config.model_dir)
    return ModelInfo(
        name=model_dir.resolve().name,
        model_dir=str(model_dir),
        family=shape.family,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len(config, shape),
        vocab_size=shape.vocab_size,
        max_loras=config.max_loras,
        eos_token_ids=tuple(i for i in read_eos_token_ids(model_dir) if i < shape.vocab_size),
    )
