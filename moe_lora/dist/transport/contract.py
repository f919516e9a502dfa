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
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Window(Protocol):
    """Memory of this process that peers may write."""

    label: str
    num_bytes: int
    num_signals: int
    bytes: torch.Tensor
    """uint8 [num_bytes], zero at first; stays mapped as long as any view of it lives."""

    def descriptor(self) -> builtins.bytes:
        """What a peer needs for `attach`: name, size, facts of the medium. ASCII, a few hundred bytes (NIXL:
        a few kilobytes); valid until the window is freed or the process ends."""

    def read_signal(self, signal: int) -> int:
        """Present value (acquire load)."""

    def set_signal(self, signal: int, value: int) -> None:
        """Set the value here, also to a lower one, and wake this process's waiters.  For starting a reused
        window over, and for waking a thread of one's own; a peer's raise at the same moment may be lost."""

    def free(self) -> None:
        """Take the window back: later puts of peers raise PeerGoneError or change nothing. Idempotent."""


class RemoteWindow(Protocol):
    """A peer's window, to write and read."""

    peer: str
    label: str
    num_bytes: int
    num_signals: int

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor | None:
        """The peer's bytes mapped here, uint8 [num_bytes] (shmem_ptr), so that a gather can write straight
        into them before `signal`; None where the medium has no such thing."""

    def signal(self, signal: int, value: int) -> None:
        """Raise a signal after writes through `view` or after puts: who sees it sees them.
        Raises PeerGoneError."""

    def alive(self) -> bool:
        """Whether the peer's process was alive and the window not freed, as far as known without waiting.
        Cheap; a medium that learns of a death only by writing may say True until then."""


class Transport(Protocol):
    """One process's end. Made by `make_transport`; closed by `close` or as a context manager.

    Everything may be called from any thread, windows' methods too; `close` once nothing else is under way.
    """

    kind: str
    name: str

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> Window:
        """Zeroed local memory that peers may write.

        Raises ValueError for sizes below zero or a label in use here.
        """

    def attach(self, descriptor: bytes) -> RemoteWindow:
        """The window a descriptor names. Raises PeerUnreachableError if it or its process is gone, ValueError
        if the descriptor is of another kind of transport, another version, or does not fit the window."""

    def put_signal(
        self, dst: RemoteWindow, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
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

    def get(self, src: RemoteWindow, offset_bytes: int, out: torch.Tensor) -> None:
        """out = src[offset : offset + out.nbytes]; returns when filled. Raises ValueError, PeerGoneError."""

    def fence(self, dst: RemoteWindow) -> None:
        """Puts issued before are delivered before puts issued after. Raises PeerGoneError."""

    def quiet(self, dst: RemoteWindow) -> None:
        """Returns when all puts are delivered and their sources may be reused. Raises PeerGoneError."""

    def signal_wait_until(self, window: Window, signal: int, at_least: int, timeout_s: float | None) -> int:
        """Wait for signal >= at_least; returns the value seen.  None: no limit.  Any thread; the GIL is free.
        Raises SignalTimeoutError."""

    def wait_any(self, waits: Sequence[tuple[Window, int, int]], timeout_s: float | None) -> int | None:
        """Index of the first (window, signal, at_least) that holds; None after timeout_s.  Spins briefly,
        then sleeps; one sleeper waits for any number of signals of this transport's windows."""

    def detach(self, remote: RemoteWindow) -> None:
        """Let a peer's window go; views stay mapped while they live. Idempotent."""

    def close(self) -> None:
        """Free all windows, detach from all, stop threads. Idempotent."""

    def __enter__(self) -> Transport: ...
    def __exit__(self, *_: object) -> None: ...


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
