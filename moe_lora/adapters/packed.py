# SPDX-License-Identifier: Apache-2.0
"""Adapters packed at true rank: per layer one flat tensor and a table of offsets.

Legend: N copies of a matrix, R LoRA rank, X table entries, C column ranges.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch

from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import MATRIX_ALIGN_BYTES, ModelShape, Site
from moe_lora.core.shard import ModelShard

Places: TypeAlias = tuple[list[tuple[int, int]], int]
"""(first element, stride) of each matrix, and the number of elements."""


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """One layer's matrices back to back, for the kernels.

    data: 1-D, model dtype, CPU.  Per matrix: A as lora_rank rows of in_features, or B transposed as lora_rank
    rows of out_features, from multiples of 64 bytes on; gaps are zero.
    table: int64 [num_entries, 3] (a_offset, b_offset, lora_rank), in elements; lora_rank 0: no delta.
    Entries may share a matrix.
    scale: float32 [num_entries].
    """

    data: torch.Tensor
    table: torch.Tensor
    scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of `data`."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, kw_only=True)
class PackedAdapter:
    """A whole adapter.

    targets: module names with deltas.  content_hash: sha256 over dtype, data, offsets, ranks and scales:
    equal hashes compute equal deltas.  warnings: config fields without effect.  base_copies: keys of base
    weights to compare.  invocation: tokens of an activated LoRA: the adapter starts at their last occurrence
    in the prompt; part of the hash.  has_columns: with entries of `ModelShape.column_sites`.  shard_elements:
    elements of each layer on the rank with the most, of a pool's adapter without tables; empty: by the
    tables.  of_ranks: expert_parallel and tensor_parallel of shard_elements.
    """

    name: str
    layers: tuple[PackedLayer, ...]
    max_lora_rank: int
    nbytes: int
    content_hash: str
    targets: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    base_copies: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()
    has_columns: bool = False
    shard_elements: tuple[int, ...] = ()
    of_ranks: tuple[int, int] = (1, 1)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One LoRA pair of a PEFT file as views.

    shrink: [N, R, in_features], N = 1 (shared) or one per expert.  expands: per module [N, R, out_features].
    source: key of lora_A.
    """

    site: Site
    modules: tuple[int, ...]
    experts: range
    shrink: torch.Tensor
    expands: tuple[torch.Tensor, ...]
    scale: float
    source: str


def pack_layer(pairs: Sequence[Pair], num_entries: int, dtype: torch.dtype, where: str) -> PackedLayer:
    """Copy each matrix once into a PackedLayer.

    Raises AdapterError for NaN or infinity, also after conversion.
    """
    places = _offsets(pairs, dtype.itemsize)
    layer = bare_layer(pairs, num_entries, dtype, places)
    data = torch.zeros(layer.data.numel(), dtype=dtype)
    positions = iter(places[0])
    for pair in pairs:
        for matrix in (pair.shrink, *pair.expands):
            offset, stride = next(positions)
            data.as_strided(matrix.shape, (stride, matrix.shape[2], 1), offset).copy_(matrix)
    if len(data) and not all(math.isfinite(bound) for bound in map(float, torch.aminmax(data))):
        raise _not_finite(pairs, dtype, where)
    return replace(layer, data=data)


def bare_layer(
    pairs: Sequence[Pair], num_entries: int, dtype: torch.dtype, places: Places | None = None
) -> PackedLayer:
    """As `pack_layer`, with data on the device "meta": values unread.  num_entries 0: no table."""
    offsets, size = places or _offsets(pairs, dtype.itemsize)
    table = torch.zeros(num_entries, 3, dtype=torch.int64)
    scale = torch.zeros(num_entries, dtype=torch.float32)
    rows, scales = table.numpy(), scale.numpy()
    positions = iter(offsets)
    for pair in pairs if num_entries else ():
        shrink, *expands = [(matrix, next(positions)) for matrix in (pair.shrink, *pair.expands)]
        for module, expand in zip(pair.modules, expands, strict=True):
            _write_entries(pair, module, shrink, expand, rows, scales)
    return PackedLayer(data=torch.empty(size, dtype=dtype, device="meta"), table=table, scale=scale)


def num_table_entries(shape: ModelShape, num_layers: int, has_columns: bool = False) -> int:
    """Entries in each table; a layer beyond the model's is the outer one."""
    if has_columns:
        return shape.column_sites[-1].entry_base + shape.column_sites[-1].num_entries
    return shape.num_entries + (len(shape.outer_sites) if num_layers > shape.num_layers else 0)


