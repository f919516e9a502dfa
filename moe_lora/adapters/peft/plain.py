# SPDX-License-Identifier: Apache-2.0
"""An adapter of any served form, written as PEFT writes one for the same model.

Gate and up with separate A get one A of both ranks, and a block-diagonal B.

Legend: E experts, R LoRA rank, I inputs, O outputs.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moe_lora.adapters.packed import Pair
from moe_lora.core.attention_shapes import LATENT_SITES
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from moe_lora.families import family_named
from moe_lora.families.schema.family import NAME_ORDERS, THINKER, Place

from .files import CONFIG_FILE, WEIGHTS_FILE
from .names import LANGUAGE_PARTS, without_wrappers

if TYPE_CHECKING:
    from moe_lora.families.schema.family import Family

_FRONT = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class PlainPair:
    """A pair by PEFT's names.  key: prefix of the tensors."""

    path: str
    key: str
    is_parameter: bool
    a: torch.Tensor
    b: torch.Tensor
    lora_rank: int
    scale: float
    parts: tuple[str, str] = ("lora_A.weight", "lora_B.weight")


@dataclass
class _Expert:
    """Matrices of an expert's module.  a: [R, I].  b: [R, O]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass
class _Layer:
    """A layer's pairs by (site, module), and by expert."""

    dense: dict[tuple[str, int], Pair] = field(default_factory=dict)
    experts: dict[tuple[str, int], dict[int, _Expert]] = field(default_factory=dict)


def family_by_names(layers: Sequence[Sequence[Pair]], shape: ModelShape) -> Family:
    """The family, with a multimodal class's names if the source has them."""
    family = family_named(shape.family)
    keys = [without_wrappers(pair.source).removeprefix(_FRONT) for pairs in layers for pair in pairs]
    for text, front in (*NAME_ORDERS, THINKER):
        named = family.named_in({family.norm.replace("model.", text, 1)})
        heads = [named.head.removesuffix("weight")] if front else []
        fronts = (f"{named.stack}.", named.embedding.removesuffix("weight"), *heads)
        if any(key.startswith(fronts) for key in keys):
            return named
    if other := [key for key in keys if not LANGUAGE_PARTS.isdisjoint(key.split("."))]:
        raise AdapterError(f"{other[0]}: this front can't be kept; name the tensors {_FRONT}{family.stack}.…")
    return family


def plain_pairs(layers: Sequence[Sequence[Pair]], family: Family, shape: ModelShape) -> list[PlainPair]:
    """The pairs of each layer (see `Match.layers`) by PEFT's names.  family: `family_by_names`."""
    found: list[PlainPair] = []
    for number, pairs in enumerate(layers):
        if number == shape.num_layers:
            found += (_outer_pair(pair, family) for pair in pairs)
            continue
        front = f"{family.stack}.{number}."
        layer = _sorted(pairs)
        found += _dense_pairs(layer, family, front)
        assert not layer.dense, f"some places of {family.title} are not written"
        found += _head_pairs(layer, family, front)
        found += _expert_pairs(layer, family, front, shape)
    return found


def without_initial(
    trained: Sequence[Sequence[Pair]], initial: Sequence[Sequence[Pair]], where: str
) -> list[list[Pair]]:
    """Pairs of B A - B0 A0, at the sum of both ranks: the delta to the base before its initial change.

    Source: PiSSA (arXiv 2404.02948), the conversion to LoRA.  Raises AdapterError.
    """
    if [[_place(pair) for pair in layer] for layer in trained] != [
        [_place(pair) for pair in layer] for layer in initial
    ]:
        raise AdapterError(
            f"{where}: adapts other modules than the trained adapter; give its initial adapter"
        )
    return [
        [_subtracted(*pairs) for pairs in zip(*layers, strict=True)]
        for layers in zip(trained, initial, strict=True)
    ]


def _place(pair: Pair) -> tuple[str, tuple[int, ...], range]:
    return pair.site.name, pair.modules, pair.experts


def _subtracted(pair: Pair, first: Pair) -> Pair:
    num = max(len(pair.shrink), len(first.shrink))
    shrinks = [one.shrink.expand(num, -1, -1) for one in (pair, first)]
    expands = []
    for b, b0 in zip(pair.expands, first.expands, strict=True):
        num = max(len(b), len(b0))
        parts = b.expand(num, -1, -1), b0.expand(num, -1, -1) * (-first.scale / pair.scale)
        expands.append(torch.cat(parts, dim=1))
    return replace(pair, shrink=torch.cat(shrinks, dim=1), expands=tuple(expands))


