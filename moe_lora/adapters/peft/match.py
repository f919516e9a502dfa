# SPDX-License-Identifier: Apache-2.0
"""Matches a PEFT file's tensors with config and model: no tensor left over, no tensor missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lora.core.errors import AdapterError, shown
from moe_lora.core.shape import ModelShape, rank_problem
from moe_lora.core.wrong_files import listed

from .base import base_copies, one_place, quantised_base
from .config import AdapterConfig, has_suffix, suffixes
from .names import TINKER_HEAD, Names, TensorName, read_names, stranger, unplaced
from .places import (
    STACKED_NAMES,
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

if TYPE_CHECKING:
    from .columns import ColumnSource
    from .replaced import ReplacedRows

_ACTIVATED = {
    *("qkv", "o", "output_gate", "dense_gate_up", "dense_down", "q", "q_a", "q_b", "kv_a"),
    *("global_qkv", "global_qk", "global_o", "delta_qkvz", "delta_ba", "delta_out"),
}
"""Sites of an activated LoRA; absorbed kv_b_proj sees the base's earlier tokens."""
_MODULES = ("matrix", "stacked", "heads")
"""Forms of modules, unlike parameters."""


@dataclass(frozen=True)
class Match:
    """layers: LoRA pairs per layer, and one more layer for the head and the embedding.

    copies: keys of base weights.  replaced: rows of the head and the embedding.  invocation: tokens of an
    activated LoRA.  columns: one term per pair.  tied: the last layer's two pairs share their tensors.
    """

    layers: list[list[PairSource]]
    swapped: bool
    warnings: tuple[str, ...]
    copies: tuple[str, ...]
    replaced: tuple[ReplacedRows, ...] = ()
    invocation: tuple[int, ...] = ()
    columns: tuple[ColumnSource, ...] = ()
    tied: bool = False


def match(
    tensors: Mapping[str, Shaped],
    config: AdapterConfig,
    shape: ModelShape,
    where: str,
    base: Mapping[str, Any] | None,
    base_dir: Path | None = None,
) -> Match:
    """Places of the tensors.  Raises AdapterError for one without place or partner, or of wrong shape."""
    if config.use_dora or config.lora_bias:
        from .columns import match_with_columns

        return match_with_columns(match, tensors, config, shape, where, base, base_dir)
    _check_sizes(tensors, shape, where)
    places = place_map(shape)
    replaced: tuple[ReplacedRows, ...] = ()
    if config.trainable_token_indices or config.modules_to_save:
        from .replaced import replaced_rows

        replaced = replaced_rows(tensors, config, shape, places, base_dir, where)
    own = {row.key for row in replaced}
    copies = base_copies({key: one for key, one in tensors.items() if key not in own}, shape, where)
    names = read_names(tensors.keys() - own - {*copies}, places.layer_prefix, places.outer, where, own)
    if places.older and any(f".{places.older}" in name.path for name in names.by_key.values()):
        places = place_map(shape, older_names=True)
    names = names.with_stacked(places.by_path, places.stacked)
    tied = config.ensure_weight_tying and _are_tied(config, places, names, base_dir, where)
    expected = _expected(config, places, {name.path for name in names.by_key.values()}, names, tied)
    found: dict[tuple[str, int], dict[str, dict[int | None, str]]] = {}
    for key, name in names.by_key.items():
        _check_known(key, name, places, expected, config, shape, where)
        keys = found.setdefault((name.path, name.depth), {}).setdefault(name.part, {})
        if name.expert in keys:
            raise one_place(key, keys[name.expert], where)
        keys[name.expert] = key
    if alone := next((halves for halves in found.values() if len(halves) == 1), None):
        raise _no_partner(alone, where)
    layers: list[list[PairSource]] = [[] for _ in range(shape.num_layers + 1)]
    for path, targeted in expected.items():
        for depth, place in enumerate(reversed(targeted)):
            there = found.get((path, depth), {}).items()
            parts = {
                part: (keys[None],) if None in keys else _of_all_experts(keys, shape, where)
                for part, keys in there
            }
            layers[places.by_path[path][0]].append(_source(path, place, parts, config, names, where))
    _check_one_form(layers, where)
    if tied:
        layers[-1][0] = replace(layers[-1][0], lora_rank=layers[-1][1].lora_rank)
    sources = [source for layer in layers for source in layer]
    if replaced or config.alora_invocation_tokens:
        _check_rare(config, sources, replaced, expected, places, shape, where)
    swapped = is_swapped(sources, tensors, shape, config.expert_layout)
    for source in sources:
        check_pair(source, tensors, shape, where, swapped)
    warnings = *names.notes, *_unmatched_names(config, expected, names), *quantised_base(config, base)
    kept = layers if layers[-1] or replaced else layers[:-1]
    return Match(kept, swapped, warnings, copies, replaced, config.alora_invocation_tokens, (), tied)


