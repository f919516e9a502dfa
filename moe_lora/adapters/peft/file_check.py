# SPDX-License-Identifier: Apache-2.0
"""Check of an adapter's files against a base model, without torch."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np

from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape
from moe_lora.core.wrong_files import TensorEntry, confined, header_entries, open_file

from .base import read_base
from .config import AdapterConfig
from .files import CONFIG_FILE, MLX_FILE, MLX_KEY, WEIGHTS_FILE, read_json, unreadable, weights_file
from .match import Match, check_rank, match
from .places import STRANGERS, max_tensors

if TYPE_CHECKING:
    from .mlx import MlxConfig

_FILES = (CONFIG_FILE, WEIGHTS_FILE, MLX_FILE)
_HEADER_BYTES_PER_TENSOR = 512
_HEADER_BYTES_BESIDE = 1 << 20
_CHUNK_BYTES = 1 << 24
# Exponent bits: all set in NaN and infinity.
_EXPONENTS = {"F32": ("<u4", 0xFF << 23), "BF16": ("<u2", 0xFF << 7), "F16": ("<u2", 0x1F << 10)} | {
    "F64": ("<u8", 0x7FF << 52)
}


def check_adapter(
    folder: Path,
    shape: ModelShape,
    *,
    values: bool = False,
    root: str | None = None,
    max_lora_rank: int | None = None,
    base_dir: Path | None = None,
) -> None:
    """Raises AdapterError if `read_adapter` would refuse the PEFT folder.

    values: also look for NaN and infinity; only `read_adapter` finds overflow in the model's dtype.
    """
    with opened(folder, shape, root=root, max_lora_rank=max_lora_rank, base_dir=base_dir) as found:
        if values:
            _check_finite(found)


@dataclass(frozen=True)
class OpenAdapter:
    """A PEFT folder that fits a model; values unread.

    where: the tensor file's name in errors.  transposed: keys of entries that are stored transposed.
    """

    weights: BinaryIO
    entries: dict[str, TensorEntry]
    match: Match
    where: str
    transposed: Container[str] = ()


@contextmanager
def opened(
    folder: Path,
    shape: ModelShape,
    called: str | None = None,
    root: str | None = None,
    max_lora_rank: int | None = None,
    subtracts: bool = False,
    base_dir: Path | None = None,
) -> Iterator[OpenAdapter]:
    """The adapter in a folder, checked by config and header.

    called: prefix of file names in errors; None: the path.  root: folder that must contain every file.
    Raises AdapterError, also at the end for files changed meanwhile; StorageError without free file handles.
    """
    shown = f"{folder}{os.sep}" if called is None else called
    name = shown.rstrip(f": {os.sep}")
    if not confined(folder, root):
        raise AdapterError(f"{name}: no such folder in the folder of adapters; copy the adapter there")
    try:
        # Resolved once: a link changed between two reads would mix adapters.
        real = Path(os.path.realpath(folder))
        before = _stamps(real)
        fields, config_where = read_json(real, shown, root), f"{shown}{CONFIG_FILE}"
        mlx: MlxConfig | None = None
        if isinstance(fields, dict) and MLX_KEY in fields and "peft_type" not in fields:
            from .mlx import MlxConfig, as_peft

            mlx = MlxConfig(fields, config_where)
        config = AdapterConfig.parse(mlx.as_peft() if mlx else fields, config_where, subtracts)
        base = read_base(config, root, shape)
        path = mlx.weights_file(real, shown) if mlx else weights_file(real, shown)
        where, transposed = f"{shown}{path.name}", frozenset[str]()
        with open_file(path, where, root) as weights:
            _check_header_size(weights, shape, where)
            entries = header_entries(weights, where)
            if mlx:
                entries, transposed, targets = as_peft(entries, mlx, shape, where)
                config = msgspec.structs.replace(config, target_modules=targets)
            found = match(entries, config, shape, where, base, base_dir)
            check_rank(found, max_lora_rank, where)
            yield OpenAdapter(weights, entries, found, where, transposed)
        after = _stamps(real)
    except OSError as error:
        raise unreadable(name, error) from error
    if after != before:
        raise AdapterError(
            f"{name}: its files changed while they were read; load it again once they are whole"
        )


def _stamps(folder: Path) -> list[tuple[int, int, int, int]]:
    """Values that change with a file."""
    facts = [os.stat(folder / name) for name in _FILES if (folder / name).exists()]
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in facts]


def _check_header_size(weights: BinaryIO, shape: ModelShape, where: str) -> None:
    """Raises AdapterError for too long a header, before parsing."""
    limit = (max_tensors(shape) + STRANGERS) * _HEADER_BYTES_PER_TENSOR + _HEADER_BYTES_BESIDE
    num_bytes = int.from_bytes(weights.read(8), "little")
    weights.seek(0)
    if limit < num_bytes <= os.fstat(weights.fileno()).st_size:
        raise AdapterError(
            f"{where}: a header of {num_bytes} bytes, at most {limit} are read for this base model, of "
            f"which an adapter has at most {max_tensors(shape)} tensors; serve the adapter with the base it "
            "was trained for, and save one adapter only"
        )


def bad_adapters(
    adapters: Iterable[tuple[str, str]],
    shape: ModelShape,
    *,
    values: bool = False,
    root: str | None = None,
    max_lora_rank: int | None = None,
    base_dir: Path | None = None,
) -> dict[str, str]:
    """Unservable (name, folder) pairs: name -> reason."""
    found = {}
    for name, folder in adapters:
        try:
            check_adapter(
                Path(folder),
                shape,
                values=values,
                root=root,
                max_lora_rank=max_lora_rank,
                base_dir=base_dir,
            )
        except AdapterError as error:
            found[name] = str(error)
    return found


def _check_finite(found: OpenAdapter) -> None:
    for key, entry in found.entries.items():
        if not _is_finite(found.weights, entry):
            raise AdapterError(
                f"{found.where}: {key}: NaN or infinite values; the training run diverged or the file is "
                "damaged"
            )


def _is_finite(file: BinaryIO, entry: TensorEntry) -> bool:
    kind, exponent = _EXPONENTS[entry.code]
    file.seek(entry.span[0])
    left = entry.span[1] - entry.span[0]
    while left > 0:
        bits = np.frombuffer(file.read(min(left, _CHUNK_BYTES)), dtype=kind)
        if bool(((bits & exponent) == exponent).any()):
            return False
        left -= max(bits.nbytes, 1)
    return True
