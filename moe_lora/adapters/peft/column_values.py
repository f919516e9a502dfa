# SPDX-License-Identifier: Apache-2.0
"""Values of scaled and shifted columns, computed once while an adapter is read.

The values enter the adapter's content hash, so every host must compute the same bits.  Sums are of integers
in fp64, exact below 2**53 in any order; the other operations are elementwise.

Legend: O output features, I input features, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from moe_lora.core.errors import AdapterError

from .base import Stored, base_file
from .base_weights import parts_of
from .columns import ColumnSource

_CHUNK = 1 << 22
"""Elements of the base in memory at a time."""
_EXACT_BITS = 53
"""Integers of fp64 without rounding."""


def with_columns(
    columns: Sequence[ColumnSource], tensors: Mapping[str, torch.Tensor], where: str
) -> dict[str, torch.Tensor]:
    """The tensors, with [O, 2] fp32 of factor - 1 and shift in place of each [O] of a column term.

    Raises AdapterError with `where` and the key for factors that are not finite.
    """
    return {**tensors, **{one.key: _values(one, tensors, where) for one in columns}}


def _values(column: ColumnSource, tensors: Mapping[str, torch.Tensor], where: str) -> torch.Tensor:
    given_O, scale = tensors[column.key].float(), column.pair.scale
    if column.weight is None:
        return torch.stack([torch.zeros_like(given_O), scale * given_O], dim=1)
    a_RI, b_OR = (tensors[key].float() for key in (column.pair.keys_a[0], column.pair.keys_b[0]))
    norm_O = norms(column.weight, a_RI, scale * b_OR)
    factor_O = (given_O.double() / norm_O).float()
    if not bool(torch.isfinite(factor_O).all()):
        cause = (
            "NaN or infinite values"
            if bool((norm_O > 0).all())
            else "a weight of the base and its delta are 0"
        )
        raise AdapterError(
            f"{where}: {column.key}: the magnitude over the norm of its weights is not finite ({cause}); the "
            "training run diverged, or the file is damaged"
        )
    shift_O = torch.zeros_like(factor_O)
    if column.bias is not None:
        shift_O = (1 - factor_O) * _read(column.bias)
    return torch.stack([factor_O - 1, shift_O], dim=1)


def norms(weight: Stored, a_RI: torch.Tensor, b_OR: torch.Tensor) -> torch.Tensor:
    """|W + B A| of each row of W: [O] fp64, of terms rounded to 2**-18 of their row's largest, or finer."""
    path, entry = weight
    lora_rank, num_in = a_RI.shape
    step = max(1, _CHUNK // num_in)
    [whole_a_RI], [scale_a] = _integers(a_RI.view(1, -1), lora_rank)
    norms = []
    with base_file(path) as file:
        read = parts_of(file, entry)
        for first in range(0, len(b_OR), step):
            rows_R, scale_O = _integers(b_OR[first : first + step], lora_rank)
            delta_OI = rows_R @ whole_a_RI.view(lora_rank, num_in) * scale_O[:, None] * scale_a
            w_OI = read(first * num_in, delta_OI.numel()).view_as(delta_OI)
            whole_OI, scale_O = _integers(delta_OI.add_(w_OI), num_in)
            norms.append(whole_OI.square_().sum(dim=1).sqrt_() * scale_O)
    return torch.cat(norms)


def _integers(rows: torch.Tensor, num_terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers in fp64 and a power of two for each row, whose product is the row, rounded.

    num_terms: sums of this number of products of two such integers stay exact.
    """
    bits = (_EXACT_BITS - num_terms.bit_length()) // 2
    _, exponents = np.frexp(rows.abs().amax(dim=1).double().numpy())
    scales = torch.from_numpy(np.ldexp(1.0, exponents - bits))
    return (rows.double() / scales[:, None]).round_(), scales


def _read(stored: Stored) -> torch.Tensor:
    path, entry = stored
    with base_file(path) as file:
        return parts_of(file, entry)(0, entry.shape[0]).float()
