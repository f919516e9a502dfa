"""How large the server ranks' arenas are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from moe_lora.adapters.packed import PackedAdapter, shard_layer
from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import DEFAULT_LORA_RANK
from moe_lora.dist.lora_server.protocol.control_messages import Memory
from moe_lora.dist.lora_server.protocol.partition import Partition

from .server_pages import ShardPages

# Which entries of a layer a server rank holds, and the pages that its part of an adapter takes.
#
# Legend: X offset-table entries of a layer.


def kept_entries(partition: Partition, server_rank: int, layer: int, slot: int) -> np.ndarray:
    """[X] bool: the entries whose matrices the rank holds; slot matters under data parallelism only."""
    dp = partition.layout.dp
    return _kept(partition, server_rank, layer, slot % dp)


@lru_cache(maxsize=4096)
def _kept(partition: Partition, server_rank: int, layer: int, slot: int) -> np.ndarray:
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
    """Pages that the adapter takes on each server rank, per layer.

    Under data parallelism one rank holds it all; which one depends on the slot, so each is charged for it.
    """
    pages: dict[int, dict[int, int]] = {}
    for rank in range(partition.layout.num_ranks):
        slot = rank % partition.layout.dp
        pages[rank] = {}
        for layer in partition.layers_of(rank):
            kept = kept_entries(partition, rank, layer, slot)
            shard = shard_layer(packed.layers[layer], partition.shape, kept)
            num_bytes = shard.num_elements * packed.layers[layer].data.element_size()
            if num_bytes:
                pages[rank][layer] = -(-num_bytes // page_bytes)
    return pages


_MIN_PAGE_BYTES = 4096
_PAGES_PER_LAYER = 8
"""Pages are small enough that rounding a layer's shard up to whole ones costs an eighth at most."""


def check_share(server: LoraServerConfig, num_bytes: int, total_bytes: int, num_sharers: int) -> None:
    """Raise ConfigError for an arena larger than this rank's share of a device; memory_gb is not checked.

    num_sharers: ranks on the device, of total_bytes.
    """
    share = total_bytes // num_sharers
    if num_sharers > 1 and server.memory_gb is None and num_bytes > share:
        raise ConfigError(
            f"lora_server.capacity={server.capacity} takes {num_bytes / 1e9:.3g} GB on a device of "
            f"{total_bytes / 1e9:.3g} GB with {num_sharers} ranks, {share / 1e9:.3g} GB for each; lower the "
            "capacity, give lora_server.memory_gb, or let fewer ranks share it (devices: in the cluster file)"
        )


def plan_memory(
    server: LoraServerConfig, partition: Partition, dtype: torch.dtype, packed: Sequence[PackedAdapter]
) -> Memory:
    """Room for `capacity` adapters as large as the largest of `packed`, or `memory_gb` on each rank.

    Raises ConfigError, with the smallest size that works, if one of `packed` does not fit.
    """
    ranks = partition.layout.num_ranks
    default = partition.shape.adapter_bytes(DEFAULT_LORA_RANK) * dtype.itemsize // partition.shape.dtype_bytes
    per_layer = min([adapter.nbytes for adapter in packed] or [default]) // partition.shape.num_layers
    page_bytes = max(_MIN_PAGE_BYTES, 2 ** int(math.log2(max(1, per_layer // ranks // _PAGES_PER_LAYER))))
    shares = [shard_pages(adapter, partition, page_bytes) for adapter in packed]
    least = [max((sum(share[rank].values()) for share in shares), default=1) for rank in range(ranks)]
    if server.memory_gb is not None:
        given = round(server.memory_gb * 1e9) // page_bytes
        if given < max(least):
            least_gb = math.ceil(max(least) * page_bytes / 1e3) / 1e6
            raise ConfigError(
                f"lora_server.memory_gb={server.memory_gb} is too small for one adapter; a rank of "
                f"{partition.layout} needs at least {least_gb:.6f}"
            )
        return Memory(server.capacity, (given,) * ranks, page_bytes)
    if not packed:
        share = -(-default // (page_bytes * ranks)) + partition.shape.num_layers
        least = [share] * ranks
    return Memory(server.capacity, tuple(server.capacity * pages for pages in least), page_bytes)
