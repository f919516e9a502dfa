# SPDX-License-Identifier: Apache-2.0
"""The leader's page arenas of all server ranks; loads name pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from moe_lora.cache.pages import PageAllocator
from moe_lora.config import MAX_COUNT
from moe_lora.core.errors import ConfigError

Run: TypeAlias = tuple[int, int]
"""(first page, number of pages) in the arena of one server rank."""
Runs: TypeAlias = Mapping[int, Mapping[int, Run]]
"""server rank -> layer -> run, without empty ranks and layers."""
ShardPages: TypeAlias = Mapping[int, Mapping[int, int]]
"""server rank -> layer -> pages of the adapter's shard."""


class ServerPages:
    """One page allocator per server rank; an adapter has one run of pages per rank and layer."""

    def __init__(self, pages_per_rank: Sequence[int]) -> None:
        self.pages_per_rank = tuple(pages_per_rank)
        self._ranks = [PageAllocator(num_pages) for num_pages in pages_per_rank]

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free pages of each rank."""
        return tuple(pages.num_free for pages in self._ranks)

    def alloc(self, shard_pages: ShardPages) -> Runs | None:
        """A run for every layer on every rank; None, without effect, if some run has no place."""
        for rank, layers in shard_pages.items():
            if sum(layers.values()) > self._ranks[rank].num_free:
                return None
        runs: dict[int, dict[int, Run]] = {rank: {} for rank in shard_pages}
        for rank, layers in shard_pages.items():
            for layer, num_pages in layers.items():
                first = self._ranks[rank].alloc_run(num_pages)
                if first is None:
                    self.free(runs)
                    return None
                runs[rank][layer] = (first, num_pages)
        return runs

    def free(self, runs: Runs) -> None:
        """Free the runs of `alloc`."""
        for rank, layers in runs.items():
            for first, num_pages in layers.values():
                self._ranks[rank].free(first, num_pages)

    def could_alloc(self, shard_pages: ShardPages, pinned: Sequence[Runs]) -> bool:
        """True if `alloc` would succeed with only the `pinned` runs in use."""
        return all(
            fits(
                self.pages_per_rank[rank],
                [run for runs in pinned for run in runs.get(rank, {}).values()],
                layers.values(),
            )
            for rank, layers in shard_pages.items()
        )

    def check_fits(self, adapter_id: str, shard_pages: ShardPages, page_bytes: int) -> None:
        """Raises ConfigError if a rank can never hold its shard, for the rank with the largest shard."""
        shards = sorted(((sum(layers.values()), rank) for rank, layers in shard_pages.items()), reverse=True)
        for needed, rank in shards:
            given = self.pages_per_rank[rank]
            if needed > given:
                raise ConfigError(
                    f"content {adapter_id} takes {needed * page_bytes / 1e9:.6f} GB on rank {rank} of the "
                    f"LoRA Server, whose budget for all adapters is {given * page_bytes / 1e9:.6f} GB; raise "
                    "lora_server.memory_gb (--lora-server-memory-gb) to "
                    f"{enough_gb(needed * page_bytes):.6f} or more"
                )

    def num_fitting(self, known: Sequence[ShardPages]) -> int:
        """Adapters of the known ones' mean size that fit every rank, ignoring fragmentation."""
        return min(
            _num_fitting(num_pages, [sum(shards.get(rank, {}).values()) for shards in known])
            for rank, num_pages in enumerate(self.pages_per_rank)
        )


def fits(num_pages: int, taken: Iterable[Run], wanted: Iterable[int]) -> bool:
    """True if runs of the wanted lengths fit beside the taken ones, first fit in this order."""
    gaps = []
    end = 0
    for first, length in sorted(taken):
        gaps.append(first - end)
        end = first + length
    gaps.append(num_pages - end)
    for length in wanted:
        place = next((index for index, gap in enumerate(gaps) if gap >= length), None)
        if place is None:
            return False
        gaps[place] -= length
    return True


def _num_fitting(num_pages: int, sizes: Sequence[int]) -> int:
    return max(1, num_pages * len(sizes) // sum(sizes)) if any(sizes) else MAX_COUNT


def enough_gb(num_bytes: int) -> float:
    """Sufficient budget for an adapter of these bytes.  Larger pages of a larger budget cost less than 0.1
    %.
    """
    return math.ceil(num_bytes * 1.001 / 1e3) / 1e6
