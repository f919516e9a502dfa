# SPDX-License-Identifier: Apache-2.0
"""Where each family's checkpoints keep the parameters of the layer stack.

Legend: E experts, F inner size of an expert or a dense MLP, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moe_lora.core.errors import ConfigError

from .spec import ModelSpec
from .stored_weight import Scheme, StoredWeight, mxfp4


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and the part of a model parameter that it fills.

    `index` addresses the parameter (slices and expert numbers); `transform` maps the checkpoint's tensor
    (and those of `extra_keys`) to that part's shape, as a view where it can.
    """

    key: str
    index: tuple[Any, ...] = ()
    transform: Callable[..., torch.Tensor | StoredWeight] | None = None
    extra_keys: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All checkpoint tensors that it reads."""
        return self.key, *self.extra_keys


WeightMap = dict[str, list[Piece]]
"""Model parameter name -> the checkpoint tensors it is made of."""


def weight_map(spec: ModelSpec, checkpoint: Container[str]) -> WeightMap:
    """Every parameter's pieces.  checkpoint: names of its tensors, which tell in which form experts are."""
    embedding, norm, layers, layer_map = "model.embed_tokens", "model.norm", "model.layers", _layer
    if spec.shape.family == "dbrx":
        embedding, norm, layers = "transformer.wte", "transformer.norm_f", "transformer.blocks"
        layer_map = _dbrx_layer
    weights = {"embedding": [Piece(f"{embedding}.weight")], "norm.weight": [Piece(f"{norm}.weight")]}
    if not spec.tie_word_embeddings:
        weights["head"] = [Piece("lm_head.weight")]
    for layer in range(spec.shape.num_layers):
        for name, pieces in layer_map(spec, checkpoint, f"{layers}.{layer}").items():
            weights[f"layers.{layer}.{name}"] = pieces
    return weights


class _LinearExperts:
    """Names of a checkpoint in which each linear layer of an expert has a tensor of its own."""

    def __contains__(self, key: object) -> bool:
        return re.search(r"\.0\.(down_proj|w2)\.weight$", str(key)) is not None


def linear_weight_map(spec: ModelSpec) -> WeightMap:
    """As `weight_map`, of the form in which quantisers of linear layers write checkpoints."""
    return weight_map(spec, _LinearExperts())


def stored_pieces(weights: WeightMap, scheme: Scheme, tensors: Container[str], num_experts: int) -> WeightMap:
    """The same with what the scheme keeps quantised read as it says, a matrix of all experts as one each.

    tensors: names of the checkpoint's.  Raises ConfigError for a weight kept transposed or interleaved.
    """
    return {
        name: [made for piece in pieces for made in _stored(name, piece, scheme, tensors, num_experts)]
        for name, pieces in weights.items()
    }


def _stored(
    name: str, piece: Piece, scheme: Scheme, tensors: Container[str], num_experts: int
) -> Iterable[Piece]:
    if not scheme.present(piece.key, tensors):
        return [piece]
    if piece.transform is not None:
        raise ConfigError(
            f"{piece.key} is quantised by {scheme.name}, but its scales do not lie along the inputs of a "
            "layer; leave these experts unquantised, or save the checkpoint in bfloat16 and give quantize=..."
        )
    (key, *others), make = scheme.read(piece.key, tensors)
    if name.rpartition(".")[0].endswith(("mlp.gate_up", "mlp.down")) and num_experts and not piece.index:

        def of_expert(expert: int, *stacked: torch.Tensor) -> StoredWeight:
            return make(*(tensor[expert] for tensor in stacked))

        return [Piece(key, (e,), partial(of_expert, e), tuple(others)) for e in range(num_experts)]
    return [Piece(key, piece.index, make, tuple(others))]


def _layer(spec: ModelSpec, checkpoint: Container[str], source: str) -> WeightMap:
    """One layer of any family but DBRX."""
    attention, site = f"{source}.self_attn", spec.shape.site("qkv")
    weights = {
        "attention_norm.weight": [Piece(f"{source}.input_layernorm.weight")],
        "mlp_norm.weight": [Piece(f"{source}.post_attention_layernorm.weight")],
    }
    for kind in _kinds(spec.attention_bias):
        weights[f"attention.qkv.{kind}"] = [
            Piece(f"{attention}.{name}_proj.{kind}", (slice(column, column + width),))
            for name, column, width in zip("qkv", site.columns, site.out_features, strict=True)
        ]
        weights[f"attention.o.{kind}"] = [Piece(f"{attention}.o_proj.{kind}")]
    for name in (*("q_norm.weight", "k_norm.weight") * spec.qk_norm, *("sinks",) * spec.sinks):
        weights[f"attention.{name}"] = [Piece(f"{attention}.{name}")]
    return weights | _mlp(spec, checkpoint, source)


def _mlp(spec: ModelSpec, checkpoint: Container[str], source: str) -> WeightMap:
    """A layer's MLP in any form that transformers writes.

    Dense, or a matrix per expert as older versions keep them; or fused: `mlp.experts.gate_up_proj` [E, 2F, H]
    (gate rows first) and `mlp.experts.down_proj` [E, H, F].
    """
    family, mlp = spec.shape.family, f"{source}.mlp"
    if family == "gpt_oss":
        return _gpt_oss_mlp(spec, checkpoint, mlp)
    if family == "llama":
        return _matrices(spec, [(mlp, ())])
    if f"{mlp}.experts.gate_up_proj" in checkpoint:
        return {
            "mlp.gate.weight": [Piece(f"{mlp}.gate.weight")],
            "mlp.gate_up.weight": [Piece(f"{mlp}.experts.gate_up_proj")],
            "mlp.down.weight": [Piece(f"{mlp}.experts.down_proj")],
        }
    if family == "mixtral":
        mlp = f"{source}.block_sparse_moe"
    experts = _matrices(spec, [(f"{mlp}.experts.{e}", (e,)) for e in range(spec.shape.num_experts)])
    return {"mlp.gate.weight": [Piece(f"{mlp}.gate.weight")]} | experts


