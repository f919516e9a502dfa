"""From a checkpoint directory (config.json, safetensors) to a model with its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from moe_lora.core.errors import ConfigError
from moe_lora.core.hf_config import read_config
from moe_lora.kernels.cpu.library import advise_huge_pages

from .causal_lm import CausalLM, ExpertLinear, LoraLinear
from .quantised_weight import Quantisation, QuantisedWeight
from .spec import ModelSpec, model_spec
from .weights import Piece, WeightMap, weight_map

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
RECOMPUTED = "rotary_emb.inv_freq"  # buffers that old checkpoints keep; config.json says the same
NUM_NAMED = 5  # unexpected tensors that an error message names
Target = torch.Tensor | QuantisedWeight


def load_model(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    experts: range | None = None,
    quantisation: Quantisation | None = None,
) -> CausalLM:
    """Build the model of a checkpoint directory and load its weights.

    experts: those of each layer to load, None = all; the others' weights are neither allocated nor read.
    quantisation: what is quantised as it is read, a few rows at a time; None = nothing.
    """
    spec = model_spec(read_config(model_dir))
    model = _empty_model(spec, dtype, device, experts, quantisation)
    checkpoint = Checkpoint(model_dir)
    _fill(model, checkpoint, weight_map(spec, checkpoint))
    return model


def _empty_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    experts: range | None,
    quantisation: Quantisation | None,
) -> CausalLM:
    """A model whose weights are allocated but not filled."""
    with torch.device("meta"):
        model = CausalLM(spec, experts).to(dtype)
        if quantisation is not None:
            _quantise_weights(model, quantisation, device)
    model = model.to_empty(device=device)
    for weight in (*model.parameters(), *model.buffers()):
        advise_huge_pages(weight)
    frequencies = torch.tensor(spec.rope.inverse_frequencies, dtype=torch.float32, device=device)
    model.register_buffer("inverse_frequencies", frequencies, persistent=False)
    if spec.tie_word_embeddings and not isinstance(model.head, QuantisedWeight):
        model.head = model.embedding
    return model.eval()


def _quantise_weights(model: CausalLM, quantisation: Quantisation, device: torch.device) -> None:
    """Put a `QuantisedWeight` in the place of each parameter of a model without storage that gets one.

    Raises ConfigError for a device without kernels, and for a shape that the format can't hold.
    """
    form = quantisation.form
    if device.type != "cpu":
        raise ConfigError(
            f"quantize={form.name!r} runs on CPU only so far, not on {device.type}; use device='cpu' or "
            "quantize='none'"
        )

    def replace_weight(owner: nn.Module, attribute: str, name: str) -> None:
        weight = getattr(owner, attribute)
        try:
            held = QuantisedWeight(weight, form)
        except ValueError as error:
            raise ConfigError(
                f"quantize={form.name!r} can't hold {name} of shape {tuple(weight.shape)}: {error}; choose "
                "a group size that divides it, or int8"
            ) from error
        delattr(owner, attribute)  # a parameter's name takes no module
        setattr(owner, attribute, held)

    for name, module in list(model.named_modules()):
        if isinstance(module, (LoraLinear, ExpertLinear)) and not name.endswith("mlp.gate"):
            replace_weight(module, "weight", f"{name}.weight")
    if quantisation.head:
        replace_weight(model, "head", "head")


class Checkpoint:
    """Memory-mapped tensors of a checkpoint: one safetensors file or several with an index.

    Raises ConfigError for a missing or damaged file.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._files: dict[Path, Any] = {}
        index = model_dir / INDEX_NAME
        if index.exists():
            self._file_of = {key: model_dir / name for key, name in _read_index(index).items()}
        else:
            self._file_of = {key: path for path in self._without_index() for key in _names(self._open(path))}

    def _without_index(self) -> list[Path]:
        single = self.model_dir / SINGLE_NAME
        paths = [single] if single.exists() else sorted(self.model_dir.glob("*.safetensors"))
        if not paths:
            raise ConfigError(
                f"{self.model_dir} has no *.safetensors; convert the checkpoint with save_pretrained "
                "(pickled weights are not read)"
            )
        return paths

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            if not path.exists():
                raise ConfigError(f"{path} is named by {INDEX_NAME} but does not exist")
            try:
                self._files[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
        return self._files[path]

    def __contains__(self, key: object) -> bool:
        return key in self._file_of

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._file_of:
            raise ConfigError(f"the checkpoint in {self.model_dir} has no tensor {key!r}")
        path = self._file_of[key]
        try:
            return self._open(path).get_tensor(key)
        except SafetensorError as error:
            raise ConfigError(f"{path} does not hold {key!r}, which {INDEX_NAME} places there") from error

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._file_of)


