"""Loads the C++ library and wraps it as signal words that threads and processes wait for."""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint64, c_void_p
from typing import Any, Generic, Protocol, TypeVar

import torch

from moe_lora.core.errors import SignalTimeoutError

from .descriptor import LINE_BYTES, Descriptor, check_signal, check_sizes

# A call into the library ends at least this often, so that Ctrl-C is seen and Python may run.
_SLICE_S = 0.25


def _library_path() -> str:
    spec = importlib.util.find_spec("moe_lora.dist.transport._shm")
    if spec is None or spec.origin is None:
        raise ImportError(
            "the transport library is not built (Linux only); install the package (pip install .), or in a "
            "checkout run python -c 'from setuptools import setup; setup()' build_ext --inplace"
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


# CDLL frees the GIL during a call; PyDLL keeps it, as getting it back can take longer than a short call.
free = _declare(ctypes.CDLL(_library_path()))
held = _declare(ctypes.PyDLL(_library_path()))


class SignalWords:
    """num_signals unsigned 64-bit words, one per cache line, and the doorbell that their waiters sleep at."""

    def __init__(self, memory: torch.Tensor, doorbell: torch.Tensor) -> None:
        """memory: uint8 [num_signals * 64] at a multiple of 64 bytes, doorbell: uint8 [>= 8], likewise."""
        self._memory = memory
        self._doorbell = doorbell
        self._start = memory.data_ptr()
        self.doorbell_address = doorbell.data_ptr()

    def address(self, signal: int) -> int:
        """Where the signal's word is."""
        return self._start + signal * LINE_BYTES

    def read(self, signal: int) -> int:
        """Acquire load."""
        return held.moe_lora_shm_load(self.address(signal))

    def set(self, signal: int, value: int) -> None:
        """Release store, also of a lower value, and wake."""
        held.moe_lora_shm_store(self.address(signal), value, self.doorbell_address)

    def raise_to(self, signal: int, value: int) -> None:
        """signal = max(signal, value), release, and wake."""
        held.moe_lora_shm_raise(self.address(signal), value, self.doorbell_address)


def lines(count: int) -> torch.Tensor:
    """Zeroed private memory of that many cache lines, aligned to one."""
    memory = torch.zeros((count + 1) * LINE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % LINE_BYTES
    return memory[start : start + count * LINE_BYTES]


class WaitedWindow(Protocol):
    """What a wait needs of a local window."""

    label: str
    num_bytes: int
    num_signals: int
    words: SignalWords


def too_late(window: WaitedWindow, signal: int, at_least: int, timeout_s: float | None) -> SignalTimeoutError:
    """The error of a wait that ended by its timeout."""
    return SignalTimeoutError(
        f"signal {signal} of window {window.label!r} is {window.words.read(signal)}, not {at_least} or more, "
        f"after timeout_s={timeout_s}; the peer is slow or has ended"
    )


class SignalWaiter:
    """Waits for signals whose waiters sleep at one doorbell."""

    def __init__(self, doorbell: torch.Tensor, spin_s: float) -> None:
        """spin_s: how long a wait spins before it sleeps."""
        if not 0 <= spin_s <= 1:
            raise ValueError(f"spin_s={spin_s} must be from 0 to 1 second; 20e-6 suits shared cores")
        self._doorbell = doorbell
        self._spin_ns = int(spin_s * 1e9)

    def until(self, window: WaitedWindow, signal: int, at_least: int, timeout_s: float | None) -> int:
        """The value seen. Raises SignalTimeoutError."""
        if self.any([(window, signal, at_least)], timeout_s) is None:
            raise too_late(window, signal, at_least, timeout_s)
        return window.words.read(signal)

    def any(self, waits: Sequence[tuple[WaitedWindow, int, int]], timeout_s: float | None) -> int | None:
        """Index of the first (window, signal, at_least) that holds; None after timeout_s."""
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


# What windows in this process's own memory have in common, whatever the medium.


class Owner(Protocol):
    """The transport that a window belongs to."""

    kind: str
    name: str
    generation: int


OwnerT = TypeVar("OwnerT", bound=Owner)


class LocalWindow(ABC, Generic[OwnerT]):
    """A `WaitedWindow`; subclasses make `bytes` and `words`, and free them."""

    bytes: torch.Tensor
    words: SignalWords

    def __init__(self, owner: OwnerT, label: str, num_bytes: int, num_signals: int) -> None:
        check_sizes(label, num_bytes, num_signals)
        self.label, self.num_bytes, self.num_signals = label, num_bytes, num_signals
        self._owner = owner

    @abstractmethod
    def medium(self) -> dict[str, Any]:
        """The facts of the medium by which peers find the window."""

    def descriptor(self) -> builtins.bytes:
        """As in the contract."""
        return Descriptor(
            kind=self._owner.kind,
            peer=self._owner.name,
            label=self.label,
            generation=self._owner.generation,
            num_bytes=self.num_bytes,
            num_signals=self.num_signals,
            medium=self.medium(),
        ).encode()

    def read_signal(self, signal: int) -> int:
        """Present value."""
        check_signal(self, signal)
        return self.words.read(signal)

    def set_signal(self, signal: int, value: int) -> None:
        """Set the value here and wake this process's waiters."""
        check_signal(self, signal, value)
        self.words.set(signal, value)
