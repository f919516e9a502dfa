# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of plain LoRA adapters, exact by concatenated ranks.

Legend: R LoRA rank, D features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import MATRIX_ALIGN_BYTES, ModelShape

from .packed import PackedAdapter, PackedLayer, assemble, entry_widths


def compose(name: str, terms: Sequence[tuple[PackedAdapter, float]], shape: ModelShape) -> PackedAdapter:
    """sum_k w_k s_k B_k A_k as one adapter of rank sum_k R_k: [w_1 s_1 A_1; ...; w_K s_K A_K], [B_1 ... B_K].

    Raises AdapterError unless all terms are plain LoRA.
    Source: PEFT, add_weighted_adapter with combination_type="cat".
    """
    for adapter, _ in terms:
        _check_plain(adapter, shape)
    layers = [
        _composed_layer([(adapter.layers[index], weight) for adapter, weight in terms], shape)
        for index in range(shape.num_layers)
    ]
    if any(not bool(torch.isfinite(layer.data).all()) for layer in layers):
        names = ", ".join(adapter.name for adapter, _ in terms)
        raise AdapterError(
            f"the weighted sum of {names} has values too large for its dtype; lower the weights"
        )
    return assemble(name, layers, shape)


def _check_plain(adapter: PackedAdapter, shape: ModelShape) -> None:
    kind = None
    if adapter.has_columns:
        kind = "has use_dora or lora_bias"
    elif adapter.invocation:
        kind = "has alora_invocation_tokens"
    elif len(adapter.layers) > shape.num_layers:
        kind = "changes lm_head or embed_tokens"
    if kind is not None:
        raise AdapterError(f"adapter {adapter.name!r} {kind}, and a sum takes plain LoRA alone; leave it out")


def _composed_layer(terms: Sequence[tuple[PackedLayer, float]], shape: ModelShape) -> PackedLayer:
    """A layer of the sum; entries with equal matrices share the sum's too."""
    first = terms[0][0]
    align = MATRIX_ALIGN_BYTES // first.data.element_size()
    tables = np.stack([layer.table.numpy() for layer, _ in terms])
    factors = np.stack([layer.scale.numpy() * weight for layer, weight in terms])
    widths = entry_widths(shape)
    table = torch.zeros_like(first.table)
    scale = torch.zeros_like(first.scale)
    pieces: list[torch.Tensor] = []
    places: dict[tuple[tuple[float, ...], ...], int] = {}
    size = 0
    for entry in np.flatnonzero(tables[:, :, 2].any(axis=0)).tolist():
        held = np.flatnonzero(tables[:, entry, 2]).tolist()
        for column in (0, 1):
            key = tuple(
                (column, k, *tables[k, entry, [column, 2]].tolist(), *([] if column else [factors[k, entry]]))
                for k in held
            )
            if key not in places:
                places[key] = size
                width = int(widths[column][entry])
                rows = [_rows(terms[k][0], tables[k, entry], column, width, factors[k, entry]) for k in held]
                matrix = torch.cat(rows).view(-1)
                gap = -len(matrix) % align
                pieces += [matrix, matrix.new_zeros(gap)]
                size += len(matrix) + gap
            table[entry, column] = places[key]
        table[entry, 2] = int(tables[held, entry, 2].sum())
        scale[entry] = 1.0
    data = torch.cat(pieces) if pieces else first.data.new_zeros(0)
    return PackedLayer(data=data, table=table, scale=scale)


def _rows(layer: PackedLayer, row: np.ndarray, column: int, width: int, factor: float) -> torch.Tensor:
    """Rows [R, D] of a term's matrix; A with the factor."""
    start, lora_rank = int(row[column]), int(row[2])
    rows = layer.data[start : start + lora_rank * width].view(lora_rank, width)
    return rows if column else (rows.float() * float(factor)).to(rows.dtype)