def _names(file: Any) -> list[str]:
    return list(file.keys())


def _read_index(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not an index with a weight_map: {error!r}") from error


def _fill(model: CausalLM, checkpoint: Checkpoint, weights: WeightMap) -> None:
    """Copy the checkpoint into the model's parameters, converting to their dtype.

    Each value is copied once, from the mapped file into place; experts that the model does not hold are not
    read.  Raises ConfigError naming the tensor if one is missing, has another shape than the model needs, or
    has no place in the model.
    """
    targets: dict[str, Target] = {name: weight.data for name, weight in model.named_parameters()}
    targets |= {name: module for name, module in model.named_modules() if isinstance(module, QuantisedWeight)}
    if model.spec.tie_word_embeddings and "head" in targets:
        weights = weights | {"head": weights["embedding"]}
    assert targets.keys() == weights.keys(), targets.keys() ^ weights.keys()
    _refuse_unexpected(model, checkpoint, weights)
    per_expert = _per_expert_parameters(model)
    for name, target in targets.items():
        for piece in weights[name]:
            if name not in per_expert:
                _fill_piece(target, piece, checkpoint)
            elif piece.index and isinstance(piece.index[0], int):
                if piece.index[0] in model.experts:
                    index = (piece.index[0] - model.experts.start, *piece.index[1:])
                    _fill_piece(target, replace(piece, index=index), checkpoint)
            else:
                _fill_piece(target, piece, checkpoint, model.experts, model.spec.shape.num_experts)


def _per_expert_parameters(model: CausalLM) -> set[str]:
    """Names of the parameters whose first dim counts experts."""
    return {
        f"{name}.{kind}"
        for name, module in model.named_modules()
        if isinstance(module, ExpertLinear)
        for kind in ("weight", "bias")
    }


def _fill_piece(
    into: Target,
    piece: Piece,
    checkpoint: Checkpoint,
    experts: range | None = None,
    num_experts: int = 0,
) -> None:
    """Copy one piece; of a tensor over all experts, the part of those in `experts`."""
    tensors = [checkpoint[key] for key in piece.keys]
    tensor = piece.transform(*tensors) if piece.transform else tensors[0]
    part = torch.empty(into.shape, device="meta")[piece.index].shape
    wanted = part if experts is None else (num_experts, *part[1:])
    if tensor.shape != wanted:
        raise ConfigError(
            f"{piece.key} in {checkpoint.model_dir} has shape {tuple(tensors[0].shape)}, "
            f"giving {tuple(tensor.shape)} where config.json asks for {tuple(wanted)}"
        )
    if experts is not None:
        tensor = tensor[experts.start : experts.stop]
    if isinstance(into, torch.Tensor):
        into[piece.index].copy_(tensor)
        return
    try:
        into.fill(piece.index, tensor)
    except ValueError as error:
        raise ConfigError(f"{piece.key} in {checkpoint.model_dir} can't be quantised: {error}") from error


def _refuse_unexpected(model: CausalLM, checkpoint: Checkpoint, weights: WeightMap) -> None:
    used = {key for pieces in weights.values() for piece in pieces for key in piece.keys}
    if model.spec.tie_word_embeddings:
        used.add("lm_head.weight")
    unexpected = sorted(k for k in checkpoint if k not in used and not k.endswith(RECOMPUTED))
    if unexpected:
        named = ", ".join(unexpected[:NUM_NAMED])
        raise ConfigError(
            f"the checkpoint in {checkpoint.model_dir} has {len(unexpected)} tensors that "
            f"{model.spec.shape.family} as config.json describes it does not use: {named}"
            f"{', ...' if len(unexpected) > NUM_NAMED else ''}; the model would compute something else"
        )
