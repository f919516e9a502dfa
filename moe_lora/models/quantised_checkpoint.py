# SPDX-License-Identifier: Apache-2.0
"""Quantise a checkpoint's linear layers in compressed-tensors' format."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moe_lora.core.errors import ConfigError
from moe_lora.core.progress import Show
from moe_lora.core.wrong_files import INDEX_NAME, read_config
from moe_lora.families import family_named, model_spec
from moe_lora.families.schema.config_json import TEXT_SECTIONS, text_config
from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels import quantised
from moe_lora.kernels.quantised import Format

from .causal_lm import CausalLM
from .checkpoint import Checkpoint
from .linear import Fp32Linear, Fp32Vector
from .loader import linear_layers
from .quantised_weight import Quantisation, rows_at_once
from .weights import Piece, is_as_stored, linear_weight_map, refuse_unexpected, weight_map

SHARD_BYTES = 1 << 30
"""Size of a file, unless a tensor is larger: a file is buffered before its write."""
_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"),
    *(".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"),
)


@dataclass(frozen=True)
class _Part:
    """A tensor of the new checkpoint: in a format, or (form None) unchanged.

    whole: shape of the source.  index: part of the source.
    """

    key: str
    shape: tuple[int, ...]
    source: Piece
    whole: tuple[int, ...]
    index: tuple[Any, ...]
    form: Format | None
    is_fp32: bool = False

    def num_bytes(self, dtype: torch.dtype) -> int:
        size = torch.Size(self.shape).numel()
        if self.form is None:
            return size * (4 if self.is_fp32 else dtype.itemsize)
        scales = -(-self.shape[0] // self.form.row_group) * self.form.num_groups(self.shape[1])
        return size * self.form.bits // 8 + scales * self.form.dtypes(dtype)[1].itemsize


def quantise_checkpoint(
    model_dir: Path, out: Path, quantisation: Quantisation, dtype: torch.dtype, show: Show
) -> None:
    """Write a quantised checkpoint to `out`, a new folder, with the other files beside the weights.

    Values and scales equal those of loading in `dtype`.  Experts become separate layers.  Needs memory for
    two files of SHARD_BYTES; `out` appears once complete.

    Raises ConfigError for a quantised checkpoint, an existing or partial folder, an unfit weight, or a full
    disk.
    """
    config = read_config(model_dir)
    section = text_config(config).get("quantization_config")
    if section:
        raise ConfigError(
            f"{model_dir} is quantised already ({section.get('quant_method')!r}): its values would be "
            "rounded twice; serve it as it is, or begin with the checkpoint that it was made of"
        )
    begun = out.with_name(f".{out.name}.partial")
    if os.path.lexists(begun):
        raise ConfigError(f"{begun} is of a run that goes on or was killed; wait for it, or remove it")
    if os.path.lexists(out):
        raise ConfigError(f"{out} is there already; give a new folder, or remove it first")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder; make it first")
    checkpoint = Checkpoint(model_dir, config)
    parts = _parts(model_spec(config, checkpoint), checkpoint, quantisation)
    _check_room(out, sum(part.num_bytes(dtype) for part in parts))
    begun.mkdir()
    try:
        _write_weights(begun, parts, checkpoint, dtype, show)
        _copy_files(model_dir, begun)
        config |= _changes(config, parts, quantisation, dtype)
        (begun / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in begun.glob("*.safetensors"):
            shutil.copymode(begun / INDEX_NAME, path)  # safetensors creates files readable by the owner only
        begun.rename(out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out} can't be written: {error}; nothing is left of it") from error
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def _parts(spec: ModelSpec, checkpoint: Checkpoint, quantisation: Quantisation) -> list[_Part]:
    """All tensors of the new checkpoint."""
    with torch.device("meta"):
        model = CausalLM(spec)
    sources, written = weight_map(spec, checkpoint), linear_weight_map(spec)
    refuse_unexpected(spec, checkpoint, sources)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    held = {name for _, _, name in linear_layers(model)}
    kept = (Fp32Vector, Fp32Linear)
    in_fp32 = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kept)}
    if quantisation.head:
        held.add("head")
        written["head"] = [Piece(family_named(spec.shape.family).head)]
        sources.setdefault("head", sources["embedding"])
        shapes["head"] = shapes["embedding"]
    parts: list[_Part] = []
    pieces = {piece.key: (name, piece) for name, pieces in written.items() for piece in pieces}
    for name, piece in pieces.values():
        whole = torch.empty(shapes[name], device="meta")
        shape = tuple(whole[piece.index].shape)
        form = quantisation.form if name in held else None
        if form is not None and (refusal := form.refusal(shape[1])):
            raise ConfigError(
                f"{form.name} can't hold {piece.key} of shape {shape}: {refusal}; choose a group size that "
                "divides it, or int8"
            )
        source, index = _source(sources[name], piece.index)
        of_source = tuple(whole[source.index].shape)
        if is_as_stored(piece):
            source = replace(source, transform=None)
            shape = of_source = tuple(checkpoint[source.key].shape)
        parts.append(_Part(piece.key, shape, source, of_source, index, form, name in in_fp32))
    return parts


def _source(pieces: list[Piece], index: tuple[Any, ...]) -> tuple[Piece, tuple[Any, ...]]:
    """The piece behind an index of a parameter, and the place there."""
    for piece in pieces:
        if piece.index == index:
            return piece, ()
        if not piece.index:
            return piece, index
        if piece.index[0] == slice(None) and piece.index[1:] == index[1:]:
            return piece, index[:1]
    raise AssertionError(index)


def _check_room(out: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if num_bytes > free:
        raise ConfigError(
            f"{out} takes {num_bytes / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free on its disk; make "
            "room, or choose another place"
        )


def _write_weights(
    folder: Path, parts: list[_Part], checkpoint: Checkpoint, dtype: torch.dtype, show: Show
) -> None:
    total = sum(part.num_bytes(dtype) for part in parts)
    files: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    done = 0

    def flush() -> None:
        save_file(shard, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(shard))
        shard.clear()

    for part in parts:
        made = _tensors(part, checkpoint, dtype)
        if shard and sum(tensor.nbytes for tensor in (*shard.values(), *made.values())) > SHARD_BYTES:
            flush()
        shard |= made
        done += part.num_bytes(dtype)
        show(f"{done / 1e9:.3g} of {total / 1e9:.3g} GB written", done, total)
    flush()
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for number, name in enumerate(names):
        (folder / f"{number}.safetensors").rename(folder / name)
    places = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _tensors(part: _Part, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A part's tensors.  Raises ConfigError for a wrong shape or infinite values."""
    stored = checkpoint.tensor(part.source)
    assert isinstance(stored, torch.Tensor)
    where, form = f"{part.source.key} in {checkpoint.model_dir}", part.form
    if tuple(stored.shape) != part.whole:
        raise ConfigError(f"{where} gives {tuple(stored.shape)} where config.json asks for {part.whole}")
    weight = stored[part.index]
    if form is None:
        held_as = torch.float32 if part.is_fp32 else dtype
        return {part.key: weight.to(held_as).clone(memory_format=torch.contiguous_format)}
    made = [
        quantised.quantise(some.to(dtype).contiguous(), form)
        for some in weight.split(rows_at_once(weight.shape[1], form.row_group))
    ]
    scale = torch.cat([scale for _, scale in made])
    if not scale.isfinite().all():
        raise ConfigError(f"{where} can't be quantised: it holds values that are not finite")
    if form.name == "fp8":
        return {part.key: torch.cat([q for q, _ in made]), f"{part.key}_scale": scale}
    return {
        f"{part.key}_packed": torch.cat([_packed_fields(q, form.bits) for q, _ in made]),
        f"{part.key}_scale": scale,
        f"{part.key}_shape": torch.tensor(part.shape),
    }


