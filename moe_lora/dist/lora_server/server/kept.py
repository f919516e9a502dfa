"""Which entries of a layer a server rank holds, and the pages that its part of an adapter takes.

Legend: X offset-table entries of a layer.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_lora.adapters.packed import PackedAdapter
from moe_lora.adapters.shard import shard_layer

from moe_lora.dist.lora_server.protocol.partition import Partition
from .server_pages import ShardPages


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
