"""Whether an adapter's files fit a base model, told without torch and, unless asked, without its values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape

from .files import TensorEntry, not_readable, read_config, read_header, weights_file
from .match import Match, match
from .places import STRANGERS, max_tensors

_HEADER_BYTES_PER_TENSOR = 512
_HEADER_BYTES_BESIDE = 1 << 20
_CHUNK_BYTES = 1 << 24
# The bits of the exponent, all set in NaN and infinity, of a float as an unsigned integer.
_EXPONENTS = {"F32": ("<u4", 0xFF << 23), "BF16": ("<u2", 0xFF << 7), "F16": ("<u2", 0x1F << 10)} | {
    "F64": ("<u8", 0x7FF << 52)
}


def check_adapter(folder: Path, shape: ModelShape, *, values: bool = False) -> None:
    """Raises AdapterError if `read_adapter` would refuse the PEFT folder, for the same reason.

    values: look for NaN and infinity too, which reads the whole file.  What overflows in the model's dtype
    only `read_adapter` finds.
    """
    weights, entries, _ = matched_header(folder, shape)
    if values:
        _check_finite(weights, entries)


def matched_header(folder: Path, shape: ModelShape) -> tuple[Path, dict[str, TensorEntry], Match]:
    """The weights file of a PEFT folder, its tensors, and their places; no value is read.

    Raises AdapterError as `check_adapter` does.
    """
    config, weights = read_config(folder), weights_file(folder)
    check_header_size(weights, shape)
    entries = read_header(weights)
    return weights, entries, match(entries, config, shape, str(weights))


def check_header_size(weights: Path, shape: ModelShape) -> None:
    """Raises AdapterError for a safetensors header longer than that of an adapter of this model.

    The header is not read, so that a file of no use costs no time: one of 500 000 tensors took 22 s.
    """
    limit = (max_tensors(shape) + STRANGERS) * _HEADER_BYTES_PER_TENSOR + _HEADER_BYTES_BESIDE
    try:
        with weights.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise not_readable(weights, error) from error
    if limit < num_bytes <= weights.stat().st_size:
        raise AdapterError(
            f"{weights}: a header of {num_bytes} bytes, at most {limit} are read for this base model, of "
            f"which an adapter has at most {max_tensors(shape)} tensors; serve the adapter with the base it "
            "was trained for, and save one adapter only"
        )


def bad_adapters(
    adapters: Iterable[tuple[str, str]], shape: ModelShape, *, values: bool = False
) -> dict[str, str]:
    """Of (name, folder) pairs those that can't be served, with the reason."""
    found = {}
    for name, folder in adapters:
        try:
            check_adapter(Path(folder), shape, values=values)
        except AdapterError as error:
            found[name] = str(error)
    return found


def _check_finite(weights: Path, entries: dict[str, TensorEntry]) -> None:
    with weights.open("rb") as file:
        for key, entry in entries.items():
            if not _is_finite(file, entry):
                raise AdapterError(
                    f"{weights}: {key}: NaN or infinite values; the training run diverged or the file is "
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
