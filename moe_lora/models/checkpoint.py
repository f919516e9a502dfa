# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint directory by name, plain or quantised."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_lora.core.errors import AdapterError, ConfigError
from moe_lora.core.wrong_files import (
    INDEX_NAME,
    file_content,
    header_entries,
    indexed,
    listed,
    open_file,
    weight_files,
)

from .stored_weight import StoredWeight, scheme_of
from .weights import Piece

_NUM_READERS = 4
"""Threads that wait for files."""
_READ_BYTES = 16 << 20
"""Bytes that a thread reads in turn: two threads in a new huge page clear it twice."""
_GAP_BYTES = 1 << 20
"""Advice joins tensors with smaller gaps."""


class Checkpoint:
    """Memory-mapped tensors of a checkpoint: one safetensors file or several with an index.

    config: names the quantisation scheme.  Raises ConfigError for a missing or damaged file.
    """

    def __init__(self, model_dir: Path, config: Mapping[str, Any] | None = None) -> None:
        self.model_dir = model_dir
        self._files: dict[Path, Any] = {}
        self._mappings: dict[Path, MappedFile] = {}
        self._readers = ThreadPoolExecutor(_NUM_READERS, "checkpoint")
        self._reads: defaultdict[str, list[Future[None]]] = defaultdict(list)
        self._batch: list[tuple[MappedFile, str, torch.Tensor]] = []
        self._batch_bytes = 0
        found = indexed(model_dir)
        if found is not None:
            self.file_of = found
            absent = sorted({path.name for path in self.file_of.values() if not path.exists()})
            if absent:
                raise ConfigError(
                    f"{model_dir} is incomplete: {INDEX_NAME} names {listed(absent)}, which "
                    f"{'does' if len(absent) == 1 else 'do'} not exist; download the missing shards"
                )
        else:
            files = {path: list(self._open(path).keys()) for path in weight_files(model_dir)}
            self.file_of = {key: path for path, keys in files.items() for key in keys}
        self.scheme = scheme_of(config or {}, self._metadata)

    def _metadata(self) -> dict[str, str]:
        """Metadata of the files' headers, joined."""
        joined: dict[str, str] = {}
        names: list[str] = []
        for path in sorted(set(self.file_of.values())):
            metadata = self._open(path).metadata() or {}
            joined |= metadata
            names += json.loads(metadata.get("tensor_names", "[]"))
        return joined | ({"tensor_names": json.dumps(names)} if names else {})

    def tensor(self, piece: Piece) -> torch.Tensor | StoredWeight:
        """The piece's tensor; a quantised tensor is not read yet."""
        tensors = [self[key] for key in piece.keys]
        if piece.transform is None:
            return tensors[0]
        try:
            made = piece.transform(*tensors)
            if isinstance(made, StoredWeight):
                made.check()
        except ValueError as error:
            raise ConfigError(f"{piece.key} in {self.model_dir} can't be read: {error}") from error
        return made

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                found = file_content(path)
                raise ConfigError(
                    f"{path} is not a readable safetensors file: {found or f'{error}; copy it again'}"
                ) from error
        return self._files[path]

    def __contains__(self, key: object) -> bool:
        return key in self.file_of or bool(self.scheme and self.scheme.present(str(key), self.file_of))

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self.file_of:
            raise ConfigError(f"the checkpoint in {self.model_dir} has no tensor {key!r}")
        path = self.file_of[key]
        try:
            return self._mapped(path).tensor(key)
        except KeyError as error:
            raise ConfigError(f"{path} does not hold {key!r}, which {INDEX_NAME} places there") from error

    def read_into(self, piece: Piece, out: torch.Tensor) -> bool:
        """True if the piece's whole first tensor goes into `out`, before its `release` returns."""
        file = self._mapped(self.file_of[piece.key])
        if not file.fits(piece.key, out):
            return False
        self._batch.append((file, piece.key, out))
        self._batch_bytes += out.nbytes
        if self._batch_bytes >= _READ_BYTES:
            self._start_reads()
        return True

    def _start_reads(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        done = self._readers.submit(_read_all, batch)
        for _, key, _ in batch:
            self._reads[key].append(done)

    def will_read(self, pieces: Iterable[Piece]) -> None:
        """Let the kernel read the tensors ahead."""
        for path, keys in self._by_file(pieces).items():
            self._mapped(path).will_read(keys)

    def release(self, pieces: Iterable[Piece]) -> None:
        """Wait for the tensors' reads, and free their mapped pages."""
        if self._batch:
            self._start_reads()
        for path, keys in self._by_file(pieces).items():
            for read in (read for key in keys for read in self._reads.pop(key, ())):
                read.result()
            self._mapped(path).release(keys)

    def _by_file(self, pieces: Iterable[Piece]) -> dict[Path, list[str]]:
        found: dict[Path, list[str]] = {}
        for key in (key for piece in pieces for key in piece.keys if key in self.file_of):
            found.setdefault(self.file_of[key], []).append(key)
        return found

    def _mapped(self, path: Path) -> MappedFile:
        if path not in self._mappings:
            self._open(path)  # for its error
            try:
                self._mappings[path] = MappedFile(path)
            except AdapterError as error:
                raise ConfigError(str(error)) from error
        return self._mappings[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)


class MappedFile:
    """A safetensors file with mapped pages.

    Raises AdapterError for a damaged header, and OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_file(path, str(path))
        self._entries = header_entries(self._file, str(path))
        self._map = mmap.mmap(self._file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)

    def tensor(self, key: str) -> torch.Tensor:
        """A view of the mapping.  Raises KeyError."""
        entry = self._entries[key]
        dtype, count = getattr(torch, entry.dtype.removeprefix("torch.")), math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.span[0])
        return flat.view(entry.shape)

    def fits(self, key: str, out: torch.Tensor) -> bool:
        """True if `read_into` can fill `out`: equal shape and dtype, on the host without gaps."""
        entry = self._entries[key]
        alike = entry.dtype == str(out.dtype) and entry.shape == tuple(out.shape)
        return alike and out.is_cpu and out.is_contiguous() and out.numel() > 0

    def read_into(self, key: str, out: torch.Tensor) -> None:
        """Read the whole tensor, past the mapping.  Raises OSError."""
        held, place = out.view(-1).view(torch.uint8).numpy().data, self._entries[key].span[0]
        while held:
            size = os.preadv(self._file.fileno(), [held], place)
            if not size:
                raise OSError(f"{self._path} was cut while it was read")
            held, place = held[size:], place + size

    def will_read(self, keys: Iterable[str]) -> None:
        """Let the kernel read ahead; `madvise` would block Python's threads."""
        for start, size in self._ranges(keys):
            os.posix_fadvise(self._file.fileno(), start, size, os.POSIX_FADV_WILLNEED)

    def release(self, keys: Iterable[str]) -> None:
        """Free these tensors' pages; a later access maps the pages again."""
        for start, size in self._ranges(keys):
            self._map.madvise(mmap.MADV_DONTNEED, start, size)

    def _ranges(self, keys: Iterable[str]) -> Iterator[tuple[int, int]]:
        for first, last in _joined(sorted(self._entries[key].span for key in keys if key in self._entries)):
            start = first - first % mmap.PAGESIZE
            yield start, min(last, len(self._map)) - start


def _read_all(batch: list[tuple[MappedFile, str, torch.Tensor]]) -> None:
    for file, key, out in batch:
        file.read_into(key, out)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and first - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined
