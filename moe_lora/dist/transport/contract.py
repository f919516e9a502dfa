# SPDX-License-Identifier: Apache-2.0
"""What every transport offers, in OpenSHMEM's words: memory others may write, and signals that count up.

A process makes one Transport, allocates windows, and hands their descriptors to its peers, which `attach`. A
peer puts bytes into a window and raises one of its signals;
who sees the signal's value sees the bytes (release store, acquire load). Signals are unsigned 64-bit, each
on its own cache line, and have one writer at a time. A raise below the present value changes nothing, and
waits ask for >=, so a value that was skipped can't hang a waiter. Membership is elastic: a process that
died returns with new windows, which peers `attach`; nobody else restarts.

Source: InfiniLoRA section 5.1 (push-based communication); OpenSHMEM 1.5 section 9.8 (signals).
"""

from __future__ import annotations

import builtins
import importlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.core.errors import PeerGoneError, SignalTimeoutError

from .descriptor import Descriptor, check_range, check_signal, check_sizes

if TYPE_CHECKING:  # loads the C++ library
    from .shm_library import SignalWaiter, SignalWords


class Window(ABC):
    """Memory of this process that peers may write; subclasses make `bytes` and `words`, and free them."""

    bytes: torch.Tensor
    """uint8 [num_bytes], zero at first; stays mapped as long as any view of it lives."""
    words: SignalWords

    def __init__(self, owner: Transport, number: int, label: str, num_bytes: int, num_signals: int) -> None:
        check_sizes(label, num_bytes, num_signals)
        self.number, self.label, self.num_bytes, self.num_signals = number, label, num_bytes, num_signals
        self._owner = owner

    @abstractmethod
    def medium(self) -> dict[str, Any]:
        """The facts of the medium by which peers find the window."""

    def descriptor(self) -> builtins.bytes:
        """What a peer needs for `attach`: name, size, facts of the medium. ASCII, a few hundred bytes (NIXL:
        a few kilobytes); valid until the window is freed or the process ends."""
        return Descriptor(
            kind=self._owner.kind,
            peer=self._owner.name,
            label=self.label,
            num_bytes=self.num_bytes,
            num_signals=self.num_signals,
            medium=self.medium(),
        ).encode()

    def read_signal(self, signal: int) -> int:
        """Present value (acquire load)."""
        check_signal(self, signal)
        return self.words.read(signal)

    def set_signal(self, signal: int, value: int) -> None:
        """Set the value here, also to a lower one, and wake this process's waiters.  For starting a reused
        window over, and for waking a thread of one's own; a peer's raise at the same moment may be lost."""
        check_signal(self, signal, value)
        self.words.set(signal, value)

    def free(self) -> None:
        """Take the window back: later puts of peers raise PeerGoneError, at the latest in their quiet, or
        change nothing. Idempotent."""
        if self._owner.forget(self):
            self.discard()

    def discard(self) -> None:  # noqa: B027
        """Give back what the medium keeps of the window, if anything; called once."""


class RemoteWindow(ABC):
    """A peer's window, to write and read."""

    def __init__(self, found: Descriptor) -> None:
        self.peer, self.label = found.peer, found.label
        self.num_bytes, self.num_signals = found.num_bytes, found.num_signals

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor | None:
        """The peer's bytes mapped here, uint8 [num_bytes] (shmem_ptr), so that a gather can write straight
        into them before `signal`; None where the medium has no such thing."""
        check_range(self, offset_bytes, num_bytes)
        return None

    @abstractmethod
    def signal(self, signal: int, value: int) -> None:
        """Raise a signal after writes through `view` or after puts: who sees it sees them.
        Raises PeerGoneError."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether the peer's process was alive and the window not freed, as far as known without waiting.
        Cheap; a medium that learns of a death only by writing may say True until then."""

    def gone_error(
        self, reason: object = "the process has ended, or it was freed or detached from"
    ) -> PeerGoneError:
        """What a use of the window raises from now on."""
        return PeerGoneError(
            f"window {self.label!r} of {self.peer!r} is gone ({reason}); attach to its newest window"
        )


