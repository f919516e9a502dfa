# SPDX-License-Identifier: Apache-2.0
"""Launch configurations worth trying, and the writing of a GPU's table."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.configs import KERNEL_NAMES, Choice, Config, ConfigEntry, ConfigTable

SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "wgmma_shrink": {
        "block_t": (16, 32, 64),
        "block_k": (64, 128, 256),
        "split_k": (1, 2, 4, 8),
        "part_k": (512, 1024, 2048),
        "tma": (False, True),
        "num_stages": (3, 4, 6),
        "num_warps": (4,),
        "programs_per_sm": (1, 2, 3, 4, 6),
    },
    "wgmma_expand": {
        "block_t": (16, 32, 64),
        "block_c": (64, 128),
        "blocks_per_item": (1, 2, 4, 8),
        "tma": (False, True),
        "num_stages": (2, 3, 4),
        "num_warps": (4,),
        "programs_per_sm": (1, 2, 3, 4, 6),
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
}
"""Values worth trying, by kernel and meta-parameter of `configs.PARAMETERS`."""
_MAX_SHARED_BYTES = 200 * 1024


def config_space(kernel: str) -> list[Config]:
    """Every configuration worth trying that fits in shared memory."""
    if kernel not in SPACES:
        raise ValueError(f"kernel={kernel!r} is unknown; choose one of {', '.join(KERNEL_NAMES)}")
    names = list(SPACES[kernel])
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*SPACES[kernel].values())]
    return [config for config in every if _staged_bytes(kernel, config) <= _MAX_SHARED_BYTES]


def _staged_bytes(kernel: str, config: Config) -> int:
    if kernel.startswith("vector"):
        return 0
    stages, tokens = config["num_stages"], config["block_t"]
    if kernel == "wgmma_shrink":
        per_program = stages * (64 + tokens) * config["block_k"]
    else:
        per_program = 64 * (stages * config["block_c"] + 2 * tokens)
    return 2 * per_program * config["programs_per_sm"]


def save_table(table: ConfigTable, path: Path | None = None) -> Path:
    """Write the table to `path`, by default the path of `load_table`; returns the path."""
    path = path or configs.table_path(table.gpu)
    data = {
        "gpu": table.gpu,
        "note": table.note,
        "dependent_launch": table.dependent_launch,
        "choices": [_given(choice) for choice in table.choices],
        "entries": [_given(entry) for entry in table.entries],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    configs.load_table.cache_clear()
    return path


def _given(row: ConfigEntry | Choice) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if value is not None}
