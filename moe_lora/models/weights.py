# SPDX-License-Identifier: Apache-2.0
"""The checkpoint tensors of each parameter, by the family's names.

Legend: E experts, F inner size of an expert or a dense MLP, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.core.attention_shapes import LATENT_SITES, MlaShape
from moe_lora.core.errors import ConfigError
from moe_lora.core.shape import ModelShape
from moe_lora.families import family_named
from moe_lora.families.schema.family import Family, ModelSpec, Place, of_all_experts

from .stored_weight import Scheme, StoredWeight, mxfp4

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .random_weights import RandomCheckpoint

UNREAD = ("rotary_emb.inv_freq", ".activation_scale")  # buffers of old checkpoints, scales of inputs
NUM_NAMED = 5
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor and its part of a model parameter.

    `index` addresses the parameter; `transform` maps the tensors of `keys` to that part's shape, if possible
    as a view.  is_stacked: has a matrix for each expert.
    """

    key: str
    index: tuple[Any, ...] = ()
    transform: Callable[..., torch.Tensor | StoredWeight] | None = None
    extra_keys: tuple[str, ...] = ()
    is_stacked: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The piece's checkpoint tensors."""
        return self.key, *self.extra_keys


@dataclass(frozen=True)
class HeadRows:
    """kv_b_proj [heads * (K + V), latent] as [heads, latent, K] or [heads, V, latent].

    read: makes a quantised matrix; None: a plain tensor.
    """

    sizes: MlaShape
    of_v: bool
    read: Callable[..., StoredWeight] | None = None

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        weight = tensors[0]
        if self.read is not None:
            stored = self.read(*tensors)
            stored.check()
            weight = stored.dequantised(slice(0, stored.shape[0]), torch.float32)
        num_rows = self.sizes.nope_dim + self.sizes.v_dim
        if weight.dim() != 2 or len(weight) % num_rows:
            return weight  # for the loader's error
        heads = weight.unflatten(0, (-1, num_rows))
        return heads[:, self.sizes.nope_dim :] if self.of_v else heads[:, : self.sizes.nope_dim].mT


WeightMap = dict[str, list[Piece]]
"""Model parameter name -> its checkpoint tensors."""


SITES = {
    "qkv": "attention.qkv",
    "o": "attention.o",
    "output_gate": "attention.gate",
    "router": "mlp.gate",
    "gate_up": "mlp.gate_up",
    "down": "mlp.down",
    "shared_gate_up": "mlp.shared.gate_up",
    "shared_down": "mlp.shared.down",
    "shared_gate": "mlp.shared_gate",
    "dense_gate_up": "mlp.gate_up",
    "dense_down": "mlp.down",
    "q": "attention.q",
    "q_a": "attention.q_a",
    "q_b": "attention.q_b",
    "kv_a": "attention.kv_a",
    "latent_k": "attention.latent_k",
    "latent_v": "attention.latent_v",
    "global_qkv": "attention.qkv",
    "global_qk": "attention.qkv",
    "global_o": "attention.o",
    "delta_qkvz": "attention.qkvz",
    "delta_ba": "attention.ba",
    "delta_out": "attention.out",
}
"""Module of a layer for each LoRA site."""


def weight_map(spec: ModelSpec, checkpoint: Container[str]) -> WeightMap:
    """Pieces of every parameter.  checkpoint: tensor names, for the form of the MLP."""

    def form(family: Family, prefix: str) -> tuple[Place, ...]:
        for places in family.mlp:
            weights = (place.of(0) for place in places if place.site != "router")
            if any(prefix + place.key in checkpoint for place in weights):
                return places
        return family.mlp[-1]

    return _mapped(spec, form, checkpoint)


def linear_weight_map(spec: ModelSpec) -> WeightMap:
    """As `weight_map`, for checkpoints of linear-layer quantisers."""

    def form(family: Family, prefix: str) -> tuple[Place, ...]:
        return next(places for places in family.mlp if all(place.form == "matrix" for place in places))

    return _mapped(spec, form)


