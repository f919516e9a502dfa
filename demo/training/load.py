"""The demo model's checkpoint back in the trainer's own form."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from .export import base_tensors
from .model import SHAPE, Weights, initial_weights


def read_base(model_dir: Path) -> Weights:
    """Weights of the Mixtral checkpoint that `write_base` wrote, in fp32."""
    weights = initial_weights(seed=0)
    places = base_tensors(weights)  # views of the weights, under the checkpoint's names
    stored = load_file(model_dir / "model.safetensors")
    if places.keys() != stored.keys():
        raise ValueError(
            f"{model_dir} is not the demo model ({SHAPE}): {sorted(places.keys() ^ stored.keys())[:3]}"
        )
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(stored[name])
    return weights
