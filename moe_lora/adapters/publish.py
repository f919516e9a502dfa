"""Into a registry only what a base model can serve: from a folder, or out of a training loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from ..core.errors import AdapterError, ConfigError
from ..core.shape import ModelShape
from .base_model import base_model_hash
from .peft_files import CONFIG_FILE, WEIGHTS_FILE
from .peft_format import read_adapter
from .registered import RegisteredAdapter
from .registry import Registry


def register_adapter(
    registry: Registry,
    name: str,
    source: str | Path | Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    model_dir: str | Path,
    owner: str = "",
    link: bool = False,
) -> RegisteredAdapter:
    """Add an adapter that the base model in `model_dir` can serve to the registry, as `Registry.add`.

    source: a PEFT folder, or LoRA tensors by their PEFT keys with the fields of adapter_config.json as
    `config`.  link: for a folder only.  Raises AdapterError as `read_adapter` does, ConfigError for a base
    model that can't be read.
    """
    if isinstance(source, Mapping):
        if config is None:
            raise ValueError("config is missing; give the fields of adapter_config.json (r, lora_alpha, …)")
        if link:
            raise ValueError("link=True needs a folder to refer to; tensors are stored")
        with TemporaryDirectory(prefix="moe_lora-") as folder:
            _write(Path(folder), source, config)
            return register_adapter(registry, name, folder, model_dir=model_dir, owner=owner)
    read_adapter(source, model_shape(model_dir), torch.bfloat16, name)
    return registry.add(name, source, base_hash=base_model_hash(model_dir), owner=owner, link=link)


def model_shape(model_dir: str | Path) -> ModelShape:
    """Sizes of the base model in a folder.  Raises ConfigError."""
    path = Path(model_dir) / "config.json"
    try:
        return ModelShape.from_hf_config(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_dir}: {error}") from error


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(dict(config))
        save_file(
            {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()},
            folder / WEIGHTS_FILE,
        )
    except (TypeError, AttributeError, ValueError) as error:
        raise AdapterError(f"config or tensors can't be saved as a PEFT adapter: {error}") from error
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
