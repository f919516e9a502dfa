# SPDX-License-Identifier: Apache-2.0
"""Rows of the embedding or the head that an adapter replaces, as LoRA pairs of their change.

PEFT replaces n rows (`trainable_token_indices`) or all (`modules_to_save`).  The change of n rows is a pair
of rank n: a one-hot of the tokens, and the trained rows minus the base's.  With more rows than columns the
pair is the change, and an identity.  Source: peft, tuners/trainable_tokens/layer.py and utils/other.py (read
at 0.21.2).

Legend: N rows, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lora.core.errors import AdapterError, shown
from moe_lora.core.shape import ModelShape
from moe_lora.core.wrong_files import TensorEntry, read_config
from moe_lora.families import model_spec
from moe_lora.families.schema.config_json import ties_all

from .base import base_tensor, one_place, resized
from .config import AdapterConfig
from .names import outer_path, read_names, stranger, without_wrappers
from .places import FLOATS, PlaceMap, Shaped, no_floats

if TYPE_CHECKING:
    import torch

    from moe_lora.adapters.packed import Pair
    from moe_lora.families.schema.family import ModelSpec

_TOKENS, _SAVED = "trainable_token_indices", "modules_to_save"
_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+?)\."
    r"(?:(?P<tokens>token_adapter\.trainable_tokens_delta(?:\.[^.]+)?)|(?:modules_to_save\.(?:[^.]+\.)?)?weight)"
)


@dataclass(frozen=True, kw_only=True)
class ReplacedRows:
    """key: of [N, H] in the file, or "".  site: "head" or "embedding".  tokens: of the rows; None: all."""

    key: str
    site: str
    tokens: tuple[int, ...] | None
    lora_rank: int


def replaced_rows(
    tensors: Mapping[str, Shaped],
    config: AdapterConfig,
    shape: ModelShape,
    places: PlaceMap,
    base_dir: Path | None,
    where: str,
) -> tuple[ReplacedRows, ...]:
    """The replaced rows of the file.  Raises AdapterError, also without a checkpoint."""
    given, (spec, tied) = config.trainable_token_indices, spec_of_base(base_dir, config)
    for name in given if isinstance(given, dict) else ():
        _site(name, places, config, _TOKENS)
    keys = _keys(tensors, places, where)
    found: dict[str, ReplacedRows] = {}
    for one in (
        *_trained_tokens(keys, config, shape, places, tied),
        *_saved(keys, config, shape, places, tied),
    ):
        if not one.key:
            pairs = (key for key in tensors if ".lora_" in key)
            names = read_names(pairs, places.layer_prefix, places.outer, where)
            path = names.readings(getattr(places.outer, one.site))[0]
            raise AdapterError(
                f"{config.where}: {_SAVED if one.tokens is None else _TOKENS} names {path}, and the file has "
                "no tensor for it; the file is incomplete, save it again"
            )
        if one.site == "head" and one.tokens is not None and spec.head_bias:
            raise AdapterError(
                f"{config.where}: {_TOKENS} names {places.outer.head}, which has a bias, and PEFT computes a "
                f"head with such rows without its bias; train rows of {places.outer.embedding} alone"
            )
        if one.site in found:
            raise AdapterError(
                f"{config.where}: {_TOKENS} and {_SAVED} both change the {one.site}; train with one of them"
            )
        _check(one, tensors[one.key], shape, where)
        base_rows(one, base_dir, where)
        found[one.site] = one
    return tuple(found[site] for site in ("head", "embedding") if site in found)


def spec_of_base(base_dir: Path | None, config: AdapterConfig) -> tuple[ModelSpec, bool]:
    """The base, and True if PEFT ties its head.  Raises AdapterError without a checkpoint."""
    if base_dir is None:
        raise AdapterError(
            f"{config.where}: {_TOKENS}, {_SAVED} and ensure_weight_tying=True depend on the base, and no "
            "checkpoint of it is here; serve or check the adapter with the folder of the base model"
        )
    base = read_config(base_dir)
    spec = model_spec(base)
    return spec, ties_all(base) or spec.tie_word_embeddings


def base_rows(rows: ReplacedRows, base_dir: Path | None, where: str) -> tuple[Path, TensorEntry]:
    """`base_tensor` of the rows."""
    return base_tensor(
        rows.site,
        base_dir,
        f"{where}: {rows.key} replaces rows of the base model's {rows.site}, and these can't be read",
        "serve the adapter with a checkpoint that has them in float32, bfloat16 or float16",
    )


def change_bytes(replaced: Sequence[ReplacedRows], shape: ModelShape, itemsize: int) -> int:
    """Bytes of the changes, and of other matrices of `replaced_pair`."""
    vocab, hidden = shape.vocab_size, shape.hidden_size
    total = 0
    for rows in replaced:
        total += vocab * hidden if rows.tokens is None else len(rows.tokens) * hidden + rows.lora_rank * vocab
        total += hidden * hidden if rows.lora_rank == hidden else 0
    return total * itemsize


def replaced_pair(rows: ReplacedRows, change: torch.Tensor, shape: ModelShape) -> Pair:
    """The pair of a change [N, H] of these rows."""
    import torch

    from moe_lora.adapters.packed import Pair

    vocab, hidden = shape.vocab_size, shape.hidden_size
    if rows.lora_rank == hidden:  # N >= H
        by_token, by_column = change.t(), torch.eye(hidden, dtype=change.dtype, device=change.device)
        if rows.tokens is not None:
            by_token = change.new_zeros(hidden, vocab)
            by_token[:, list(rows.tokens)] = change.t()
    else:
        assert rows.tokens is not None, "all rows have the rank of the columns"
        by_token, by_column = change.new_zeros(len(rows.tokens), vocab), change
        by_token[range(len(rows.tokens)), list(rows.tokens)] = 1
    by_token, by_column = by_token.unsqueeze(0), by_column.unsqueeze(0)
    shrink, expand = (by_column, by_token) if rows.site == "head" else (by_token, by_column)
    return Pair(
        site=shape.sites_by_name[rows.site],
        modules=(0,),
        experts=range(1),
        shrink=shrink,
        expands=(expand,),
        scale=1.0,
        source=rows.key,
    )


def _keys(tensors: Mapping[str, Shaped], places: PlaceMap, where: str) -> dict[tuple[str, str], str]:
    """(site, field of the config) -> key."""
    found: dict[tuple[str, str], str] = {}
    for key in sorted(tensors):
        parts = _KEY.fullmatch(without_wrappers(key))
        if parts is None or parts["path"].endswith((".base_layer", ".original_module")):
            continue
        path = outer_path(parts["path"], places.layer_prefix, places.outer)
        if path not in places.outer and parts["tokens"]:
            raise AdapterError(f"{where}: {key}: {stranger(key)}")
        if path not in places.outer:
            continue
        site = places.outer._fields[places.outer.index(path)]
        before = found.setdefault((site, _TOKENS if parts["tokens"] else _SAVED), key)
        if before != key:
            raise one_place(key, before, where)
    return found


def _trained_tokens(
    keys: Mapping[tuple[str, str], str],
    config: AdapterConfig,
    shape: ModelShape,
    places: PlaceMap,
    tied: bool,
) -> Iterator[ReplacedRows]:
    given = config.trainable_token_indices
    by_name = given if isinstance(given, dict) else {places.outer.embedding: given} if given else {}
    by_site: dict[str, tuple[int, ...]] = {}
    for name, tokens in by_name.items():
        site = _site(name, places, config, _TOKENS)
        if by_site.setdefault(site, _tokens(tokens, config, shape)) != tokens:
            raise AdapterError(f"{config.where}: {_TOKENS} has two lists of the {site}'s tokens; keep one")
    of_embedding = by_site.get("embedding")
    shares = tied and of_embedding is not None and by_site.get("head", of_embedding) == of_embedding
    for site in dict.fromkeys((*by_site, *(["head"] if shares else []))):
        tokens = of_embedding if shares and of_embedding is not None else by_site[site]
        yield ReplacedRows(
            key=keys.get(("embedding" if shares else site, _TOKENS), ""),
            site=site,
            tokens=tokens,
            lora_rank=min(len(tokens), shape.hidden_size),
        )


def _saved(
    keys: Mapping[tuple[str, str], str],
    config: AdapterConfig,
    shape: ModelShape,
    places: PlaceMap,
    tied: bool,
) -> Iterator[ReplacedRows]:
    sites = [_site(name, places, config, _SAVED) for name in config.modules_to_save]
    if sites and tied and config.ensure_weight_tying:
        raise AdapterError(
            f"{config.where}: {_SAVED} with ensure_weight_tying=True on a tied base is not supported; train "
            "with ensure_weight_tying=false and both of lm_head and embed_tokens"
        )
    for site in dict.fromkeys(sites):
        yield ReplacedRows(
            key=keys.get((site, _SAVED), ""),
            site=site,
            tokens=None,
            lora_rank=shape.hidden_size,
        )


def _site(name: str, places: PlaceMap, config: AdapterConfig, field: str) -> str:
    outer = places.outer
    served = outer_path(name, places.layer_prefix, outer)
    for site, path in outer._asdict().items():
        if path == served or path.endswith(f".{name}"):
            return str(site)
    raise AdapterError(
        f"{config.where}: {field}: {shown(name)} is not supported: an adapter may replace rows of "
        f"{outer.embedding} and {outer.head} alone; train without it"
    )


def _tokens(tokens: tuple[int, ...], config: AdapterConfig, shape: ModelShape) -> tuple[int, ...]:
    bad = next((token for token in tokens if token >= shape.vocab_size), None)
    if bad is not None or len(set(tokens)) < len(tokens) or not tokens:
        raise AdapterError(
            f"{config.where}: {_TOKENS}={shown(list(tokens))} must name different tokens from 0 to "
            f"{shape.vocab_size - 1}; serve the adapter with the base it was trained for"
        )
    return tokens


def _check(rows: ReplacedRows, tensor: Shaped, shape: ModelShape, where: str) -> None:
    if str(tensor.dtype) not in FLOATS:
        raise no_floats(rows.key, tensor, where)
    found, num_rows = tuple(tensor.shape), shape.vocab_size if rows.tokens is None else len(rows.tokens)
    if rows.tokens is None and found[1:] == (shape.hidden_size,) and found[0] != num_rows:
        raise resized(rows.key, tensor, shape, where)
    if found != (num_rows, shape.hidden_size):
        raise AdapterError(
            f"{where}: {rows.key}: expected shape {[num_rows, shape.hidden_size]}, found {list(found)}; the "
            f"adapter was trained for another base model, or {_TOKENS} is not that of this tensor"
        )
