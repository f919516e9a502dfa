# SPDX-License-Identifier: Apache-2.0
"""Tensors of a safetensors file as views of a mapping, whose pages can be given back after use."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from moe_lora.adapters.peft.files import header_entries, open_file

_GAP_BYTES = 1 << 20
"""Advice joins tensors with at most these bytes between them."""


class MappedFile:
    """A safetensors file.  Raises AdapterError for a damaged header, and OSError."""

    def __init__(self, path: Path) -> None:
        self._file = open_file(path, str(path))
        self._entries = header_entries(self._file, str(path))
        sharing, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(self._file.fileno(), 0, sharing, access)

    def tensor(self, key: str) -> torch.Tensor:
        """A view of the mapping.  Raises KeyError for an unknown key."""
        entry = self._entries[key]
        dtype, count = getattr(torch, entry.dtype.removeprefix("torch.")), math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.span[0])
        return flat.view(entry.shape)

    def fits(self, key: str, out: torch.Tensor) -> bool:
        """True if `read_into` can fill `out`: of equal shape and dtype, in the host's memory without gaps."""
        entry = self._entries[key]
        alike = entry.dtype == str(out.dtype) and entry.shape == tuple(out.shape)
        return alike and out.is_cpu and out.is_contiguous() and out.numel() > 0

    def read_into(self, key: str, out: torch.Tensor) -> None:
        """Read the whole tensor into `out`, past the mapping.  Raises OSError."""
        held, place = out.view(-1).view(torch.uint8).numpy().data, self._entries[key].span[0]
        while held:
            size = os.preadv(self._file.fileno(), [held], place)
            if not size:
                raise OSError(f"{self._file.name} was cut while it was read")
            held, place = held[size:], place + size

    def will_read(self, keys: Iterable[str]) -> None:
        """Let the kernel read these tensors ahead."""
        self._advise(keys, mmap.MADV_WILLNEED)

    def release(self, keys: Iterable[str]) -> None:
        """Give back the pages of these tensors; a later access maps them again."""
        self._advise(keys, mmap.MADV_DONTNEED)

    def _advise(self, keys: Iterable[str], advice: int) -> None:
        spans = sorted(self._entries[key].span for key in keys if key in self._entries)
        for first, last in _joined(spans):
            start = first - first % mmap.PAGESIZE
            self._map.madvise(advice, start, min(last, len(self._map)) - start)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and first - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined
