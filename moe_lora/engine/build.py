"""From an `EngineConfig` to a running engine core."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from moe_lora.adapters.peft_format import read_adapter
from moe_lora.cache.blocks import BlockManager
from moe_lora.cache.pages import PageAllocator
from moe_lora.core.clock import WallClock
from moe_lora.core.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.core.request import ModelInfo
from moe_lora.core.shape import ModelShape
from moe_lora.execution.context import ExecutionContext
from moe_lora.execution.local import LocalBackend
from moe_lora.kernels.huge_pages import advise_huge_pages
from moe_lora.kernels.step import KvLayout, SlotTable
from moe_lora.models.families import load_model, read_config

from .core import EngineCore
from .placement import LocalPlacement
from .residency import Residency
from .runner import ModelRunner
from .scheduler import Scheduler
from .sizing import arena_size, free_bytes, max_model_len
from .text import read_eos_token_ids

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_engine(config: EngineConfig) -> EngineCore:
    """Load the model and the adapters, allocate the arena, compile the decode step.

    Raises ConfigError or AdapterError for anything that can be known at start.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    model_dir = Path(config.model_dir)
    hf_config = read_config(model_dir)
    dtype = choose_dtype(config.dtype, hf_config)
    model = load_model(model_dir, dtype, device)
    shape = model.spec.shape
    adapters = [(read_adapter(Path(path), shape, dtype, name), path) for name, path in config.adapters]
    layout = kv_layout(config, shape, dtype)
    size = arena_size(config, shape, layout, [packed.nbytes for packed, _ in adapters], free_bytes(device))
    arena, slots = allocate(config, size.num_pages * layout.page_bytes, shape, device)
    clock = WallClock()
    pages = PageAllocator(size.num_pages)
    blocks = BlockManager(pages, config.block_size, size.kv_pages, prefix_caching=config.prefix_caching)
    placement = LocalPlacement(pages, layout.page_bytes, arena, slots, blocks)
    residency = Residency(placement, blocks, clock)
    for packed, path in adapters:
        residency.add(packed, path)
    context = ExecutionContext(arena, layout, LocalBackend(shape, arena, slots))
    runner = ModelRunner(
        model, context, device, eager=config.eager, decode_buckets=decode_buckets(config, device)
    )
    runner.warm_up()
    scheduler = Scheduler(
        blocks,
        residency,
        clock,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        starvation_s=config.starvation_s,
    )
    info = model_info(config, shape, dtype)
    gigabytes = arena.numel() / 1e9
    logger.info(
        "engine ready: %s, %d adapters, %.3f GB arena on %s", info.name, len(adapters), gigabytes, device
    )
    return EngineCore(info, shape, dtype, scheduler, runner, residency, blocks, clock, config.seed)


def kv_layout(config: EngineConfig, shape: ModelShape, dtype: torch.dtype) -> KvLayout:
    """How this model's KV lies in pages."""
    return KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
        dtype=dtype,
    )


def model_info(config: EngineConfig, shape: ModelShape, dtype: torch.dtype) -> ModelInfo:
    """What front ends are told of the engine; end tokens outside the vocabulary can't be met."""
    model_dir = Path(config.model_dir)
    return ModelInfo(
        name=model_dir.resolve().name,
        model_dir=str(model_dir),
        family=shape.family,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len(config, shape),
        vocab_size=shape.vocab_size,
        max_loras=config.max_loras,
        eos_token_ids=tuple(i for i in read_eos_token_ids(model_dir) if i < shape.vocab_size),
    )


def allocate(
    config: EngineConfig, arena_bytes: int, shape: ModelShape, device: torch.device
) -> tuple[torch.Tensor, SlotTable]:
    """The arena and the slot table.  Raises ConfigError if the memory for them can't be had."""
    try:
        arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        advise_huge_pages(arena)
        return arena, SlotTable(config.max_loras, shape.num_layers, shape.num_entries, device)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ConfigError(
            f"no memory on {device} for {arena_bytes / 1e9:.3g} GB of KV and adapters and a table of "
            f"{config.max_loras:.3g} adapters; lower kv_cache_gb={config.kv_cache_gb}, "
            f"lora_memory_gb={config.lora_memory_gb} or max_loras={config.max_loras}"
        ) from error


def choose_device(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`.  Raises ConfigError if CUDA is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda' was asked for, but torch finds no CUDA device; use device='cpu' or 'auto'"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, hf_config: dict) -> torch.dtype:
    """The dtype for `auto` (the checkpoint's; bfloat16 for float16), `float32` or `bfloat16`."""
    if name == "auto":
        stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16").removeprefix(
            "torch."
        )
        name = "float32" if stored == "float32" else "bfloat16"
    return DTYPES[name]


def decode_buckets(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    """Batch sizes that decode steps are padded to; empty: one graph serves any size."""
    if config.decode_buckets is not None:
        return config.decode_buckets
    if device.type == "cpu":
        return ()
    powers = [2**i for i in range(config.max_num_seqs.bit_length()) if 2**i < config.max_num_seqs]
    return (*powers, config.max_num_seqs)