def _mapped(
    spec: ModelSpec, form: Callable[[Family, str], tuple[Place, ...]], checkpoint: Container[str] = ()
) -> WeightMap:
    family = family_named(spec.shape.family).named_in(checkpoint, spec.tie_word_embeddings)
    norm = _plus_one if spec.norm_offset else None
    weights: WeightMap = {
        "embedding": [Piece(family.embedding)],
        "norm.weight": [Piece(family.norm, transform=norm)],
    }
    if spec.norm_bias:
        weights["norm.bias"] = [Piece(_bias_of(family.norm))]
    if spec.head_bias:
        weights["head_bias"] = [Piece(_bias_of(family.head))]
    if not spec.tie_word_embeddings:
        weights["head"] = [Piece(family.head)]
    for layer in range(spec.shape.num_layers):
        prefix, ours = f"{family.stack}.{layer}.", f"layers.{layer}"
        for name, key in family.tensors.items():
            if _has_tensor(spec, layer, name):
                older = prefix + family.older_tensors.get(name, key)
                found = older if older in checkpoint else prefix + key
                offset = _plus_one if spec.norm_offset and name.endswith("norm.weight") else None
                made = torch.flatten if name in family.older_tensors else offset  # older files have one row
                weights[f"{ours}.{name}"] = [Piece(found, transform=made)]
        for name, key in family.recurrent_tensors.items() if spec.shape.is_recurrent(layer) else ():
            weights[f"{ours}.{name}"] = [Piece(prefix + key, transform=_SHAPED.get(name))]
        places = (*family.attention, *family.beside, *form(family, prefix))
        held = (place for place in places if spec.shape.has_site(layer, place.site))
        for place in of_all_experts(held, spec.shape.num_experts):
            name = f"{ours}.{SITES[place.site]}"
            if place.form == "heads":
                weights |= _heads(spec.shape, ours, prefix + place.key)
                continue
            weights.setdefault(f"{name}.weight", []).extend(_weights(spec.shape, place, prefix))
            if _has_bias(spec, place.site):
                weights.setdefault(f"{name}.bias", []).extend(_biases(spec.shape, place, prefix))
    return weights


def _heads(shape: ModelShape, ours: str, key: str) -> WeightMap:
    assert shape.mla is not None
    return {
        f"{ours}.{SITES[site]}.weight": [Piece(key, transform=HeadRows(shape.mla, site == "latent_v"))]
        for site in LATENT_SITES
    }


def _has_tensor(spec: ModelSpec, layer: int, name: str) -> bool:
    if name.startswith("mlp."):
        return layer not in spec.shape.dense_layers
    if name.startswith("attention.q_a_norm"):
        return spec.shape.has_site(layer, "q_a")
    if name.startswith(("attention.q_norm", "attention.k_norm")):
        return spec.qk_norm and not spec.shape.is_recurrent(layer)
    return True


