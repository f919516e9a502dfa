# SPDX-License-Identifier: Apache-2.0
"""The contract of every transport, in OpenSHMEM's words.

Peers `attach` to a window's descriptor, put bytes and raise a signal.  A reader of the value sees the bytes
(release store, acquire load).  Signals are unsigned 64-bit with one writer at a time; a lower value changes
nothing, and waits test >=.  A restarted process has new windows; peers need no restart.

Source: InfiniLoRA section 5.1 (push-based communication); OpenSHMEM 1.5 section 9.8 (signals).
"""

from __future__ import annotations

import builtins
import importlib
import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moe_lora.core.errors import PeerGoneError, SignalTimeoutError

if TYPE_CHECKING:
    from .shm_library import SignalWaiter, SignalWords

VERSION = 2
LINE_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A window's owner, size, and medium."""

    kind: str
    peer: str
    label: str
    num_bytes: int
    num_signals: int
    medium: dict[str, Any]

    def encode(self) -> bytes:
        """JSON in ASCII."""
        return json.dumps({"version": VERSION, **asdict(self)}).encode("ascii")

    @staticmethod
    def decode(data: bytes, kind: str) -> Descriptor:
        """Raises ValueError for data of another version or transport."""
        try:
            fields = json.loads(data)
            version = fields.pop("version")
            found = Descriptor(**fields) if version == VERSION else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{data[:60]!r} is no window descriptor ({error!r})") from None
        if found is None:
            raise ValueError(
                f"the peer's window descriptor has version {version}, this process speaks {VERSION}; "
                "run the same version of moe_lora in all processes"
            )
        if found.kind != kind:
            raise ValueError(
                f"{found.peer!r} offers window {found.label!r} over transport {found.kind!r}, this process "
                f"uses {kind!r}; set the same transport in all processes"
            )
        return found


def check_same_size(found: Descriptor, num_bytes: int, num_signals: int) -> None:
    """Raises ValueError unless the sizes are the descriptor's."""
    if (num_bytes, num_signals) != (found.num_bytes, found.num_signals):
        raise ValueError(
            f"window {found.label!r} of {found.peer!r} has {num_bytes} bytes and {num_signals} signals, its "
            f"descriptor says {found.num_bytes} and {found.num_signals}; pass descriptors on unchanged"
        )


