# SPDX-License-Identifier: Apache-2.0
"""Untrusted files without torch: tensor headers, and causes of unreadable files.

Sizes and offsets are checked before any allocation.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

from moe_lora.core.errors import ConfigError

from .errors import MAX_REASON_CHARS, AdapterError, cut, shown

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
HEAD_BYTES = 512
MAX_LISTED = 10
_SHOWN_TEXT_CHARS = 60
_DOWNLOAD, _SAVE = "download the file again", "save it with safetensors.torch.save_file"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)(?P<suffix>\.[\w.]+)")
_MAX_SHARDS = 100_000


class FileKind(NamedTuple):
    """Kind of a file's content, and the way out."""

    kind: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.kind}; {self.way_out}"


_POINTER = FileKind(
    "a Git LFS pointer, not the file",
    "run git lfs pull in its repository, or download the file itself",
)
_STARTS = (
    (b"version https://git-lfs.github.com/spec/", _POINTER),
    (b"version https://hawser.github.com/spec/", _POINTER),
    (
        b"# xet version ",
        FileKind("an XET pointer, not the file", "install git-xet and pull, or " + _DOWNLOAD),
    ),
    (b"GGUF", FileKind("a GGUF file", "give the safetensors file that it was converted from")),
    (b"\x89HDF", FileKind("an HDF5 file", "save it as safetensors")),
    (
        b"PK\x03\x04",
        FileKind("a ZIP archive, as torch.save writes it", _SAVE),
    ),
    (b"\x1f\x8b", FileKind("a gzip archive", "unpack it")),
    (b"BZh", FileKind("a bzip2 archive", "unpack it")),
    (b"\xfd7zXZ", FileKind("an XZ archive", "unpack it")),
    (b"\x28\xb5\x2f\xfd", FileKind("a Zstandard archive", "unpack it")),
    *((b"\x80" + bytes([number]), FileKind("a pickle", _SAVE)) for number in range(2, 6)),
)
_ANNEX = re.compile(rb"(?:\.\./)*(?:\.git)?/annex/objects/")
_HTML = re.compile(rb"<(?:!doctype html|html|\?xml)\b", re.IGNORECASE)


def content_of(head: bytes, *, is_text: bool = False) -> FileKind | None:
    """Kind of an unreadable file by its first HEAD_BYTES bytes; None if unknown.

    is_text: the reader expected text.
    """
    if not head:
        return FileKind("an empty file", _DOWNLOAD)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for start, content in _STARTS:
        if head.startswith(start) or text.startswith(start):
            return content
    if _ANNEX.match(text):
        return FileKind("a git-annex pointer, not the file", "run git annex get in its repository")
    if _HTML.match(text):
        return FileKind(
            "a web page, such as one to sign in", "download the file itself, with the access that it needs"
        )
    if not any(head):
        return FileKind("only zero bytes, as an unfinished download leaves them", _DOWNLOAD)
    if is_text:
        return None
    shown = text.decode("utf-8", "ignore")
    line = shown.splitlines()[0] if shown else ""
    if line and all(char.isprintable() or char in "\r\n\t" for char in shown):
        return FileKind(f"a text: {line[:_SHOWN_TEXT_CHARS]!r}", _DOWNLOAD)
    return None


def file_content(path: Path, *, is_text: bool = False) -> FileKind | None:
    """As `content_of`, for a file.  Raises OSError."""
    with path.open("rb") as file:
        return content_of(file.read(HEAD_BYTES), is_text=is_text)


def pointer_problem(path: Path, content: bytes) -> str | None:
    """Cause and way out for an unreadable text file; None if unknown."""
    found = content_of(content[:HEAD_BYTES], is_text=True)
    return None if found is None else f"{path} is {found}"


def listed(names: list[str]) -> str:
    """The first MAX_LISTED names, and the number of the rest."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def missing_shards(names: list[str]) -> list[str]:
    """Absent names of file sets called STEM-0000I-of-0000N."""
    missing: list[str] = []
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if found := _SHARD.fullmatch(name):
            sets.setdefault((found["stem"], found["total"], found["suffix"]), set()).add(int(found["number"]))
    for (stem, total, suffix), numbers in sorted(sets.items()):
        width = len(total)
        first = 0 if 0 in numbers else 1
        wanted = range(first, min(int(total), _MAX_SHARDS) + first)
        missing += [
            f"{stem}-{number:0{width}d}-of-{total}{suffix}" for number in wanted if number not in numbers
        ]
    return missing


_SHARDED_STATE = (
    *("*.distcp", "*/*.distcp", "__*_*.distcp", "pytorch_model_fsdp*", "optimizer_*/*.distcp"),
    *("global_step*", "*_model_states.pt", "*_optim_states.pt", "zero_to_fp32.py"),
)
_TRAINER_STATE = (
    *("optimizer.*", "optimizer-*", "scheduler.pt", "scheduler.bin", "scaler.pt", "rng_state*.pth"),
    *("random_states_*.pkl", "trainer_state.json", "training_args.bin"),
)
_ESFT = "expert_cfg.json"
WHOLE_EXPERTS = (
    "full weights of experts, as ESFT trains, are not served beside other adapters; load them into the base "
    "and save a model of its own with save_pretrained, or train a LoRA on these experts"
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_OTHER_FORMATS = ("*.gguf", "*.ggml", "*.h5", "*.msgpack", "*.onnx", "*.npz")


def pickle_problem(folder: Path) -> str | None:
    """Cause and way out for pickled weights, if any, without a trainer's state."""
    state = _named(folder, (*_TRAINER_STATE, *_SHARDED_STATE))
    names = [name for name in _named(folder, _PICKLES) if name not in state]
    for name in names:
        found = None
        with suppress(OSError):
            found = file_content(folder / name, is_text=True) if (folder / name).is_file() else None
        if found and found.way_out != _SAVE:
            return f"{name} is {found}; then convert it to safetensors, since a pickle is not read"
    what = "a pickle can run code when it is opened and is not read; convert it to safetensors"
    return f"{listed(names)}: {what} with save_pretrained" if names else None


def other_content(folder: Path) -> str | None:
    """Unexpected content of a folder, with the way out; None if unknown."""
    if found := other_format(folder):
        return found
    weights = _named(folder, ("*.safetensors",))
    return f"it holds {listed(weights)}" if weights else None


def other_format(folder: Path) -> str | None:
    """As `other_content`, for folders of other tools."""
    return next(_findings(folder), None)


def _findings(folder: Path) -> Iterator[str]:
    if (folder / _ESFT).is_file():
        yield f"its {_ESFT} is of ESFT: {WHOLE_EXPERTS}"
    if snapshots := _named(folder, ("snapshots/*",)):
        yield f"it is the top of a Hugging Face cache; give the folder of a revision: {listed(snapshots)}"
    if formats := _named(folder, _OTHER_FORMATS):
        yield f"it holds {listed(formats)}, a format that is not read; give the safetensors files"
    if shards := _named(folder, _SHARDED_STATE):
        yield (
            f"it holds the divided state of DeepSpeed or FSDP ({listed(shards)}); join the state first: "
            "zero_to_fp32.py for DeepSpeed, a full state dict for FSDP, and save_pretrained"
        )
    checkpoints = [
        name for name in _named(folder, ("checkpoint-*",)) if any((folder / name).glob("*config.json"))
    ]
    if checkpoints:
        yield f"it holds {listed(checkpoints)}; give the folder of one of them"
    if state := _named(folder, _TRAINER_STATE):
        yield (
            f"it holds only the state of a trainer ({listed(state)}), which has no weights; save the model "
            "with save_pretrained"
        )


def _named(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted({str(found.relative_to(folder)) for pattern in patterns for found in folder.glob(pattern)})


def read_config(model_dir: Path) -> dict[str, Any]:
    """The checkpoint's config.json.  Raises ConfigError."""
    path = model_dir / "config.json"
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; give the directory of a Hugging Face checkpoint{_instead(model_dir)}"
        )
    found = read_json_file(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must be a JSON object, not {type(found).__name__}")
    return found


def read_json_file(path: Path) -> Any:
    """Content of a JSON file.  Raises ConfigError, with the file's kind if known."""
    content = path.read_bytes()
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if problem := pointer_problem(path, content):
            raise ConfigError(problem) from error
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def indexed(model_dir: Path) -> dict[str, Path] | None:
    """Tensor name -> file, by the index; None without, or beside a single file.  Raises ConfigError."""
    path = model_dir / INDEX_NAME
    if (model_dir / SINGLE_NAME).exists() or not path.exists():
        return None
    try:
        places = read_json_file(path)["weight_map"]
        files = {name: model_dir / str(name) for name in places.values()}
        return {key: files[name] for key, name in places.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not an index with a weight_map: {error!r}") from error


def weight_files(model_dir: Path) -> list[Path]:
    """Files of a checkpoint without an index.  Raises ConfigError without a file, or for missing shards."""
    single = model_dir / SINGLE_NAME
    paths = [single] if single.exists() else sorted(model_dir.glob("*.safetensors"))
    if not paths:
        why = pickle_problem(model_dir) or other_content(model_dir)
        why = why or "convert the checkpoint with save_pretrained"
        raise ConfigError(f"{model_dir} has no *.safetensors; {why}")
    if not single.exists() and (absent := missing_shards([path.name for path in paths])):
        raise ConfigError(
            f"{model_dir} is incomplete: {listed(absent)} of its shards do not exist; download the missing "
            "shards"
        )
    return paths


def _instead(model_dir: Path) -> str:
    if (model_dir / "adapter_config.json").is_file():
        return "; this one is of an adapter: give its base model, and the adapter by --lora-modules"
    found = other_content(model_dir)
    return f"; {found}" if found else ""


_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 8
_MAX_PATH_CHARS = 4096
"""Linux PATH_MAX; resolving links takes quadratic time."""
_MAX_KEY_CHARS = 500
"""Longest tensor name; errors show the whole name."""
_END = re.compile(rb'"data_offsets"\s{0,99}:\s{0,99}\[\s{0,99}\d{1,19}\s{0,99},\s{0,99}(\d{1,19})')
_SLICE, _OVERLAP = 1 << 20, 1024
"""Bytes of a header per search, since a search holds the interpreter."""
_DTYPES = {
    **{"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2), "F64": ("float64", 8)},
    **{
        f"{sign}{8 * size}": (f"{word}{8 * size}", size)
        for sign, word in (("I", "int"), ("U", "uint"))
        for size in (1, 2, 4, 8)
    },
    **{"BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1)},
    "F8_E8M0": ("float8_e8m0fnu", 1),
}


@cache
def _entry_decoder() -> Callable[[Any], Any]:
    """Imports msgspec late: checks of kernels go without."""
    import msgspec

    size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    fields = [
        ("dtype", str),
        ("shape", Annotated[list[size], msgspec.Meta(max_length=_MAX_DIMS)]),
        ("data_offsets", tuple[size, size]),
    ]
    return msgspec.json.Decoder(msgspec.defstruct("Entry", fields, forbid_unknown_fields=True)).decode


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
    """A regular file, open to read, inside the folder `root`.

    Raises AdapterError for anything else (a pipe is not opened), and OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")
    # The path may have changed.
    opened = Path(f"/proc/self/fd/{handle}")
    if stat.S_ISREG(os.fstat(handle).st_mode) and confined(opened if opened.exists() else path, root):
        return file
    file.close()
    raise AdapterError(f"{called}: no regular file in the folder of adapters; copy the adapter there")


def read_header(weights: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, values unread.  Raises AdapterError."""
    try:
        with open_file(weights, str(weights)) as file:
            return header_entries(file, str(weights))
    except OSError as error:
        raise not_readable(weights, error) from error


def header_entries(file: BinaryIO, where: str) -> dict[str, TensorEntry]:
    """The tensors of an open safetensors file, values unread.

    Raises AdapterError unless names are unique, bytes match shapes and dtypes, and data are contiguous to the
    end.
    """
    import msgspec

    try:
        length = _header_length(file)
        text = file.read(length)
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = found.pop("__metadata__", msgspec.Raw(b"{}"))
        msgspec.json.decode(metadata, type=dict[str, str])
        entries = {key: _entry_decoder()(raw) for key, raw in found.items()}
        json.loads(text, object_pairs_hook=without_twins)
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


def _check_spans(entries: dict[str, Any], num_bytes: int) -> None:
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


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


def announced_bytes(head: bytes | bytearray) -> int | None:
    """Bytes of a safetensors file by a whole header; None for a partial header.

    Finds only the end of the last tensor.  Raises ValueError for another file.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) >= 8 and not 0 < length <= _MAX_HEADER_BYTES:
        kind = content_of(bytes(head[:HEAD_BYTES]))
        raise ValueError(str(kind or f"its header has {length} bytes, at most {_MAX_HEADER_BYTES} are read"))
    if len(head) < 8 + length or len(head) < 8:
        return None
    end, last = 8 + length, 0
    for start in range(8, end, _SLICE):
        for found in _END.finditer(head, start, min(end, start + _SLICE + _OVERLAP)):
            last = max(last, int(found[1]))
    return end + last


def header_of(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file without free text, and the offset of the data.

    Raises ValueError without a header.
    """
    try:
        length = _header_length(file)
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
    except (AttributeError, ValueError, RecursionError) as error:
        content = _other_content(file)
        raise ValueError(f"its header is none of safetensors: {content or error}") from error
    return header, 8 + length


def _other_content(file: BinaryIO) -> FileKind | None:
    """Kind of an open file that is not safetensors; None for damaged safetensors."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    return None if head[8:9] == b"{" else content_of(head)


def not_readable(where: Path | str, error: Exception, file: BinaryIO | None = None) -> AdapterError:
    """The error for a file other than safetensors."""
    content = None if file is None or isinstance(error, OSError) else _other_content(file)
    if content is not None:
        return AdapterError(f"{where}: not a readable safetensors file ({content.kind}); {content.way_out}")
    problem = error.strerror if isinstance(error, OSError) else cut(str(error), MAX_REASON_CHARS)
    return AdapterError(f"{where}: not a readable safetensors file ({problem}); copy it again")
