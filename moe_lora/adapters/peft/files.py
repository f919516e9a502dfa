# SPDX-License-Identifier: Apache-2.0
"""The two files of a PEFT adapter folder, read without torch.

Files are untrusted: sizes, names and offsets are checked before any allocation.  Callers choose the folder's
name in errors.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.core.wrong_files import (
    HEAD_BYTES,
    Content,
    content_of,
    listed,
    missing_shards,
    other_content,
    other_format,
    pickled_weights,
)

from .config import MAX_REASON_CHARS, AdapterConfig, cut, shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 4 << 20
"""Largest adapter_config.json; naming each expert of a large model takes 1 MB."""
_INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_SHARDS = ("adapter_model-*.safetensors", "model-*-of-*.safetensors", "pytorch_model-*.safetensors")
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 8
_MAX_PATH_CHARS = 4096
"""Linux PATH_MAX; resolving links takes quadratic time."""
_MAX_KEY_CHARS = 500
"""Longest tensor name, shown whole in errors."""
_DTYPES = {
    **{"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2), "F64": ("float64", 8)},
    **{
        f"{sign}{8 * size}": (f"{word}{8 * size}", size)
        for sign, word in (("I", "int"), ("U", "uint"))
        for size in (1, 2, 4, 8)
    },
    **{"BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1)},
}
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in a safetensors header; offsets count from the header's end."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_DECODE_ENTRY = msgspec.json.Decoder(_Entry).decode


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a safetensors header.

    dtype: torch's name.  code: the header's.  span: byte offsets in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    code: str
    span: tuple[int, int]


def confined(path: str | Path, root: str | None) -> bool:
    """True if `path`, with links and `..` resolved, lies in the folder `root`; None: any path."""
    if root is None:
        return True
    if len(str(path)) > _MAX_PATH_CHARS:
        return False
    try:
        real, base = os.path.realpath(path), os.path.realpath(root)
    except (OSError, ValueError):
        return False
    return real == base or real.startswith(base.rstrip(os.sep) + os.sep)


def open_file(path: Path, called: str, root: str | None = None) -> BinaryIO:
    """A regular file, open to read.

    called: its name in errors.  root: folder that must contain the resolved file.  Raises AdapterError for
    anything else (a pipe is not opened), and OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")
    # The opened file: the path may have changed.
    opened = Path(f"/proc/self/fd/{handle}")
    if stat.S_ISREG(os.fstat(handle).st_mode) and confined(opened if opened.exists() else path, root):
        return file
    file.close()
    raise AdapterError(f"{called}: no regular file in the folder of adapters; copy the adapter there")


def read_config(folder: Path) -> AdapterConfig:
    """The folder's adapter_config.json.  Raises AdapterError with the file and the key."""
    path = folder / CONFIG_FILE
    return AdapterConfig.parse(read_json(folder), str(path))


def adapter_folder(path: str, name: str) -> str:
    """An adapter's folder: `path`, or the subfolder of a PEFT adapter not called "default".

    A subfolder of the adapter's name comes before a single other subfolder; else `path` itself.  Raises
    AdapterError for several subfolders, or another tool's folder.
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
        if found := other_format(Path(path)):
            raise AdapterError(f"{path}: has no {CONFIG_FILE}; {found}")
        return path
    return os.path.join(path, name if name in below else below[0])


def weights_file(folder: Path, called: str | None = None) -> Path:
    """Path of the folder's tensors.  Raises AdapterError if absent, divided or pickled.

    called: prefix of file names in errors; None: the path.
    """
    called = f"{folder}{os.sep}" if called is None else called
    weights = folder / WEIGHTS_FILE
    if weights.is_file():
        return weights
    if weights.is_symlink():
        raise AdapterError(
            f"{called}{WEIGHTS_FILE}: a link to a file that is not there; download the adapter again"
        )
    _check_not_divided(folder, called)
    if pickles := pickled_weights(folder):
        raise AdapterError(
            f"{called}{listed(pickles)}: a pickle can run code when it is opened and is not read; convert it "
            f"to {WEIGHTS_FILE} with safetensors.torch.save_file"
        )
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
    """File names in an index of shards; empty without a readable index."""
    if not index.is_file():
        return []
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
    except msgspec.MsgspecError:
        return []
    return sorted({cut(name) for name in names})


def read_header(weights: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, values unread.  Raises AdapterError as `header_entries`."""
    try:
        with open_file(weights, str(weights)) as file:
            return header_entries(file, str(weights))
    except OSError as error:
        raise not_readable(weights, error) from error


