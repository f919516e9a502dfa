"""Matching the tensors of a PEFT file with its config and the model: nothing left over, nothing missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import MAX_CUDA_LORA_RANK, ModelShape

from .base import check_base, quantised_base
from .config import AdapterConfig, shown, suffixes
from .places import (
    STRANGERS,
    PairSource,
    Place,
    PlaceMap,
    Shaped,
    check_pair,
    is_swapped,
    max_tensors,
    place_map,
)
from .training_state import check_embeddings

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+?)(?P<nested>(?:\.base_layer)*)\.lora_(?P<part>[AB])(?:\.[^.]+)?\.weight"
)
_KNOWN_STRANGERS = (
    (r"lora_magnitude_vector", "DoRA is not supported; train with use_dora=false"),
    (r"lora_embedding_|embed_tokens|wte", "LoRA on embeddings is not supported; train without that target"),
    (r"lm_head", "LoRA on the output head is not supported; train without that target"),
    (r"\.bias$", "biases are not supported; train with bias='none' and lora_bias=false"),
    (
        r"modules_to_save",
        "an adapter that replaces base modules is not supported; train without modules_to_save",
    ),
)
_MAX_SHOWN_NAMES = 10


@dataclass(frozen=True)
class TensorName:
    """A LoRA tensor's key in parts: module path, nesting depth of its wrapper, "A" or "B"."""

    path: str
    depth: int
    part: str


@dataclass(frozen=True)
class Match:
    """layers: per layer the LoRA pairs of the file.  swapped: see `is_swapped`.  warnings: what of the config
    has no effect, and why."""

    layers: list[list[PairSource]]
    swapped: bool
    warnings: tuple[str, ...]


def match(
    tensors: Mapping[str, Shaped],
    config: AdapterConfig,
    shape: ModelShape,
    where: str,
    base: Mapping[str, Any] | None,
) -> Match:
    """The tensors of the file and their places in the model.

    base: what the config.json of the base model that the config names holds (see `read_base`).  A target name
    that matches nothing in the model is a warning, as in PEFT.  Raises AdapterError naming `where` and the
    key if a tensor has no place in the model or is not targeted by the config, has another shape than its
    place or is no float, if a targeted module has no tensors, or an A has no B.
    """
    check_base(config, base, shape)
    if len(tensors) > max_tensors(shape) + STRANGERS:
        raise AdapterError(
            f"{where}: {len(tensors)} tensors, an adapter of this base model has at most "
            f"{max_tensors(shape)}; serve it with the base it was trained for, and save one adapter only"
        )
    check_embeddings(tensors, shape, where)
    names = {key: _parse(key, where) for key in sorted(tensors)}
    if not names:
        raise AdapterError(f"{where}: holds no tensors, so the adapter would change nothing")
    old_mixtral = shape.family == "mixtral" and any(".block_sparse_moe." in n.path for n in names.values())
    places = place_map(shape, old_mixtral)
    expected = _expected(config, places, {name.path for name in names.values()})
    found: dict[tuple[str, int], dict[str, str]] = {}
    for key, name in names.items():
        _check_known(key, name, places, expected, config, shape, where)
        parts = found.setdefault((name.path, name.depth), {})
        if name.part in parts:
            raise AdapterError(
                f"{where}: {key} and {parts[name.part]} are one tensor of two adapters; give one adapter "
                "only, from a PEFT model by get_peft_model_state_dict(model, adapter_name=...)"
            )
        parts[name.part] = key
    layers: list[list[PairSource]] = [[] for _ in range(shape.num_layers)]
    for path, targeted in expected.items():
        for depth, place in enumerate(reversed(targeted)):
            source = _source(path, place, found.get((path, depth), {}), config, where)
            layers[places.by_path[path][0]].append(source)
    for layer in layers:
        _check_one_form(layer, where)
    sources = [source for layer in layers for source in layer]
    swapped = is_swapped(sources, tensors, shape)
    for source in sources:
        check_pair(source, tensors, shape, where, swapped)
    warnings = *_unmatched_names(config, expected), *quantised_base(config, base)
    return Match(layers, swapped, warnings)


def check_rank(found: Match, max_lora_rank: int | None, where: str) -> None:
    """Raise AdapterError if a LoRA pair has a rank above `max_lora_rank`.  None: no limit."""
    if max_lora_rank is None:
        return
    largest = max((source.lora_rank for layer in found.layers for source in layer), default=0)
    if largest > max_lora_rank:
        raise AdapterError(
            f"{where}: the LoRA rank {largest} is above max_lora_rank={max_lora_rank} of this server; raise "
            f"--max-lora-rank (up to {MAX_CUDA_LORA_RANK} on CUDA), or train the adapter with a lower rank"
        )


def _parse(key: str, where: str) -> TensorName:
    found = _KEY.fullmatch(key)
    if found and "lora_embedding" not in key:
        return TensorName(found["path"], found["nested"].count("."), found["part"])
    for pattern, way_out in _KNOWN_STRANGERS:
        if re.search(pattern, key):
            raise AdapterError(f"{where}: {key}: {way_out}")
    raise AdapterError(
        f"{where}: {key}: unknown tensor; expected only keys like "
        "base_model.model.<module>.lora_A.weight and .lora_B.weight"
    )