def _copy_files(model_dir: Path, folder: Path) -> None:
    for path in model_dir.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name != "config.json":
            shutil.copy(path, folder / path.name)
        elif path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, folder / path.name)


def _changes(
    config: Mapping[str, Any], parts: list[_Part], quantisation: Quantisation, dtype: torch.dtype
) -> dict[str, Any]:
    form = quantisation.form
    assert form is not None
    in_blocks = form.row_group > 1
    kind = "float-quantized" if form.name == "fp8" else "pack-quantized"
    weights = {
        "num_bits": form.bits,
        "type": "float" if form.name == "fp8" else "int",
        "symmetric": True,
        "strategy": "block" if in_blocks else "group" if form.group_size else "channel",
        "group_size": None if in_blocks else form.group_size or None,
        "block_structure": [form.row_group, form.group_size] if in_blocks else None,
        "dynamic": False,
    }
    kept = [part.key.removesuffix(".weight") for part in parts if part.form is None and len(part.shape) == 2]
    if not quantisation.head and "lm_head" not in kept:
        kept.append("lm_head")  # tied: readers see a layer without a tensor
    section = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "format": kind, "weights": weights}},
        "ignore": kept,
    }
    return {"quantization_config": section, **_restated(config, quantisation, dtype)}


def _restated(config: Mapping[str, Any], quantisation: Quantisation, dtype: torch.dtype) -> dict[str, Any]:
    """Also in the sections of a language model."""
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
    stated: dict[str, Any] = dict.fromkeys(names, str(dtype).removeprefix("torch."))
    for section in TEXT_SECTIONS:
        if isinstance(part := config.get(section), Mapping):
            stated[section] = {**part, **_restated(part, quantisation, dtype)}
    return stated | ({"tie_word_embeddings": False} if quantisation.head else {})


def _packed_fields(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [R, K] as int32 [R, K * bits / 32], the last word padded."""
    codes = values.view(torch.uint8) + (1 << bits - 1)
    codes = torch.nn.functional.pad(codes, (0, -values.shape[1] % (32 // bits)))
    if bits == 4:
        low, high = codes.unflatten(1, (-1, 2)).unbind(2)
        codes = low | high << 4
    return codes.contiguous().view(torch.int32)
