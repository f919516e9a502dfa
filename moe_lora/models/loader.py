"""From a checkpoint directory (config.json, safetensors) to a model with its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moe_lora.core.errors import ConfigError

from .causal_lm import CausalLM

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and the part of a model parameter that it fills.

    `index` addresses the parameter (slices and expert numbers); `transform` maps the checkpoint's tensor
    to that part's shape.
    """

    key: str
    index: tuple[Any, ...] = ()
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None


WeightMap = dict[str, list[Piece]]
"""Model parameter name -> the checkpoint tensors it is made of."""


class Checkpoint:
    """Memory-mapped tensors of a checkpoint: one safetensors file or several with an index."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._files: dict[str, Any] = {}
        index = model_dir / INDEX_NAME
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            self._file_of = {key: model_dir / name for key, name in weight_map.items()}
        else:
            self._file_of = {key: path for path in self._single_file() for key in self._open(path).keys()}

    def _single_file(self) -> list[Path]:
        paths = sorted(self.model_dir.glob("*.safetensors"))
        if not paths:
            raise ConfigError(
                f"{self.model_dir} has no *.safetensors; convert the checkpoint with save_pretrained "
                "(pickled weights are not read)"
            )
        return paths

    def _open(self, path: Path) -> Any:
        if path.name not in self._files:
            if not path.exists():
                raise ConfigError(f"{path} is named by {INDEX_NAME} but does not exist")
            self._files[path.name] = safe_open(path, framework="pt")
        return self._files[path.name]

    def __contains__(self, key: str) -> bool:
        return key in self._file_of

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._file_of:
            raise ConfigError(f"the checkpoint in {self.model_dir} has no tensor {key!r}")
        return self._open(self._file_of[key]).get_tensor(key)

    def keys(self) -> Iterator[str]:
        return iter(self._file_of)


def fill(model: CausalLM, checkpoint: Checkpoint, weights: WeightMap) -> None:
    """Copy the checkpoint into the model's parameters, converting to their dtype.

    Raises ConfigError naming the tensor if one is missing or has another shape than the model needs.
    """
    for name, parameter in model.named_parameters():
        for piece in weights[name]:
            tensor = checkpoint[piece.key]
            tensor = piece.transform(tensor) if piece.transform else tensor
            target = parameter.data[piece.index]
            if target.shape != tensor.shape:
                raise ConfigError(
                    f"{piece.key} in {checkpoint.model_dir} has shape {tuple(tensor.shape)}, "
                    f"config.json asks for {tuple(target.shape)}"
                )
            target.copy_(tensor)
