# SPDX-License-Identifier: Apache-2.0
"""The tool that wrote an adapter's files, and the form of its pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .config import DETAIL_KEY, FLAT_KEY
from .files import MLX_KEY
from .match import Match
from .names import TINKER_HEAD
from .places import PairSource
from .replaced import ReplacedRows

_OF_LORA_CONFIG = ("layer_replication", "megatron_core", "loftq_config")
"""Keys that LoraConfig always writes, and other tools leave out."""
_OF_TRAINING = (
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "velora_config",
)
_FORMS = {
    "matrix": "linear layers",
    "fused": "3-D parameters of all experts",
    "rows": "2-D parameters of all experts",
    "stacked": "tensors with a dim of experts",
}


@dataclass(frozen=True)
class Origin:
    """ignored: content without effect on the answers."""

    tool: str
    forms: tuple[str, ...]
    ignored: tuple[str, ...]


def origin_of(fields: Mapping[str, Any], keys: Iterable[str], found: Match) -> Origin:
    """The origin of a matched file.  fields: of adapter_config.json."""
    sources = [source for layer in found.layers for source in layer]
    ignored = [
        f"{key}={value!r}" if isinstance(value, bool | int | float | str) else key
        for key in _OF_TRAINING
        if (value := fields.get(key))
    ]
    ignored += [f"{key} (the base's own weights)" for key in found.copies]
    forms = tuple(dict.fromkeys((*map(_form, sources), *map(_replaced, found.replaced))))
    if found.columns:
        forms += ("DoRA" if found.columns[0].weight else "a bias of each lora_B",)
    if found.invocation:
        forms += (f"activated by the prompt's last {list(found.invocation)}",)
    return Origin(_tool(fields, tuple(keys), sources), forms, tuple(ignored))


def _form(source: PairSource) -> str:
    place = source.place
    if place.site in ("head", "embedding"):
        return "the vocabulary head" if place.site == "head" else "the embedding"
    if place.expert is not None:
        return "a module per expert"
    if len(source.keys_a) != len(source.keys_b):
        return "a matrix of all experts beside one per expert"
    return _FORMS[place.form]


def _replaced(rows: ReplacedRows) -> str:
    what = "all rows" if rows.tokens is None else f"{len(rows.tokens)} rows"
    return f"{what} of the {'vocabulary head' if rows.site == 'head' else rows.site}"


def _tool(fields: Mapping[str, Any], keys: tuple[str, ...], sources: list[PairSource]) -> str:
    if MLX_KEY in fields:
        return "mlx-lm"
    auto_mapping = fields.get("auto_mapping")
    marks = {*fields, *(auto_mapping if isinstance(auto_mapping, Mapping) else ())}
    if marks & {"unsloth_fixed", FLAT_KEY, DETAIL_KEY}:
        return "Unsloth"
    if any(len(source.keys_a) != len(source.keys_b) for source in sources):
        return "Megatron-Bridge"
    stacked = any(source.place.form == "stacked" for source in sources)
    if stacked or any(f".{TINKER_HEAD}." in key or ".attn." in key for key in keys):
        return "Tinker"
    if version := fields.get("peft_version"):
        return f"PEFT {version}"
    if all(key in fields for key in _OF_LORA_CONFIG):
        return "PEFT"
    return "a tool that the files do not name"