def _expected(config: AdapterConfig, places: PlaceMap, present: set[str]) -> dict[str, list[Place]]:
    """Module path → places that the config targets, in order of definition."""
    # A newer transformers keeps experts and gate as parameters, which target_modules does not reach.  The
    # file tells: one from an older transformers has modules of single experts.
    firsts = [places.by_path[path][1][0] for path in present if path in places.by_path]
    has_experts = any(place.expert is not None for place in firsts)
    has_gate = has_experts or any(place.site == "router" for place in firsts)
    expected: dict[str, list[Place]] = {}
    for path, (_, in_order) in places.by_path.items():
        if in_order[0].expert is not None and not has_experts:
            continue
        for place in in_order:
            targeted = config.targets_parameter(f"{path}.{place.parameter}")
            is_linear = has_gate or place.site != "router" or not place.optional_linear
            if place.form == "matrix" and is_linear and not targeted:
                targeted = not config.excludes(path) if config.all_linear else config.targets_module(path)
            if targeted:
                expected.setdefault(path, []).append(place)
    return expected


def _check_known(
    key: str,
    name: TensorName,
    places: PlaceMap,
    expected: dict[str, list[Place]],
    config: AdapterConfig,
    shape: ModelShape,
    where: str,
) -> None:
    if name.path not in places.by_path:
        for pattern, way_out in _KNOWN_STRANGERS:
            if re.search(pattern, key):
                raise AdapterError(f"{where}: {key}: {way_out}")
        layer = re.match(rf"{re.escape(places.layer_prefix)}\.(\d+)\.", name.path)
        if layer and int(layer.group(1)) >= shape.num_layers:
            raise AdapterError(
                f"{where}: {key}: layer {layer.group(1)} is out of range, the base model has "
                f"{shape.num_layers} layers; serve the adapter with the base it was trained for"
            )
        raise AdapterError(
            f"{where}: {key}: matches no module of the {shape.family} base model; "
            "serve the adapter with the base it was trained for"
        )
    if name.depth >= len(expected.get(name.path, ())):
        raise AdapterError(
            f"{where}: {key}: no target_modules or target_parameters of {config.where} names it, "
            "so it is unclear whether it belongs to the adapter; add the target or remove the tensor"
        )


def _check_one_form(layer: list[PairSource], where: str) -> None:
    """An expert's delta in both forms at once would have to be added up; PEFT never writes that."""
    fused = {source.place.site: source.key_a for source in layer if source.place.form == "fused"}
    for source in layer:
        if source.place.expert is not None and source.place.site in fused:
            raise AdapterError(
                f"{where}: {source.key_a} and {fused[source.place.site]} adapt the same experts twice; "
                "save the adapter in one form, fused or per expert"
            )


def _unmatched_names(config: AdapterConfig, expected: dict[str, list[Place]]) -> Iterable[str]:
    """A text for each list of targets of which some match nothing."""
    parameters = [f"{path}.{place.parameter}" for path, places in expected.items() for place in places]
    lists: list[tuple[str, tuple[str, ...], Iterable[str]]] = [
        ("target_parameters", config.target_parameters, parameters)
    ]
    if not isinstance(config.target_modules, str):
        lists.append(("target_modules", config.target_modules, expected))
    for key, targets, paths in lists:
        left = set(targets)
        for path in paths:
            if not left:
                break
            left.difference_update(suffixes(path))
        if left:
            unmatched = sorted(left)
            names = ", ".join(map(shown, unmatched[:_MAX_SHOWN_NAMES]))
            more = len(unmatched) - _MAX_SHOWN_NAMES
            yield (
                f"{config.where}: {key}: {names}{f' and {more} more' if more > 0 else ''} match nothing in "
                "the base model, and the adapter has no tensors for them"
            )


def _source(path: str, place: Place, parts: dict[str, str], config: AdapterConfig, where: str) -> PairSource:
    for part, other in (("A", "B"), ("B", "A")):
        if other in parts and part not in parts:
            raise AdapterError(
                f"{where}: {parts[other]} has no lora_{part} beside it; the file is incomplete, save it again"
            )
    what = path if place.form == "matrix" else f"{path}.{place.parameter}"
    if not parts:
        raise AdapterError(
            f"{where}: no tensors for {what}, which {config.where} targets; the file is incomplete or was "
            "trained for another base model; save it again, or remove the target if it was never trained"
        )
    # A linear layer reached as a parameter has its pattern matched against the parameter's name.
    is_parameter = place.form != "matrix" or not (config.all_linear or config.targets_module(path))
    pattern_path = f"{path}.{place.parameter}" if is_parameter else path
    lora_rank = config.rank_of(pattern_path)
    # With rank 1 both orders of a fused parameter's columns are the same.
    has_order = place.form == "fused" and lora_rank > 1
    return PairSource(
        place=place,
        key_a=parts["A"],
        key_b=parts["B"],
        lora_rank=lora_rank,
        scale=config.scale_of(pattern_path),
        grouped=has_order and config.expert_layout.is_grouped(place.parameter, parts["B"]),
    )
