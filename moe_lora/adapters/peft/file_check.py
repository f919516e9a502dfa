"""Whether an adapter's files fit a base model, told without torch and, unless asked, without its values."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moe_lora.adapters.registry.base_model import check_base
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape

from .files import TensorEntry, not_readable, read_config, read_header, weights_file
from .match import match
from .places import check_pair, is_swapped, place_map
from .training_state import check_embeddings

# Of tensors beyond what an adapter can have, so that a few strangers are refused by name.
_STRANGERS = 1000
_HEADER_BYTES_PER_TENSOR = 512
_HEADER_BYTES_BESIDE = 1 << 20
_CHUNK_BYTES = 1 << 24
# The bits of the exponent, all set in NaN and infinity, of a float as an unsigned integer.
_EXPONENTS = {"F32": ("<u4", 0xFF << 23), "BF16": ("<u2", 0xFF << 7), "F16": ("<u2", 0x1F << 10)} | {
    "F64": ("<u8", 0x7FF << 52)
}


@lru_cache(maxsize=8)
def max_tensors(shape: ModelShape) -> int:
    """The most tensors an adapter of this model can have: an A and a B for each place."""
    return 2 * sum(len(places) for _, places in place_map(shape).by_path.values())


def check_num_tensors(num_tensors: int, shape: ModelShape, where: str) -> None:
    """Raises AdapterError for far more tensors than an adapter of this model can have."""
    if num_tensors > max_tensors(shape) + _STRANGERS:
        raise AdapterError(
            f"{where}: {num_tensors} tensors, an adapter of this base model has at most "
            f"{max_tensors(shape)}; serve it with the base it was trained for, and save one adapter only"
        )


def check_header_size(weights: Path, shape: ModelShape) -> None:
    """Raises AdapterError for a safetensors header longer than that of an adapter of this model.

    The header is not read, so that a file of no use costs no time: one of 500 000 tensors took 22 s.
    """
    limit = (max_tensors(shape) + _STRANGERS) * _HEADER_BYTES_PER_TENSOR + _HEADER_BYTES_BESIDE
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


def check_adapter(folder: Path, shape: ModelShape, *, values: bool = False) -> None:
    """Raises AdapterError if `read_adapter` would refuse the PEFT folder, for the same reason.

    values: look for NaN and infinity too, which reads the whole file.  What overflows in the model's dtype
    only `read_adapter` finds.
    """
    config = read_config(folder)
    check_base(config, shape)
    weights = weights_file(folder)
    check_header_size(weights, shape)
    entries = read_header(weights)
    check_num_tensors(len(entries), shape, str(weights))
    check_embeddings(entries, shape, str(weights))
    sources = [source for layer in match(entries, config, shape, str(weights)).layers for source in layer]
    swapped = is_swapped(sources, entries, shape)
    for source in sources:
        check_pair(source, entries, shape, str(weights), swapped)
    if values:
        _check_finite(weights, entries)


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
