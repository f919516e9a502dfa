# SPDX-License-Identifier: Apache-2.0
"""Experts' LoRA tensors with a dim of experts: A [E or 1, R, I] and B [E or 1, O, R], 1 shared by all.

Tinker writes both so, as `mlp.experts.w1` (gate), `w3` (up) and `w2` (down).  Megatron-Bridge writes a shared
matrix so, by the projection's name, and the other matrix of the pair once per expert.
Source: tinker-cookbook, weights/_merge.py; Megatron-Bridge, models/conversion/peft_bridge.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from moe_lora.families.schema.family import PROJECTIONS, Place

from .names import TensorName

_STYLES = (("w1", "w3", "w2"), PROJECTIONS)
_SITES = (("gate_up", (0,)), ("gate_up", (1,)), ("down", (0,)))
_SHORT, _LONG = ".attn.", ".self_attn."


def stacked_places(adapted: Iterable[Place]) -> Iterator[Place]:
    """Gate, up and down below each module with fused experts, by both styles of names."""
    for container in dict.fromkeys(place.path for place in adapted if place.form == "fused"):
        for style in _STYLES:
            for leaf, (site, modules) in zip(style, _SITES, strict=True):
                yield Place(path=f"{container}.{leaf}", site=site, modules=modules, form="stacked")


def present_styles(paths: Iterable[str]) -> set[str]:
    """Leaves of each style with a leaf among the stacked paths: a style is whole."""
    leaves = {path.rpartition(".")[2] for path in paths}
    return {leaf for style in _STYLES if leaves & set(style) for leaf in style}


def placed(
    by_key: Mapping[str, TensorName], by_path: Mapping[str, tuple[int, tuple[Place, ...]]]
) -> dict[str, TensorName]:
    """The names with Tinker's `attn` as `self_attn`, and a shared matrix's partners at its place."""
    named = {key: _long_name(name, by_path) for key, name in by_key.items()}
    parts: dict[str, set[str]] = {}
    for name in named.values():
        if name.path in by_path and by_path[name.path][1][0].form == "stacked":
            parts.setdefault(name.path, set()).add(name.part)
    partners = {path: ({"A", "B"} - found).pop() for path, found in parts.items() if len(found) == 1}
    if not partners:
        return named
    return {key: _joined(name, partners) for key, name in named.items()}


def _long_name(name: TensorName, by_path: Mapping[str, object]) -> TensorName:
    path = name.path.replace(_SHORT, _LONG)
    return replace(name, path=path) if path in by_path and name.path not in by_path else name


def _joined(name: TensorName, partners: Mapping[str, str]) -> TensorName:
    """A partner of one expert, moved to the shared matrix's place."""
    front, _, leaf = name.path.rpartition(".")
    container, _, number = front.rpartition(".")
    path = f"{container}.{leaf}"
    if number.isdecimal() and partners.get(path) == name.part:
        return replace(name, path=path, expert=int(number))
    return name