def write_plain(
    pairs: Sequence[PlainPair], folder: Path, kept: Mapping[str, Any], num_layers: int, stack: str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors.  Raises AdapterError for an unusable folder.

    kept: fields of the source's config.
    """
    if folder.exists() and any(folder.iterdir()):
        raise AdapterError(f"{folder}: is not empty; give a new folder")
    tensors = {}
    for pair in pairs:
        for part, tensor in zip(pair.parts, (pair.a, pair.b), strict=True):
            tensors[f"{_FRONT}{pair.key}.{part}"] = tensor.contiguous()
    fields = {**_config(pairs, num_layers, stack), **kept}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder.resolve(), ignore_errors=True)
        raise AdapterError(f"{folder} can't be written: {error}; nothing is left of it") from error


def _sorted(pairs: Iterable[Pair]) -> _Layer:
    layer = _Layer()
    for pair in pairs:
        for module, expand in zip(pair.modules, pair.expands, strict=True):
            place = pair.site.name, module
            if not pair.site.num_experts:
                layer.dense[place] = pair
                continue
            for index, expert in enumerate(pair.experts):
                a, b = (one[index if one.shape[0] > 1 else 0] for one in (pair.shrink, expand))
                layer.experts.setdefault(place, {})[expert] = _Expert(a, b, pair.scale)
    return layer


def _outer_pair(pair: Pair, family: Family) -> PlainPair:
    a, b = pair.shrink[0], pair.expands[0][0].t()
    if pair.site.name == "head":
        return _module_pair(family.head.removesuffix(".weight"), a, b, pair.scale)
    path = family.embedding.removesuffix(".weight")
    return _module_pair(path, a, b, pair.scale, ("lora_embedding_A", "lora_embedding_B"))


def _module_pair(
    path: str, a: torch.Tensor, b: torch.Tensor, scale: float, parts: tuple[str, str] | None = None
) -> PlainPair:
    fields: dict[str, Any] = {} if parts is None else {"parts": parts}
    return PlainPair(
        path=path, key=path, is_parameter=False, a=a, b=b, lora_rank=a.shape[0], scale=scale, **fields
    )


def _dense_pairs(layer: _Layer, family: Family, front: str) -> Iterable[PlainPair]:
    for place in (*family.attention, *family.adapted, *family.beside):
        pair = layer.dense.get((place.site, place.modules[0]))
        if pair is None or place.form != "matrix" or place.is_split:
            continue
        for module in place.modules:
            del layer.dense[place.site, module]
        blocks = [pair.expands[pair.modules.index(module)][0] for module in place.modules]
        a, b = pair.shrink[0], torch.cat(blocks, dim=1).t()
        is_parameter = place.optional_linear
        path = f"{front}{place.path}"
        yield PlainPair(
            path=f"{path}.{place.parameter}" if is_parameter else path,
            key=path,
            is_parameter=is_parameter,
            a=a,
            b=b,
            lora_rank=a.shape[0],
            scale=pair.scale,
        )


def _head_pairs(layer: _Layer, family: Family, front: str) -> Iterable[PlainPair]:
    """kv_b_proj of latent attention: one A if both sites share it, else A of both ranks."""
    if (LATENT_SITES[0], 0) not in layer.experts:
        return
    of_k, of_v = (layer.experts[site, 0] for site in LATENT_SITES)
    path = next(place.path for place in family.attention if place.form == "heads")
    blocks, num_k = [of_k[0].b, of_v[0].a], of_k[0].b.shape[0]
    rows = [row for head in range(len(of_k)) for row in (of_k[head].a.t(), of_v[head].b.t())]
    if torch.equal(*blocks):
        blocks = blocks[:1]
    else:
        rows[::2] = [torch.nn.functional.pad(row, (0, blocks[1].shape[0])) for row in rows[::2]]
        rows[1::2] = [torch.nn.functional.pad(row, (num_k, 0)) for row in rows[1::2]]
    yield _module_pair(f"{front}{path}", torch.cat(blocks), torch.cat(rows), of_k[0].scale)


def _expert_pairs(layer: _Layer, family: Family, front: str, shape: ModelShape) -> list[PlainPair]:
    """Nested parameters of one module: see `places`."""
    found: list[PlainPair] = []
    for place in reversed(family.adapted):
        if place.is_split or place.form not in ("fused", "rows"):
            continue
        if all((place.site, module) not in layer.experts for module in place.modules):
            continue
        modules = [layer.experts.get((place.site, module)) for module in place.modules]
        depth = sum(one.key.startswith(f"{front}{place.path}") for one in found)
        made = _fused(modules, place, shape) if place.form == "fused" else _rows(modules, place, shape)
        a, b, lora_rank, scale = made
        found.append(
            PlainPair(
                path=f"{front}{place.path}.{place.parameter}",
                key=f"{front}{place.path}{'.base_layer' * depth}",
                is_parameter=True,
                a=a,
                b=b,
                lora_rank=lora_rank,
                scale=scale,
            )
        )
    return found


_Made = tuple[torch.Tensor, torch.Tensor, int, float]


def _fused(modules: Sequence[Mapping[int, _Expert] | None], place: Place, shape: ModelShape) -> _Made:
    """A [E * R, I], expert-major, B [O, R * E], rank-major, R, and the scale."""
    scales = {one.scale for experts in modules if experts for one in experts.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    pairs = [_whole_expert(modules, expert, place, shape, scale) for expert in range(shape.num_experts)]
    lora_rank = max(a.shape[0] for a, _ in pairs)
    a_ERI = torch.stack([_padded(a, lora_rank) for a, _ in pairs])
    b_ERO = torch.stack([_padded(b, lora_rank) for _, b in pairs])
    b = b_ERO.permute(2, 1, 0).reshape(b_ERO.shape[2], -1)
    return a_ERI.reshape(-1, a_ERI.shape[2]), b, lora_rank, scale


def _whole_expert(
    modules: Sequence[Mapping[int, _Expert] | None],
    expert: int,
    place: Place,
    shape: ModelShape,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [R, I] and B [R, O] of one expert's whole parameter."""
    found = [None if experts is None else experts.get(expert) for experts in modules]
    widths = [shape.site(place.site).out_features[module] for module in place.modules]
    some = [one for one in found if one is not None]
    if not some:
        like = next(one for experts in modules if experts for one in experts.values())
        return like.a.new_zeros(1, like.a.shape[1]), like.b.new_zeros(1, sum(widths))
    is_common = all(torch.equal(one.a, some[0].a) for one in some)
    blocks = [some[0].a] if is_common else [one.a for one in some]
    a = torch.cat(blocks)
    b = a.new_zeros(a.shape[0], sum(widths))
    row = column = 0
    for number, (one, width) in enumerate(zip(found, widths, strict=True)):
        if one is not None:
            rows = slice(row, row + one.a.shape[0])
            columns = slice(number, None, len(widths)) if place.interleaved else slice(column, column + width)
            b[rows, columns] = one.b if one.scale == scale else one.b * (one.scale / scale)
            row += 0 if is_common else one.a.shape[0]
        column += width
    return a, b


def _padded(matrix: torch.Tensor, lora_rank: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, 0, lora_rank - matrix.shape[0]))