def check_rank(found: Match, max_lora_rank: int | None, where: str) -> None:
    """Raises AdapterError for a rank above `max_lora_rank`."""
    if max_lora_rank is None:
        return
    for rows in found.replaced:
        if rows.lora_rank > max_lora_rank:
            raise AdapterError(
                f"{where}: {rows.key} replaces rows of the {rows.site}, a pair of their number or of "
                f"hidden_size: {rank_problem(rows.lora_rank, max_lora_rank)}"
            )
    largest = max((source.lora_rank for layer in found.layers for source in layer), default=0)
    if largest > max_lora_rank:
        raise AdapterError(f"{where}: {rank_problem(largest, max_lora_rank)}")


def _check_activated(
    config: AdapterConfig,
    sources: Sequence[PairSource],
    replaced: Sequence[ReplacedRows],
    shape: ModelShape,
) -> None:
    """Refuses an activated LoRA on modules without activation in PEFT, and with unknown tokens.

    Source: aLoRA (arXiv 2504.12397); peft, tuners/lora/variants.py.
    """
    tokens = config.alora_invocation_tokens
    if max(tokens) >= shape.vocab_size:
        raise AdapterError(
            f"{config.where}: alora_invocation_tokens={shown(list(tokens))} must be tokens from 0 to "
            f"{shape.vocab_size - 1}; serve the adapter with the base it was trained for"
        )
    served = _ACTIVATED if shape.num_experts else {*_ACTIVATED, "gate_up", "down"}
    other = next((one.keys_a[0] for one in sources if one.place.site not in served), None)
    other = other or next((one.key for one in replaced), None)
    if other is not None:
        raise AdapterError(
            f"{config.where}: alora_invocation_tokens={shown(list(tokens))} with {other}: an activated LoRA "
            "is served on attention (without kv_b_proj), DeltaNet and dense MLPs alone; train without this "
            "target, or a plain LoRA"
        )


def _check_rare(
    config: AdapterConfig,
    sources: Sequence[PairSource],
    replaced: tuple[ReplacedRows, ...],
    expected: Mapping[str, Sequence[Place]],
    places: PlaceMap,
    shape: ModelShape,
    where: str,
) -> None:
    """Refuses combinations that replaced rows and activated LoRAs exclude."""
    for rows in replaced:
        path = getattr(places.outer, rows.site)
        if path in expected:
            raise AdapterError(
                f"{where}: {rows.key} replaces rows of {path}, and {path} has a LoRA pair too; "
                "train with one of them"
            )
    if config.alora_invocation_tokens:
        _check_activated(config, sources, replaced, shape)


def _are_tied(
    config: AdapterConfig, places: PlaceMap, names: Names, base_dir: Path | None, where: str
) -> bool:
    """True if PEFT ties the pairs of head and embedding.  Raises AdapterError if one of both is alone."""
    from .replaced import spec_of_base

    missing = {*places.outer} - {name.path for name in names.by_key.values()}
    if len(missing) == len(places.outer) or not spec_of_base(base_dir, config)[1]:
        return False
    if missing:
        raise AdapterError(
            f"{where}: {config.where} has ensure_weight_tying=True, and the file has no pair of "
            f"{missing.pop()}; save the adapter again with PEFT 0.21 or newer"
        )
    return True


def check_tied(found: Match, tensors: Mapping[str, Any], where: str) -> None:
    """Raises AdapterError if PEFT would read one of two tied pairs as the other."""
    head, embedding = found.layers[-1]
    for (key,), (other,) in ((head.keys_a, embedding.keys_b), (head.keys_b, embedding.keys_a)):
        if not bool((tensors[key] == tensors[other].T).all()):
            raise AdapterError(
                f"{where}: {key} is not {other} transposed, and ensure_weight_tying=True makes them one "
                "tensor; set it to false if both were trained, else save the adapter again with PEFT"
            )


