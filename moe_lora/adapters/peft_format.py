"""Reading PEFT adapters: a directory, or a state dict out of a training loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..core.errors import AdapterError
from ..core.shape import ModelShape
from .base_model import check_base
from .config import AdapterConfig
from .file_check import check_header_size, check_num_tensors
from .match import Match, match
from .packed import PackedAdapter, assemble, pack_layer, packed_bytes
from .pairs import is_swapped, make_pair
from .peft_files import not_readable, read_config, weights_file
from .training_state import check_embeddings, config_fields, lora_tensors

logger = logging.getLogger(__name__)


def read_adapter(
    path: str | Path, shape: ModelShape, dtype: torch.dtype, name: str | None = None, *, log: bool = True
) -> PackedAdapter:
    """Pack the PEFT directory at `path` for a base model of this shape, in the model's dtype.

    name: the adapter's name, by default the folder's. The weights are mapped and each tensor copied
    once. Raises AdapterError, which names the file and the key, unless every tensor is used and
    everything the config targets is there. If base_model_name_or_path is a local checkpoint it must
    have the sizes of the base; another name alone is no error, since names move. log: write what
    `PackedAdapter.warnings` says to the log.
    """
    folder = Path(path)
    with _opened(folder, shape) as (tensors, config, where):
        packed = _pack(tensors, config, shape, dtype, name or folder.resolve().name, where)
    return _logged(packed, log)


def adapter_layer_bytes(path: str | Path, shape: ModelShape, dtype: torch.dtype) -> list[int]:
    """Bytes that each layer of the PEFT directory would take packed; no value is read.

    Raises AdapterError as `read_adapter` does, but for values that are not finite.
    """
    with _opened(Path(path), shape) as (tensors, config, where):
        matched, swapped = _matched(tensors, config, shape, where)
        return [
            packed_bytes([make_pair(source, tensors, shape, where, swapped) for source in layer], dtype)
            for layer in matched.layers
        ]


@contextmanager
def _opened(
    folder: Path, shape: ModelShape
) -> Iterator[tuple[Mapping[str, torch.Tensor], AdapterConfig, str]]:
    """The tensors of a PEFT directory, mapped, its config, and how errors call it."""
    config = read_config(folder)
    check_base(config, shape)
    weights = weights_file(folder)
    check_header_size(weights, shape)
    try:
        with safe_open(weights, framework="pt") as file:
            check_num_tensors(len(file.keys()), shape, str(weights))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            yield tensors, config, str(weights)
    except (SafetensorError, OSError) as error:
        raise not_readable(weights, error) from error


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
    check_base(parsed, shape)
    return _logged(_pack(tensors_of(state_dict, shape, where), parsed, shape, dtype, name, where), True)


def tensors_of(
    state_dict: Mapping[str, torch.Tensor], shape: ModelShape, where: str
) -> dict[str, torch.Tensor]:
    """The LoRA tensors of a state dict, on the CPU.  Raises AdapterError as `lora_tensors` does."""
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise AdapterError(f"{where}: {key}: expected a tensor, found {type(value).__name__}")
    found = lora_tensors(state_dict, shape, where)
    check_num_tensors(len(found), shape, where)
    return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}


def _pack(
    tensors: Mapping[str, torch.Tensor],
    config: AdapterConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    where: str,
) -> PackedAdapter:
    matched, swapped = _matched(tensors, config, shape, where)
    layers = []
    for sources in matched.layers:
        pairs = [make_pair(source, tensors, shape, where, swapped) for source in sources]
        layers.append(pack_layer(pairs, shape, dtype, where))
    return assemble(name, layers, shape, matched.warnings)


def _matched(
    tensors: Mapping[str, torch.Tensor], config: AdapterConfig, shape: ModelShape, where: str
) -> tuple[Match, bool]:
    """The places of the tensors, and whether the roles of A and B are exchanged."""
    check_embeddings(tensors, shape, where)
    matched = match(tensors, config, shape, where)
    sources = [source for layer in matched.layers for source in layer]
    return matched, is_swapped(sources, tensors, shape)


def _logged(packed: PackedAdapter, log: bool) -> PackedAdapter:
    for warning in packed.warnings if log else ():
        logger.warning("%s", warning)
    return packed
