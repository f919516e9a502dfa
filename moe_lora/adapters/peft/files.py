# SPDX-License-Identifier: Apache-2.0
"""The two files of a PEFT adapter folder, untrusted, read without torch."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from moe_lora.core.errors import AdapterError, StorageError, cut
from moe_lora.core.wrong_files import (
    HEAD_BYTES,
    content_of,
    listed,
    missing_shards,
    open_file,
    other_content,
    other_format,
    pickle_problem,
    without_twins,
)

from .config import AdapterConfig, has_suffix

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MLX_FILE, MLX_KEY = "adapters.safetensors", "lora_parameters"
"""mlx-lm's tensors; a field of its CONFIG_FILE."""
MAX_CONFIG_BYTES = 4 << 20
"""Largest adapter_config.json; naming each expert of a large model takes 1 MB."""
_INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_SHARDS = ("adapter_model-*.safetensors", "model-*-of-*.safetensors", "pytorch_model-*.safetensors")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_config(folder: Path) -> AdapterConfig:
    """The folder's adapter_config.json.  Raises AdapterError."""
    return AdapterConfig.parse(read_json(folder), str(folder / CONFIG_FILE))


def adapter_folder(path: str, name: str) -> str:
    """An adapter's folder: `path`, or the subfolder of a PEFT adapter not called "default".

    Raises AdapterError for several subfolders without `name`, another tool's folder, a name that is no
    UTF-8, or a missing permission.
    """
    if os.path.isfile(os.path.join(path, CONFIG_FILE)):
        return path
    try:
        os.stat(os.path.join(path, os.curdir))  # fails without the permission to search
        entries = sorted(os.listdir(path))
    except PermissionError as error:
        raise unreadable(path, error) from error
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
        if found := other_format(Path(path)):
            raise AdapterError(f"{path}: has no {CONFIG_FILE}; {found}")
        return path
    found = name if name in below else below[0]
    if any("\udc80" <= char <= "\udcff" for char in found):
        raise AdapterError(f"{path}: the name of its folder {cut(found)} is no UTF-8; rename the folder")
    return os.path.join(path, found)


def weights_file(folder: Path, called: str | None = None) -> Path:
    """Path of the folder's tensors.  Raises AdapterError if absent, divided or pickled."""
    called = f"{folder}{os.sep}" if called is None else called
    weights = folder / WEIGHTS_FILE
    if weights.is_file():
        return weights
    if weights.exists():
        what = "a folder" if weights.is_dir() else "a pipe or a device"
        raise AdapterError(f"{called}{WEIGHTS_FILE}: {what}, not a file; copy the adapter's file there")
    if weights.is_symlink():
        raise AdapterError(
            f"{called}{WEIGHTS_FILE}: a link to a file that is not there; download the adapter again"
        )
    _check_not_divided(folder, called)
    if problem := pickle_problem(folder):
        raise AdapterError(f"{called}{problem}")
    found = other_content(folder)
    raise AdapterError(
        f"{called}{WEIGHTS_FILE}: missing; {f'{found}; ' if found else ''}"
        "save the adapter with safe_serialization=True"
    )


def _check_not_divided(folder: Path, called: str) -> None:
    shards = sorted({found.name for pattern in _SHARDS for found in folder.glob(pattern)})
    indexed = _indexed_files(folder / _INDEX_FILE)
    if not shards and not indexed:
        return
    missing = sorted({name for name in indexed if name not in shards} | set(missing_shards(shards)))
    absent = f", without {listed(missing)}" if missing else ""
    raise AdapterError(
        f"{called}{WEIGHTS_FILE}: missing; the adapter is divided into shards "
        f"({listed(shards) or 'by its index'}{absent}), and one file is read; "
        + (
            "download the missing shards, then load the adapter with PEFT and save it with save_pretrained"
            if missing
            else "load it with PEFT and save it with save_pretrained, or join the shards by "
            "safetensors.torch.save_file"
        )
    )


def _indexed_files(index: Path) -> list[str]:
    """File names in an index of shards; empty if unreadable."""
    if not index.is_file():
        return []
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
    except msgspec.MsgspecError:
        return []
    return sorted({cut(name) for name in names})


def unreadable(name: str, error: OSError) -> AdapterError | StorageError:
    """The error for unreadable files; a lack of file handles is no fault of theirs."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        what = f"can't be read now: {error.strerror}; raise the limit of the server with ulimit -n"
        return StorageError(f"{name}: {what}")
    why = error.strerror or error
    way_out = "load it again once its files are whole"
    if isinstance(error, PermissionError):
        way_out = "let the server's user read the folder and its files"
    return AdapterError(f"{name}: can't be read ({why}); {way_out}")


def max_rank(config: AdapterConfig, keys: Iterable[str]) -> int:
    """LoRA rank of the largest pair, by the tensors' names."""
    if not config.rank_pattern:
        return config.lora_rank
    parameters = {one.rpartition(".")[2] for one in config.target_parameters}
    found = set[int]()
    for path in {key.partition(".lora_")[0].removeprefix("base_model.model.") for key in keys}:
        path = path.removesuffix(".base_layer")
        names = (f"{path}.{one}" for one in parameters)
        targeted = [one for one in names if has_suffix(one, config.target_parameters)]
        found |= {config.rank_and_scale(one)[0] for one in targeted or [path]}
    return max(found, default=config.lora_rank)


def target_names(config: AdapterConfig) -> tuple[str, ...]:
    """Targeted modules and parameters, sorted; a regular expression unchanged."""
    modules = config.target_modules
    names = (modules,) if isinstance(modules, str) else modules
    return tuple(sorted({*filter(None, names), *config.target_parameters}))


def read_json(folder: Path, called: str | None = None, root: str | None = None) -> Any:
    """Content of the folder's adapter_config.json.  Raises AdapterError."""
    shown = str(folder) if called is None else called.removesuffix(": ")
    called = f"{folder}{os.sep}" if called is None else called
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise AdapterError(f"{shown}: no such folder; give the folder that holds {CONFIG_FILE}")
    if not path.is_file():
        found = other_content(folder)
        raise AdapterError(
            f"{called}{CONFIG_FILE}: missing; a PEFT adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}"
            + (f", and {found}" if found else "")
        )
    with open_file(path, f"{called}{CONFIG_FILE}", root) as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{called}{CONFIG_FILE}: larger than {MAX_CONFIG_BYTES} bytes; save it again")
    try:
        found = json.loads(text.decode(), object_pairs_hook=without_twins)
        if b"\\ud" in text.lower():  # half a surrogate pair, refused by files, logs and databases
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        content = content_of(text[:HEAD_BYTES], is_text=True)
        problem = f"{error}); save the adapter again" if content is None else f"{content})"
        raise AdapterError(f"{called}{CONFIG_FILE}: not valid JSON ({problem}") from error
    return found