def _check_sizes(tensors: Mapping[str, Shaped], shape: ModelShape, where: str) -> None:
    """Refuses too many tensors, none, and empty tensors."""
    if len(tensors) > max_tensors(shape) + STRANGERS:
        raise AdapterError(
            f"{where}: {len(tensors)} tensors, an adapter of this base model has at most "
            f"{max_tensors(shape)}; serve it with the base it was trained for, and save one adapter only"
        )
    gather = (
        "save again with the parts of all processes gathered: under DeepSpeed ZeRO-3 with "
        "stage3_gather_16bit_weights_on_model_save=true or zero_to_fp32.py, under FSDP from a full state dict"
    )
    if not tensors:
        raise AdapterError(
            f"{where}: holds no tensors, so the adapter would change nothing; DeepSpeed ZeRO-3 and FSDP "
            f"leave such a file; {gather}"
        )
    empty = sorted(key for key, tensor in tensors.items() if 0 in tuple(tensor.shape))
    if empty:
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise AdapterError(
            f"{where}: {empty[0]}{others}: shape {list(tensors[empty[0]].shape)} is empty; saved under "
            f"DeepSpeed ZeRO-3 or FSDP without gathering; {gather}"
        )


def _expected(
    config: AdapterConfig, places: PlaceMap, present: set[str], names: Names, tied: bool
) -> dict[str, list[Place]]:
    # Newer transformers keep experts and gate as parameters, beyond target_modules.
    firsts = [places.by_path[path][1][0] for path in present if path in places.by_path]
    has_experts = any(place.expert is not None for place in firsts)
    has_gate = has_experts or any(place.site == "router" for place in firsts)
    is_split = any(place.is_split for place in firsts)
    leaves = {path.rpartition(".")[2] for path in present & places.stacked}
    stacked = {leaf for one in STACKED_NAMES if leaves.intersection(one) for leaf in one}
    expected: dict[str, list[Place]] = {}
    for path, (_, in_order) in places.by_path.items():
        if in_order[0].expert is not None and not has_experts:
            continue
        if in_order[0].is_split not in (None, is_split):
            continue
        if path in places.stacked and path.rpartition(".")[2] not in stacked:
            continue
        readings = names.readings(path)
        for place in in_order:
            targeted = any(
                has_suffix(f"{one}.{place.parameter}", config.target_parameters) for one in readings
            )
            is_linear = has_gate or place.site != "router" or not place.optional_linear
            if place.form in _MODULES and is_linear and not targeted:
                targeted = any(
                    _is_linear_target(config, one, place) if config.all_linear else config.targets_module(one)
                    for one in readings
                )
            if targeted:
                expected.setdefault(path, []).append(place)
    if tied:  # PEFT drops the target of a tied head.
        expected = {places.outer.head: [*places.by_path[places.outer.head][1]], **expected}
    return expected


def _is_linear_target(config: AdapterConfig, path: str, place: Place) -> bool:
    """PEFT's "all-linear" leaves out head and embedding, Tinker's only the embedding."""
    is_outer = place.site in ("head", "embedding")
    return not config.excludes(path) and (not is_outer or path.endswith(f".{TINKER_HEAD}"))


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
        if way_out := stranger(key):
            raise AdapterError(f"{where}: {key}: {way_out}")
        layer = re.match(rf"{re.escape(places.layer_prefix)}\.(\d+)\.", name.path)
        if layer and int(layer.group(1)) >= shape.num_layers:
            raise AdapterError(
                f"{where}: {key}: layer {layer.group(1)} is out of range, the base model has "
                f"{shape.num_layers} layers; serve the adapter with the base it was trained for"
            )
        raise AdapterError(
            f"{where}: {key}: "
            + (
                unplaced(name.path, places.layer_prefix, _ends_as_a_module(name.path, places))
                or f"matches no module of the {shape.family} base model; serve the adapter with the base it "
                "was trained for"
            )
        )
    if name.is_embedding != (name.path == places.outer.embedding):
        raise AdapterError(
            f"{where}: {key}: PEFT writes lora_embedding_A and lora_embedding_B for the embedding alone, and "
            "lora_A.weight and lora_B.weight for every other module; train with the embedding in "
            "target_modules, not in target_parameters, or save the adapter again with PEFT"
        )
    if name.depth >= len(expected.get(name.path, ())):
        raise AdapterError(
            f"{where}: {key}: no target_modules or target_parameters of {config.where} names it, "
            "so it is unclear whether it belongs to the adapter; add the target or remove the tensor"
        )


def _ends_as_a_module(path: str, places: PlaceMap) -> bool:
    inside = re.search(r"(?:^|\.)(?:layers|blocks)(\.\d+\..+)", path)
    return inside is not None and f"{places.layer_prefix}{inside[1]}" in places.by_path


