# SPDX-License-Identifier: Apache-2.0
"""From an `EngineConfig` to a running engine core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.config import EngineConfig
from moe_lora.config.engine import AUTO
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import ModelInfo
from moe_lora.core.shape import ModelShape, check_expert_parallel
from moe_lora.core.shard import ModelShard
from moe_lora.engine.adapters.adapter_store import AdapterStore, ShardSizes
from moe_lora.engine.adapters.manager import AdapterManager
from moe_lora.engine.adapters.transfers import Transfers
from moe_lora.engine.ranks.followers import Allocate, Followers, RankReport, start_followers
from moe_lora.engine.ranks.rank import Rank
from moe_lora.engine.ranks.rank_runner import make_runner
from moe_lora.engine.step.runner import ModelRunner
from moe_lora.engine.step.sampler import Sampler
from moe_lora.engine.text.tokenizer_files import read_eos_token_ids, read_sampling_defaults
from moe_lora.families import family_named, shape_of
from moe_lora.scheduling.scheduler import Scheduler, StepLimits
from moe_lora.scheduling.views import RequestQueue, shortest_first

from .adapters.make_store import instance_transport, leases_of, make_contents, make_store, pool_of
from .arena_size import (
    ArenaSize,
    arena_size,
    free_bytes,
    kept_originals,
    make_cache,
    max_model_len,
    within_share,
)
from .core import EngineCore
from .sequence import Sequence

if TYPE_CHECKING:
    from moe_lora.engine.moving.kv_transfer import KvTransfer


def schedules_ahead(config: EngineConfig, rank: Rank, store: AdapterStore) -> bool:
    """True if steps are launched before the tokens of the step before are read.

    Raises ConfigError if required but impossible.
    """
    reason = check_ahead(config, host=store.host is not None, merges=rank.merges)
    wanted = config.async_scheduling == "on" or (
        config.async_scheduling == "auto" and rank.device.type == "cuda"
    )
    return wanted and reason is None


def check_ahead(config: EngineConfig, *, host: bool, merges: bool) -> str | None:
    """Reason against steps ahead, or None.  host: with host workers; merges: weights may carry an adapter.

    Raises ConfigError if steps ahead are required.
    """
    reasons = {
        "several ranks, all but one of which are told of tokens": config.num_ranks > 1,
        "a LoRA Server, whose answers a step waits for": config.lora_server is not None,
        "host_workers, whose answers a step waits for": host,
        f"batching={config.batching!r}, which times steps": merges,
        "an emulated step_profile": config.emulation.step_profile is not None,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if config.async_scheduling == "on" and reason is not None:
        raise ConfigError(
            f"async_scheduling='on' does not go together with {reason}; use 'auto' or 'off', or do without it"
        )
    return reason


logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, followers: Followers | None = None) -> EngineCore:
    """Load the model and the adapters, allocate the arena, compile the decode step.

    followers: the instance's other ranks; None: started by the settings.  Followers end with the engine, or
    with a failed build.  Raises ConfigError or AdapterError for errors known at start.
    """
    mine = followers or Followers()
    try:
        hf_config = config.hf_config()
        shape = shape_of(hf_config)
        # Checked again after the model's load, with "auto" resolved.
        check_ahead(
            config,
            host=config.host_workers not in (0, AUTO),
            merges=config.batching not in ("unmerged", AUTO),
        )
        check_expert_parallel(shape.num_experts, config.expert_parallel)
        ModelShard(shape, config.tensor_parallel, config.expert_parallel)  # checks the numbers
        if config.num_ranks > 1:
            mine = followers or start_followers(config)
        mine.set_up(config)
        if config.threads_per_process is not None:
            torch.set_num_threads(config.threads_per_process)  # each thread keeps its first number
        return _in_own_thread(partial(_build, config, mine))
    except BaseException:
        mine.close()
        raise


def _in_own_thread(work: Callable[[], EngineCore]) -> EngineCore:
    """Run `work` in a separate thread; returns the result or raises the error.

    OpenMP keeps worker threads for every thread that ever used some.  Steps run in another thread: if the
    loading thread stayed alive, there would be two workers per core, and decode steps took up to twice as
    long.
    """
    result: Future[EngineCore] = Future()
    left = Event()

    def run() -> None:
        try:
            core = work()
        except BaseException as error:
            result.set_exception(error)
            return
        result.set_result(core)
        if left.is_set():
            core.close(at_once=True)

    thread = Thread(target=run, name="engine-build", daemon=True)  # Ctrl-C does not wait for the thread
    thread.start()
    try:
        core = result.result()
    except KeyboardInterrupt:
        left.set()
        raise
    thread.join()
    return core


def _build(config: EngineConfig, followers: Followers) -> EngineCore:
    logger.info("loading %s", config.model_dir)
    rank = Rank(config)
    shape, page_bytes = rank.shape, rank.layout.page_bytes
    followers.settle()
    contents = make_contents(config, rank)
    kept = [rank.kept_entries(other) for other in range(config.num_ranks)]
    sizes = ShardSizes(shape, page_bytes, kept, rank.divides_adapters)
    if config.pool is None:
        adapters = contents.read_all(config.adapters, leave_out_bad=config.leave_out_bad)
        adapter_pages = [sum(sizes.layer_pages(packed)) for packed, _ in adapters]
    else:
        adapters = []
        measured = contents.layer_bytes(config.adapters, leave_out_bad=config.leave_out_bad)
        adapter_pages = [sum(sizes.in_pages(layers)) for layers in measured]
    kept_bytes = _kept_originals(config, rank, [packed for packed, _ in adapters])
    size = arena_size(
        *(
            config,
            rank.shard.shape,
            rank.layout,
            adapter_pages,
            rank.device,
            within_share(config, rank.device, rank.free_bytes()),
            rank.local_sites,
        ),
        kept_bytes=kept_bytes,
    )
    followers.tell(Allocate(size.num_pages, size.num_host_pages))
    rank.allocate(size.num_pages, size.num_host_pages)
    followers.settle()
    alone = config.num_ranks == 1
    with ExitStack() as undo:
        store = make_store(config, rank, size, followers, contents, undo)
        undo.callback(store.close)
        followers.settle()
        if alone:
            runner = make_runner(rank, host=store.host, find=store.find)
        else:
            exchanges = rank.join(followers.directory)
            runner = make_runner(rank, exchanges, followers.tell, store.host, find=store.find)
        followers.settle()
        core = _core(config, rank, size, sizes, followers, contents, runner, store)
        undo.pop_all()
        undo.callback(core.close)
        for packed, path in adapters:
            core.add_adapter(packed, path)
        ranks = site_ranks(rank.shape, [packed for packed, _ in adapters])
        runner.warm_up(ranks, config.max_num_batched_tokens)
        followers.tell(RankReport())
        followers.settle()
        undo.pop_all()
    logger.info(
        "engine ready: %s, %d adapters, arenas of %.1f MB on %s and %.1f MB on the host, %d processes",
        *(core.info.name, len(adapters), size.num_pages * page_bytes / 1e6, rank.device),
        *(size.num_host_pages * page_bytes / 1e6, config.num_ranks),
    )
    return core


def _kept_originals(config: EngineConfig, rank: Rank, adapters: list[PackedAdapter]) -> int:
    if not rank.merges:
        return 0
    targets = {module for packed in adapters for module in packed.targets}
    known = rank.weight_merge.bytes_of(targets) if adapters else None
    usual_modules = {
        module for name in rank.shape.default_targets for module in rank.shape.site(name).modules
    }
    usual = rank.weight_merge.bytes_of(usual_modules)
    return kept_originals(config, known, usual, _host_free(config))


def _host_free(config: EngineConfig) -> int:
    return free_bytes(torch.device("cpu")) // (config.num_instances * config.num_ranks)


def _core(
    config: EngineConfig,
    rank: Rank,
    size: ArenaSize,
    sizes: ShardSizes,
    followers: Followers,
    contents: AdapterContents,
    runner: ModelRunner,
    store: AdapterStore,
) -> EngineCore:
    page_bytes = rank.layout.page_bytes
    clock, cache = WallClock(), make_cache(config, size, page_bytes, rank.shape.state_pages(page_bytes))
    pool = pool_of(config, store)
    manager = AdapterManager(
        cache,
        store,
        sizes,
        clock,
        num_pages=size.num_pages - size.request_pages,
        leases=leases_of(config, rank, store),
        host_loads=None if store.host is None else rank.host.loads(config.max_num_batched_tokens),
    )
    transfers = Transfers(
        cache,
        manager,
        rank.copier(store.find, pool),
        clock,
        make_mover=rank.mover,
        interval_s=config.swap_interval_s,
        followers=followers,
    )
    transfers.blocking = config.emulation.blocking_loads
    scheduler: Scheduler[Sequence] = Scheduler(
        cache,
        manager,
        clock,
        StepLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            starvation_s=config.starvation_s,
            max_host_tokens=0 if store.host is None else rank.host.tokens_per_step,
        ),
        queue=RequestQueue(shortest_first) if config.queue == "sjf-oracle" else None,
    )
    info = model_info(config, rank.shape, rank.dtype, size.max_kv_pages, rank.device_names)
    sampler = Sampler(info.eos_token_ids, config.seed, ahead=schedules_ahead(config, rank, store))
    core = EngineCore(info, scheduler, runner, manager, transfers, contents, sampler)
    core.pool = pool
    core.attach_moves(partial(_kv_transfer, config, rank))
    if runner.merged is not None:
        from moe_lora.engine.merging.merging import make_merging

        core.attach_merging(make_merging(config, rank, runner, manager, clock, partial(_host_free, config)))
    return core


def _kv_transfer(config: EngineConfig, rank: Rank) -> KvTransfer:
    """Both ends of KV moves.  Several ranks, and recurrent layers, move requests by their tokens."""
    from moe_lora.engine.moving.kv_transfer import KvTransfer

    moves_kv = config.num_ranks == 1 and rank.shape.delta is None
    transport = partial(instance_transport, config, f"{config.instance}-kv") if moves_kv else None
    return KvTransfer(rank.arena, rank.layout, transport)


def site_ranks(shape: ModelShape, adapters: list[PackedAdapter]) -> list[int]:
    """The largest rank of the adapters at each site, the outer sites last."""
    sites = (*shape.sites, *shape.outer_sites)
    entries = np.zeros(sites[-1].entry_base + 1, dtype=np.int64)
    for layer in (layer for packed in adapters for layer in packed.layers):
        ranks = layer.table[: len(entries), 2].numpy()
        np.maximum(entries[: len(ranks)], ranks, out=entries[: len(ranks)])
    return [int(entries[s.entry_base : s.entry_base + s.num_entries].max(initial=0)) for s in sites]


def model_info(
    config: EngineConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    num_kv_blocks: int,
    devices: tuple[str, ...] = (),
) -> ModelInfo:
    """The engine's facts for front ends; end tokens outside the vocabulary are dropped."""
    model_dir, reads = Path(config.model_dir), config.generation_config == "auto"
    ends = read_eos_token_ids(model_dir, with_generation_config=reads)
    return ModelInfo(
        name=model_dir.resolve().name,
        model_dir=str(model_dir),
        family=shape.family,
        tool_format=family_named(shape.family).tool_format,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len(config, shape),
        vocab_size=shape.vocab_size,
        max_loras=config.max_loras,
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        devices=devices,
        eos_token_ids=tuple(i for i in ends if i < shape.vocab_size),
        sampling_defaults=read_sampling_defaults(model_dir) if reads else {},
    )
