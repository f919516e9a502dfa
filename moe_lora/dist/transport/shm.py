"""Transport over shared memory on one host: a put is a memcpy and a store, a wait spins, then sleeps.

All processes run as one user in one PID namespace.  Puts are complete when they return.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from moe_lora.core.errors import PeerGoneError, PeerUnreachableError

from . import shm_library
from .contract import RemoteWindow, Store, Window
from .descriptor import Descriptor, check_new_window, check_range, check_signal, check_sizes, check_tensor
from .directory import Directory
from .shm_library import SignalWords, Waiter
from .shm_memory import OwnSegment, Segment, map_peer_segment

# Below this a copy is done without letting go of the GIL: getting it back may take longer than the copy.
_SHORT_COPY_BYTES = 64 << 10


class ShmWindow:
    """Local memory in a segment of its own."""

    def __init__(self, owner: ShmTransport, label: str, num_bytes: int, num_signals: int) -> None:
        check_sizes(label, num_bytes, num_signals)
        self.label, self.num_bytes, self.num_signals = label, num_bytes, num_signals
        self._segment = OwnSegment(num_bytes, num_signals)
        self.bytes = self._segment.data
        self.words = SignalWords(self._segment.signals, owner.bell.doorbell)
        self._owner = owner
        self._freed = False

    def descriptor(self) -> bytes:
        """As in the contract; the medium is process, files, tags."""
        bell = self._owner.bell
        return Descriptor(
            kind=ShmTransport.kind,
            peer=self._owner.name,
            label=self.label,
            generation=self._owner.generation,
            num_bytes=self.num_bytes,
            num_signals=self.num_signals,
            medium={
                "pid": os.getpid(),
                **{"fd": self._segment.fd, "tag": self._segment.tag},
                **{"bell_fd": bell.fd, "bell_tag": bell.tag},
            },
        ).encode()

    def read_signal(self, signal: int) -> int:
        """Present value."""
        check_signal(self, signal)
        return self.words.read(signal)

    def set_signal(self, signal: int, value: int) -> None:
        """Set the value here and wake this process's waiters."""
        check_signal(self, signal, value)
        self.words.set(signal, value)

    def free(self) -> None:
        """Take the window back: later puts of peers raise PeerGoneError."""
        if not self._freed:
            self._freed = True
            self._segment.free()
            self._owner.forget(self)


class _Process:
    """A process that windows are attached of: its doorbell, and a handle that tells when it ends."""

    def __init__(self, found: Descriptor) -> None:
        medium = found.medium
        try:
            self.pidfd = os.pidfd_open(medium["pid"])
        except OSError as error:
            raise PeerUnreachableError(
                f"process {medium['pid']} of {found.peer!r} does not run ({error.strerror}); open its newest "
                "window"
            ) from None
        weakref.finalize(self, os.close, self.pidfd)
        # The tag is checked after the handle was taken, so the handle is this process's and no later one's.
        bell = replace(found, num_bytes=0, num_signals=0)
        self.bell = map_peer_segment(bell, medium["bell_fd"], medium["bell_tag"])


class ShmRemoteWindow:
    """A peer's window, mapped here."""

    def __init__(self, found: Descriptor, peer: _Process, segment: Segment) -> None:
        self.peer, self.label, self.generation = found.peer, found.label, found.generation
        self.num_bytes, self.num_signals = found.num_bytes, found.num_signals
        self._process: _Process | None = peer
        self._freed = segment.freed.data_ptr()
        self._segment: Segment | None = segment
        self.words = SignalWords(segment.signals, peer.bell.doorbell)

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor | None:
        """The peer's bytes."""
        check_range(self, offset_bytes, num_bytes)
        return self.live_segment().data[offset_bytes : offset_bytes + num_bytes]

    def signal(self, signal: int, value: int) -> None:
        """Raise a signal. Raises PeerGoneError."""
        check_signal(self, signal, value)
        self.live_segment()
        self.words.raise_to(signal, value)

    def alive(self) -> bool:
        """One system call."""
        process, segment = self._process, self._segment
        if process is None or segment is None:
            return False
        freed = shm_library.held.moe_lora_shm_load(self._freed)
        return not freed and not shm_library.held.moe_lora_shm_ended(process.pidfd)

    def live_segment(self) -> Segment:
        """The mapping. Raises PeerGoneError."""
        segment = self._segment
        if segment is None or not self.alive():
            raise PeerGoneError(
                f"window {self.label!r} of {self.peer!r} generation {self.generation} is gone: the process "
                "has ended, or the window was freed or detached from; open its newest window"
            )
        return segment

    def detach(self) -> None:
        """Let go of the mapping; views keep it while they live."""
        self._process = self._segment = None