def _offsets(pairs: Sequence[Pair], itemsize: int) -> Places:
    offsets: list[tuple[int, int]] = []
    size = 0
    align = MATRIX_ALIGN_BYTES // itemsize
    for pair in pairs:
        for matrix in (pair.shrink, *pair.expands):
            stride = -(-matrix.shape[1] * matrix.shape[2] // align) * align
            offsets.append((size, stride))
            size += stride * matrix.shape[0]
    return offsets, size


def _write_entries(
    pair: Pair,
    module: int,
    shrink: tuple[torch.Tensor, tuple[int, int]],
    expand: tuple[torch.Tensor, tuple[int, int]],
    rows: np.ndarray,
    scales: np.ndarray,
) -> None:
    width, num = len(pair.site.modules), len(pair.experts)
    first = pair.site.entry(module, pair.experts.start)
    entries = slice(first, first + num * width, width)
    for column, (matrix, (offset, stride)) in enumerate((shrink, expand)):
        step = stride if matrix.shape[0] > 1 else 0
        rows[entries, column] = offset if not step else np.arange(offset, offset + num * step, step)
    rows[entries, 2] = pair.shrink.shape[1]
    scales[entries] = pair.scale


def _not_finite(pairs: Sequence[Pair], dtype: torch.dtype, where: str) -> AdapterError:
    for pair in pairs:
        for part, matrices in (("lora_A", (pair.shrink,)), ("lora_B", pair.expands)):
            for matrix in matrices:
                if not bool(torch.isfinite(matrix.to(dtype)).all()):
                    cause = f"values too large for {dtype}"
                    if not bool(torch.isfinite(matrix).all()):
                        cause = "NaN or infinite values"
                    return AdapterError(
                        f"{where}: {pair.source} (or its lora_B): {cause} in {part}; "
                        "the training run diverged or the file is damaged"
                    )
    raise AssertionError("packed data is not finite but every source is")


def assemble(
    name: str,
    layers: Sequence[PackedLayer],
    shape: ModelShape,
    warnings: tuple[str, ...] = (),
    invocation: tuple[int, ...] = (),
    has_columns: bool = False,
) -> PackedAdapter:
    """The packed layers as one adapter."""
    ranks = torch.stack([layer.table[:, 2] for layer in layers])
    if has_columns:
        ranks = ranks[:, : shape.column_sites[0].entry_base]
    used = ranks.amax(dim=0)
    sites = shape.sites if len(layers) <= shape.num_layers else (*shape.sites, *shape.outer_sites)
    targets = tuple(
        module
        for site in sites
        for index, module in enumerate(site.modules)
        if bool(used[site.entry_base + index : site.entry_base + site.num_entries : len(site.modules)].any())
    )
    return PackedAdapter(
        name=name,
        layers=tuple(layers),
        max_lora_rank=int(ranks.max()),
        nbytes=sum(layer.nbytes for layer in layers),
        content_hash=content_hash(layers, invocation),
        targets=targets,
        warnings=warnings,
        invocation=invocation,
        has_columns=has_columns,
    )


def content_hash(layers: Sequence[PackedLayer], invocation: tuple[int, ...] = ()) -> str:
    """See `PackedAdapter.content_hash`."""
    digest = hashlib.sha256()
    for layer in layers:
        digest.update(str(layer.data.dtype).encode())
        for tensor in (layer.data, layer.table, layer.scale):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    if invocation:
        digest.update(repr(invocation).encode())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class LayerShard:
    """A rank's part of a packed layer.

    With divided layers (`core.shard`) B is divided for column-parallel sites, A for row-parallel sites, so
    deltas need no communication (unlike S-LoRA, arXiv 2311.03285).  copies: (first element in the layer's
    data, in the shard, number of elements), ascending.  divided: matrices with a part of their columns (first
    element in the layer's data, in the shard, number of rows, of columns, row stride in the data, in the
    shard).  table, scale: as in `PackedLayer`, offsets in the shard.
    """

    copies: tuple[tuple[int, int, int], ...]
    table: torch.Tensor
    scale: torch.Tensor
    num_elements: int
    divided: tuple[tuple[int, ...], ...] = ()

    def copy(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """out = the shard's elements of the layer's `data`; both 1-D."""
        for source, target, count in self.copies:
            out[target : target + count].copy_(data[source : source + count])
        for source, target, num_rows, width, stride, out_stride in self.divided:
            part = data[source:].as_strided((num_rows, width), (stride, 1))
            out[target:].as_strided((num_rows, width), (out_stride, 1)).copy_(part)


@lru_cache(maxsize=64)
def entry_widths(held: ModelShape | ModelShard) -> tuple[np.ndarray, np.ndarray]:
    """Row widths of A and B, outer and column sites included: [X] int64 each."""
    shape = held.shape if isinstance(held, ModelShard) else held
    sites = (*shape.sites, *held.outer_sites, *shape.column_sites)
    a_width = np.zeros(num_table_entries(shape, shape.num_layers, True), dtype=np.int64)
    b_width = np.zeros_like(a_width)
    for site in sites:
        entries = slice(site.entry_base, site.entry_base + site.num_entries)
        a_width[entries] = site.in_features
        b_width[entries] = np.tile(site.out_features, max(1, site.num_experts))
    return a_width, b_width


@lru_cache(maxsize=64)
def _held_columns(shard: ModelShard) -> np.ndarray:
    """[2, X, C, 2] int64: per entry of A and B, (first, number) of column ranges."""
    whole = shard.whole
    sites = (*whole.sites, *whole.outer_sites, *whole.column_sites)
    found = np.zeros((2, num_table_entries(whole, whole.num_layers, True), 3, 2), dtype=np.int64)
    for site in sites:
        entries = slice(site.entry_base, site.entry_base + site.num_entries)
        found[0, entries, 0] = shard.inputs(site).start, len(shard.inputs(site))
        for module, parts in enumerate(shard.outputs(site)):
            for number, part in enumerate(parts):
                found[1, entries, number][module :: len(site.modules)] = part.start, len(part)
    return found


def shard_layer(
    layer: PackedLayer,
    shape: ModelShape,
    kept: np.ndarray,
    shard: ModelShard | None = None,
    beside: LayerShard | None = None,
) -> LayerShard:
    """The part of `layer` with the entries `kept` ([X] bool), and with all outer entries and columns.

    Shared matrices stay shared.  shard: division of sites; None: matrices stay whole.  beside: another rank's
    part in the same memory, with the undivided matrices; num_elements includes `beside`.
    """
    table = layer.table.numpy()
    kept = np.concatenate([kept, np.ones(len(table) - len(kept), dtype=bool)])
    rows = np.flatnonzero(kept & (table[:, 2] > 0))
    lora_rank = table[rows, 2]
    starts = np.concatenate([table[rows, 0], table[rows, 1]])
    held = shape if shard is None else shard
    sizes = np.concatenate([lora_rank * width[rows] for width in entry_widths(held)])
    align = MATRIX_ALIGN_BYTES // layer.data.element_size()
    unique, first = np.unique(starts, return_index=True)
    sizes = -(-sizes[first] // align) * align
    of_b, which = np.divmod(first, max(1, len(rows)))
    matrices = of_b, rows[which]
    num_elements = 0
    if beside is not None:
        whole, own = (np.stack(entry_widths(one))[matrices] for one in (shape, held))
        sizes, num_elements = sizes * (whole != own), beside.num_elements
    places = num_elements + np.cumsum(sizes) - sizes
    num_elements += int(sizes.sum())
    if beside is not None:
        places = np.where(sizes > 0, places, beside.table.numpy()[rows[which], of_b])
    shard_table = np.zeros_like(table)
    shard_table[rows, :2] = places[np.searchsorted(unique, table[rows, :2])]
    shard_table[rows, 2] = lora_rank
    copies = _merged(unique, places, sizes)
    divided: tuple[tuple[int, ...], ...] = ()
    if shard is not None:
        copies, divided = _divided(shard, matrices, (unique, places, sizes), lora_rank[which])
    return LayerShard(
        copies=copies if beside is None else (),
        divided=divided,
        table=torch.from_numpy(shard_table),
        scale=torch.where(torch.from_numpy(shard_table[:, 2]) > 0, layer.scale, 0.0),
        num_elements=num_elements,
    )


def entries_of_experts(shape: ModelShape, experts: range) -> np.ndarray:
    """[X] bool: dense entries, and entries of these experts."""
    kept = np.ones(shape.num_entries, dtype=bool)
    for site in shape.sites:
        if site.is_routed:
            kept[site.entry_base : site.entry_base + site.num_entries] = False
            kept[site.entry(0, experts.start) : site.entry(0, experts.stop)] = True
    return kept


def _divided(
    shard: ModelShard,
    matrices: tuple[np.ndarray, np.ndarray],
    where: tuple[np.ndarray, np.ndarray, np.ndarray],
    lora_rank: np.ndarray,
) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, ...], ...]]:
    """`LayerShard.copies` and `divided`."""
    starts, places, sizes = where
    strides, out_strides = (np.stack(entry_widths(one))[matrices] for one in (shard.whole, shard))
    whole = strides == out_strides
    found: list[tuple[int, ...]] = []
    column = np.zeros_like(starts)
    for first, width in np.moveaxis(_held_columns(shard)[matrices], 0, -1):
        table = np.stack([starts + first, places + column, lora_rank, width, strides, out_strides], 1)
        for row in table[~whole & (width > 0)].tolist():
            last = found[-1] if found else (0,) * 6
            ends = last[0] + last[2] * last[4], last[1] + last[2] * last[5]
            if (*ends, *last[3:]) == (row[0], row[1], *row[3:]):
                found[-1] = (*last[:2], last[2] + row[2], *last[3:])
            else:
                found.append(tuple(row))
        column = column + width
    return _merged(starts[whole], places[whole], sizes[whole]), tuple(found)


def _merged(starts: np.ndarray, places: np.ndarray, sizes: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    if not len(starts):
        return ()
    apart = [part[1:] != part[:-1] + sizes[:-1] for part in (starts, places)]
    begins = np.concatenate([[0], np.flatnonzero(apart[0] | apart[1]) + 1])
    counts = np.add.reduceat(sizes, begins)
    return tuple(zip(starts[begins].tolist(), places[begins].tolist(), counts.tolist(), strict=True))