def header_entries(file: BinaryIO, where: str) -> dict[str, TensorEntry]:
    """The tensors of an open safetensors file, values unread.

    Raises AdapterError with `where` unless names are unique, bytes match shapes and dtypes, and data are
    contiguous from the header's end to the file's end.
    """
    try:
        length = _header_length(file)
        text = file.read(length)
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = found.pop("__metadata__", msgspec.Raw(b"{}"))
        msgspec.json.decode(metadata, type=dict[str, str])
        entries = {key: _DECODE_ENTRY(raw) for key, raw in found.items()}
        json.loads(text, object_pairs_hook=_without_twins)
        _check_spans(entries, os.fstat(file.fileno()).st_size - 8 - length)
    except (msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:
        raise not_readable(where, error, file) from error
    start = 8 + length
    return {
        key: TensorEntry(
            f"torch.{_DTYPES[one.dtype][0]}",
            tuple(one.shape),
            one.dtype,
            (start + one.data_offsets[0], start + one.data_offsets[1]),
        )
        for key, one in entries.items()
    }


def _check_spans(entries: dict[str, _Entry], num_bytes: int) -> None:
    end = 0
    for (first, last), key in sorted((tuple(one.data_offsets), key) for key, one in entries.items()):
        one = entries[key]
        if len(key) > _MAX_KEY_CHARS or not key.isprintable():
            raise ValueError(
                f"{shown(key)} is the name of no tensor: at most {_MAX_KEY_CHARS} printable characters"
            )
        if one.dtype not in _DTYPES:
            raise ValueError(f"{shown(key)} has the unknown dtype {shown(one.dtype)}")
        if first != end:
            how = "overlaps the tensor before it" if first < end else "leaves a gap before it"
            raise ValueError(f"{shown(key)} {how}: it begins at {first}, what is before ends at {end}")
        needed = math.prod(one.shape) * _DTYPES[one.dtype][1]
        if last - first != needed:
            raise ValueError(f"{shown(key)} of shape {one.shape} needs {needed} bytes, not {last - first}")
        end = last
    if end != num_bytes:
        raise ValueError(f"it has {num_bytes} bytes of tensors, its header names {end}")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object.  Raises ValueError for a doubled name, as readers differ there."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {shown(name)} is given twice")
        found[name] = value
    return found


def _header_length(file: BinaryIO) -> int:
    length, num_bytes = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if not 0 < length <= min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise ValueError(f"its header is cut short: {length} bytes are announced, the file has {num_bytes}")
    return length


def header_of(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file without free text, and the offset of the data.

    Raises ValueError without a header, with the kind of the file if known.
    """
    try:
        length = _header_length(file)
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
    except (AttributeError, ValueError, RecursionError) as error:
        content = _other_content(file)
        raise ValueError(f"its header is none of safetensors: {content or error}") from error
    return header, 8 + length


def _other_content(file: BinaryIO) -> Content | None:
    """Kind of an open file that is not safetensors; None for damaged safetensors."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    return None if head[8:9] == b"{" else content_of(head)


def not_readable(where: Path | str, error: Exception, file: BinaryIO | None = None) -> AdapterError:
    """The error for a file that is not safetensors.  file: the open file, if opened."""
    content = None if file is None or isinstance(error, OSError) else _other_content(file)
    if content is not None:
        return AdapterError(f"{where}: not a readable safetensors file ({content.kind}); {content.way_out}")
    problem = error.strerror if isinstance(error, OSError) else cut(str(error), MAX_REASON_CHARS)
    return AdapterError(f"{where}: not a readable safetensors file ({problem}); copy it again")


def unreadable(name: str, error: OSError) -> AdapterError | StorageError:
    """The error for an adapter whose files can't be read: without a free file handle no fault of them."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        what = f"can't be read now: {error.strerror}; raise the limit of the server with ulimit -n"
        return StorageError(f"{name}: {what}")
    why = error.strerror or error
    return AdapterError(f"{name}: can't be read ({why}); load it again once its files are whole")


def max_rank(config: AdapterConfig) -> int:
    """The largest LoRA rank in the config."""
    return max(config.lora_rank, *config.rank_pattern.values(), 0)


def target_names(config: AdapterConfig) -> tuple[str, ...]:
    """Targeted modules and parameters in the config, sorted; a regular expression unchanged."""
    modules = config.target_modules
    names = (modules,) if isinstance(modules, str) else modules
    return tuple(sorted({*filter(None, names), *config.target_parameters}))


def read_json(folder: Path, called: str | None = None, root: str | None = None) -> Any:
    """Content of the folder's adapter_config.json.

    called, root: as in `weights_file` and `open_file`.  Raises AdapterError for an absent or too large file,
    or no JSON.
    """
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
        found = json.loads(text.decode(), object_pairs_hook=_without_twins)
        if b"\\ud" in text.lower():  # half a surrogate pair, refused by files, logs and databases
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        content = content_of(text[:HEAD_BYTES], is_text=True)
        problem = f"{error}); save the adapter again" if content is None else f"{content})"
        raise AdapterError(f"{called}{CONFIG_FILE}: not valid JSON ({problem}") from error
    return found
