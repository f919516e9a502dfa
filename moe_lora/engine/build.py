"""From an `EngineConfig` to a running engine core."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.peft_format import read_adapter
from moe_lora.cache.blocks import BlockManager
from moe_lora.cache.pages import PageAllocator
from moe_lora.core.clock import WallClock
from moe_lora.core.config import EngineConfig
from moe_lora.core.expert_parallel import check_expert_parallel
from moe_lora.core.hf_config import read_config
from moe_lora.core.request import ModelInfo
from moe_lora.core.shape import ModelShape

from .core import EngineCore
from .followers import HOST_STORE, Allocate, Followers, Report, start_followers
from .placement import LocalPlacement, Placement
from .rank import Rank
from .remote_placement import BothPlacements, RemotePlacement
from .residency import Residency
from .runner import ModelRunner
from .scheduler import Scheduler
from .sizing import arena_size, max_model_len
from .slot_writer import GroupSlotWriter, LocalSlotWriter, PartSlotWriter, ShardSizes, SlotWriter
from .text import read_eos_token_ids

logger = logging.getLogger(__name__)


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
    adapters = [(read_adapter(Path(path), shape, dtype, name), path) for name, path in config.adapters]
    sizes = ShardSizes(shape, [rank.kept_entries(other) for other in range(config.expert_parallel)])
    adapter_bytes = [sum(sizes.layer_bytes(packed)) for packed, _ in adapters]
    size = arena_size(config, shape, layout, adapter_bytes, rank.free_bytes(), rank.local_sites)
    if followers is not None:
        followers.tell(Allocate(size.num_pages * layout.page_bytes))
    rank.allocate(size.num_pages * layout.page_bytes)
    if followers is not None:
        followers.settle()
    runner, writer = _parts(rank, followers, sizes)
    clock = WallClock()
    pages = PageAllocator(size.num_pages)
    blocks = BlockManager(pages, config.block_size, size.kv_pages, prefix_caching=config.prefix_caching)
    load_rate = None if config.load_gb_per_s is None else config.load_gb_per_s * 1e9
    placement = LocalPlacement(pages, layout.page_bytes, writer, blocks, load_rate)
    residency = Residency(_placement(rank, placement), blocks, clock)
    for packed, path in adapters:
        residency.add(packed, path)
    runner.warm_up()
    if followers is not None:
        followers.tell(Report())
        followers.settle()
    scheduler = Scheduler(
        blocks,
        residency,
        clock,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        starvation_s=config.starvation_s,
        shortest_first=config.queue == "sjf-oracle",
    )
    info = model_info(config, shape, dtype)
    logger.info(
        "engine ready: %s, %d adapters, %.3f GB arena on %s, %d processes",
        *(info.name, len(adapters), rank.arena.numel() / 1e9, rank.device, config.expert_parallel),
    )
    return EngineCore(info, shape, dtype, scheduler, runner, residency, blocks, clock, config.seed, followers)


def _parts(rank: Rank, followers: Followers | None, sizes: ShardSizes) -> tuple[ModelRunner, SlotWriter]:
    """What computes steps and what fills slots, on this rank alone or on all of them."""
    if followers is None:
        if rank.lora_server is not None:
            return rank.runner(), PartSlotWriter(rank.own_slots(), rank.arena, sizes)
        return rank.runner(), LocalSlotWriter(rank.slots, rank.arena)
    runner = rank.runner(rank.join(followers.directory), followers.tell)
    followers.settle()
    store = HostStore(followers.directory / HOST_STORE)
    return runner, GroupSlotWriter(rank.own_slots(), sizes, store, followers)


def _placement(rank: Rank, local: LocalPlacement) -> Placement:
    """Who makes adapters ready: this device, the LoRA Server, or each a part."""
    if rank.lora_server is None:
        return local
    remote = RemotePlacement(rank.lora_server)
    return BothPlacements(local, remote) if rank.local_sites else remote


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
