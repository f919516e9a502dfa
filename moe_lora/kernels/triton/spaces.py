"""The meta-parameters of each kernel and the values of them worth trying."""

from __future__ import annotations

import itertools
from typing import Any

Config = dict[str, Any]

SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "wgmma_shrink": {
        "block_t": (16, 32, 64),
        "block_k": (64, 128, 256),
        "split_k": (1, 2, 4, 8),
        "warp_specialize": (True, False),
        "num_stages": (3, 4, 6),
        "num_warps": (4,),
        "programs_per_sm": (1, 2),
    },
    "wgmma_expand": {
        "block_t": (16, 32, 64),
        "blocks_per_item": (1, 2, 4, 8),
        "warp_specialize": (True, False),
        "num_stages": (2, 3, 4),
        "num_warps": (4,),
        "programs_per_sm": (1, 2, 4),
    },
    "vector_shrink": {
        "block_r": (4, 8, 16),
        "block_k": (256, 512, 1024),
        "split_k": (1, 2, 4),
        "num_stages": (1, 2, 4),
        "num_warps": (4, 8),
        "programs_per_sm": (2, 4, 8),
    },
    "vector_expand": {
        "block_r": (16, 32),
        "block_c": (64, 128, 256),
        "num_stages": (1, 2, 4),
        "num_warps": (4, 8),
        "programs_per_sm": (2, 4, 8),
    },
    "fused_delta": {
        "block_t": (16, 32),
        "block_r": (16, 32, 64),
        "block_k": (64, 128),
        "block_c": (64, 128),
        "column_parts": (1, 2, 4, 8),
        "num_stages": (3, 4),
        "num_warps": (4,),
        "programs_per_sm": (2,),
    },
}
"""Per kernel and meta-parameter the values worth trying. `block_t`: tokens of a tile (wgmma's N); `block_r`:
rank rows; `block_k`: input columns a step; `split_k`: parts of the input width that are summed apart;
`block_c`: output columns; `blocks_per_item`: blocks of 64 output columns that one work item covers;
`column_parts`: work items that share the output columns, each of which recomputes h;
`programs_per_sm`: programs of the persistent grid on each SM."""
KERNEL_NAMES = tuple(SPACES)
ORDER_FIXING: dict[str, tuple[str, ...]] = {
    "wgmma_shrink": ("block_k", "split_k"),
    "wgmma_expand": (),
    "vector_shrink": ("block_r", "block_k", "split_k", "num_warps"),
    "vector_expand": ("block_r", "block_c", "num_warps"),
    "fused_delta": ("block_r", "block_k"),
}
"""Meta-parameters that change the order in which a row's products are added, so that they must not depend on
the phase. Tensor cores add along the inner width whatever the tile of tokens; where threads add, the layout
of the whole tile decides."""
_MAX_SHARED_BYTES = 200 * 1024


def check_config(kernel: str, config: Config) -> None:
    """Raises ValueError if the kernel is unknown or a meta-parameter is missing, unknown or not a size."""
    if kernel not in SPACES:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {', '.join(KERNEL_NAMES)}")
    if set(config) != set(SPACES[kernel]):
        raise ValueError(f"{kernel} takes {sorted(SPACES[kernel])}, the config has {sorted(config)}")
    for name, value in config.items():
        if int(value) != value or (value < 1 and name != "warp_specialize"):
            raise ValueError(f"{name}={value!r} of {kernel} must be a positive integer")


def config_space(kernel: str) -> list[Config]:
    """Every configuration of the kernel worth trying, those left out that can't fit in shared memory."""
    if kernel not in SPACES:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {', '.join(KERNEL_NAMES)}")
    names = list(SPACES[kernel])
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*SPACES[kernel].values())]
    return [config for config in every if _staged_bytes(kernel, config) <= _MAX_SHARED_BYTES]


def order_of(kernel: str, config: Config) -> tuple[Any, ...]:
    """The values of the configuration that fix the order of sums."""
    return tuple(config[name] for name in ORDER_FIXING[kernel])


def _staged_bytes(kernel: str, config: Config) -> int:
    """Bytes that the stages of a two-byte dtype's operand tiles take per SM (0 where tiles are registers)."""
    if kernel.startswith("vector"):
        return 0
    rows, depth = (64, 64) if kernel == "wgmma_expand" else (config.get("block_r", 64), config["block_k"])
    tokens = config["block_t"] * (2 if kernel == "wgmma_expand" else 1)
    return 2 * config["num_stages"] * (rows + tokens) * depth * config["programs_per_sm"]