def _rows(modules: Sequence[Mapping[int, _Expert] | None], place: Place, shape: ModelShape) -> _Made:
    """A [R, H] of all experts, and B [E * F, R]; down is transposed: A and B change places."""
    assert modules[0] is not None, "the caller has found it"
    experts = [modules[0][expert] for expert in range(shape.num_experts)]
    is_down = place.site == "down"
    a = experts[0].b if is_down else experts[0].a
    b = torch.cat([(one.a if is_down else one.b).t() for one in experts])
    return a, b, a.shape[0], experts[0].scale


def _config(pairs: Sequence[PlainPair], num_layers: int, stack: str) -> dict[str, Any]:
    """adapter_config.json: the most frequent rank and scale, patterns for the rest."""
    (lora_rank, scale), _ = Counter((one.lora_rank, one.scale) for one in pairs).most_common(1)[0]
    others = [one for one in pairs if (one.lora_rank, one.scale) != (lora_rank, scale)]
    groups = {}
    for key, is_parameter in (("target_modules", False), ("target_parameters", True)):
        groups[key] = _names(
            [one.path for one in pairs if one.is_parameter == is_parameter], num_layers, stack
        )
    ranks, alphas = {}, {}
    for value in dict.fromkeys((one.lora_rank, one.scale) for one in others):
        paths = [one.path for one in others if (one.lora_rank, one.scale) == value]
        for name in _names(paths, num_layers, stack):
            pattern = name.replace(".", r"\.")
            ranks[pattern], alphas[pattern] = value[0], value[0] * value[1]
    return {
        "peft_type": "LORA",
        "peft_version": "0.19.0",
        "task_type": "CAUSAL_LM",
        "r": lora_rank,
        "lora_alpha": lora_rank * scale,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": groups["target_modules"],
        "target_parameters": groups["target_parameters"] or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


def _names(paths: Sequence[str], num_layers: int, stack: str) -> list[str]:
    """Names below the layer if every layer has one, else, and of a multimodal class, the whole path."""
    if stack.count(".") > 1:
        return sorted(paths)
    below: dict[str, list[str]] = {}
    for path in paths:
        rest = path.removeprefix(f"{stack}.").partition(".")[2] if path.startswith(f"{stack}.") else ""
        below.setdefault(rest or path, []).append(path)
    found: list[str] = []
    for rest, ones in below.items():
        found += [rest] if rest == ones[0] or len(ones) == num_layers else ones
    return sorted(found)