def _matrices(spec: ModelSpec, sources: Iterable[tuple[str, tuple[int, ...]]]) -> WeightMap:
    """Gate, up and down as matrices of their own under each (prefix, index into the parameter)."""
    names = {"mixtral": ("w1", "w3", "w2"), "dbrx": ("w1", "v1", "w2")}
    gate, up, down = names.get(spec.shape.family, ("gate_proj", "up_proj", "down_proj"))
    weights: WeightMap = {}
    for kind in _kinds(spec.mlp_bias):
        weights[f"mlp.gate_up.{kind}"] = [
            Piece(f"{prefix}.{name}.{kind}", (*index, rows))
            for prefix, index in sources
            for name, rows in zip((gate, up), _halves(spec), strict=True)
        ]
        weights[f"mlp.down.{kind}"] = [Piece(f"{prefix}.{down}.{kind}", index) for prefix, index in sources]
    return weights


def _dbrx_layer(spec: ModelSpec, checkpoint: Container[str], source: str) -> WeightMap:
    """w1, v1 and w2 are gate, up and (untransposed) down of all experts, one below the other.

    Or layers of each expert, as quantisers write them.
    """
    experts, inner = spec.shape.num_experts, spec.shape.intermediate_size
    attention, mlp = f"{source}.norm_attn_norm", f"{source}.ffn.experts.mlp"

    def per_expert(stacked: torch.Tensor) -> torch.Tensor:
        """[E*F, H] -> [E, F, H]; another number of rows stays as it is, for the loader to report."""
        return stacked.view(experts, inner, -1) if stacked.shape[0] == experts * inner else stacked

    weights = {
        "attention_norm.weight": [Piece(f"{attention}.norm_1.weight")],
        "mlp_norm.weight": [Piece(f"{attention}.norm_2.weight")],
        "attention.qkv.weight": [Piece(f"{attention}.attn.Wqkv.weight")],
        "attention.o.weight": [Piece(f"{attention}.attn.out_proj.weight")],
        "mlp.gate.weight": [Piece(f"{source}.ffn.router.layer.weight")],
    }
    if f"{mlp}.0.w2.weight" in checkpoint:
        return weights | _matrices(spec, [(f"{mlp}.{e}", (e,)) for e in range(experts)])
    return weights | {
        "mlp.gate_up.weight": [
            Piece(f"{mlp}.{name}", (slice(None), rows), per_expert)
            for name, rows in zip(("w1", "v1"), _halves(spec), strict=True)
        ],
        "mlp.down.weight": [Piece(f"{mlp}.w2", (), lambda stacked: per_expert(stacked).mT)],
    }


def _gpt_oss_mlp(spec: ModelSpec, checkpoint: Container[str], mlp: str) -> WeightMap:
    """Gate (even) and up (odd) interleaved; experts in floating point, [E, H, 2F] and [E, F, H], or in MXFP4.

    Those are blocks and scales of [E, 2F, H] and [E, H, F], of which each piece is a part of one expert's.
    Or layers of each expert, gate and up apart, as quantisers write them.
    """
    gate = {
        "mlp.gate.weight": [Piece(f"{mlp}.router.weight")],
        "mlp.gate.bias": [Piece(f"{mlp}.router.bias")],
    }
    if f"{mlp}.experts.0.down_proj.weight" in checkpoint:
        experts = range(spec.shape.num_experts)
        return gate | _matrices(spec, [(f"{mlp}.experts.{e}", (e,)) for e in experts])
    every = slice(None)
    halves = [(slice(first, None, 2), rows) for first, rows in enumerate(_halves(spec))]

    def quantised(key: str, expert: int, stored: slice, index: tuple[slice, ...]) -> Piece:
        def transform(blocks: torch.Tensor, scales: torch.Tensor) -> StoredWeight:
            return mxfp4(blocks[expert, stored], scales[expert, stored])

        return Piece(f"{key}_blocks", (expert, *index), transform, extra_keys=(f"{key}_scales",))

    def transposed(stored: slice, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., stored].mT

    def part(stored: slice, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., stored]

    gate_up, down = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
    if f"{gate_up}_blocks" in checkpoint:
        experts = range(spec.shape.num_experts)
        up_pieces = [quantised(gate_up, e, stored, (rows,)) for e in experts for stored, rows in halves]
        down_pieces = [quantised(down, e, every, ()) for e in experts]
    else:
        up_pieces = [Piece(gate_up, (every, rows), partial(transposed, stored)) for stored, rows in halves]
        down_pieces = [Piece(down, (), partial(transposed, every))]
    return gate | {
        "mlp.gate_up.weight": up_pieces,
        "mlp.down.weight": down_pieces,
        "mlp.gate_up.bias": [
            Piece(f"{gate_up}_bias", (every, rows), partial(part, stored)) for stored, rows in halves
        ],
        "mlp.down.bias": [Piece(f"{down}_bias")],
    }


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _halves(spec: ModelSpec) -> tuple[slice, slice]:
    """Rows of gate and of up in the fused parameter."""
    inner = spec.shape.intermediate_size
    return slice(0, inner), slice(inner, 2 * inner)
