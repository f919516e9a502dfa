"""Reading PEFT adapters: a directory, or a state dict out of a training loop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ..core.errors import AdapterError
from ..core.shape import ModelShape
from .config import AdapterConfig
from .match import match
from .packed import PackedAdapter, Pair, assemble, pack_layer, packed_bytes
from .pairs import is_swapped, make_pair
from .peft_files import not_readable, read_config, read_files, read_header, weights_file

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_SAME_BASE = (
    *("family", "num_layers", "hidden_size", "intermediate_size", "num_experts"),
    *("num_heads", "num_kv_heads", "head_dim"),
)


def read_adapter(
    path: str | Path, shape: ModelShape, dtype: torch.dtype, name: str | None = None
) -> PackedAdapter:
    """Pack the PEFT directory at `path` for a base model of this shape, in the model's dtype.

    name: the adapter's name, by default the folder's. Both files are read once, whole, into this process's
    memory: at the peak that takes the file twice, or once beside the packed adapter. Raises AdapterError,
    which names the file and the key, unless every tensor is used and everything the config targets is
    there. If base_model_name_or_path is a local checkpoint it must have the sizes of the base; another name
    alone is no error, since names move.
    """
    folder = Path(path)
    config, weights, where = read_files(folder)
    _check_base(config, shape)
    try:
        tensors = load(weights)
    except (SafetensorError, KeyError) as error:
        raise not_readable(where, error) from error
    del weights  # the tensors are copies
    return _pack(tensors, config, shape, dtype, name or folder.resolve().name, where)


def adapter_layer_bytes(path: str | Path, shape: ModelShape, dtype: torch.dtype) -> list[int]:
    """Bytes that each layer of the PEFT directory would take packed; no value is read.

    Raises AdapterError as `read_adapter` does, but for values that are not finite.
    """
    config = read_config(Path(path))
    _check_base(config, shape)
    weights = weights_file(Path(path))
    tensors = {}
    for key, (kind, sizes) in read_header(weights).items():
        if kind not in _DTYPES:
            raise not_readable(weights, ValueError(f"{key} has dtype {kind}"))
        tensors[key] = torch.empty(sizes, dtype=_DTYPES[kind], device="meta")
    return [packed_bytes(pairs, dtype) for pairs in _pairs(tensors, config, shape, str(weights))]


def pack_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
) -> PackedAdapter:
    """Pack LoRA tensors by their PEFT keys, with the fields of adapter_config.json as `config`.

    Keys may lack the prefix `base_model.model.` and may carry the adapter's name, as in
    `lora_A.default.weight`. Tensors are copied, so that training may go on. Raises AdapterError as
    `read_adapter` does.
    """
    where = f"adapter {name!r}"
    parsed = AdapterConfig.parse(dict(config), f"{where} config")
    _check_base(parsed, shape)
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise AdapterError(f"{where}: {key}: expected a tensor, found {type(value).__name__}")
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in state_dict.items()}
    return _pack(tensors, parsed, shape, dtype, name, where)


def _pack(
    tensors: Mapping[str, torch.Tensor],
    config: AdapterConfig,
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    where: str,
) -> PackedAdapter:
    layers = [pack_layer(pairs, shape, dtype, where) for pairs in _pairs(tensors, config, shape, where)]
    return assemble(name, layers, shape)


def _pairs(
    tensors: Mapping[str, torch.Tensor], config: AdapterConfig, shape: ModelShape, where: str
) -> Iterator[list[Pair]]:
    """The pairs of each layer."""
    sources = match(tensors, config, shape, where)
    swapped = is_swapped([source for layer in sources for source in layer], tensors, shape)
    for layer in sources:
        yield [make_pair(source, tensors, shape, where, swapped) for source in layer]


def _check_base(config: AdapterConfig, shape: ModelShape) -> None:
    """Refuse an adapter whose base model lies here and has other sizes."""
    if config.base_model is None:
        return
    base_config = os.path.join(config.base_model, "config.json")
    if not os.path.isfile(base_config):
        return
    key = f"{config.where}: base_model_name_or_path={config.base_model!r}"
    try:
        base = ModelShape.from_hf_config(json.loads(Path(base_config).read_text(encoding="utf-8")))
    except (ValueError, OSError, RecursionError) as error:
        raise AdapterError(f"{key} is not a model that can be compared with the base ({error})") from error
    for field in _SAME_BASE:
        if getattr(base, field) != getattr(shape, field):
            raise AdapterError(
                f"{key} has {field}={getattr(base, field)}, the base model served has "
                f"{getattr(shape, field)}; serve the adapter with the base it was trained for"
            )
