"""The two files of a PEFT adapter folder, as far as they can be read without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..core.errors import AdapterError
from .config import AdapterConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_config(folder: Path) -> AdapterConfig:
    """The folder's adapter_config.json.  Raises AdapterError naming the file and the key."""
    path = folder / CONFIG_FILE
    return AdapterConfig.parse(_read_json(folder, path), str(path))


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


def check_whole(weights: Path) -> None:
    """Raises AdapterError unless this is a safetensors file of the length that its header names."""
    try:
        with safe_open(weights, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise not_readable(weights, error) from error


def not_readable(weights: Path, error: Exception) -> AdapterError:
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


def _read_json(folder: Path, path: Path) -> Any:
    if not folder.is_dir():
        raise AdapterError(f"{folder}: no such folder; give the folder that holds {CONFIG_FILE}")
    if not path.is_file():
        raise AdapterError(f"{path}: missing; a PEFT adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not valid JSON ({error}); save the adapter again") from error