def _check_one_form(layers: list[list[PairSource]], where: str) -> None:
    """Refuses an expert's delta in two forms at once."""
    known: dict[tuple[int, str, int], tuple[object, str]] = {}
    for number, source in ((number, one) for number, layer in enumerate(layers) for one in layer):
        place = source.place
        form = "expert" if place.expert is not None else (place.form, place.path.rpartition(".")[2])
        for module in place.modules:
            before, key = known.setdefault((number, place.site, module), (form, source.keys_a[0]))
            if before != form:
                raise AdapterError(
                    f"{where}: {source.keys_a[0]} and {key} adapt the same experts twice; "
                    "save the adapter in one form, fused or per expert"
                )


def _unmatched_names(config: AdapterConfig, expected: dict[str, list[Place]], names: Names) -> Iterable[str]:
    modules = [(one, places) for path, places in expected.items() for one in names.readings(path)]
    parameters = [f"{path}.{place.parameter}" for path, places in modules for place in places]
    lists: list[tuple[str, frozenset[str], Iterable[str]]] = [
        ("target_parameters", config.target_parameters, parameters)
    ]
    if not isinstance(config.target_modules, str):
        lists.append(("target_modules", config.target_modules, [path for path, _ in modules]))
    for key, targets, paths in lists:
        left = set(targets)
        for path in paths:
            if not left:
                break
            left.difference_update(suffixes(path))
        if left:
            yield (
                f"{config.where}: {key}: {listed([*map(shown, sorted(left))])} match nothing in the base "
                "model, and the adapter has no tensors for them"
            )


def _no_partner(parts: Mapping[str, Mapping[int | None, str]], where: str) -> AdapterError:
    """The error for a pair with one half."""
    [(part, keys)] = parts.items()
    other = "B" if part == "A" else "A"
    return AdapterError(
        f"{where}: {next(iter(keys.values()))} has no lora_{other} beside it; the file is incomplete, save "
        "it again"
    )


def _of_all_experts(keys: Mapping[int | None, str], shape: ModelShape, where: str) -> tuple[str, ...]:
    """The tensors of all experts in order."""
    missing = sorted({*range(shape.num_experts)} - keys.keys())
    if missing:
        [first, *_] = keys.values()
        raise AdapterError(
            f"{where}: {first} has no tensor of expert {missing[0]} beside it; the file is incomplete, save "
            "it again"
        )
    return tuple(keys[expert] for expert in range(shape.num_experts))


def _source(
    path: str,
    place: Place,
    parts: dict[str, tuple[str, ...]],
    config: AdapterConfig,
    names: Names,
    where: str,
) -> PairSource:
    if not parts:
        what = names.readings(path)[0] + ("" if place.form in _MODULES else f".{place.parameter}")
        raise AdapterError(
            f"{where}: no tensors for {what}, which {config.where} targets; the file is incomplete or was "
            "trained for another base model; save it again, or remove the target if it was never trained"
        )
    lora_rank, scale = _rank_and_scale(path, place, config, names)
    # With rank 1 both column orders are equal.
    has_order = place.form == "fused" and lora_rank > 1
    return PairSource(
        place=place,
        keys_a=parts["A"],
        keys_b=parts["B"],
        lora_rank=lora_rank,
        scale=scale,
        grouped=has_order and config.expert_layout.is_grouped(place.parameter, parts["B"][0]),
    )


def _rank_and_scale(path: str, place: Place, config: AdapterConfig, names: Names) -> tuple[int, float]:
    """Rank and scale of a pair, by the config's patterns.

    Raises AdapterError if patterns give the wrapped name a different value.
    """
    readings = names.readings(path)
    # A linear layer as a parameter matches patterns by the parameter's name.
    is_parameter = place.form not in _MODULES or any(
        has_suffix(f"{one}.{place.parameter}", config.target_parameters) for one in readings
    )
    found: dict[tuple[int, float], str] = {}
    for one in readings:
        pattern_path = f"{one}.{place.parameter}" if is_parameter else one
        found.setdefault(config.rank_and_scale(pattern_path), pattern_path)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise AdapterError(
            f"{config.where}: rank_pattern or alpha_pattern gives two values to one module: {first} and "
            f"{second} are its names without and with a wrapper; write patterns for both names, or rename "
            "the tensors without the wrapper"
        )
    return next(iter(found))
