# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest

from tests.families import (
    ALL_TARGETS,
    BESIDE_TARGETS,
    PER_EXPERT_FAMILIES,
    make_adapter,
    make_checkpoint,
)

RANKS = (4, 8, 16, 64)
SEEDS = {
    "llama": 0,
    "mixtral": 1,
    "qwen3_moe": 1,
    "gpt_oss": 0,
    "dbrx": 0,
    "qwen3": 0,
    "mistral": 1,
    "qwen2": 0,
    "qwen2_moe": 1,
    "qwen3_next": 0,
    "qwen3_5_moe": 0,
    "glm4_moe": 1,
    "deepseek_v3": 1,
    "deepseek_v2": 0,
    "glm4_moe_lite": 0,
    "ernie4_5_moe": 2,
    "olmoe": 0,
    "granite": 0,
    "granitemoe": 0,
    "minimax_m2": 0,
    "afmoe": 4,
    "gemma4": 1,
    "phimoe": 0,
    "phi3": 0,
    "qwen3_vl_moe": 0,
    "qwen3_5": 0,
    "ministral3": 0,
    "seed_oss": 0,
    "smollm3": 0,
    "ernie4_5": 0,
    "glm4": 0,
    "olmo2": 0,
    "olmo3": 0,
    "gemma3": 0,
    "exaone4": 0,
    "dots1": 0,
    "granitemoeshared": 0,
    "flex_olmo": 0,
}
"""Checkpoint seeds for which no decision of the oracle tests is close (the tests assert it)."""


@dataclass(frozen=True)
class Served:
    """A checkpoint and its adapters, one of each rank."""

    family: str
    model_dir: Path
    adapters: Sequence[Path]


class Adapters(Sequence[Path]):
    """A checkpoint's adapters, made when they are first read: `make` of each rank."""

    def __init__(self, make: Callable[[int], Path]) -> None:
        self._make = cache(make)

    def __getitem__(self, index):
        return tuple(map(self._make, RANKS[index])) if isinstance(index, slice) else self._make(RANKS[index])

    def __len__(self) -> int:
        return len(RANKS)


_made: dict[str, Served] = {}


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """family → its tiny checkpoint with adapters of ranks 4, 8, 16 and 64 on attention and experts.

    The fixture exists once for each module that imports it; the modules share what it made.
    """

    def make(family: str) -> Served:
        if family not in _made:
            folder = tmp_path_factory.mktemp(family)
            base = make_checkpoint(family, folder / "base", seed=SEEDS[family])
            _made[family] = Served(family, base, Adapters(partial(_adapter, family, base, folder)))
        return _made[family]

    return make


def _adapter(family: str, base: Path, folder: Path, lora_rank: int) -> Path:
    """A delta about as large as the base at every rank.

    Rank 8 is on the gate too; rank 16 in the per-expert form where there is one.
    """
    targets = (*ALL_TARGETS, "router", *BESIDE_TARGETS) if lora_rank == 8 else ALL_TARGETS
    form = "per_expert" if lora_rank == 16 and family in PER_EXPERT_FAMILIES else "fused"
    return make_adapter(
        family,
        base,
        folder / f"rank{lora_rank}",
        lora_rank,
        targets,
        seed=lora_rank,
        form=form,
        scale=2 / lora_rank**0.5,
    )
