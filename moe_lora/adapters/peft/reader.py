# SPDX-License-Identifier: Apache-2.0
"""Reads PEFT adapters from a directory or a state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_lora.adapters.packed import (
    PackedAdapter,
    PackedLayer,
    Pair,
    assemble,
    bare_layer,
    num_table_entries,
    pack_layer,
)
from moe_lora.core.errors import AdapterError
from moe_lora.core.host import free_memory_bytes
from moe_lora.core.shape import ModelShape

from .base import EMBEDDING, read_base, resized
from .config import AdapterConfig
from .file_check import OpenAdapter, opened
from .match import Match, check_rank, check_tied, match
from .names import without_wrappers
from .places import Shaped, make_pairs


def read_adapter(
    path: str | Path,
    shape: ModelShape,
    dtype: torch.dtype,
    name: str | None = None,
    *,
    called: str | None = None,
    root: str | None = None,
    max_lora_rank: int | None = None,
    base_dir: Path | None = None,
) -> PackedAdapter:
    """Pack the PEFT directory at `path` for a base model of this shape, in the model's dtype.

    Peak memory: the file, the packed adapter, and the changes of replaced rows.  Raises AdapterError unless
    every tensor is used and every target is present.  base_dir: checkpoint of the base, for replaced rows.
    Otherwise as `opened`.
    """
    folder = Path(path)
    with opened(folder, shape, called, root, max_lora_rank, base_dir=base_dir) as found:
        needed = sum(layer.nbytes for layer in _bare_layers(found, shape, dtype, tables=False))
        if found.match.replaced:
            from .replaced import change_bytes

            needed += change_bytes(found.match.replaced, shape, dtype.itemsize)
        tensors = _read_tensors(found, needed)
        named = name or folder.resolve().name
        return _pack(found.match, tensors, shape, dtype, named, found.where, base_dir)


def read_pairs(
    path: str | Path, shape: ModelShape, subtracts: bool = False, base_dir: Path | None = None
) -> tuple[list[list[Pair]], Match]:
    """The pairs of each layer of a PEFT directory, in the file's dtypes, and the matched file.

    Raises AdapterError.
    """
    with opened(Path(path), shape, subtracts=subtracts, base_dir=base_dir) as found:
        if found.match.columns:
            raise AdapterError(
                f"{found.where}: no plain pair computes DoRA or lora_bias, so there is nothing to convert; "
                "serve the adapter as it is"
            )
        rows, dtype = found.match.replaced, torch.float32
        if not rows:
            return _pairs(found.match, _read_tensors(found, 0), shape), found.match
        from .base_weights import with_changes
        from .replaced import change_bytes

        tensors = _read_tensors(found, change_bytes(rows, shape, dtype.itemsize))
        tensors = with_changes(found.match, tensors, base_dir, found.where, dtype)
        return _pairs(found.match, tensors, shape), found.match


def _pairs(found: Match, tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> list[list[Pair]]:
    """The pairs of each layer.  tensors: after `with_changes` and `with_columns`."""
    pairs = [
        [pair for source in layer for pair in make_pairs(source, tensors, shape, found.swapped)]
        for layer in found.layers
    ]
    if found.replaced:
        from .replaced import replaced_pair

        pairs[-1] += [replaced_pair(one, tensors[f"{one.site} {one.key}"], shape) for one in found.replaced]
    if found.columns:
        from .columns import column_pair

        for column in found.columns:
            pairs[column.layer].append(column_pair(column, tensors[column.key], shape))
    return pairs


def _read_tensors(found: OpenAdapter, needed: int) -> dict[str, torch.Tensor]:
    """The file's tensors in memory: a truncated mapped file would kill the process.

    needed: bytes held at the same time.  Raises AdapterError, also without memory.
    """
    entries = {key: entry for key, entry in found.entries.items() if key not in found.match.copies}
    num_bytes = sum(entry.span[1] - entry.span[0] for entry in entries.values())
    if num_bytes + needed > free_memory_bytes():
        raise AdapterError(
            f"{found.where}: {num_bytes} bytes of tensors, and {needed} packed, are more than the host has "
            "memory free; free some, or save the adapter with a lower rank or in bfloat16"
        )
    tensors = {}
    for _, key in sorted((entry.span, key) for key, entry in entries.items()):
        entry = entries[key]
        dtype = getattr(torch, entry.dtype.removeprefix("torch."))
        is_turned = key in found.transposed
        tensor = torch.empty(entry.shape[::-1] if is_turned else entry.shape, dtype=dtype)
        found.weights.seek(entry.span[0])
        size = found.weights.readinto(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
        tensors[key] = tensor.T.contiguous() if is_turned else tensor
        if size != entry.span[1] - entry.span[0]:
            raise AdapterError(f"{found.where}: cut while it was read; load it again once it is whole")
    if found.match.tied:
        check_tied(found.match, tensors, found.where)
    return tensors


def bare_layers(
    path: str | Path,
    shape: ModelShape,
    dtype: torch.dtype,
    root: str | None = None,
    max_lora_rank: int | None = None,
    base_dir: Path | None = None,
    *,
    tables: bool = True,
) -> list[PackedLayer]:
    """The packed layers of the PEFT directory, with data on the device "meta": values unread.

    Raises AdapterError.
    """
    with opened(Path(path), shape, root=root, max_lora_rank=max_lora_rank, base_dir=base_dir) as found:
        return _bare_layers(found, shape, dtype, tables=tables)


def _bare_layers(
    found: OpenAdapter, shape: ModelShape, dtype: torch.dtype, *, tables: bool
) -> list[PackedLayer]:
    tensors = {
        key: torch.empty(entry.shape, dtype=dtype, device="meta") for key, entry in found.entries.items()
    }
    tensors |= {f"{rows.site} {rows.key}": tensors[rows.key] for rows in found.match.replaced}
    for column in found.match.columns:
        tensors[column.key] = tensors[column.key].new_empty(*found.entries[column.key].shape, 2)
    matched = found.match
    num_entries = num_table_entries(shape, len(matched.layers), bool(matched.columns)) if tables else 0
    return [bare_layer(pairs, num_entries, dtype) for pairs in _pairs(matched, tensors, shape)]


def pack_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    config: Any,
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    max_lora_rank: int | None = None,
    base_dir: Path | None = None,
) -> PackedAdapter:
    """Pack copies of LoRA tensors by their PEFT keys.

    config: the fields of adapter_config.json, or PEFT's LoraConfig.  Keys may lack the prefix
    `base_model.model.` and may carry the adapter's name, as in `lora_A.default.weight`; base weights are left
    out.  Raises AdapterError.
    """
    where = f"adapter {name!r}"
    parsed = AdapterConfig.parse(config_fields(config, f"{where} config"), f"{where} config")
    tensors = tensors_of(state_dict, shape, where)
    matched = match(tensors, parsed, shape, where, read_base(parsed, None, shape), base_dir)
    check_rank(matched, max_lora_rank, where)
    if matched.tied:
        check_tied(matched, tensors, where)
    return _pack(matched, tensors, shape, dtype, name, where, base_dir)


def tensors_of(
    state_dict: Mapping[str, torch.Tensor], shape: ModelShape, where: str
) -> dict[str, torch.Tensor]:
    """The LoRA tensors of a state dict, on the CPU.  Raises AdapterError."""
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise AdapterError(f"{where}: {key}: expected a tensor, found {type(value).__name__}")
    found = lora_tensors(state_dict, shape, where)
    for key, value in found.items():
        check_dense(f"{where}: {key}", value)
    # A tied head shares the trained rows of the embedding.
    rows = [key for key in sorted(found) if "trainable_tokens_delta" in key]
    shared = {*rows} - {*{found[key].data_ptr(): key for key in rows}.values()}
    return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items() if key not in shared}


def check_dense(called: str, tensor: torch.Tensor) -> None:
    """Raises AdapterError for a tensor without values, or a sparse tensor."""
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "on the device meta, without values" if tensor.is_meta else f"of layout {tensor.layout}"
        raise AdapterError(f"{called}: a tensor {kind}; give dense tensors with values")


def _pack(
    matched: Match,
    tensors: Mapping[str, torch.Tensor],
    shape: ModelShape,
    dtype: torch.dtype,
    name: str,
    where: str,
    base_dir: Path | None,
) -> PackedAdapter:
    if matched.replaced:
        from .base_weights import with_changes

        tensors = with_changes(matched, tensors, base_dir, where, dtype)
    if matched.columns:
        from .base_weights import with_columns

        tensors = with_columns(matched.columns, tensors, where)
    num_entries = num_table_entries(shape, len(matched.layers), bool(matched.columns))
    layers = [pack_layer(pairs, num_entries, dtype, where) for pairs in _pairs(matched, tensors, shape)]
    packed = assemble(name, layers, shape, matched.warnings, matched.invocation, bool(matched.columns))
    return replace(packed, base_copies=matched.copies)


_BASE_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?:model|transformer|lm_head)\.")
_TRAINED = ("lora_", "modules_to_save", "trainable_tokens_delta")

Tensor = TypeVar("Tensor", bound=Shaped)


def config_fields(config: Any, where: str) -> dict[str, Any]:
    """The fields of adapter_config.json.

    config: these fields, PEFT's LoraConfig, or a PEFT model's `peft_config`.  Raises AdapterError.
    """
    if isinstance(config, Mapping) and config and all(map(_is_peft_config, config.values())):
        if len(config) > 1:
            raise AdapterError(
                f"{where}: the configs of {len(config)} adapters ({', '.join(map(str, config))}); "
                "give one of them, such as model.peft_config['default']"
            )
        [config] = config.values()
    if _is_peft_config(config):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise AdapterError(
            f"{where}: expected the fields of adapter_config.json or a PEFT LoraConfig, "
            f"found {type(config).__name__}"
        )
    return {key: _plain(value) for key, value in config.items()}


def lora_tensors(state_dict: Mapping[str, Tensor], shape: ModelShape, where: str) -> dict[str, Tensor]:
    """The adapter's tensors of a state dict, possibly of the whole PEFT model.

    Leaves out base weights, as PEFT does.  Raises AdapterError for resized embeddings.
    """
    wrapped = any(
        ".base_layer." in key and not EMBEDDING.fullmatch(key) and not _is_trained(key) for key in state_dict
    )
    if not wrapped:
        return dict(state_dict)
    for key, tensor in state_dict.items():
        if EMBEDDING.fullmatch(key) and tensor.shape[0] != shape.vocab_size:
            raise resized(key, tensor, shape, where)
    return {
        key: tensor
        for key, tensor in state_dict.items()
        if _is_trained(key) or not _BASE_WEIGHT.match(without_wrappers(key))
    }


def _is_trained(key: str) -> bool:
    return any(mark in key for mark in _TRAINED)


def _is_peft_config(value: Any) -> bool:
    return hasattr(value, "peft_type") and callable(getattr(value, "to_dict", None))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
