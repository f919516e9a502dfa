# SPDX-License-Identifier: Apache-2.0
"""The base's values for copies, replaced rows, and DoRA's norms.

Column factors and shifts enter the content hash, so every host must compute equal bits. Sums are of integers
in fp64, exact below 2**53 in any order; the rest is elementwise.

Legend: O outputs, I inputs, R LoRA rank.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import torch

from moe_lora.core.errors import AdapterError
from moe_lora.core.wrong_files import TensorEntry, header_entries, open_file

from .base import Stored, base_file, base_tensor
from .columns import ColumnSource
from .files import unreadable, weights_file
from .match import Match
from .replaced import base_rows

_CHUNK = 1 << 18
"""Elements of the base in memory at a time."""
_WAY_OUT = (
    "an adapter that replaces base weights is not supported; if the embeddings were not trained, save the "
    "adapter again with save_pretrained(..., save_embedding_layers=False)"
)
Parts: TypeAlias = Callable[[int, int], torch.Tensor]
"""(first element, number) -> these elements of a tensor, 1-D."""


def check_copies_in(folder: Path, copies: Sequence[str], model_dir: Path | None, called: str | None) -> None:
    """`check_copies` of the adapter's file in a folder."""
    path = weights_file(folder, called)
    where = str(path) if called is None else f"{called}{path.name}"
    try:
        with open_file(path, where) as file:
            entries = header_entries(file, where)
            parts = {key: _adapters_parts(file, entries[key], where) for key in copies}
            check_copies(parts, model_dir, where)
    except OSError as error:
        raise unreadable(where, error) from error


def check_copies(copies: Mapping[str, Parts], model_dir: Path | None, where: str) -> None:
    """Raises AdapterError unless each copy has the checkpoint's values."""
    for key, parts in copies.items():
        problem = f"{where}: {key}: a copy of the base model's weights, and they can't be compared"
        site = "head" if "lm_head" in key else "embedding"
        path, entry = base_tensor(site, model_dir, problem, _WAY_OUT, key.endswith(".bias"))
        with base_file(path) as file:
            if not _same_values(parts, parts_of(file, entry), math.prod(entry.shape)):
                raise AdapterError(f"{where}: {key}: values other than the base model's: {_WAY_OUT}")


def with_changes(
    found: Match, tensors: Mapping[str, torch.Tensor], base_dir: Path | None, where: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors, with the changes of `Match.replaced` to the checkpoint: [N, H], by site and key."""
    changes: dict[str, torch.Tensor] = {}
    for rows in found.replaced:
        path, entry = base_rows(rows, base_dir, where)
        with base_file(path) as file:
            change = _change(tensors[rows.key], parts_of(file, entry), rows.tokens, dtype)
        changes[f"{rows.site} {rows.key}"] = change
    return {**tensors, **changes}


def _change(
    trained: torch.Tensor, base: Parts, tokens: Sequence[int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """trained - base in fp32, some rows at a time.  tokens: None: all rows."""
    change = torch.empty(trained.shape, dtype=dtype)
    hidden = trained.shape[1]
    step = 1 if tokens is not None else max(1, _CHUNK // hidden)
    for first in range(0, len(trained), step):
        part = trained[first : first + step].float()
        start = first if tokens is None else tokens[first]
        change[first : first + step] = part - base(start * hidden, part.numel()).view_as(part).float()
    return change


def parts_in_memory(tensor: torch.Tensor) -> Parts:
    flat = tensor.detach().flatten()
    return lambda first, number: flat[first : first + number].cpu()


def parts_of(file: BinaryIO, entry: TensorEntry) -> Parts:
    dtype = getattr(torch, entry.dtype.removeprefix("torch."))

    def read(first: int, number: int) -> torch.Tensor:
        file.seek(entry.span[0] + first * dtype.itemsize)
        found = file.read(number * dtype.itemsize)
        if len(found) != number * dtype.itemsize:
            raise OSError(errno.EIO, "cut while it was read")
        return torch.frombuffer(bytearray(found), dtype=dtype)

    return read


def _adapters_parts(file: BinaryIO, entry: TensorEntry, where: str) -> Parts:
    """`parts_of` an adapter's file: an OSError is the adapter's fault."""
    parts = parts_of(file, entry)

    def read(first: int, number: int) -> torch.Tensor:
        try:
            return parts(first, number)
        except OSError as error:
            raise unreadable(where, error) from error

    return read


def _same_values(copy: Parts, base: Parts, num_elements: int) -> bool:
    """True if the copy has the base's values, rounded."""
    for first in range(0, num_elements, _CHUNK):
        number = min(_CHUNK, num_elements - first)
        part = copy(first, number)
        if not torch.equal(part, base(first, number).to(part.dtype)):
            return False
    return True


_NORM_CHUNK = 1 << 22
"""Elements of the base in memory at a time."""
_EXACT_BITS = 53
"""Integers of fp64 without rounding."""


def with_columns(
    columns: Sequence[ColumnSource], tensors: Mapping[str, torch.Tensor], where: str
) -> dict[str, torch.Tensor]:
    """The tensors, with [O, 2] fp32 of factor - 1 and shift for each [O] of a column term.

    Raises AdapterError for infinite or NaN factors.
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
    shift_O = (1 - factor_O) * _read(column.bias) if column.bias is not None else torch.zeros_like(factor_O)
    return torch.stack([factor_O - 1, shift_O], dim=1)


def norms(weight: Stored, a_RI: torch.Tensor, b_OR: torch.Tensor) -> torch.Tensor:
    """|W + B A| of each row of W: [O] fp64, of terms rounded to 2**-18 of their row's largest, or finer."""
    path, entry = weight
    lora_rank, num_in = a_RI.shape
    step = max(1, _NORM_CHUNK // num_in)
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
    """Per row, integers in fp64 and a power of two; their product is the rounded row.

    Sums of num_terms products of two such integers stay exact.
    """
    bits = (_EXACT_BITS - num_terms.bit_length()) // 2
    _, exponents = np.frexp(rows.abs().amax(dim=1).double().numpy())
    scales = torch.from_numpy(np.ldexp(1.0, exponents - bits))
    return (rows.double() / scales[:, None]).round_(), scales


def _read(stored: Stored) -> torch.Tensor:
    path, entry = stored
    with base_file(path) as file:
        return parts_of(file, entry)(0, entry.shape[0]).float()
