# SPDX-License-Identifier: Apache-2.0
"""Memory of an engine for KV and adapters."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.adapters.packed import num_table_entries
from moe_lora.cache.unified import UnifiedCache
from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import free_memory_bytes, host_memory_bytes, resident_bytes
from moe_lora.core.shape import DEFAULT_LORA_RANK, ModelShape
from moe_lora.kernels.cpu.library import advise_huge_pages
from moe_lora.kernels.operands import KvLayout, SlotTable
from moe_lora.policies.caching.caching import CachingPolicy, FastLibra, Recency, make_caching_policy
from moe_lora.timing.host_times import CacheCosts

if TYPE_CHECKING:
    from .kv_events import KvEvents

logger = logging.getLogger(__name__)

FREE_SHARE = 0.25
"""Share of free memory for KV and for adapters each, if automatic."""
MB, GB = 1e6, 1e9


@dataclass(frozen=True)
class ArenaSize:
    """Pages of the arenas, shared by KV and adapters.

    request_pages: KV and state of a request of full length.  adapter_pages: the largest adapter at the start.
    """

    num_pages: int
    num_host_pages: int
    max_kv_pages: int
    request_pages: int
    adapter_pages: int


def free_bytes(device: torch.device, num_sharers: int = 1) -> int:
    """Free memory on the device, or of this rank's share."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return share_left(free, total, torch.cuda.memory_reserved(device), num_sharers)
    return free_memory_bytes()


def within_share(config: EngineConfig, device: torch.device, free: int) -> int:
    """Bytes of `free` that memory_utilization leaves for KV and adapters."""
    share = config.memory_utilization
    if share is None:
        return free
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1] // most_sharers(config)
        held = torch.cuda.memory_reserved(device)
    else:
        total, held = host_memory_bytes() // config.num_ranks, resident_bytes() * config.num_instances
    left = int(share * total) - held
    if left <= 0:
        raise ConfigError(
            f"memory_utilization={share:g} of {total / GB:.3g} GB leaves nothing beside the "
            f"{held / GB:.3g} GB that the instance holds with its weights; raise it"
        )
    return min(free, left)


