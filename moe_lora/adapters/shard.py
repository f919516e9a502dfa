"""The part of a packed adapter that one rank holds: some entries of each layer, packed again without gaps.

Legend: X offset-table entries of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from moe_lora.core.shape import MATRIX_ALIGN_BYTES, ModelShape
from .packed import PackedAdapter, PackedLayer


@dataclass(frozen=True, kw_only=True)
class LayerShard:
    """Which elements of a packed layer's data a rank copies, and where its entries then lie.

    copies: (first element in the layer's data, first element in the shard, number of elements), ascending.
    table, scale: as in `PackedLayer`, offsets from the shard's start; lora_rank 0 where an entry is not kept.
    """

    copies: tuple[tuple[int, int, int], ...]
    table: torch.Tensor
    scale: torch.Tensor
    num_elements: int

    def copy(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """out = the shard's elements of the layer's `data`; both 1-D, out of `num_elements`."""
        for source, target, count in self.copies:
            out[target : target + count].copy_(data[source : source + count])


@lru_cache(maxsize=8)
def _entry_widths(shape: ModelShape) -> tuple[np.ndarray, np.ndarray]:
    """Row widths of A and B of each entry: [X] int64 each."""
    a_width = np.zeros(shape.num_entries, dtype=np.int64)
    b_width = np.zeros(shape.num_entries, dtype=np.int64)
    for site in shape.sites:
        entries = slice(site.entry_base, site.entry_base + site.num_entries)
        a_width[entries] = site.in_features
        b_width[entries] = np.tile(site.out_features, max(1, site.num_experts))
    return a_width, b_width


def shard_layer(layer: PackedLayer, shape: ModelShape, kept: np.ndarray) -> LayerShard:
    """The part of `layer` that holds the entries `kept` ([X] bool); shared matrices stay shared."""
    table = layer.table.numpy()
    rows = np.flatnonzero(kept & (table[:, 2] > 0))
    lora_rank = table[rows, 2]
    starts = np.concatenate([table[rows, 0], table[rows, 1]])
    sizes = np.concatenate([lora_rank * width[rows] for width in _entry_widths(shape)])
    align = MATRIX_ALIGN_BYTES // layer.data.element_size()
    sizes = -(-sizes // align) * align
    unique, first = np.unique(starts, return_index=True)
    places = np.cumsum(sizes[first]) - sizes[first]
    shard_table = np.zeros_like(table)
    shard_table[rows, :2] = places[np.searchsorted(unique, table[rows, :2])]
    shard_table[rows, 2] = lora_rank
    return LayerShard(
        copies=_merged(unique, places, sizes[first]),
        table=torch.from_numpy(shard_table),
        scale=torch.where(torch.from_numpy(shard_table[:, 2]) > 0, layer.scale, 0.0),
        num_elements=int(sizes[first].sum()),
    )


def entries_of_experts(shape: ModelShape, experts: range) -> np.ndarray:
    """What a rank with these experts computes: every dense entry and the entries of its experts, [X] bool."""
    kept = np.ones(shape.num_entries, dtype=bool)
    for site in shape.sites:
        if site.num_experts:
            kept[site.entry_base : site.entry_base + site.num_entries] = False
            kept[site.entry(0, experts.start) : site.entry(0, experts.stop)] = True
    return kept


def _merged(starts: np.ndarray, places: np.ndarray, sizes: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """Copies of neighbouring matrices as one."""
    if not len(starts):
        return ()
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
    begins = np.concatenate([[0], breaks])
    counts = np.add.reduceat(sizes, begins)
    return tuple(zip(starts[begins].tolist(), places[begins].tolist(), counts.tolist(), strict=True))


def shard_adapter(packed: PackedAdapter, shape: ModelShape, kept: Sequence[np.ndarray]) -> PackedAdapter:
    """`packed` with only the entries kept[layer] ([X] bool) of each layer, in memory of its own."""
    layers = []
    for layer, mask in zip(packed.layers, kept, strict=True):
        shard = shard_layer(layer, shape, mask)
        data = layer.data.new_empty(shard.num_elements)
        shard.copy(layer.data, data)
        layers.append(PackedLayer(data=data, table=shard.table, scale=shard.scale))
    return replace(packed, layers=tuple(layers), nbytes=sum(layer.nbytes for layer in layers))
