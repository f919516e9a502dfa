"""Reading PEFT adapters: a directory, or a state dict out of a training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from moe_lora.adapters.packed import PackedAdapter, assemble, pack_layer, packed_bytes
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape

from .config import AdapterConfig
from .file_check import check_header_size, matched_header
from .files import CONFIG_FILE, WEIGHTS_FILE, not_readable, read_json, weights_file
from .match import match
from .places import make_pair
from .training_state import config_fields, lora_tensors

logger = logging.getLogger(__name__)


def read_adapter(
    path: str | Path, shape: ModelShape, dtype: torch.dtype, name: str | None = None, *, log: bool = True
) -> PackedAdapter:
    """Pack the PEFT directory at `path` for a base model of this shape, in the model's dtype.

    name: the adapter's name, by default the folder's. Both files are read once, whole, into this process's
    memory: at the peak that takes the file twice, or once beside the packed adapter. Raises AdapterError,
    which names the file and the key, unless every tensor is used and everything the config targets is
    there. If base_model_name_or_path is a local checkpoint it must have the sizes of the base; another name
    alone is no error, since names move. log: write what `PackedAdapter.warnings` says to the log.
    """
    folder = Path(path)
    config, weights, where = read_files(folder, shape)
    try:
        tensors = load(weights)
    except (SafetensorError, KeyError) as error:
        raise not_readable(where, error) from error
    del weights  # the tensors are copies
    packed = _pack(tensors, config, shape, dtype, name or folder.resolve().name, where)
    return _logged(packed, log)


def read_files(folder: Path, shape: ModelShape) -> tuple[AdapterConfig, bytes, str]:
    """Config, bytes of the weights file, and how errors call that file.

    Both files are read once and whole, into memory of our own: a mapped file that somebody writes to ends
    the process that looks at it.  Raises AdapterError for files that can't be read or changed meanwhile, and
    as `check_header_size` does.
    """
    try:
        # Once: a link that is set anew between the two files would join one adapter's to another's.
        real = Path(os.path.realpath(folder))
        before = _stamps(real)
        config = AdapterConfig.parse(read_json(folder, real / CONFIG_FILE), str(folder / CONFIG_FILE))
        check_header_size(weights_file(real), shape)
        weights = (real / WEIGHTS_FILE).read_bytes()
        after = _stamps(real)
    except OSError as error:
        raise AdapterError(
            f"{folder}: can't be read ({error.strerror or error}); load it again once its files are whole"
        ) from error
    if after != before:
        raise AdapterError(
            f"{folder}: its files changed while they were read; load it again once they are whole"
        )
    return config, weights, str(folder / WEIGHTS_FILE)


def _stamps(folder: Path) -> list[tuple[int, int, int, int]]:
    """What changes when a file does."""
    facts = [os.stat(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in facts]


def adapter_layer_bytes(path: str | Path, shape: ModelShape, dtype: torch.dtype) -> list[int]:
    """Bytes that each layer of the PEFT directory would take packed; no value is read.

    Raises AdapterError as `read_adapter` does, but for values that are not finite.
    """
    _, entries, matched = matched_header(Path(path), shape)
    tensors = {key: torch.empty(entry.shape, dtype=dtype, device="meta") for key, entry in entries.items()}
    return [
        packed_bytes([make_pair(source, tensors, shape, matched.swapped) for source in layer], dtype)
        for layer in matched.layers
    ]


def pack_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    config: Any,
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
) -> PackedAdapter:
    """Pack LoRA tensors by their PEFT keys.

    config: the fields of adapter_config.json, or PEFT's LoraConfig.  Keys may lack the prefix
    `base_model.model.` and may carry the adapter's name, as in `lora_A.default.weight`; the base's weights
    in the state dict of a whole PEFT model are left out. Tensors are copied, so that training may go on.
    Raises AdapterError as `read_adapter` does.
    """
    where = f"adapter {name!r}"
    parsed = AdapterConfig.parse(config_fields(config, f"{where} config"), f"{where} config")
    return _logged(_pack(tensors_of(state_dict, shape, where), parsed, shape, dtype, name, where), True)


def tensors_of(
    state_dict: Mapping[str, torch.Tensor], shape: ModelShape, where: str
) -> dict[str, torch.Tensor]:
    """The LoRA tensors of a state dict, on the CPU.  Raises AdapterError as `lora_tensors` does."""
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise AdapterError(f"{where}: {key}: expected a tensor, found {type(value).__name__}")
    found = lora_tensors(state_dict, shape, where)
    return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}


def _pack(
    tensors: Mapping[str, torch.Tensor],
    config: AdapterConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    where: str,
) -> PackedAdapter:
    matched = match(tensors, config, shape, where)
    layers = []
    for sources in matched.layers:
        pairs = [make_pair(source, tensors, shape, matched.swapped) for source in sources]
        layers.append(pack_layer(pairs, shape, dtype, where))
    return assemble(name, layers, shape, matched.warnings)


def _logged(packed: PackedAdapter, log: bool) -> PackedAdapter:
    for warning in packed.warnings if log else ():
        logger.warning("%s", warning)
    return packed
