# SPDX-License-Identifier: Apache-2.0
"""Sizes of the server ranks' arenas, and each rank's part of an adapter.

Legend: X offset-table entries of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import LayerShard, PackedAdapter, shard_layer
from moe_lora.cache.leases.residency import ShardPages, enough_gb
from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import host_memory_bytes
from moe_lora.core.partition import Partition
from moe_lora.core.shape import DEFAULT_LORA_RANK

from .messages import Memory


def rank_parts(
    packed: PackedAdapter, partition: Partition, server_rank: int, layer: int, slot: int
) -> list[LayerShard]:
    """The server rank's part of a layer: one for whole sites, or by instance rank, in the same memory.

    num_elements of the last part: of the memory.  slot: matters under data parallelism.
    """
    kept = _kept(partition, server_rank, layer, slot % partition.layout.dp)
    parts: list[LayerShard] = []
    for shard in partition.shards or (None,):
        before = parts[-1] if parts else None
        parts.append(shard_layer(packed.layers[layer], partition.shape, kept, shard, before))
    return parts


@lru_cache(maxsize=4096)
def _kept(partition: Partition, server_rank: int, layer: int, slot: int) -> np.ndarray:
    """[X] bool: the rank's entries of a layer."""
    kept = np.zeros(partition.shape.num_entries, dtype=bool)
    for index, site in enumerate(partition.shape.sites):
        if not partition.serves(index):
            continue
        for expert in range(max(1, site.num_experts)):
            of = expert if site.num_experts else None
            if partition.owner(layer, index, of, slot=slot) == server_rank:
                first = site.entry(0, expert)
                kept[first : first + len(site.modules)] = True
    return kept


def shard_pages(packed: PackedAdapter, partition: Partition, page_bytes: int) -> ShardPages:
    """Pages on each server rank, per layer; under data parallelism on every rank."""
    pages: dict[int, dict[int, int]] = {}
    for rank in range(partition.layout.num_ranks):
        slot = rank % partition.layout.dp
        pages[rank] = {}
        for layer in partition.layers_of(rank):
            parts = rank_parts(packed, partition, rank, layer, slot)
            num_bytes = parts[-1].num_elements * packed.layers[layer].data.element_size()
            if num_bytes:
                pages[rank][layer] = -(-num_bytes // page_bytes)
    return pages


_MIN_PAGE_BYTES = 4096
_PAGES_PER_LAYER = 8
"""Rounding up to pages costs a layer's shard at most an eighth."""
_MAX_PAGES = 1 << 18
"""Most pages of a rank, all searched per layer."""
_USUAL_SHARE = 8
"""Usual adapters take at most an eighth of a device."""


def spare_bytes(device: torch.device, num_sharers: int) -> int:
    """Memory of each rank for adapters of the usual size.

    Constant per machine: a restarted leader plans the same memory.
    """
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        total = host_memory_bytes()
    return total // _USUAL_SHARE // num_sharers


def check_share(server: LoraServerConfig, num_bytes: int, total_bytes: int, num_sharers: int) -> None:
    """Raises ConfigError for an arena above this rank's share; memory_gb is not checked."""
    share = total_bytes // num_sharers
    if num_sharers > 1 and server.memory_gb is None and num_bytes > share:
        raise ConfigError(
            f"lora_server.capacity={server.capacity} takes {num_bytes / 1e9:.3g} GB on a device of "
            f"{total_bytes / 1e9:.3g} GB with {num_sharers} ranks, {share / 1e9:.3g} GB for each; lower the "
            "capacity, give lora_server.memory_gb, or let fewer ranks share it (devices: in the cluster file)"
        )


def memory_of_all(
    config: EngineConfig, partition: Partition, dtype: torch.dtype, device: torch.device, store: HostStore
) -> Memory:
    """`plan_memory` for the instances' adapters, put into the store.

    Leaves out bad adapters: they must not block a restart.
    """
    server = config.lora_server
    assert server is not None
    contents = AdapterContents(
        partition.shape,
        dtype,
        store,
        root=config.adapter_root,
        max_lora_rank=config.max_lora_rank,
        computed_by="lora_server",
    )
    packed = [adapter for adapter, _ in contents.read_all(config.adapters, leave_out_bad=True)]
    num_sharers = partition.layout.num_ranks
    if device.type == "cuda":
        num_sharers = config.device_shares[0].num_sharers if config.device_shares else 1
    return plan_memory(server, partition, dtype, packed, spare_bytes(device, num_sharers))


def plan_memory(
    server: LoraServerConfig,
    partition: Partition,
    dtype: torch.dtype,
    packed: Sequence[PackedAdapter],
    spare: int | None = None,
) -> Memory:
    """The budget of each rank: `memory_gb`, or `capacity` times the largest of `packed`.

    Without memory_gb at least `capacity` rank-16 adapters on all targets, within the spare bytes.  Raises
    ConfigError with the least sufficient size if an adapter does not fit.
    """
    ranks = range(partition.layout.num_ranks)
    usual = partition.shape.adapter_bytes(DEFAULT_LORA_RANK) * dtype.itemsize // partition.shape.dtype_bytes
    page_bytes = _page_bytes(partition, min([usual, *(adapter.nbytes for adapter in packed)]))
    budgets = _budgets(server, partition, page_bytes, packed, usual, spare)
    if max(budgets) > page_bytes * _MAX_PAGES:
        page_bytes = 2 ** math.ceil(math.log2(max(budgets) / _MAX_PAGES))
        budgets = _budgets(server, partition, page_bytes, packed, usual, spare)
    memory = Memory(server.capacity, tuple(budget // page_bytes for budget in budgets), page_bytes)
    for adapter in packed if server.memory_gb is not None else ():
        shares = shard_pages(adapter, partition, page_bytes)
        least = max(sum(shares[rank].values()) for rank in ranks)
        if least > memory.num_pages[0]:
            raise ConfigError(
                f"lora_server.memory_gb={server.memory_gb} is too small for adapter {adapter.name!r} of "
                f"{adapter.nbytes / 1e9:.6f} GB; a rank of {partition.layout} needs at least "
                f"{enough_gb(least * page_bytes):.6f}"
            )
    return memory


def _page_bytes(partition: Partition, num_bytes: int) -> int:
    shard_bytes = num_bytes // partition.shape.num_layers // partition.layout.num_ranks
    return max(_MIN_PAGE_BYTES, 2 ** int(math.log2(max(1, shard_bytes // _PAGES_PER_LAYER))))


def _budgets(
    server: LoraServerConfig,
    partition: Partition,
    page_bytes: int,
    packed: Sequence[PackedAdapter],
    usual: int,
    spare: int | None,
) -> list[int]:
    num_ranks = partition.layout.num_ranks
    if server.memory_gb is not None:
        return [round(server.memory_gb * 1e9)] * num_ranks
    shares = [shard_pages(adapter, partition, page_bytes) for adapter in packed]
    largest = [max((sum(share[rank].values()) for share in shares), default=0) for rank in range(num_ranks)]
    one_usual = (-(-usual // (page_bytes * num_ranks)) + partition.shape.num_layers) * page_bytes
    wanted = server.capacity * one_usual
    floor = wanted if spare is None else max(one_usual, min(wanted, spare))
    return [max(server.capacity * pages * page_bytes, floor) for pages in largest]
