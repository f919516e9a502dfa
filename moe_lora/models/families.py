"""The model families by the `model_type` of their config.json, and the front door: `load_model`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import torch

from moe_lora.core.errors import ConfigError
from moe_lora.core.hf_config import read_config
from moe_lora.core.shape import FAMILIES
from moe_lora.kernels.cpu.library import advise_huge_pages

from .causal_lm import CausalLM
from .loader import Checkpoint, WeightMap, fill
from .spec import ModelSpec


class Family(Protocol):
    """What a family's module provides."""

    def spec(self, config: dict[str, Any]) -> ModelSpec: ...

    def weight_map(self, spec: ModelSpec, checkpoint: Checkpoint) -> WeightMap: ...


def family_of(config: dict[str, Any]) -> Family:
    """Module of the family named by config.json.  Raises ConfigError if there is none."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(f"model_type={name!r} is not supported; supported are {', '.join(FAMILIES)}")
    return importlib.import_module(f".{name}", __package__)


def empty_model(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, experts: range | None = None
) -> CausalLM:
    """A model whose weights are allocated but not filled."""
    with torch.device("meta"):
        model = CausalLM(spec, experts).to(dtype)
    model = model.to_empty(device=device)
    for weight in model.parameters():
        advise_huge_pages(weight)
    frequencies = torch.tensor(spec.rope.inverse_frequencies, dtype=torch.float32, device=device)
    model.register_buffer("inverse_frequencies", frequencies, persistent=False)
    if spec.tie_word_embeddings:
        model.head = model.embedding
    return model.eval()


def load_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device, experts: range | None = None
) -> CausalLM:
    """Build the model of a checkpoint directory and load its weights.

    experts: those of each layer to load, None = all; the others' weights are neither allocated nor read.
    """
    config = read_config(model_dir)
    family = family_of(config)
    spec = family.spec(config)
    model = empty_model(spec, dtype, device, experts)
    checkpoint = Checkpoint(model_dir)
    fill(model, checkpoint, family.weight_map(spec, checkpoint))
    return model
