"""From a checkpoint directory (config.json, safetensors) to a model with its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape

from .causal_lm import CausalLM, ExpertLinear
from .spec import ModelSpec

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
RECOMPUTED = "rotary_emb.inv_freq"  # buffers that old checkpoints keep; config.json says the same
NUM_NAMED = 5  # unexpected tensors that an error message names


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and the part of a model parameter that it fills.

    `index` addresses the parameter (slices and expert numbers); `transform` maps the checkpoint's tensor
    (and those of `extra_keys`) to that part's shape, as a view where it can.
    """

    key: str
    index: tuple[Any, ...] = ()
    transform: Callable[..., torch.Tensor] | None = None
    extra_keys: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All checkpoint tensors that it reads."""
        return self.key, *self.extra_keys


WeightMap = dict[str, list[Piece]]
"""Model parameter name -> the checkpoint tensors it is made of."""


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

    def __contains__(self, key: str) -> bool:
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


def fill(model: CausalLM, checkpoint: Checkpoint, weights: WeightMap) -> None:
    """Copy the checkpoint into the model's parameters, converting to their dtype.

    Each value is copied once, from the mapped file into place; experts that the model does not hold are not
    read.  Raises ConfigError naming the tensor if one is missing, has another shape than the model needs, or
    has no place in the model.
    """
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
    _refuse_unexpected(model, checkpoint, weights)
    per_expert = _per_expert_parameters(model)
    for name, parameter in parameters.items():
        for piece in weights[name]:
            if name not in per_expert:
                _fill_piece(parameter.data, piece, checkpoint)
            elif piece.index and isinstance(piece.index[0], int):
                if piece.index[0] in model.experts:
                    index = (piece.index[0] - model.experts.start, *piece.index[1:])
                    _fill_piece(parameter.data, replace(piece, index=index), checkpoint)
            else:
                _fill_piece(parameter.data, piece, checkpoint, model.experts, model.spec.shape.num_experts)


def _per_expert_parameters(model: CausalLM) -> set[str]:
    """Names of the parameters whose first dim counts experts."""
    return {
        f"{name}.{kind}"
        for name, module in model.named_modules()
        if isinstance(module, ExpertLinear)
        for kind in ("weight", "bias")
    }


def _fill_piece(
    parameter: torch.Tensor,
    piece: Piece,
    checkpoint: Checkpoint,
    experts: range | None = None,
    num_experts: int = 0,
) -> None:
    """Copy one piece; of a tensor over all experts, the part of those in `experts`."""
    tensors = [checkpoint[key] for key in piece.keys]
    tensor = piece.transform(*tensors) if piece.transform else tensors[0]
    target = parameter[piece.index]
    wanted = target.shape if experts is None else (num_experts, *target.shape[1:])
    if tensor.shape != wanted:
        raise ConfigError(
            f"{piece.key} in {checkpoint.model_dir} has shape {tuple(tensors[0].shape)}, "
            f"giving {tuple(tensor.shape)} where config.json asks for {tuple(wanted)}"
        )
    target.copy_(tensor if experts is None else tensor[experts.start : experts.stop])


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


# Where the families' checkpoints keep the parameters of a layer stack (see `WeightMap`).
#
# Legend: E experts, F expert inner size, H hidden size.


def stem_weights(
    spec: ModelSpec, *, embedding: str = "model.embed_tokens.weight", norm: str = "model.norm.weight"
) -> WeightMap:
    """Embedding, last norm and head."""
    weights = {"embedding": [Piece(embedding)], "norm.weight": [Piece(norm)]}
    if not spec.tie_word_embeddings:
        weights["head"] = [Piece("lm_head.weight")]
    return weights


def attention_weights(spec: ModelSpec, layer: int) -> WeightMap:
    """Norms and attention of one layer, named alike in every family but DBRX."""
    source, target = f"model.layers.{layer}", f"layers.{layer}"
    site = spec.shape.site("qkv")
    weights: WeightMap = {
        f"{target}.attention_norm.weight": [Piece(f"{source}.input_layernorm.weight")],
        f"{target}.mlp_norm.weight": [Piece(f"{source}.post_attention_layernorm.weight")],
    }
    for kind in _kinds(spec.qkv_bias):
        weights[f"{target}.attention.qkv.{kind}"] = [
            Piece(f"{source}.self_attn.{name}_proj.{kind}", (slice(column, column + width),))
            for name, column, width in zip("qkv", site.columns, site.out_features, strict=True)
        ]
    for kind in _kinds(spec.o_bias):
        weights[f"{target}.attention.o.{kind}"] = [Piece(f"{source}.self_attn.o_proj.{kind}")]
    for name in ("q_norm", "k_norm") if spec.qk_norm else ():
        weights[f"{target}.attention.{name}.weight"] = [Piece(f"{source}.self_attn.{name}.weight")]
    if spec.sinks:
        weights[f"{target}.attention.sinks"] = [Piece(f"{source}.self_attn.sinks")]
    return weights


def dense_mlp_weights(spec: ModelSpec, layer: int) -> WeightMap:
    """Gate, up and down projections of a dense layer."""
    source, target = f"model.layers.{layer}.mlp", f"layers.{layer}.mlp"
    inner = spec.shape.intermediate_size
    weights: WeightMap = {}
    for kind in _kinds(spec.mlp_bias):
        weights[f"{target}.gate_up.{kind}"] = [
            Piece(f"{source}.gate_proj.{kind}", (slice(0, inner),)),
            Piece(f"{source}.up_proj.{kind}", (slice(inner, 2 * inner),)),
        ]
        weights[f"{target}.down.{kind}"] = [Piece(f"{source}.down_proj.{kind}")]
    return weights


def expert_weights(
    shape: ModelShape, layer: int, checkpoint: Checkpoint, module: str, names: tuple[str, str, str]
) -> WeightMap:
    """Gate and experts of one layer in either form that transformers writes.

    The older form keeps one matrix per expert under `module`, with `names` for gate, up and down; the fused
    form keeps `mlp.experts.gate_up_proj` [E, 2F, H] (gate rows first) and `mlp.experts.down_proj` [E, H, F].
    """
    fused, target = f"model.layers.{layer}.mlp", f"layers.{layer}.mlp"
    if f"{fused}.experts.gate_up_proj" in checkpoint:
        return {
            f"{target}.gate.weight": [Piece(f"{fused}.gate.weight")],
            f"{target}.gate_up.weight": [Piece(f"{fused}.experts.gate_up_proj")],
            f"{target}.down.weight": [Piece(f"{fused}.experts.down_proj")],
        }
    source, inner = f"model.layers.{layer}.{module}", shape.intermediate_size
    gate, up, down = names
    rows = ((gate, slice(0, inner)), (up, slice(inner, 2 * inner)))
    experts = range(shape.num_experts)
    return {
        f"{target}.gate.weight": [Piece(f"{source}.gate.weight")],
        f"{target}.gate_up.weight": [
            Piece(f"{source}.experts.{e}.{name}.weight", (e, part)) for e in experts for name, part in rows
        ],
        f"{target}.down.weight": [Piece(f"{source}.experts.{e}.{down}.weight", (e,)) for e in experts],
    }


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