class Sized(Protocol):
    """Operand of bounds checks."""

    @property
    def label(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_signals(self) -> int: ...


def check_sizes(label: str, num_bytes: int, num_signals: int) -> None:
    """Raises ValueError below zero."""
    if num_bytes < 0 or num_signals < 0:
        raise ValueError(
            f"window {label!r}: num_bytes={num_bytes} and num_signals={num_signals} must be 0 or more"
        )


def check_range(window: Sized, offset_bytes: int, num_bytes: int) -> None:
    """Raises ValueError for a range beyond the window."""
    if offset_bytes < 0 or num_bytes < 0 or offset_bytes + num_bytes > window.num_bytes:
        raise ValueError(
            f"{num_bytes} bytes at offset {offset_bytes} do not fit window {window.label!r} of "
            f"{window.num_bytes} bytes; send less, or allocate the window larger"
        )


def check_signal(window: Sized, signal: int, value: int = 0) -> None:
    """Raises ValueError for a missing signal or a value beyond unsigned 64 bits."""
    if not 0 <= signal < window.num_signals:
        raise ValueError(
            f"window {window.label!r} has {window.num_signals} signals, numbered from 0; {signal} is "
            "none of them"
        )
    if not 0 <= value < 1 << 64:
        raise ValueError(f"signal value {value} is no unsigned 64-bit number")


def check_tensor(tensor: torch.Tensor, role: str) -> int:
    """Bytes of a tensor.  Raises ValueError unless contiguous and on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{role} must be a contiguous CPU tensor, not shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()} on {tensor.device}; call .contiguous() or .cpu() first"
        )
    return tensor.nbytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as uint8 [nbytes]."""
    return tensor.reshape(-1).view(torch.uint8)


class Window(ABC):
    """Memory of this process for peers' writes."""

    bytes: torch.Tensor
    """uint8 [num_bytes], initially zero; views keep the mapping."""
    words: SignalWords

    def __init__(self, owner: Transport, number: int, label: str, num_bytes: int, num_signals: int) -> None:
        check_sizes(label, num_bytes, num_signals)
        self.number, self.label, self.num_bytes, self.num_signals = number, label, num_bytes, num_signals
        self._owner = owner

    @abstractmethod
    def medium(self) -> dict[str, Any]:
        """The medium's facts for peers."""

    def descriptor(self) -> builtins.bytes:
        """ASCII for `attach`, at most a few kilobytes; valid until the window or process ends."""
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
        """Set the value here, even lower, and wake this process's waiters.

        A peer's simultaneous raise may be lost.
        """
        check_signal(self, signal, value)
        self.words.set(signal, value)

    def free(self) -> None:
        """Peers' later puts raise PeerGoneError, at the latest in quiet, or change nothing.  Idempotent."""
        if self._owner.forget(self):
            self.discard()

    def discard(self) -> None:  # noqa: B027
        """Release the medium's resources; called once."""


class RemoteWindow(ABC):
    """A peer's window, to write and read."""

    def __init__(self, found: Descriptor) -> None:
        self.peer, self.label = found.peer, found.label
        self.num_bytes, self.num_signals = found.num_bytes, found.num_signals

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor | None:
        """The peer's bytes here, uint8 [num_bytes] (shmem_ptr), written before `signal`; None: not mapped."""
        check_range(self, offset_bytes, num_bytes)
        return None

    @abstractmethod
    def signal(self, signal: int, value: int) -> None:
        """Raise a signal behind earlier writes and puts.  Raises PeerGoneError."""

    @abstractmethod
    def alive(self) -> bool:
        """True if the peer's process and window exist, as far as known without a wait."""

    def gone_error(
        self, reason: object = "the process has ended, or it was freed or detached from"
    ) -> PeerGoneError:
        """The error of later uses of the window."""
        return PeerGoneError(
            f"window {self.label!r} of {self.peer!r} is gone ({reason}); attach to its newest window"
        )


class Transport(ABC):
    """One process's end, from `make_transport`.

    Thread-safe, with windows' methods; call `close` last.
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
        self._closed = False

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> Window:
        """Zeroed local memory for peers' writes.  Raises ValueError for bad sizes or a used label."""
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
        """Called by a freed window; True if known."""
        with self._lock:
            return self._windows.pop(window.number, None) is not None

    @abstractmethod
    def attach(self, descriptor: bytes) -> RemoteWindow:
        """Raises PeerUnreachableError for a lost window, ValueError for another transport, version, size."""

    @abstractmethod
    def put_signal(
        self, dst: Any, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
    ) -> None:
        """dst[offset : offset + src.nbytes] = src, then signal = max(signal, value).

        A reader of the value sees this and all earlier puts of this process into the window, without a
        `fence`.

        src: contiguous, on the CPU, or None for the signal alone; unchanged until `quiet(dst)`.  NIXL
        progresses puts only while the process puts, waits or quiets, and bytes may overtake each other
        without a `fence`.  Raises ValueError beyond the window, PeerGoneError.
        """

    @abstractmethod
    def get(self, src: Any, offset_bytes: int, out: torch.Tensor) -> None:
        """out = src[offset : offset + out.nbytes], complete on return.  Raises ValueError, PeerGoneError."""

    @abstractmethod
    def fence(self, dst: Any) -> None:
        """Deliver earlier puts before later puts.  Raises PeerGoneError."""

    @abstractmethod
    def quiet(self, dst: Any) -> None:
        """Wait until puts are delivered and sources reusable.  Raises PeerGoneError."""

    def signal_wait_until(self, window: Window, signal: int, at_least: int, timeout_s: float | None) -> int:
        """Wait for signal >= at_least; returns the value.  None: no limit.  Releases the GIL.

        Raises SignalTimeoutError.
        """
        if self.wait_any([(window, signal, at_least)], timeout_s) is None:
            raise SignalTimeoutError(
                f"signal {signal} of window {window.label!r} is {window.words.read(signal)}, not {at_least} "
                f"or more, after timeout_s={timeout_s}; the peer is slow or has ended"
            )
        return window.words.read(signal)

    def wait_any(self, waits: Sequence[tuple[Window, int, int]], timeout_s: float | None) -> int | None:
        """Index of the first reached (window, signal, at_least); None after timeout_s.

        Spins briefly, then sleeps, over this transport's windows.
        """
        return self._waiter.any(waits, timeout_s)

    @abstractmethod
    def detach(self, remote: Any) -> None:
        """Release a peer's window; views stay mapped.  Idempotent."""

    def close(self) -> None:
        """Free and detach windows, stop threads.  Idempotent."""
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
        """Release the medium, after all windows."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_PLACES = {
    "shm": ("shm", "ShmTransport"),
    "gloo": ("gloo", "GlooTransport"),
    "nixl": ("nixl", "NixlTransport"),
}
KINDS = tuple(_PLACES)


def make_transport(kind: str, *, name: str, **options: Any) -> Transport:
    """Raises ValueError for an unknown kind.

    name: unique in the cluster, e.g. "server/3"; kept by a restarted process.
    """
    if kind not in _PLACES:
        raise ValueError(f"transport {kind!r} is unknown; choose one of {', '.join(_PLACES)}")
    module, class_name = _PLACES[kind]
    made: Transport = getattr(importlib.import_module(f".{module}", __package__), class_name)(
        name=name, **options
    )
    return made
