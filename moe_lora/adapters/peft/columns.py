# SPDX-License-Identifier: Apache-2.0
"""Tensors that scale or shift output columns: DoRA's magnitudes, and biases of lora_B.  Torch-free.

Source: peft, tuners/lora/dora.py and tuners/lora/layer.py (read at 0.21.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape

from .base import Stored, base_modules, one_place
from .config import AdapterConfig
from .places import FLOATS, PairSource, Shaped, expected_shapes, make_pairs, no_floats

if TYPE_CHECKING:
    import torch

    from moe_lora.adapters.packed import Pair

    from .match import Match

_OF_PAIR = re.compile(r"(?P<module>.+)\.lora_A(?:\.(?P<adapter>[^.]+))?\.weight")
_MAGNITUDE = re.compile(
    r"(?P<module>.+)\.lora_magnitude_vector(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?"
)
_BIAS = re.compile(r"(?P<module>.+)\.lora_B(?:\.(?P<adapter>[^.]+))?\.bias")
Keys = dict[tuple[str | None, ...], str]
"""(module, adapter's name) in the file's words -> key."""


@dataclass(frozen=True, kw_only=True)
class ColumnSource:
    """The column term beside a pair.

    key: of [O] in the file.  weight, bias: of the base's module; None for a bias of lora_B.
    """

    layer: int
    pair: PairSource
    key: str
    weight: Stored | None = None
    bias: Stored | None = None


def match_with_columns(
    match: Callable[..., Match],
    tensors: Mapping[str, Shaped],
    config: AdapterConfig,
    shape: ModelShape,
    where: str,
    base: Mapping[str, Any] | None,
    base_dir: Path | None,
) -> Match:
    """`match` of the pairs, with a column term for each.

    Raises AdapterError as `match`, for a single term or pair, for modules without a column site, and for DoRA
    without base weights.
    """
    keys = _column_keys(tensors, config, where)
    own = {*keys.values()}
    pairs = {key: tensor for key, tensor in tensors.items() if key not in own}
    plain = msgspec.structs.replace(config, use_dora=False, lora_bias=False)
    found = match(pairs, plain, shape, where, base, base_dir)
    columns = _columns(found, keys, config, shape, where)
    for one in columns:
        _check(one, tensors[one.key], shape, where)
    if config.use_dora:
        columns = list(_with_base(columns, shape, base_dir, where))
    return replace(found, columns=tuple(columns))


def _column_keys(tensors: Iterable[str], config: AdapterConfig, where: str) -> Keys:
    """The keys of column terms.  Raises AdapterError."""
    if config.use_dora and config.lora_bias:
        raise AdapterError(
            f"{config.where}: use_dora=True with lora_bias=True is not supported, by PEFT neither; train "
            "with one of them"
        )
    if config.alora_invocation_tokens:
        raise AdapterError(
            f"{config.where}: alora_invocation_tokens with {_field(config)}=True is not supported; train an "
            "activated LoRA without it"
        )
    found: Keys = {}
    for key in sorted(tensors):
        if parts := (_MAGNITUDE if config.use_dora else _BIAS).fullmatch(key):
            before = found.setdefault((parts["module"], parts["adapter"]), key)
            if before != key:
                raise one_place(key, before, where)
    return found


def _columns(
    found: Match, keys: Keys, config: AdapterConfig, shape: ModelShape, where: str
) -> list[ColumnSource]:
    sources = [(number, source) for number, layer in enumerate(found.layers) for source in layer]
    for _, source in sources:
        _check_place(source, config, shape)
    left = dict(keys)
    columns = [
        ColumnSource(layer=number, pair=source, key=_key_of(source, left, config, where))
        for number, source in sources
    ]
    if left:
        raise AdapterError(
            f"{where}: {min(left.values())} has no lora_A beside it; the file is incomplete, save it again"
        )
    return columns


def column_pair(column: ColumnSource, values: torch.Tensor, shape: ModelShape) -> Pair:
    """The pair at the column site.  values: [O, 2], in the order of lora_B's rows."""
    pair = column.pair
    tensors = {pair.keys_a[0]: values.new_zeros(2, 1), pair.keys_b[0]: values}
    [made] = make_pairs(replace(pair, lora_rank=2, scale=1.0), tensors, shape, swapped=False)
    [site] = (site for site in shape.column_sites if site.name == pair.place.site)
    return replace(made, site=site, source=column.key)


def _check_place(source: PairSource, config: AdapterConfig, shape: ModelShape) -> None:
    sites = {site.name for site in shape.column_sites}
    if source.place.form != "matrix" or source.place.site not in sites:
        field = _field(config)
        raise AdapterError(
            f"{config.where}: {field}=True with {source.keys_a[0]}: served on attention (without kv_b_proj) "
            f"and dense layers alone; train with {field}=false, or without this target"
        )


def _key_of(source: PairSource, left: Keys, config: AdapterConfig, where: str) -> str:
    parts = _OF_PAIR.fullmatch(source.keys_a[0])
    key = None if parts is None else left.pop((parts["module"], parts["adapter"]), None)
    if key is None:
        what = "lora_magnitude_vector" if config.use_dora else "lora_B.bias"
        raise AdapterError(
            f"{where}: {source.keys_a[0]} has no {what} beside it, and {config.where} has "
            f"{_field(config)}=True; the file is incomplete, save it again"
        )
    return key


def _field(config: AdapterConfig) -> str:
    return "use_dora" if config.use_dora else "lora_bias"


def _check(column: ColumnSource, tensor: Shaped, shape: ModelShape, where: str) -> None:
    if str(tensor.dtype) not in FLOATS:
        raise no_floats(column.key, tensor, where)
    expected = expected_shapes(column.pair, shape, swapped=False)[1][:1]
    if tuple(tensor.shape) != expected:
        raise AdapterError(
            f"{where}: {column.key}: expected shape {list(expected)}, found {list(tensor.shape)}; serve the "
            "adapter with the base it was trained for"
        )


def _with_base(
    columns: Sequence[ColumnSource], shape: ModelShape, base_dir: Path | None, where: str
) -> Iterator[ColumnSource]:
    shapes = [expected_shapes(one.pair, shape, swapped=False) for one in columns]
    stored = base_modules(
        [(one.layer, one.pair.place, (b[0], a[1])) for one, (a, b) in zip(columns, shapes, strict=True)],
        base_dir,
        f"{where}: use_dora=True needs norms of the base model's weights, and these can't be read",
        "serve the adapter with a checkpoint of the base in float32, bfloat16 or float16",
    )
    for one, (weight, bias) in zip(columns, stored, strict=True):
        yield replace(one, weight=weight, bias=bias)
