"""The two files of a PEFT adapter folder, as far as they can be read without torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from moe_lora.core.errors import AdapterError

from .config import AdapterConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_HEADER_BYTES = 100_000_000
"""That of the safetensors library."""
# As torch calls them.
_DTYPES = {"F32": "torch.float32", "BF16": "torch.bfloat16", "F16": "torch.float16", "F64": "torch.float64"}


@dataclass(frozen=True)
class TensorEntry:
    """What a safetensors header says of a tensor.

    dtype: as torch calls it.  code: as the header does.  span: the offsets of its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    code: str
    span: tuple[int, int]


def read_config(folder: Path) -> AdapterConfig:
    """The folder's adapter_config.json.  Raises AdapterError naming the file and the key."""
    path = folder / CONFIG_FILE
    return AdapterConfig.parse(read_json(folder, path), str(path))


def adapter_folder(path: str, name: str) -> str:
    """Where an adapter lies: `path`, or a folder below, where PEFT saves one that is not called "default".

    Below, the folder of the adapter's own name goes before an only other one; where neither is, `path` itself
    is returned.  Raises AdapterError if there are several others.
    """
    if os.path.isfile(os.path.join(path, CONFIG_FILE)):
        return path
    try:
        entries = sorted(os.listdir(path))
    except (OSError, ValueError):
        return path
    below = [entry for entry in entries if os.path.isfile(os.path.join(path, entry, CONFIG_FILE))]
    if len(below) > 1 and name not in below:
        listed = ", ".join([*below[:10], *["…"] * (len(below) > 10)])
        raise AdapterError(
            f"{path}: holds {len(below)} adapters ({listed}) and none called {name!r}; "
            "give the folder of one of them"
        )
    if not below:
        return path
    return os.path.join(path, name if name in below else below[0])


def weights_file(folder: Path) -> Path:
    """Where the folder's tensors lie.  Raises AdapterError if they are absent or pickled."""
    weights = folder / WEIGHTS_FILE
    if weights.is_file():
        return weights
    pickles = sorted(found.name for pattern in _PICKLES for found in folder.glob(pattern))
    if pickles:
        raise AdapterError(
            f"{folder / pickles[0]}: a pickle can run code when it is opened and is not read; convert it to "
            f"{WEIGHTS_FILE} with safetensors.torch.save_file"
        )
    raise AdapterError(f"{weights}: missing; save the adapter with safe_serialization=True")


def read_header(weights: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file; no value is read.

    Raises AdapterError unless it is as long as its header says.
    """
    try:
        with weights.open("rb") as file:
            header, start = header_of(file)
            num_bytes = os.fstat(file.fileno()).st_size
        entries = {key: _entry(fields, start) for key, fields in header.items()}
        end = max((entry.span[1] for entry in entries.values()), default=start)
        if end != num_bytes:
            raise ValueError(f"it has {num_bytes} bytes, its header names {end}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_readable(weights, error) from error
    return entries


def header_of(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file without its free text, and where the data begin.

    Raises ValueError if there is none.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(_MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size - 8):
        raise ValueError("its header is cut short")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
    except (AttributeError, RecursionError) as error:
        raise ValueError("its header is none of safetensors") from error
    return header, 8 + length


def _entry(fields: dict[str, object], start: int) -> TensorEntry:
    code, sizes, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not (isinstance(code, str) and isinstance(sizes, list) and isinstance(offsets, list)):
        raise TypeError("its header is none of safetensors")
    first, last = (start + int(offset) for offset in offsets)
    return TensorEntry(_DTYPES.get(code, code), tuple(map(int, sizes)), code, (first, last))


def not_readable(weights: Path | str, error: Exception) -> AdapterError:
    """What to raise for a file that safetensors refuses."""
    return AdapterError(f"{weights}: not a readable safetensors file ({error}); copy it again")


def max_rank(config: AdapterConfig) -> int:
    """The largest LoRA rank that the config gives any module."""
    return max(config.lora_rank, *config.rank_pattern.values(), 0)


def target_names(config: AdapterConfig) -> tuple[str, ...]:
    """Targeted modules and parameters as the config names them, sorted; a regular expression as it is."""
    modules = config.target_modules
    names = (modules,) if isinstance(modules, str) else modules
    return tuple(sorted({*filter(None, names), *config.target_parameters}))


def read_json(folder: Path, path: Path) -> Any:
    """What the folder's JSON file holds.  Raises AdapterError if there is none, or it is no JSON."""
    if not folder.is_dir():
        raise AdapterError(f"{folder}: no such folder; give the folder that holds {CONFIG_FILE}")
    if not path.is_file():
        raise AdapterError(f"{path}: missing; a PEFT adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not valid JSON ({error}); save the adapter again") from error
