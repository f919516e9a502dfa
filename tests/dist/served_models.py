# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with adapters of mixed ranks, forms and targets, and the requests asked of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from moe_lora.core.request import GenerateRequest, SamplingParams
from tests.families import (
    ALL_TARGETS,
    BESIDE_TARGETS,
    PER_EXPERT_FAMILIES,
    VOCAB_SIZE,
    make_adapter,
    make_checkpoint,
)

NUM_TOKENS, FEW_TOKENS = 20, 4
CAPACITY = 3
"""Adapters that the LoRA Server holds at once: one fewer than there are."""

_ADAPTERS = {
    "attention": (3, ("qkv", "o"), "fused"),
    "all": (5, (*ALL_TARGETS, "router"), "fused"),
    "modules": (16, (*ALL_TARGETS, "router"), "per_expert"),
    "experts": (33, ("gate_up", "down"), "fused"),
}


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint and its adapters, (name, directory) each."""

    family: str
    model_dir: Path
    adapters: tuple[tuple[str, str], ...]


def make_served_model(family: str, folder: Path) -> ServedModel:
    """Ranks 3 to 33 on some or all sites, the gate and the per-expert form where the family has them."""
    base = make_checkpoint(family, folder / "base")
    adapters = []
    for seed, (name, (lora_rank, targets, form)) in enumerate(_ADAPTERS.items()):
        path = make_adapter(
            family,
            base,
            folder / name,
            lora_rank,
            (*targets, *BESIDE_TARGETS) if "router" in targets else targets,
            seed=seed,
            form=form if family in PER_EXPERT_FAMILIES else "fused",
            scale=2 / lora_rank**0.5,
        )
        adapters.append((name, str(path)))
    return ServedModel(family, base, tuple(adapters))


def requests_to(model: ServedModel) -> list[GenerateRequest]:
    """Prompts of 1 to 40 tokens for the base model and each adapter, mixed.

    The first adapter is soon done with, so that the last takes its place while the others are in use.
    """
    rng = random.Random(3)
    first, second, third, last = (name for name, _ in model.adapters)
    names = [first, second, None, third, last, second, None, third, last]
    lengths = [9, 40, 1, *(rng.randint(2, 30) for _ in names[3:])]
    return [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=FEW_TOKENS if name == first else NUM_TOKENS, ignore_eos=True
            ),
            adapter=name,
        )
        for number, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]
