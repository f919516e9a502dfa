"""The C++ library as signal words that threads and processes wait for, and what all media share above it."""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_uint64, c_void_p
from typing import Any, Generic, TypeVar

import torch

from moe_lora.core.errors import PeerGoneError, SignalTimeoutError

from .descriptor import LINE_BYTES, Descriptor, check_range, check_signal, check_sizes

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


class SignalWaiter:
    """Waits for signals whose waiters sleep at one doorbell.  spin_s: how long a wait spins before."""

    def __init__(self, doorbell: torch.Tensor, spin_s: float = 20e-6) -> None:
        self._doorbell = doorbell
        self._spin_ns = int(spin_s * 1e9)

    def any(self, waits: Sequence[tuple[LocalWindow, int, int]], timeout_s: float | None) -> int | None:
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


# What all media have in common: windows in this process's own memory, windows of peers, and their transport.


class LocalWindow(ABC):
    """A window of this process; subclasses make `bytes` and `words`, and free them."""

    bytes: torch.Tensor
    words: SignalWords

    def __init__(
        self, owner: LocalTransport[Any, Any], number: int, label: str, num_bytes: int, num_signals: int
    ) -> None:
        check_sizes(label, num_bytes, num_signals)
        self.number, self.label, self.num_bytes, self.num_signals = number, label, num_bytes, num_signals
        self._owner = owner

    @abstractmethod
    def medium(self) -> dict[str, Any]:
        """The facts of the medium by which peers find the window."""

    def descriptor(self) -> builtins.bytes:
        return Descriptor(
            kind=self._owner.kind,
            peer=self._owner.name,
            label=self.label,
            num_bytes=self.num_bytes,
            num_signals=self.num_signals,
            medium=self.medium(),
        ).encode()

    def read_signal(self, signal: int) -> int:
        check_signal(self, signal)
        return self.words.read(signal)

    def set_signal(self, signal: int, value: int) -> None:
        check_signal(self, signal, value)
        self.words.set(signal, value)

    def free(self) -> None:
        """Later puts change nothing or raise PeerGoneError, at the latest in the sender's next quiet."""
        if self._owner.forget(self):
            self.discard()

    def discard(self) -> None:  # noqa: B027
        """Give back what the medium keeps of the window, if anything; called once."""


class PeerWindow(ABC):
    """A window of a peer; without a `view` where the memory is not mapped here."""

    def __init__(self, found: Descriptor) -> None:
        self.peer, self.label = found.peer, found.label
        self.num_bytes, self.num_signals = found.num_bytes, found.num_signals

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor | None:
        check_range(self, offset_bytes, num_bytes)
        return None

    @abstractmethod
    def signal(self, signal: int, value: int) -> None: ...

    @abstractmethod
    def alive(self) -> bool: ...

    def gone_error(
        self, reason: object = "the process has ended, or it was freed or detached from"
    ) -> PeerGoneError:
        return PeerGoneError(
            f"window {self.label!r} of {self.peer!r} is gone ({reason}); attach to its newest window"
        )


LocalT = TypeVar("LocalT", bound=LocalWindow)
PeerT = TypeVar("PeerT", bound=PeerWindow)
SelfT = TypeVar("SelfT")


class LocalTransport(ABC, Generic[LocalT, PeerT]):
    """The windows of one process and those that it is attached to; see the contract."""

    kind: str
    local_window: Callable[[Any, int, str, int, int], LocalT]

    def __init__(self, name: str, waiter: SignalWaiter) -> None:
        self.name = name
        self._waiter = waiter
        self._numbers = itertools.count()
        self._windows: dict[int, LocalT] = {}
        self._remotes: set[PeerT] = set()
        self._lock = threading.RLock()
        """Held around the windows of both sides."""
        self._closed = False

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> LocalT:
        with self._lock:
            if self._closed:
                raise ValueError(f"transport {self.name!r} is closed; make a new one")
            if label in {window.label for window in self._windows.values()}:
                raise ValueError(
                    f"{self.name!r} has a window {label!r}; free it first, or choose another label"
                )
            window = self.local_window(self, next(self._numbers), label, num_bytes, num_signals)
            self._windows[window.number] = window
        return window

    def forget(self, window: LocalWindow) -> bool:
        """Called by a window that is freed; whether it was still known."""
        with self._lock:
            return self._windows.pop(window.number, None) is not None

    @abstractmethod
    def attach(self, descriptor: bytes) -> PeerT: ...

    @abstractmethod
    def detach(self, remote: Any) -> None: ...

    def signal_wait_until(self, window: Any, signal: int, at_least: int, timeout_s: float | None) -> int:
        if self.wait_any([(window, signal, at_least)], timeout_s) is None:
            raise SignalTimeoutError(
                f"signal {signal} of window {window.label!r} is {window.words.read(signal)}, not {at_least} "
                f"or more, after timeout_s={timeout_s}; the peer is slow or has ended"
            )
        value: int = window.words.read(signal)
        return value

    def wait_any(self, waits: Sequence[tuple[Any, int, int]], timeout_s: float | None) -> int | None:
        return self._waiter.any(waits, timeout_s)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            windows, remotes = list(self._windows.values()), list(self._remotes)
        for window in windows:
            window.free()
        for remote in remotes:
            self.detach(remote)
        self.end()

    def end(self) -> None:
        """Give back what the medium keeps, once all windows are freed and detached from."""

    def __enter__(self: SelfT) -> SelfT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
