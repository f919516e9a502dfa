# SPDX-License-Identifier: Apache-2.0
"""Registers adapters that a base model can serve: from a folder, or from a training loop."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE, adapter_folder
from moe_lora.adapters.peft.reader import config_fields, read_adapter, tensors_of
from moe_lora.core.errors import AdapterError
from moe_lora.core.records import RegisteredAdapter

from .base_model import base_model_hash, model_shape
from .registry import Registry

logger = logging.getLogger(__name__)


def register_adapter(
    registry: Registry,
    name: str,
    source: str | Path | Mapping[str, torch.Tensor],
    config: Any = None,
    *,
    model_dir: str | Path,
    owner: str = "",
    link: bool = False,
) -> RegisteredAdapter:
    """Check an adapter against the base model in `model_dir`, then `Registry.add`.

    source: a PEFT folder, or LoRA tensors by their PEFT keys with `config` (see `pack_state_dict`).  link:
    for a folder only.  Raises AdapterError as `read_adapter`, ConfigError for an unreadable base model.
    """
    if isinstance(source, Mapping):
        if config is None:
            raise ValueError("config is missing; give the fields of adapter_config.json (r, lora_alpha, …)")
        if link:
            raise ValueError("link=True needs a folder to refer to; tensors are stored")
        with TemporaryDirectory(prefix="moe_lora-") as folder:
            shape, where = model_shape(model_dir), f"adapter {name!r}"
            _write(Path(folder), tensors_of(source, shape, where), config_fields(config, f"{where} config"))
            return register_adapter(registry, name, folder, model_dir=model_dir, owner=owner)
    source = adapter_folder(str(source), name)
    packed = read_adapter(source, model_shape(model_dir), torch.bfloat16, name, base_dir=Path(model_dir))
    for warning in packed.warnings:
        logger.warning("%s", warning)
    return registry.add(name, source, base_hash=base_model_hash(model_dir), owner=owner, link=link)


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(config)
        # Cloned: safetensors refuses tensors with shared memory.
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    except (TypeError, ValueError) as error:
        raise AdapterError(f"config or tensors can't be saved as a PEFT adapter: {error}") from error
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{folder} can't be written: {error}; make room in TMPDIR") from error
