# SPDX-License-Identifier: Apache-2.0
"""Values of scaled and shifted columns, computed once while an adapter is read.

Legend: O output features, I input features, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moe_lora.core.errors import AdapterError

from .base import Stored
from .base_weights import parts_of
from .columns import ColumnSource
from .files import open_file

_CHUNK = 1 << 22
"""Elements of the base in memory at a time."""


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
    a_RI, b_OR = (tensors[key].float() for key in (column.pair.key_a, column.pair.key_b))
    norm_O = _norms(column.weight, a_RI, scale * b_OR)
    factor_O = given_O / norm_O
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


def _norms(weight: Stored, a_RI: torch.Tensor, b_OR: torch.Tensor) -> torch.Tensor:
    """|W + B A| of each row of W: [O] fp32."""
    path, entry = weight
    num_in = a_RI.shape[1]
    step = max(1, _CHUNK // num_in)
    norms = []
    with open_file(path, str(path)) as file:
        read = parts_of(file, entry)
        for first in range(0, len(b_OR), step):
            rows_R = b_OR[first : first + step]
            w_I = read(first * num_in, len(rows_R) * num_in).view(-1, num_in).float()
            norms.append(torch.linalg.vector_norm(torch.addmm(w_I, rows_R, a_RI), dim=1))
    return torch.cat(norms)


def _read(stored: Stored) -> torch.Tensor:
    path, entry = stored
    with open_file(path, str(path)) as file:
        return parts_of(file, entry)(0, entry.shape[0]).float()