def share_left(free: int, total: int, own: int, num_sharers: int) -> int:
    """min(free, total / num_sharers - own), at least 0.

    The sharers' order of start does not matter.
    """
    return free if num_sharers == 1 else max(0, min(free, total // num_sharers - own))


def max_model_len(config: EngineConfig, shape: ModelShape) -> int:
    """The length limit: as configured, else the model's."""
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
    adapter_pages: Sequence[int],
    device: torch.device,
    free: int,
    local_sites: Sequence[str],
    kept_bytes: int = 0,
) -> ArenaSize:
    """Resolve arena_mb, host_arena_mb, kv_cache_gb and lora_memory_gb.

    local_sites: computed here; none: adapters take no room.  kept_bytes: of original weights, on the host.
    Raises ConfigError, with the least size, if no request fits beside each adapter (leave_out_bad: any).
    """
    if device.type == "cpu":
        free = max(0, free // config.num_instances - kept_bytes)
    _check_share(config, free)
    page_bytes = layout.page_bytes
    request_pages = -(-max_model_len(config, shape) // config.block_size) + shape.state_pages(page_bytes)
    sizes = (config.arena_mb, MB, request_pages), (config.lora_memory_gb, GB, shape.num_layers)
    rooms = [int(size * unit) // page_bytes - beside for size, unit, beside in sizes if size]
    most = min(rooms, default=math.inf) if config.leave_out_bad else math.inf
    largest = max((num for num in adapter_pages if num <= most), default=0)
    if config.arena_mb is None:
        wanted = config.max_num_seqs * request_pages
        kv_share = FREE_SHARE if config.memory_utilization is None else 1 - FREE_SHARE
        kv_pages = _resolve(
            "kv_cache_gb", config.kv_cache_gb, wanted, request_pages, page_bytes, free * kv_share
        )
        lora_pages = 0
        if local_sites:
            targets = [name for name in shape.default_targets if name in local_sites]
            usual = shape.adapter_bytes(DEFAULT_LORA_RANK, targets, expert_parallel=config.expert_parallel)
            wanted = config.max_loras * max(-(-usual // page_bytes) + shape.num_layers, largest)
            lora_pages = _resolve(
                "lora_memory_gb",
                config.lora_memory_gb,
                wanted,
                largest + shape.num_layers,
                page_bytes,
                free * FREE_SHARE,
            )
        num_pages = kv_pages + lora_pages
    else:
        num_pages = int(config.arena_mb * MB) // page_bytes
        least = request_pages + largest
        if num_pages < least:
            raise ConfigError(
                f"arena_mb={config.arena_mb:g} is too small for one request of max_model_len="
                f"{max_model_len(config, shape)} tokens with the largest adapter; this model needs at least "
                f"{_rounded_up(least * page_bytes / MB)}"
            )
    return ArenaSize(
        num_pages=num_pages,
        num_host_pages=_host_pages(config, num_pages, page_bytes, device, kept_bytes),
        max_kv_pages=_bound("kv_cache_gb", config.kv_cache_gb, num_pages, request_pages, page_bytes),
        request_pages=request_pages,
        adapter_pages=largest,
    )


def allocated(
    config: EngineConfig, shape: ModelShape, device: torch.device, num_bytes: int, num_host_bytes: int
) -> tuple[torch.Tensor, torch.Tensor | None, SlotTable]:
    """Arenas of device and host (page-locked for CUDA), and the slot table.

    Raises ConfigError without enough memory.
    """
    try:
        arena = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        advise_huge_pages(arena)
        num_layers = shape.num_layers + 1
        num_entries = num_table_entries(shape, num_layers, True)
        slots = SlotTable(config.max_loras, num_layers, num_entries, device)
    except (RuntimeError, MemoryError, OverflowError) as error:
        sizes = {name: getattr(config, name) for name in ("arena_mb", "kv_cache_gb", "lora_memory_gb")}
        given = "".join(f"{name}={size:g}, " for name, size in sizes.items() if size is not None)
        raise ConfigError(
            f"no memory on {device} for {num_bytes / 1e9:.3g} GB of KV and adapters and a table "
            f"of {config.max_loras:.3g} adapters; lower {given or 'arena_mb, '}or "
            f"max_loras={config.max_loras}"
        ) from error
    if not num_host_bytes:
        return arena, None, slots
    try:
        if device.type == "cuda":
            from moe_lora.kernels.page_locked import page_locked

            return arena, page_locked(num_host_bytes, device), slots
        host_arena = torch.empty(num_host_bytes, dtype=torch.uint8)
        advise_huge_pages(host_arena)
    except (RuntimeError, OSError, MemoryError, OverflowError) as error:
        raise ConfigError(
            f"no host memory for an arena of {num_host_bytes / 1e6:.6g} MB; lower host_arena_mb, or set it "
            "to 0"
        ) from error
    return arena, host_arena, slots


def kept_originals(config: EngineConfig, known_bytes: int | None, usual_bytes: int, free: int) -> int:
    """Host memory of each process for original weights under merging.

    known_bytes: of weights changed by adapters at the start; None: usual_bytes count.  Raises ConfigError if
    known_bytes exceeds free.
    """
    wanted = usual_bytes if known_bytes is None else known_bytes
    if known_bytes is not None and known_bytes > free:
        raise ConfigError(
            f"batching={config.batching!r} keeps the original weights of what adapters change on the host: "
            f"{known_bytes / GB:.3g} GB in each process, for which {free / GB:.3g} GB are free; use "
            "batching='unmerged', or adapters with fewer target modules"
        )
    logger.log(
        logging.WARNING if wanted > free else logging.INFO,
        "merging will keep up to %.1f MB of original weights on the host in each process; %.1f MB are free",
        *(wanted / MB, free / MB),
    )
    return wanted


def _check_share(config: EngineConfig, free: int) -> None:
    num_sharers = most_sharers(config)
    if num_sharers > 1 and not free and config.arena_mb is None:
        raise ConfigError(
            f"{num_sharers} ranks share a device, and the weights take all of this rank's part of its "
            "memory; let fewer ranks share it (devices: in the cluster file), quantize the weights, or give "
            "arena_mb"
        )


def most_sharers(config: EngineConfig) -> int:
    """Ranks on the most shared device: all arenas are equal."""
    return max((one.num_sharers for one in config.device_shares), default=1)


def _host_pages(
    config: EngineConfig, num_pages: int, page_bytes: int, device: torch.device, kept_bytes: int
) -> int:
    if config.host_arena_mb is not None:
        host_pages = int(config.host_arena_mb * MB) // page_bytes
        if config.host_arena_mb and not host_pages:
            raise ConfigError(
                f"host_arena_mb={config.host_arena_mb:g} is less than one page; give at least "
                f"{_rounded_up(page_bytes / MB)}, or 0 for none"
            )
        return host_pages
    if device.type == "cpu":
        return 0
    free = free_bytes(torch.device("cpu")) / config.num_instances / config.num_ranks - kept_bytes
    return min(num_pages, int(max(0.0, free) * FREE_SHARE) // page_bytes)


def _bound(setting: str, given_gb: float | None, num_pages: int, least_pages: int, page_bytes: int) -> int:
    if given_gb is None:
        return num_pages
    pages = int(given_gb * GB) // page_bytes
    if pages < least_pages:
        least_gb = _rounded_up(least_pages * page_bytes / GB)
        raise ConfigError(f"{setting}={given_gb} is too small; this model needs at least {least_gb}")
    return min(pages, num_pages)


def _resolve(
    setting: str, given_gb: float | None, wanted_pages: int, least_pages: int, page_bytes: int, most: float
) -> int:
    """Pages of a setting, else the wanted pages in `most` bytes."""
    if given_gb is None:
        return max(least_pages, min(wanted_pages, int(most) // page_bytes))
    huge = int(given_gb * GB) // page_bytes
    return _bound(setting, given_gb, huge, least_pages, page_bytes)


def _rounded_up(size: float) -> str:
    return f"{math.ceil(size * 1e6) / 1e6:.6f}"


def caching_policy(config: EngineConfig, size: ArenaSize, page_bytes: int) -> CachingPolicy:
    """The caching policy of the settings; each static part has room for a request."""
    costs = CacheCosts(page_bytes=page_bytes)
    if config.emulation.load_gb_per_s is not None:
        rate = config.emulation.load_gb_per_s * 1e9
        costs = replace(costs, transfer_bytes_per_s=rate, disk_bytes_per_s=rate)
    policy = make_caching_policy(config.cache_policy, costs)
    if isinstance(policy, FastLibra) and config.swap_time_unit_s is not None:
        return replace(policy, time_unit_s=config.swap_time_unit_s)
    if isinstance(policy, Recency) and policy.traits.adapter_share is not None:
        num_pages = round(policy.traits.adapter_share * size.num_pages)
        if config.kv_cache_gb is not None:
            num_pages = size.num_pages - size.max_kv_pages
        num_pages = min(max(num_pages, size.adapter_pages), size.num_pages - size.request_pages)
        share = (num_pages + 0.5) / size.num_pages
        return replace(policy, traits=replace(policy.traits, adapter_share=share))
    return policy


def make_events(config: EngineConfig, undo: ExitStack) -> KvEvents | None:
    """Events of cached prefixes, if configured."""
    settings = config.kv_event_settings()
    if settings is None:
        return None
    from .kv_events import KvEvents

    found = KvEvents(settings, config.block_size, config.instance)
    undo.callback(found.close)
    return found


def make_cache(
    config: EngineConfig, size: ArenaSize, page_bytes: int, state_pages: int, events: KvEvents | None = None
) -> UnifiedCache:
    """The cache over the arenas.  state_pages: of a request's recurrent state."""
    settings: dict[str, Any] = {
        "num_device_pages": size.num_pages,
        "num_host_pages": size.num_host_pages,
        "block_size": config.block_size,
        "policy": caching_policy(config, size, page_bytes),
        "max_kv_pages": size.max_kv_pages,
        "max_adapters": config.max_loras,
        "prefix_caching": config.prefix_caching,
    }
    if events is not None:
        settings["make_tree"] = events.make_tree
    if not state_pages:
        return UnifiedCache(**settings)
    from .step.unequal_layers import StateCache

    logger.info(
        "the state of each request takes %d pages (%.3g MB), and so does each snapshot that lets a prompt "
        "start from a known prefix",
        *(state_pages, state_pages * page_bytes / 1e6),
    )
    return StateCache(state_pages=state_pages, **settings)
