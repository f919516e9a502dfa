"""How much memory an engine takes for KV and for adapters, from its settings and its model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_lora.core.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import DEFAULT_TARGETS, ModelShape
from moe_lora.kernels.step import KvLayout

FREE_SHARE = 0.25
"""Part of the free memory that an automatic size may take, for KV and for adapters each."""
DEFAULT_LORA_RANK = 16
GB = 1e9
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class ArenaSize:
    """Pages for KV and for adapters.  They share one arena."""

    kv_pages: int
    lora_pages: int

    @property
    def num_pages(self) -> int:
        return self.kv_pages + self.lora_pages


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Not MemFree (SC_AVPHYS_PAGES): the page cache, checkpoint files above all, gives way when asked.
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def max_model_len(config: EngineConfig, shape: ModelShape) -> int:
    """The length limit: as configured, else what the model allows."""
    if config.max_model_len is None:
        return shape.max_position
    if config.max_model_len > shape.max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's {shape.max_position}; lower it"
        )
    return config.max_model_len


def arena_size(
    config: EngineConfig,
    shape: ModelShape,
    layout: KvLayout,
    adapter_bytes: Sequence[int],
    free: int,
    local_sites: Sequence[str],
) -> ArenaSize:
    """Resolve kv_cache_gb and lora_memory_gb.

    adapter_bytes: what the adapters known at the start take on a rank.  free: bytes free on the device.
    local_sites: those whose deltas this engine computes; without any, adapters take no room.
    Raises ConfigError, with the smallest size that works, if one request of max_model_len or the largest
    adapter does not fit.
    """
    free //= config.num_instances
    blocks_per_request = -(-max_model_len(config, shape) // config.block_size)
    wanted = config.max_num_seqs * blocks_per_request
    kv_pages = _resolve(
        "kv_cache_gb", config.kv_cache_gb, wanted, blocks_per_request, layout.page_bytes, free
    )
    if not local_sites:
        return ArenaSize(kv_pages, 0)
    targets = [name for name in DEFAULT_TARGETS if name in local_sites]
    usual = shape.adapter_bytes(DEFAULT_LORA_RANK, targets, expert_parallel=config.expert_parallel)
    largest = max([usual, *adapter_bytes])
    slack = shape.num_layers * layout.page_bytes
    pages_each = -(-(largest + slack) // layout.page_bytes)
    least = -(-(max(adapter_bytes, default=0) + slack) // layout.page_bytes)
    lora_pages = _resolve(
        "lora_memory_gb", config.lora_memory_gb, config.max_loras * pages_each, least, layout.page_bytes, free
    )
    return ArenaSize(kv_pages, lora_pages)


def _resolve(
    setting: str, given_gb: float | None, wanted_pages: int, least_pages: int, page_bytes: int, free: int
) -> int:
    if given_gb is None:
        return max(least_pages, min(wanted_pages, int(free * FREE_SHARE) // page_bytes))
    pages = int(given_gb * GB) // page_bytes
    if pages < least_pages:
        least_gb = math.ceil(least_pages * page_bytes / GB * 1e6) / 1e6
        raise ConfigError(f"{setting}={given_gb} is too small; this model needs at least {least_gb:.6f}")
    return pages
