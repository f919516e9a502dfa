# SPDX-License-Identifier: Apache-2.0
"""Binding of the C++ library: signal words and waits."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import torch

from .contract import LINE_BYTES, check_signal

# Longest library call: Ctrl-C must be seen.
_SLICE_S = 0.25


def _library_path() -> str:
    spec = importlib.util.find_spec("moe_lora.dist.transport._shm")
    if spec is None or spec.origin is None:
        raise ImportError(
            "the transport library is not built (Linux only); install the package (pip install .), or in a "
            "checkout run python setup.py build_ext --inplace"
        )
    return spec.origin


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.moe_lora_shm_ended.argtypes = [c_int32]
    library.moe_lora_shm_load.argtypes = [c_void_p]
    library.moe_lora_shm_load.restype = c_uint64
    library.moe_lora_shm_store.argtypes = [c_void_p, c_uint64, c_void_p]
    library.moe_lora_shm_store.restype = None
    library.moe_lora_shm_raise.argtypes = [c_void_p, c_uint64, c_void_p]
    library.moe_lora_shm_raise.restype = None
    library.moe_lora_shm_put.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_uint64, c_void_p]
    library.moe_lora_shm_put.restype = None
    library.moe_lora_shm_copy.argtypes = [c_void_p, c_void_p, c_int64]
    library.moe_lora_shm_copy.restype = None
    library.moe_lora_shm_wait.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64]
    library.moe_lora_shm_wait.restype = c_int64
    return library


# CDLL frees the GIL during a call; PyDLL keeps the GIL, for short calls.
free = _declare(ctypes.CDLL(_library_path()))
held = _declare(ctypes.PyDLL(_library_path()))


class SignalWords:
    """Unsigned 64-bit words, one per cache line, and their waiters' doorbell."""

    def __init__(self, memory: torch.Tensor, doorbell: torch.Tensor) -> None:
        """memory: uint8 [num_signals * 64], doorbell: uint8 [>= 8]; both at a multiple of 64 bytes."""
        self.memory = memory
        self._doorbell = doorbell
        self._start = memory.data_ptr()
        self.doorbell_address = doorbell.data_ptr()

    def address(self, signal: int) -> int:
        return self._start + signal * LINE_BYTES

    def tensor(self, signal: int) -> torch.Tensor:
        """The word, int64 [1], for a device."""
        start = signal * LINE_BYTES
        return self.memory[start : start + 8].view(torch.int64)

    def read(self, signal: int) -> int:
        """Acquire load."""
        return held.moe_lora_shm_load(self.address(signal))

    def set(self, signal: int, value: int) -> None:
        """Release store, even lower, and wake."""
        held.moe_lora_shm_store(self.address(signal), value, self.doorbell_address)

    def raise_to(self, signal: int, value: int) -> None:
        """signal = max(signal, value), release, and wake."""
        held.moe_lora_shm_raise(self.address(signal), value, self.doorbell_address)


def lines(count: int) -> torch.Tensor:
    """Zeroed private memory of aligned cache lines."""
    memory = torch.zeros((count + 1) * LINE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % LINE_BYTES
    return memory[start : start + count * LINE_BYTES]


class SignalWaiter:
    """Waits for signals of one doorbell.  spin_s: before a sleep."""

    def __init__(self, doorbell: torch.Tensor, spin_s: float = 20e-6) -> None:
        self._doorbell = doorbell
        self._spin_ns = int(spin_s * 1e9)

    def any(self, waits: Sequence[tuple[Any, int, int]], timeout_s: float | None) -> int | None:
        """See `Transport.wait_any`."""
        count = len(waits)
        addresses, at_least = (c_void_p * count)(), (c_uint64 * count)()
        for index, (window, signal, value) in enumerate(waits):
            check_signal(window, signal, value)
            addresses[index] = window.words.address(signal)
            at_least[index] = value
        bell = self._doorbell.data_ptr()
        found = held.moe_lora_shm_wait(addresses, at_least, count, bell, 0, 0)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while found < 0:
            left_s = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left_s <= 0:
                return None
            found = free.moe_lora_shm_wait(addresses, at_least, count, bell, self._spin_ns, int(left_s * 1e9))
        return found
