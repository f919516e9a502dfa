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
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.config import EngineConfig
from moe_lora.core.clock import WallClock
from moe_lora.core.request import ModelInfo
from moe_lora.core.shard import ModelShard
from moe_lora.engine.adapters.adapter_store import AdapterStore, ShardSizes, site_ranks
from moe_lora.engine.adapters.manager import AdapterManager
from moe_lora.engine.adapters.transfers import Transfers
from moe_lora.engine.ranks.followers import Allocate, Followers, RankReport, start_followers
from moe_lora.engine.ranks.rank import Rank
from moe_lora.engine.ranks.rank_runner import make_runner
from moe_lora.engine.step.sampler import Sampler, schedules_ahead
from moe_lora.engine.text.tokenizer_files import read_eos_token_ids, read_sampling_defaults
from moe_lora.families import family_named, shape_of
from moe_lora.scheduling.scheduler import Scheduler, StepLimits
from moe_lora.scheduling.views import RequestQueue, shortest_first

from .adapters.make_store import instance_transport, make_contents, make_store
from .arena_size import (
    arena_size,
    free_bytes,
    kept_originals,
    make_cache,
    make_events,
    max_model_len,
    within_share,
)
from .core import EngineCore

if TYPE_CHECKING:
    from moe_lora.engine.moving import RequestMoves


logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, followers: Followers | None = None) -> EngineCore:
    """Load the model and the adapters, allocate the arena, compile the decode step.

    followers: end with the engine, or a failed build.  Raises ConfigError or AdapterError.
    """
    mine = followers or Followers()
    try:
        shape = shape_of(config.hf_config())
        # Checked again with "auto" resolved.
        schedules_ahead(config, config.device)
        ModelShard(shape, config.tensor_parallel, config.expert_parallel)
        if config.num_ranks > 1:
            mine = followers or start_followers(config)
        mine.set_up(config)
        if config.threads_per_process is not None:
            torch.set_num_threads(config.threads_per_process)
        return _in_own_thread(lambda: _Build(config, mine).core())
    except BaseException:
        mine.close()
        raise


def _in_own_thread(work: Callable[[], EngineCore]) -> EngineCore:
    """Run `work` in a separate thread.

    OpenMP keeps workers for each thread: beside those of steps, decode took up to twice as long.
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

    thread = Thread(target=run, name="engine-build", daemon=True)
    thread.start()
    try:
        core = result.result()
    except KeyboardInterrupt:
        left.set()
        raise
    thread.join()
    return core


class _Build:
    """The parts of an engine, in order."""

    def __init__(self, config: EngineConfig, followers: Followers) -> None:
        logger.info("loading %s", config.model_dir)
        self._config, self._followers = config, followers
        self._rank = rank = Rank(config)
        followers.settle()
        self._page_bytes = rank.layout.page_bytes
        self._contents = make_contents(config, rank)
        kept = [rank.kept_entries(other) for other in range(config.num_ranks)]
        self._sizes = ShardSizes(rank.shape, self._page_bytes, kept, rank.divides_adapters)
        if config.pool is None:
            self._adapters = self._contents.read_all(config.adapters, leave_out_bad=config.leave_out_bad)
            adapter_pages = [sum(self._sizes.layer_pages(packed.layers)) for packed, _ in self._adapters]
        else:
            self._adapters = []
            bare = self._contents.bare_layers(
                config.adapters, leave_out_bad=config.leave_out_bad, tables=config.num_ranks > 1
            )
            adapter_pages = [sum(self._sizes.layer_pages(layers)) for layers in bare]
        free = within_share(config, rank.device, rank.free_bytes())
        where = (rank.shard.shape, rank.layout, adapter_pages, rank.device, free, rank.local_sites)
        self._size = size = arena_size(config, *where, kept_bytes=self._kept_originals())
        followers.tell(Allocate(size.num_pages, size.num_host_pages))
        rank.allocate(size.num_pages, size.num_host_pages)
        followers.settle()

    def core(self) -> EngineCore:
        """The core, warm, with the first adapters."""
        config, rank, followers, size = self._config, self._rank, self._followers, self._size
        with ExitStack() as undo:
            store = make_store(config, rank, size, followers, self._contents, self._sizes, undo)
            undo.callback(store.close)
            followers.settle()
            if config.num_ranks == 1:
                runner = make_runner(rank, host=store.host, find=store.find)
            else:
                exchanges = followers.meet(partial(rank.join, followers.directory))
                runner = make_runner(rank, exchanges, followers, store.host, find=store.find)
                followers.attach(runner, rank)
            followers.settle()
            self._events = make_events(config, undo)
            manager, transfers, scheduler = self._moving_parts(store)
            info = model_info(config, rank, size.max_kv_pages)
            is_ahead = schedules_ahead(
                config, rank.device.type, host=store.host is not None, merges=rank.merges
            )
            sampler = Sampler(info, config.seed, ahead=is_ahead, jumps=rank.device.type == "cpu")
            core = EngineCore(info, scheduler, runner, manager, transfers, sampler)
            core.attach_moves(partial(_moves, config, rank))
            if self._events is not None:
                core.at_close.append(self._events.close)
            core.rank = rank
            if runner.merged is not None:
                from moe_lora.engine.merging.merging import make_merging

                free = partial(_host_free, config)
                core.attach_merging(make_merging(config, rank, runner, manager, scheduler.clock, free))
            undo.pop_all()
            undo.callback(core.close)
            self._adapters = core.add_adapters(self._adapters, leave_out_bad=config.leave_out_bad)
            ranks = site_ranks(rank.shape, [packed for packed, _ in self._adapters])
            runner.warm_up(ranks, config.max_num_batched_tokens)
            followers.tell(RankReport())
            followers.settle()
            undo.pop_all()
        logger.info(
            "engine ready: %s, %d adapters, arenas of %.1f MB on %s and %.1f MB on the host, %d processes",
            *(info.name, len(self._adapters), size.num_pages * self._page_bytes / 1e6, rank.device),
            *(size.num_host_pages * self._page_bytes / 1e6, config.num_ranks),
        )
        return core

    def _moving_parts(self, store: AdapterStore) -> tuple[AdapterManager, Transfers, Scheduler[Any]]:
        """Adapter manager, transfers and scheduler."""
        config, rank, size = self._config, self._rank, self._size
        clock = WallClock()
        state_pages = rank.shape.state_pages(self._page_bytes)
        cache = make_cache(config, size, self._page_bytes, state_pages, self._events)
        manager = AdapterManager(
            cache,
            store,
            self._sizes,
            self._contents,
            clock,
            num_pages=min(size.num_pages - size.request_pages, cache.max_adapter_pages),
            host_loads=None if store.host is None else rank.host.loads(config.max_num_batched_tokens),
        )
        if self._events is not None:
            self._events.names = manager.versions
        transfers = Transfers(
            cache,
            manager,
            rank.copier(store.find, store.pool),
            clock,
            make_mover=rank.mover,
            interval_s=config.swap_interval_s,
            followers=self._followers,
        )
        transfers.blocking = config.emulation.blocking_loads
        limits = StepLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            starvation_s=config.starvation_s,
            max_host_tokens=0 if store.host is None else rank.host.tokens_per_step,
        )
        queue = RequestQueue[Any](shortest_first) if config.queue == "sjf-oracle" else None
        return manager, transfers, Scheduler(cache, manager, clock, limits, queue)

    def _kept_originals(self) -> int:
        rank, adapters = self._rank, [packed for packed, _ in self._adapters]
        if not rank.merges:
            return 0
        targets = {module for packed in adapters for module in packed.targets}
        known = rank.weight_merge.bytes_of(targets) if adapters else None
        usual_modules = {
            module for name in rank.shape.default_targets for module in rank.shape.site(name).modules
        }
        usual = rank.weight_merge.bytes_of(usual_modules)
        return kept_originals(self._config, known, usual, _host_free(self._config))


def _host_free(config: EngineConfig) -> int:
    return free_bytes(torch.device("cpu")) // (config.num_instances * config.num_ranks)


def _moves(config: EngineConfig, rank: Rank, *parts: Any) -> RequestMoves:
    """Several ranks, and recurrent layers, move requests by tokens."""
    from moe_lora.engine.moving import make_moves

    moves_kv = config.num_ranks == 1 and rank.shape.delta is None
    transport = partial(instance_transport, config, f"{config.instance}-kv") if moves_kv else None
    return make_moves(rank, transport, *parts)


def model_info(config: EngineConfig, rank: Rank, num_kv_blocks: int) -> ModelInfo:
    """Facts for front ends; drops end tokens outside the vocabulary."""
    shape = rank.shape
    model_dir, reads = Path(config.model_dir), config.generation_config == "auto"
    ends = read_eos_token_ids(model_dir, with_generation_config=reads)
    return ModelInfo(
        name=model_dir.resolve().name,
        model_dir=str(model_dir),
        family=shape.family,
        tool_format=family_named(shape.family).tool_format,
        dtype=str(rank.dtype).removeprefix("torch."),
        max_model_len=max_model_len(config, shape),
        vocab_size=shape.vocab_size,
        max_loras=config.max_loras,
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        devices=rank.device_names,
        eos_token_ids=tuple(i for i in ends if i < shape.vocab_size),
        sampling_defaults=read_sampling_defaults(model_dir) if reads else {},
        expert_bytes=shape.expert_bytes,
    )
