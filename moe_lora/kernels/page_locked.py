# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory, which a CUDA device copies from and to by itself, while others compute."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

from .cpu.library import advise_huge_pages

_PORTABLE = 1
"""cudaHostRegisterPortable: for all of the process's contexts."""
STAGE_BYTES = 4 << 20


def page_lock(memory: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Page-locks host memory as it is; what is returned undoes it.  Raises RuntimeError if it can't be."""
    cudart, start = torch.cuda.cudart(), memory.data_ptr()
    with torch.cuda.device(device):
        torch.cuda.check_error(cudart.cudaHostRegister(start, memory.nbytes, _PORTABLE))

    def undo() -> None:
        with torch.cuda.device(device):
            torch.cuda.check_error(cudart.cudaHostUnregister(start))

    return undo


def page_locked(num_bytes: int, device: torch.device) -> torch.Tensor:
    """[num_bytes] uint8, page-locked until nobody holds it; raises RuntimeError, OSError as it can't be had.

    Memory of our own, because torch's allocator rounds up to a power of two: 20.4 GB would take 34.4.
    """
    owner = np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory = torch.from_numpy(owner)
    advise_huge_pages(memory)
    # Before the bytes are given back, as they must be; at the process's end the driver does it.
    weakref.finalize(owner, page_lock(memory, device)).atexit = False
    return memory


class Staging:
    """Copies from memory that is not page-locked, mapped files above all, to a device.

    Through two page-locked buffers: one is filled while the device reads the other.  The device's part is on
    the current stream.  One thread at a time copies.
    """

    def __init__(self, num_bytes: int = STAGE_BYTES) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._read = [torch.cuda.Event() for _ in self._buffers]
        self._turn = threading.Lock()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """target = source, both 1-D uint8; source may go as soon as this returns."""
        size = len(self._buffers[0])
        for number, start in enumerate(range(0, len(source), size)):
            part = source[start : start + size]
            buffer, read = self._buffers[number % 2][: len(part)], self._read[number % 2]
            with self._turn:
                read.synchronize()
                # numpy copies without Python's lock.
                np.copyto(buffer.numpy(), part.numpy())
                target[start : start + len(part)].copy_(buffer, non_blocking=True)
                read.record()
