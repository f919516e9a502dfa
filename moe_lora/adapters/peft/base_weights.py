# SPDX-License-Identifier: Apache-2.0
"""The base's embedding and head beside an adapter's: copies must be equal, replaced rows are a change.

PEFT saves a targeted module's base weights beside the LoRA pair.  A trained copy would change the base.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch

from moe_lora.core.errors import AdapterError
from moe_lora.core.wrong_files import TensorEntry, header_entries, open_file

from .base import base_file, base_tensor
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
    """`check_copies` of the adapter's file in a folder.  called: as in `files.weights_file`."""
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
    """Raises AdapterError unless each copy has the values of the checkpoint in model_dir.

    None for model_dir: the base has no checkpoint.
    """
    for key, parts in copies.items():
        problem = f"{where}: {key}: a copy of the base model's weights, and they can't be compared"
        path, entry = base_tensor("head" if "lm_head" in key else "embedding", model_dir, problem, _WAY_OUT)
        with base_file(path) as file:
            if not _same_values(parts, parts_of(file, entry), math.prod(entry.shape)):
                raise AdapterError(f"{where}: {key}: values other than the base model's: {_WAY_OUT}")


def with_changes(
    found: Match, tensors: Mapping[str, torch.Tensor], base_dir: Path | None, where: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors, and by key the changes of `Match.replaced` to the checkpoint: [N, H] of the dtype."""
    changes: dict[str, torch.Tensor] = {}
    for rows in found.replaced:
        if rows.key not in changes:  # a tied head shares the rows of the embedding
            path, entry = base_rows(rows, base_dir, where)
            with base_file(path) as file:
                changes[rows.key] = _change(tensors[rows.key], parts_of(file, entry), rows.tokens, dtype)
    return {**tensors, **changes}


def _change(
    trained: torch.Tensor, base: Parts, tokens: Sequence[int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """trained - base in fp32, some rows at a time.  tokens: of the rows; None: all."""
    change = torch.empty(trained.shape, dtype=dtype)
    hidden = trained.shape[1]
    step = 1 if tokens is not None else max(1, _CHUNK // hidden)
    for first in range(0, len(trained), step):
        part = trained[first : first + step].float()
        start = first if tokens is None else tokens[first]
        change[first : first + step] = part - base(start * hidden, part.numel()).view_as(part).float()
    return change


def parts_in_memory(tensor: torch.Tensor) -> Parts:
    """The parts of a tensor in memory."""
    flat = tensor.detach().flatten()
    return lambda first, number: flat[first : first + number].cpu()


def parts_of(file: BinaryIO, entry: TensorEntry) -> Parts:
    """The parts of a tensor in an open file."""
    dtype = getattr(torch, entry.dtype.removeprefix("torch."))

    def read(first: int, number: int) -> torch.Tensor:
        file.seek(entry.span[0] + first * dtype.itemsize)
        found = file.read(number * dtype.itemsize)
        if len(found) != number * dtype.itemsize:
            raise OSError(errno.EIO, "cut while it was read")
        return torch.frombuffer(bytearray(found), dtype=dtype)

    return read


def _adapters_parts(file: BinaryIO, entry: TensorEntry, where: str) -> Parts:
    """`parts_of` an adapter's file: an OSError would be an error of the base's."""
    parts = parts_of(file, entry)

    def read(first: int, number: int) -> torch.Tensor:
        try:
            return parts(first, number)
        except OSError as error:
            raise unreadable(where, error) from error

    return read


def _same_values(copy: Parts, base: Parts, num_elements: int) -> bool:
    """True if the copy has the base's values, rounded to the copy's dtype."""
    for first in range(0, num_elements, _CHUNK):
        number = min(_CHUNK, num_elements - first)
        part = copy(first, number)
        if not torch.equal(part, base(first, number).to(part.dtype)):
            return False
    return True
