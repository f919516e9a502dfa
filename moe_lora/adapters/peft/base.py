# SPDX-License-Identifier: Apache-2.0
"""The base beside an adapter.  Torch-free."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from moe_lora.core.errors import MAX_REASON_CHARS, AdapterError, StorageError, cut, shown
from moe_lora.core.shape import ModelShape
from moe_lora.core.wrong_files import (
    TensorEntry,
    confined,
    header_entries,
    indexed,
    open_file,
    pointer_problem,
    read_config,
    weight_files,
)
from moe_lora.families import family_of, model_spec, shape_of
from moe_lora.families.schema.config_json import TEXT_SECTIONS, text_config
from moe_lora.families.schema.family import Place

from .config import AdapterConfig
from .files import MAX_CONFIG_BYTES
from .places import FLOATS, Shaped, no_floats

_SAME_BASE = (
    *("family", "num_layers", "hidden_size", "intermediate_size", "num_experts"),
    *("num_heads", "num_kv_heads", "head_dim", "shared_size", "dense_size", "dense_layers", "mla"),
    "global_heads",
)
_QUANTISED_NAME = re.compile(
    r"(?<![a-z])(?:(?:bnb-)?[48]-?bit|awq|gptq|gguf|(?:nv|mx)fp4|fp8|int[48]|w[48]a(?:16|8))(?![a-z0-9])",
    re.IGNORECASE,
)

Stored: TypeAlias = tuple[Path, TensorEntry]
"""A checkpoint's tensor: file and entry."""
EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|lm_head)\.(?:weight|base_layer\.(?:weight|bias))")
_LORA_ON_EMBEDDING = re.compile(r"(?:^|\.)(embed_tokens|wte|lm_head)\.(?:.*\.)?lora_")


