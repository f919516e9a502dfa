"""How large the server ranks' arenas are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import ConfigError

from .kept import shard_pages
from moe_lora.dist.lora_server.protocol.partition import Partition

DEFAULT_LORA_RANK = 16
_MIN_PAGE_BYTES = 4096
_PAGES_PER_LAYER = 8
"""Pages are small enough that rounding a layer's shard up to whole ones costs an eighth at most."""


@dataclass(frozen=True)
class Memory:
    """Slots of the server, pages of each rank's arena, bytes of a page."""

    capacity: int
    num_pages: tuple[int, ...]
    page_bytes: int


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