class ShmTransport:
    """Shared memory on one host; see the contract."""

    kind = "shm"

    def __init__(self, *, name: str, store: Store | None = None, spin_s: float = 20e-6) -> None:
        """spin_s: how long a wait spins before it sleeps."""
        self.name = name
        self._directory = Directory(store, self.kind, name)
        self.generation = self._directory.generation
        self.bell = OwnSegment(0, 0)
        self._waiter = Waiter(self.bell.doorbell, spin_s)
        self._windows: dict[str, ShmWindow] = {}
        self._processes: weakref.WeakValueDictionary[tuple[int, int], _Process] = (
            weakref.WeakValueDictionary()
        )
        self._remotes: weakref.WeakSet[ShmRemoteWindow] = weakref.WeakSet()
        self._closed = False

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> ShmWindow:
        """A window in a segment of its own."""
        check_new_window(self.name, label, self._windows, self._closed)
        window = ShmWindow(self, label, num_bytes, num_signals)
        self._windows[label] = window
        self._directory.publish(label, window.descriptor())
        return window

    def forget(self, window: ShmWindow) -> None:
        """Called by a window that is freed."""
        del self._windows[window.label]

    def attach(self, descriptor: bytes) -> ShmRemoteWindow:
        """Map the window that a descriptor names."""
        found = Descriptor.decode(descriptor, self.kind)
        key = found.medium["pid"], found.medium["bell_tag"]
        process = self._processes.get(key)
        if process is None:
            process = self._processes[key] = _Process(found)
        segment = map_peer_segment(found, found.medium["fd"], found.medium["tag"])
        remote = ShmRemoteWindow(found, process, segment)
        if not remote.alive():
            raise PeerUnreachableError(
                f"window {found.label!r} of {found.peer!r} was freed, or its process ended; open its newest "
                "window"
            )
        self._remotes.add(remote)
        return remote

    def open(self, peer: str, label: str, timeout_s: float) -> ShmRemoteWindow:
        """Attach to the newest window of that name."""
        return self._directory.find(peer, label, self.attach, timeout_s)

    def put_signal(
        self, dst: RemoteWindow, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
    ) -> None:
        """Copy, then raise; complete on return."""
        assert isinstance(dst, ShmRemoteWindow)
        if src is None:
            dst.signal(signal, value)
            return
        num_bytes = check_tensor(src, "src")
        check_range(dst, offset_bytes, num_bytes)
        check_signal(dst, signal, value)
        segment = dst.live_segment()
        library = shm_library.held if num_bytes < _SHORT_COPY_BYTES else shm_library.free
        library.moe_lora_shm_put(
            segment.data.data_ptr() + offset_bytes,
            src.data_ptr(),
            num_bytes,
            dst.words.address(signal),
            value,
            dst.words.doorbell_address,
        )

    def get(self, src: RemoteWindow, offset_bytes: int, out: torch.Tensor) -> None:
        """Copy from the peer's memory."""
        assert isinstance(src, ShmRemoteWindow)
        num_bytes = check_tensor(out, "out")
        check_range(src, offset_bytes, num_bytes)
        segment = src.live_segment()
        shm_library.free.moe_lora_shm_copy(out.data_ptr(), segment.data.data_ptr() + offset_bytes, num_bytes)

    def fence(self, dst: RemoteWindow) -> None:
        """Puts are complete when they return."""
        self.quiet(dst)

    def quiet(self, dst: RemoteWindow) -> None:
        """Puts are complete when they return; raises PeerGoneError as a put would."""
        assert isinstance(dst, ShmRemoteWindow)
        dst.live_segment()

    def signal_wait_until(self, window: Window, signal: int, at_least: int, timeout_s: float | None) -> int:
        """Spin, then sleep, until the signal has reached the value."""
        assert isinstance(window, ShmWindow)
        return self._waiter.until(window, signal, at_least, timeout_s)

    def wait_any(self, waits: Sequence[tuple[Window, int, int]], timeout_s: float | None) -> int | None:
        """Spin, then sleep, until one of the signals has reached its value."""
        return self._waiter.any(cast("Sequence[tuple[ShmWindow, int, int]]", waits), timeout_s)

    def detach(self, remote: RemoteWindow) -> None:
        """Let a peer's window go."""
        assert isinstance(remote, ShmRemoteWindow)
        self._remotes.discard(remote)
        remote.detach()

    def close(self) -> None:
        """Free and detach all."""
        if self._closed:
            return
        self._closed = True
        for window in list(self._windows.values()):
            window.free()
        for remote in list(self._remotes):
            self.detach(remote)
        self.bell.free()

    def __enter__(self) -> ShmTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
