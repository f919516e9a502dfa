"""Large CPU tensors on huge pages, so that streaming weights misses the TLB less often."""

from __future__ import annotations

import ctypes
import mmap

import torch

_LEAST_BYTES = 4 << 20
_libc = ctypes.CDLL(None)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages behind a CPU tensor that has not been written yet; small ones are left alone.

    Only advice: where the system has no transparent huge pages nothing changes.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or not tensor.is_cpu or tensor.nbytes < _LEAST_BYTES:
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
