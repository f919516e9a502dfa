# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory, for asynchronous copies."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

from .cpu.library import advise_huge_pages

_PORTABLE = 1
STAGE_BYTES = 4 << 20


def page_lock(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Page-lock host memory; returns the undo.  Raises RuntimeError on failure."""
    cudart, start = torch.cuda.cudart(), memory.data_ptr()
    with torch.cuda.device(device):
        torch.cuda.check_error(cudart.cudaHostRegister(start, memory.nbytes, _PORTABLE))

    def undo() -> None:
        with torch.cuda.device(device):
            torch.cuda.check_error(cudart.cudaHostUnregister(start))

    return undo


def page_locked(num_bytes: int, device: torch.device) -> torch.Tensor:
    """[num_bytes] uint8, page-locked during its life.  Raises RuntimeError or OSError on failure.

    Own memory: torch's allocator rounds up to a power of two.
    """
    owner = np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory = torch.from_numpy(owner)
    advise_huge_pages(memory)
    # Unlock before the memory is freed; at process exit the driver does.
    weakref.finalize(owner, page_lock(memory, device)).atexit = False
    return memory


class Staging:
    """Copies from memory without page lock, e.g. mapped files.

    One buffer fills while the device reads another, on the current stream.  For one thread.
    """

    def __init__(self, num_bytes: int = STAGE_BYTES) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._read = [torch.cuda.Event() for _ in self._buffers]
        self._turn = threading.Lock()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """target = source, both 1-D uint8; source may be freed on return."""
        size = len(self._buffers[0])
        for number, start in enumerate(range(0, len(source), size)):
            part = source[start : start + size]
            buffer, read = self._buffers[number % 2][: len(part)], self._read[number % 2]
            with self._turn:
                read.synchronize()
                np.copyto(buffer.numpy(), part.numpy())
                target[start : start + len(part)].copy_(buffer, non_blocking=True)
                read.record()
