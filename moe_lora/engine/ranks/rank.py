# SPDX-License-Identifier: Apache-2.0
"""Parts of every process of an engine: weights, an arena, host workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_lora.adapters.packed import PackedAdapter, entries_of_experts
from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.config.devices import device_name
from moe_lora.core.errors import ConfigError
from moe_lora.core.progress import progress, silent
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.engine.adapters.copies import Arenas, RankCopier
from moe_lora.engine.adapters.transfers import Mover
from moe_lora.engine.arena_size import allocated, free_bytes, most_sharers
from moe_lora.families import shape_of, stored_dtype
from moe_lora.kernels.cpu.library import give_memory_back
from moe_lora.kernels.operands import SlotTable, kv_layout
from moe_lora.models.loader import held_weights, load_model, random_model, refill, refill_random
from moe_lora.models.quantised_weight import quantisation_of

from .exchange import (
    RENDEZVOUS,
    Backend,
    Exchanges,
    RankSums,
    ReduceExchange,
    RowExchange,
    open_group,
)

if TYPE_CHECKING:
    from moe_lora.dist.lora_server.attach import LoraServerClient
    from moe_lora.engine.adapters.pool_store import PoolAdapters
    from moe_lora.models.weight_merge import WeightMerge

    from .host_settings import HostSettings

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rank:
    """One of an engine's processes, with a loaded part of the model.

    Call `allocate` next, then `join` with several ranks, then `make_runner`.  local_sites: with deltas
    computed here.
    """

    arena: torch.Tensor
    host_arena: torch.Tensor | None
    slots: SlotTable
    _exchanges: list[RowExchange | ReduceExchange | RankSums]

    def __init__(self, config: EngineConfig, dist_rank: int = 0) -> None:
        if config.threads_per_process is not None:
            torch.set_num_threads(config.threads_per_process)
        hf_config = config.hf_config()
        if dist_rank == 0 and config.dtype == "auto" and stored_dtype(hf_config) == "float16":
            logger.info(
                "the checkpoint is float16, and dtype auto serves it in bfloat16, which rounds its weights; "
                "--dtype float32 keeps all their digits and takes twice the memory"
            )
        self.config = config = resolved(config, hf_config)
        self.dist_rank = dist_rank
        self.device = rank_device(torch.device(config.device), config.num_ranks, dist_rank)
        self.dtype = DTYPES[config.dtype]
        self.shape = shape_of(hf_config)
        check_layers(config, self.shape, self.device.type)
        self.shard = self.shard_of(dist_rank)
        quantisation = quantisation_of(config.quantize, config.quantize_group_size, config.quantize_head)
        only = config.instance == EngineConfig.instance  # several bars would overwrite each other
        held = (self.dtype, self.device, self.shard, quantisation)
        with progress(logger.info, bar=only) if dist_rank == 0 else nullcontext(silent) as show:
            if config.load_format == "dummy":
                self.model = random_model(hf_config, *held, show)
            else:
                self.model = load_model(Path(config.model_dir), *held, show)
        self.layout = kv_layout(self.shard.shape, config.block_size, self.dtype)
        self.lora_server = server = self.reach(config.lora_server)
        self.local_sites = [
            site.name
            for i, site in enumerate(self.shape.sites)
            if server is None or not server.partition.serves(i)
        ]

    def reach(self, server: LoraServerConfig | None, limit_s: float = math.inf) -> LoraServerClient | None:
        """A connection to a LoRA Server, if any."""
        config = self.config
        if server is None:
            return None
        from moe_lora.dist.lora_server.attach import LoraServerClient

        client = LoraServerClient(
            server,
            self.shape,
            self.dtype,
            config.instance,
            client_rank=self.dist_rank,
            ranks=(config.expert_parallel, config.tensor_parallel),
            limit_s=limit_s,
        )
        if server.device_puts != "none":
            client.meet_devices(self.shape, self.dtype, self.device)
        return client

    def move_to(self, server: LoraServerConfig, reached: LoraServerClient) -> LoraServerClient:
        """Send rows to another LoRA Server, between steps; returns the former connection."""
        former = self.lora_server
        assert former is not None
        reached.take_over(former)
        self.lora_server, self.config = reached, replace(self.config, lora_server=server)
        return former

    def free_bytes(self) -> int:
        """Free memory for this rank; on CPU the ranks share."""
        free = free_bytes(self.device, most_sharers(self.config))
        return free // self.config.num_ranks if self.device.type == "cpu" else free

    def allocate(self, num_pages: int, num_host_pages: int) -> None:
        """Allocate arenas and slot table.  Raises ConfigError without memory."""
        sizes = num_pages * self.layout.page_bytes, num_host_pages * self.layout.page_bytes
        self.arena, self.host_arena, self.slots = allocated(self.config, self.shape, self.device, *sizes)

    def free_arenas(self) -> None:
        """Free the arenas' memory; addresses stay, so captured graphs stay valid.  CPU only."""
        give_memory_back(self.arena)
        if self.host_arena is not None:
            give_memory_back(self.host_arena)

    def free_weights(self) -> None:
        """As `free_arenas`, until `read_weights`."""
        for weight in held_weights(self.model):
            give_memory_back(weight)

    def read_weights(self) -> None:
        """Read the weights again into place.  Raises ConfigError for a changed checkpoint."""
        if self.config.load_format == "dummy":
            refill_random(self.model, self.config.hf_config(), self.device)
        else:
            refill(self.model, Path(self.config.model_dir))

    def join(self, directory: Path) -> Exchanges:
        """Connect the ranks; returns once all have joined."""
        group = self._open_group(directory / RENDEZVOUS)
        experts: RowExchange | ReduceExchange | None = None
        if self.config.expert_parallel > 1:
            on_cuda = self.device.type == "cuda"
            experts = ReduceExchange(group) if on_cuda else RowExchange(group, self.shape.num_experts)
        sums = RankSums(group) if self.config.tensor_parallel > 1 else None
        self._exchanges = [one for one in (experts, sums) if one is not None]
        return Exchanges(experts, sums)

    def leave(self) -> None:
        """Close the connections.  Idempotent."""
        for exchange in self._exchanges:
            exchange.group = None

    def meet(self, rendezvous: Path) -> None:
        """Connect the ranks again.  rendezvous: of no earlier group."""
        group = self._open_group(rendezvous)
        for exchange in self._exchanges:
            exchange.group = group

    def _open_group(self, rendezvous: Path) -> Backend:
        config = self.config
        return open_group(rendezvous, self.dist_rank, config.num_ranks, self.device, config.rank_timeout_s)

    def shard_of(self, dist_rank: int) -> ModelShard:
        """A rank's part of the model."""
        config = self.config
        return ModelShard(self.shape, config.tensor_parallel, config.expert_parallel, dist_rank)

    @property
    def device_names(self) -> tuple[str, ...]:
        """Each rank's device, in the process keeper's numbering."""
        config = self.config
        if self.device.type != "cuda":
            return (self.device.type,) * config.num_ranks
        numbers = [one.number for one in config.device_shares] or range(config.num_ranks)
        return tuple(map(device_name, numbers))

    @property
    def divides_adapters(self) -> ModelShard | None:
        """The shard of adapter matrices; None: whole matrices."""
        return self.shard if self.shard.tensor_parallel > 1 else None

    def kept_entries(self, dist_rank: int) -> np.ndarray:
        """[X] bool: the entries that a rank computes."""
        kept = entries_of_experts(self.shape, self.shard_of(dist_rank).experts)
        for site in self.shape.sites:
            if site.name not in self.local_sites:
                kept[site.entry_base : site.entry_base + site.num_entries] = False
        return kept

    def copier(self, find: Callable[[str], PackedAdapter], pool: PoolAdapters | None = None) -> RankCopier:
        """Copies in this rank's memory; `find` and `pool` give adapters by content hash."""
        return RankCopier(
            Arenas(self.arena, self.host_arena, self.layout.page_bytes),
            self.slots,
            self.shape,
            self.kept_entries(self.dist_rank),
            find,
            pool,
            self.divides_adapters,
        )

    def mover(self, on_done: Callable[[], None]) -> Mover:
        """Copies beside steps, at the emulated rate."""
        rate = self.config.emulation.load_gb_per_s
        return Mover(self.device, on_done, None if rate is None else rate * 1e9)

    @cached_property
    def host(self) -> HostSettings:
        """This rank's host workers.  Raises ConfigError."""
        from .host_settings import host_settings

        return host_settings(
            self.config,
            shape=self.shape,
            dtype=self.dtype,
            device=self.device,
            local_sites=self.local_sites,
            dist_rank=self.dist_rank,
        )

    @property
    def present(self) -> np.ndarray:
        """[slots, layers] bool: loaded layers, without outer sites."""
        return self.slots.present[:, : self.shape.num_layers]

    @cached_property
    def merges(self) -> bool:
        """True if weights may carry an adapter.  Raises ConfigError if required but impossible."""
        batching = self.config.batching
        if batching == "unmerged":
            return False
        from moe_lora.models.weight_merge import can_be_merged

        if can_be_merged(self.model):
            return True
        if batching != "auto":
            raise ConfigError(
                f"batching={batching!r} and a checkpoint with quantised weights do not go together: "
                "no adapter can be folded into them; use batching='auto' or 'unmerged', or quantize='none', "
                "which holds them dequantised"
            )
        if not self.dist_rank:
            logger.info("the weights are quantised: with batching=auto all steps stay unmerged")
        return False

    @cached_property
    def weight_merge(self) -> WeightMerge:
        """Only if `merges`."""
        from moe_lora.models.weight_merge import WeightMerge

        return WeightMerge(self.model)


def check_layers(config: EngineConfig, shape: ModelShape, device: str) -> None:
    """Raises ConfigError for a device or part that can't compute all layers."""
    for kind in shape.special_layers if device != "cpu" else ():
        raise ConfigError(f"device={device!r} has no kernel of {kind} yet; choose device='cpu'")
    if config.host_workers and shape.delta is not None:
        raise ConfigError(
            f"host_workers={config.host_workers} may compute a step's tokens twice, and the state of a Gated "
            "DeltaNet layer counts each token once; leave host_workers out"
        )
    if config.host_workers and shape.mla is not None:
        raise ConfigError(
            f"host_workers={config.host_workers} compute no deltas of kv_b_proj of Multi-head Latent "
            "Attention; leave host_workers out"
        )


def resolved(config: EngineConfig, hf_config: dict) -> EngineConfig:
    """The settings with dtype, device and decode_buckets resolved.

    dtype "auto" is the checkpoint's (bfloat16 for float16), device "auto" CUDA if present.  decode_buckets
    None: powers of two on CUDA.  Raises ConfigError without the requested CUDA.
    """
    device, dtype, buckets = config.device, config.dtype, config.decode_buckets
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda' was asked for, but torch finds no CUDA device; use device='cpu' or 'auto', and no "
            "devices: in the cluster file"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if stored_dtype(hf_config) == "float32" else "bfloat16"
    if buckets is None and device == "cuda":
        powers = [2**i for i in range(config.max_num_seqs.bit_length()) if 2**i < config.max_num_seqs]
        buckets = (*powers, config.max_num_seqs)
    return replace(config, device=device, dtype=dtype, decode_buckets=buckets)


def rank_device(device: torch.device, num_ranks: int, dist_rank: int) -> torch.device:
    """Rank r has the r-th visible device.  Raises ConfigError for too few."""
    if device.type == "cpu" or num_ranks == 1:
        return device
    if torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"an instance of {num_ranks} ranks (expert_parallel, tensor_parallel) needs as many CUDA "
            f"devices, torch finds {torch.cuda.device_count()}; lower them, use device='cpu', or let "
            "CUDA_VISIBLE_DEVICES list more"
        )
    torch.cuda.set_device(dist_rank)
    return torch.device("cuda", dist_rank)