class Transport(ABC):
    """One process's end. Made by `make_transport`; closed by `close` or as a context manager.

    Everything may be called from any thread, windows' methods too; `close` once nothing else is under way.
    Windows of peers are those that this transport attached.
    """

    kind: str
    local_window: Callable[..., Any]

    def __init__(self, name: str, waiter: SignalWaiter) -> None:
        self.name = name
        self._waiter = waiter
        self._numbers = itertools.count()
        self._windows: dict[int, Any] = {}
        self._remotes: set[Any] = set()
        self._lock = threading.RLock()
        """Held around the windows of both sides."""
        self._closed = False

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> Window:
        """Zeroed local memory that peers may write.

        Raises ValueError for sizes below zero or a label in use here.
        """
        with self._lock:
            if self._closed:
                raise ValueError(f"transport {self.name!r} is closed; make a new one")
            if label in {window.label for window in self._windows.values()}:
                raise ValueError(
                    f"{self.name!r} has a window {label!r}; free it first, or choose another label"
                )
            window: Window = self.local_window(self, next(self._numbers), label, num_bytes, num_signals)
            self._windows[window.number] = window
        return window

    def forget(self, window: Window) -> bool:
        """Called by a window that is freed; whether it was still known."""
        with self._lock:
            return self._windows.pop(window.number, None) is not None

    @abstractmethod
    def attach(self, descriptor: bytes) -> RemoteWindow:
        """The window a descriptor names. Raises PeerUnreachableError if it or its process is gone, ValueError
        if the descriptor is of another kind of transport, another version, or does not fit the window."""

    @abstractmethod
    def put_signal(
        self, dst: Any, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
    ) -> None:
        """dst[offset : offset + src.nbytes] = src, then signal = max(signal, value).

        Who sees the value sees this put and all that this process put into this window before, without a
        `fence` between: signal n + 1 says that frames 0 to n are there.

        src: contiguous, on the CPU, any dtype, or None for the signal alone; not to be changed before
        `quiet(dst)`.  Asynchronous where the medium is: over NIXL a put, and a signal behind it, gets on
        while its process puts, waits or quiets, and the bytes of puts may overtake each other unless `fence`
        stands between.
        Any offset and length, zero too.
        Raises ValueError beyond the window, PeerGoneError.
        """

    @abstractmethod
    def get(self, src: Any, offset_bytes: int, out: torch.Tensor) -> None:
        """out = src[offset : offset + out.nbytes]; returns when filled. Raises ValueError, PeerGoneError."""

    @abstractmethod
    def fence(self, dst: Any) -> None:
        """Puts issued before are delivered before puts issued after. Raises PeerGoneError."""

    @abstractmethod
    def quiet(self, dst: Any) -> None:
        """Returns when all puts are delivered and their sources may be reused. Raises PeerGoneError."""

    def signal_wait_until(self, window: Window, signal: int, at_least: int, timeout_s: float | None) -> int:
        """Wait for signal >= at_least; returns the value seen.  None: no limit.  Any thread; the GIL is free.
        Raises SignalTimeoutError."""
        if self.wait_any([(window, signal, at_least)], timeout_s) is None:
            raise SignalTimeoutError(
                f"signal {signal} of window {window.label!r} is {window.words.read(signal)}, not {at_least} "
                f"or more, after timeout_s={timeout_s}; the peer is slow or has ended"
            )
        return window.words.read(signal)

    def wait_any(self, waits: Sequence[tuple[Window, int, int]], timeout_s: float | None) -> int | None:
        """Index of the first (window, signal, at_least) that holds; None after timeout_s.  Spins briefly,
        then sleeps; one sleeper waits for any number of signals of this transport's windows."""
        return self._waiter.any(waits, timeout_s)

    @abstractmethod
    def detach(self, remote: Any) -> None:
        """Let a peer's window go; views stay mapped while they live. Idempotent."""

    def close(self) -> None:
        """Free all windows, detach from all, stop threads. Idempotent."""
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

    @abstractmethod
    def end(self) -> None:
        """Give back what the medium keeps, once all windows are freed and detached from."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Makes a transport by name, and tells which ones this installation has.


_PLACES = {
    "shm": ("shm", "ShmTransport"),
    "gloo": ("gloo", "GlooTransport"),
    "nixl": ("nixl", "NixlTransport"),
}
KINDS = tuple(_PLACES)


def make_transport(kind: str, *, name: str, **options: Any) -> Transport:
    """One process's end of a transport.

    kind: one of KINDS.  name: unique in the cluster, such as "server/3"; a process that returns after a crash
    uses its old name.  options: those of the kind's class.
    Raises ValueError for an unknown kind.
    """
    if kind not in _PLACES:
        raise ValueError(f"transport {kind!r} is unknown; choose one of {', '.join(_PLACES)}")
    module, class_name = _PLACES[kind]
    made: Transport = getattr(importlib.import_module(f".{module}", __package__), class_name)(
        name=name, **options
    )
    return made