def read_base(config: AdapterConfig, root: str | None, shape: ModelShape) -> dict[str, Any] | None:
    """config.json of the base model; None if absent here, or outside `root`.  Raises AdapterError."""
    path = os.path.join(config.base_model, "config.json")
    if not config.base_model or not confined(path, root) or not os.path.isfile(path):
        return None
    try:
        with open_file(Path(path), "config.json", root) as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise ValueError(f"config.json is larger than {MAX_CONFIG_BYTES} bytes")
        try:
            found = json.loads(text.decode())
        except ValueError as error:
            raise ValueError(pointer_problem(Path("config.json"), text) or str(error)) from error
        if not isinstance(found, dict):
            raise ValueError(f"config.json must be a JSON object, found {type(found).__name__}")
    except (ValueError, OSError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise _not_comparable(config, error) from error
    _check_base(config, found, shape)
    return found


def _check_base(config: AdapterConfig, base: Mapping[str, Any], shape: ModelShape) -> None:
    try:
        theirs = shape_of(base)
    except ValueError as error:
        raise _not_comparable(config, error) from error
    for field in _SAME_BASE:
        if getattr(theirs, field) != getattr(shape, field):
            raise AdapterError(
                f"{_key(config)} has {field}={cut(str(getattr(theirs, field)))}, the base model served has "
                f"{getattr(shape, field)}; serve the adapter with the base it was trained for"
            )


def quantised_base(config: AdapterConfig, base: Mapping[str, Any] | None) -> Iterator[str]:
    """Warnings for a base with quantised weights, by name or config."""
    named = _QUANTISED_NAME.search(os.path.basename(config.base_model.rstrip("/")))
    kind = named and named[0]
    config_of_base = base or {}
    if not config_of_base.keys().isdisjoint(TEXT_SECTIONS):
        config_of_base = text_config(config_of_base)
    section = config_of_base.get("quantization_config")
    if isinstance(section, Mapping) and isinstance(found := section.get("quant_method"), str):
        kind = cut(found)
    if kind is not None:
        yield (
            f"{_key(config)} says that it was trained beside weights quantised as {kind}; beside a base that "
            "is held otherwise its answers are not quite those of its training"
        )


def base_copies(tensors: Mapping[str, Shaped], shape: ModelShape, where: str) -> tuple[str, ...]:
    """Keys of base weights saved by PEFT beside a LoRA pair on the embedding or the head.

    Raises AdapterError for other base embeddings.
    """
    copies = tuple(sorted(key for key in tensors if EMBEDDING.fullmatch(key)))
    adapted = {found[1] for key in tensors if (found := _LORA_ON_EMBEDDING.search(key))}
    for key in copies:
        if tuple(tensors[key].shape)[:1] != (shape.vocab_size,):
            raise resized(key, tensors[key], shape, where)
        expected = [shape.vocab_size, shape.hidden_size][: 1 if key.endswith(".bias") else 2]
        if list(tensors[key].shape) != expected:
            raise AdapterError(
                f"{where}: {key}: expected shape {expected}, found {list(tensors[key].shape)}; serve the "
                "adapter with the base it was trained for"
            )
        if str(tensors[key].dtype) not in FLOATS:
            raise no_floats(key, tensors[key], where)
        [leaf] = {"embed_tokens", "wte", "lm_head"} & set(key.split("."))
        if leaf not in adapted:
            raise AdapterError(
                f"{where}: {key}: the base model's own embeddings, which PEFT adds with "
                "save_embedding_layers; they may have been trained, and an adapter that replaces base "
                "weights is not supported; if they were not, save the adapter again with "
                "save_pretrained(..., save_embedding_layers=False)"
            )
    return copies


def base_tensor(site: str, model_dir: Path | None, problem: str, way_out: str, bias: bool = False) -> Stored:
    """File and entry of a checkpoint's embedding or head: [V, H] of floats; bias: the head's, [V].

    site: "embedding" or "head"; a tied head is the embedding.  problem, way_out: start and end of the error.
    Raises AdapterError; StorageError as `base_file`.
    """
    try:
        if model_dir is None:
            raise ValueError("the served base model has no checkpoint")
        config, places = read_config(model_dir), _files_by_name(model_dir)
        spec = model_spec(config, places)
        family = family_of(config).named_in(places, spec.tie_word_embeddings)
        name = family.head if site == "head" and not spec.tie_word_embeddings else family.embedding
        name = name.removesuffix("weight") + "bias" if bias else name
        if name not in places:
            module = name.removesuffix("weight")
            stored = [one for one in sorted(places) if one.startswith(module)]
            raise ValueError(f"the checkpoint has no {name}{f', but {stored[0]}' if stored else ''}")
        entry = _header(places[name])[name]
        expected = (spec.shape.vocab_size, spec.shape.hidden_size)[: 2 - bias]
        if entry.dtype not in FLOATS or entry.shape != expected:
            raise _unlike(name, entry, expected)
    except (OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{problem} ({error}): {way_out}") from error
    return places[name], entry


def base_modules(
    modules: Iterable[tuple[int, Place, tuple[int, int]]],
    model_dir: Path | None,
    problem: str,
    way_out: str,
) -> Iterator[tuple[Stored, Stored | None]]:
    """Weight and bias, if any, of a checkpoint's linear layers.

    modules: layer, place, weight's shape.  Otherwise as `base_tensor`.
    """
    header = cache(_header)
    try:
        if model_dir is None:
            raise ValueError("the served base model has no checkpoint")
        places = _files_by_name(model_dir)
        family = family_of(read_config(model_dir)).named_in(places)

        def stored(name: str, shape: tuple[int, ...]) -> Stored:
            entry = header(places[name])[name]
            if entry.dtype not in FLOATS or entry.shape != shape:
                raise _unlike(name, entry, shape)
            return places[name], entry

        for layer, place, shape in modules:
            front = f"{family.stack}.{layer}."
            if front + place.key not in places:
                raise ValueError(f"the checkpoint has no {front}{place.key}")
            bias = front + place.bias_key
            yield stored(front + place.key, shape), stored(bias, shape[:1]) if bias in places else None
    except (OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{problem} ({error}): {way_out}") from error


def _unlike(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{name} of the checkpoint is {entry.dtype.removeprefix('torch.')} {list(entry.shape)}, and "
        f"not float32, bfloat16 or float16 {list(shape)}"
    )


@contextmanager
def base_file(path: Path) -> Iterator[BinaryIO]:
    """An open file of the base's checkpoint.  Raises StorageError if unreadable: no adapter's fault."""
    try:
        with _opened(path) as file:
            yield file
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise broken_base(path, error.strerror) from error


def _opened(path: Path) -> BinaryIO:
    try:
        return open_file(path, path.name)
    except AdapterError as error:
        raise broken_base(path, error) from error


def broken_base(path: Path, problem: object) -> StorageError:
    """The error for an unreadable checkpoint file."""
    return StorageError(
        f"the base model's {path.name} can't be read ({problem}); this is no fault of the adapter: download "
        "the base model again"
    )


def _header(path: Path) -> dict[str, TensorEntry]:
    with base_file(path) as file:
        try:
            return header_entries(file, path.name)
        except AdapterError as error:
            raise broken_base(path, error) from error


def _files_by_name(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> file of the checkpoint."""
    return indexed(model_dir) or {name: path for path in weight_files(model_dir) for name in _header(path)}


def resized(key: str, tensor: Shaped, shape: ModelShape, where: str) -> AdapterError:
    """The error for a base embedding of another vocabulary."""
    return AdapterError(
        f"{where}: {key}: shape {list(tensor.shape)}, the base model's vocabulary has {shape.vocab_size} "
        "tokens: it was resized for training, and an adapter that replaces the base's embeddings is not "
        "supported; train without new tokens, or save the resized base model, and train and serve on that"
    )


def one_place(key: str, other: str, where: str) -> AdapterError:
    """The error for two tensors of one module."""
    return AdapterError(
        f"{where}: {key} and {other} have one place in the model; keep the tensor that belongs to the "
        "adapter, and remove the other"
    )


def _key(config: AdapterConfig) -> str:
    return f"{config.where}: base_model_name_or_path={shown(config.base_model, MAX_REASON_CHARS)}"


def _not_comparable(config: AdapterConfig, error: Exception) -> AdapterError:
    why = cut(str(error), MAX_REASON_CHARS)
    return AdapterError(f"{_key(config)} is not a model that can be compared with the base ({why})")