def _plus_one(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() + 1


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """A depthwise convolution [C, 1, W] as [C, W]."""
    return weight.squeeze(1)


_SHAPED = {"attention.conv": _rows}
AS_STORED = (_plus_one, _rows)


def is_as_stored(piece: Piece) -> bool:
    """True if a new checkpoint keeps the form."""
    return piece.transform in AS_STORED or isinstance(piece.transform, HeadRows)


def _bias_of(key: str) -> str:
    return f"{key.removesuffix('weight')}bias"


def stored_pieces(weights: WeightMap, scheme: Scheme, tensors: Container[str], num_experts: int) -> WeightMap:
    """The map with quantised tensors read by the scheme, a matrix per expert.

    Raises ConfigError for a transposed or interleaved weight.
    """
    return {
        name: [made for piece in pieces for made in _stored(piece, scheme, tensors, num_experts)]
        for name, pieces in weights.items()
    }


def _stored(piece: Piece, scheme: Scheme, tensors: Container[str], num_experts: int) -> Iterable[Piece]:
    if not scheme.present(piece.key, tensors):
        return [piece]
    if isinstance(piece.transform, HeadRows):
        (key, *others), make = scheme.read(piece.key, tensors)
        return [Piece(key, (), replace(piece.transform, read=make), tuple(others))]
    if piece.transform is not None:
        raise ConfigError(
            f"{piece.key} is quantised by {scheme.name}, but its scales do not lie along the inputs of a "
            "layer; leave these experts unquantised, or save the checkpoint in bfloat16 and give quantize=..."
        )
    (key, *others), make = scheme.read(piece.key, tensors)
    if piece.is_stacked:

        def of_expert(expert: int, *stacked: torch.Tensor) -> StoredWeight:
            return make(*(tensor[expert] for tensor in stacked))

        return [Piece(key, (e,), partial(of_expert, e), tuple(others)) for e in range(num_experts)]
    return [Piece(key, piece.index, make, tuple(others))]


def _has_bias(spec: ModelSpec, site: str) -> bool:
    in_attention = spec.attention_bias
    biases = {"qkv": in_attention or spec.qkv_bias, "o": in_attention, "router": spec.gate_bias}
    biases |= {"q_a": in_attention, "kv_a": in_attention}
    biases |= dict.fromkeys(("shared_gate", "output_gate", "q", "q_b"), False)
    return biases.get(site, spec.mlp_bias)


def _weights(shape: ModelShape, place: Place, prefix: str) -> Iterator[Piece]:
    key = prefix + place.key
    if place.form == "mxfp4":
        scales = (f"{key.removesuffix('_blocks')}_scales",)
        for expert in range(shape.num_experts):
            for rows, stored in _parts(shape, place):
                yield Piece(key, (expert, *rows), partial(_mxfp4, expert, stored), scales)
        return
    for rows, stored in _parts(shape, place):
        match place.form:
            case "matrix":
                yield Piece(key, (*_expert(place), *rows))
            case "fused" if place.transposed is None:
                yield Piece(key, transform=partial(_by_shape, shape.site(place.site).in_features))
            case "fused" if place.interleaved or place.transposed:
                transform = partial(_fused, stored, bool(place.transposed))
                yield Piece(key, (slice(None), *rows) if rows else (), transform)
            case "fused":
                yield Piece(key, is_stacked=True)
            case "rows":
                transform = partial(_by_expert, shape.num_experts, place.site == "down")
                yield Piece(key, (slice(None), *rows) if rows else (), transform)


def _biases(shape: ModelShape, place: Place, prefix: str) -> Iterator[Piece]:
    key = prefix + place.bias_key
    if place.form == "matrix":
        for rows, _ in _parts(shape, place):
            yield Piece(key, (*_expert(place), *rows))
    elif not place.interleaved:
        yield Piece(key)
    else:
        for rows, stored in _parts(shape, place):
            yield Piece(key, (slice(None), *rows), partial(_fused, stored, False))


def _parts(shape: ModelShape, place: Place) -> Iterator[tuple[tuple[slice, ...], slice]]:
    """For each stored part: rows in the parameter, () for all; and outputs in the tensor."""
    site, num_modules = shape.site(place.site), len(place.modules)
    if num_modules == len(site.modules) and not place.interleaved:
        yield (), slice(None)
        return
    for i, module in enumerate(place.modules):
        first = site.columns[module]
        rows = slice(first, first + site.out_features[module])
        yield (rows,), slice(i, None, num_modules) if place.interleaved else slice(None)


def _expert(place: Place) -> tuple[int, ...]:
    return () if place.expert is None else (place.expert,)


def _mxfp4(expert: int, stored: slice, blocks: torch.Tensor, scales: torch.Tensor) -> StoredWeight:
    return mxfp4(blocks[expert, stored], scales[expert, stored])


def _fused(stored: slice, transposed: bool, tensor: torch.Tensor) -> torch.Tensor:
    """Some outputs of [E, in, out] as [E, out, in], or of a bias [E, out]."""
    return _transposed(tensor[..., stored]) if transposed else tensor[..., stored]


def _by_shape(in_features: int, tensor: torch.Tensor) -> torch.Tensor:
    """[E, out, in], or [E, in, out] transposed."""
    return tensor if tensor.shape[-1] == in_features else _transposed(tensor)


def _by_expert(num_experts: int, is_down: bool, stacked: torch.Tensor) -> torch.Tensor:
    """[E*F, H] -> [E, F, H], of down [E, H, F].  Other shapes stay, for the loader's error."""
    inner, rest = divmod(stacked.shape[0], num_experts)
    by_expert = stacked if rest else stacked.view(num_experts, inner, *stacked.shape[1:])
    return _transposed(by_expert) if is_down else by_expert


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """A vector stays, for the loader's error."""
    return tensor.mT if tensor.dim() > 1 else tensor


def refuse_unexpected(spec: ModelSpec, checkpoint: Checkpoint | RandomCheckpoint, weights: WeightMap) -> None:
    """Raise ConfigError for unused checkpoint tensors.

    A tied head may be there, equal to the embedding.
    """
    used = {key for pieces in weights.values() for piece in pieces for key in piece.keys}
    left = [key for key in checkpoint if key not in used and not key.endswith(UNREAD)]
    head = family_named(spec.shape.family).named_in(checkpoint).head
    if spec.tie_word_embeddings and head in left:
        one, other = checkpoint[head], checkpoint[weights["embedding"][0].key]
        if one.dtype == other.dtype and torch.equal(one, other):
            left.remove(head)
    plain = {key: key.replace("language_model.", "", 1) for key in left}
    unexpected = sorted(key for key in left if not plain[key].startswith(spec.unused))
    if len(unexpected) < len(left):
        kinds = [one for one in spec.unused if any(name.startswith(one) for name in plain.values())]
        logger.info(
            "%d tensors of the checkpoint are not read: multi-token prediction or vision (%s)",
            *(len(left) - len(unexpected), ", ".join(kinds)),
        )
    if head in unexpected and spec.tie_word_embeddings:
        raise ConfigError(
            f"the checkpoint in {checkpoint.model_dir} has a {head} that is not its embedding, and "
            "config.json has tie_word_embeddings=true; set it to false, as text_config.tie_word_embeddings"
        )
    unexpected = [key for key in unexpected if checkpoint[key].numel()]  # not of no shared experts
    if unexpected:
        named = ", ".join(unexpected[:NUM_NAMED])
        raise ConfigError(
            f"the checkpoint in {checkpoint.model_dir} has {len(unexpected)} tensors that "
            f"{spec.shape.family} as config.json describes it does not use: {named}"
            f"{', ...' if len(unexpected) > NUM_NAMED else ''}; the model would compute something else"
        )
