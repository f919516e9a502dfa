"""Transport over shared memory on one host: a put is a memcpy and a store, a wait spins, then sleeps.

All processes run as one user in one PID namespace.  Puts are complete when they return.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from moe_lora.core.errors import PeerGoneError, PeerUnreachableError

from . import shm_library
from .contract import RemoteWindow, Store, Window
from .descriptor import (
    LINE_BYTES,
    Descriptor,
    Directory,
    check_new_window,
    check_range,
    check_same_size,
    check_signal,
    check_tensor,
)
from .shm_library import LocalWindow, SignalWaiter, SignalWords

# Segments of memory that processes of one user on one host share: memfds, found through /proc.
#
# A memfd has no name, so nothing is left behind however a process ends: the kernel frees it with the last
# mapping.  A peer opens /proc/PID/fd/FD; a random tag in the header tells whether that is still the segment
# it was told of.  Layout: a header page {magic, tag, num_bytes, num_signals}, {freed}, {doorbell}; signals,
# 64 bytes each; data, at a page.


_MAGIC = int.from_bytes(b"moelora1", "little")
_HEADER = struct.Struct("<QQQQ")
_FREED_OFFSET = LINE_BYTES
_DOORBELL_OFFSET = 2 * LINE_BYTES
_PAGE = mmap.PAGESIZE


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


class Segment:
    """A mapped segment; stays mapped while this object or a tensor over it lives."""

    def __init__(self, fd: int, num_bytes: int, num_signals: int) -> None:
        data = _PAGE + _up(num_signals * LINE_BYTES)
        total = data + _up(num_bytes)
        if os.fstat(fd).st_size != total:
            raise ValueError(
                f"the peer's segment has {os.fstat(fd).st_size} bytes where {num_bytes} bytes and "
                f"{num_signals} signals need {total}; run the same version of moe_lora in all processes"
            )
        # Populated, as page faults would cost more than the copy in the first put.
        memory = mmap.mmap(fd, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.header = whole[:LINE_BYTES]
        self.freed = whole[_FREED_OFFSET : _FREED_OFFSET + 1]
        self.doorbell = whole[_DOORBELL_OFFSET : _DOORBELL_OFFSET + LINE_BYTES]
        self.signals = whole[_PAGE : _PAGE + num_signals * LINE_BYTES]
        self.data = whole[data : data + num_bytes]


class OwnSegment(Segment):
    """A new segment of this process."""

    def __init__(self, num_bytes: int, num_signals: int) -> None:
        self.tag = secrets.randbits(62)
        self.fd = os.memfd_create("moe_lora", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, _PAGE + _up(num_signals * LINE_BYTES) + _up(num_bytes))
            super().__init__(self.fd, num_bytes, num_signals)
        except BaseException:
            os.close(self.fd)
            raise
        header = _HEADER.pack(_MAGIC, self.tag, num_bytes, num_signals)
        self.header[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def free(self) -> None:
        """Tell peers and close the file; they and views here keep the memory until they let go."""
        self.freed[0] = 1
        os.close(self.fd)


def map_peer_segment(found: Descriptor, fd_number: int, tag: int) -> Segment:
    """Raises PeerUnreachableError if the segment is gone, ValueError if it does not fit its descriptor."""
    pid = found.medium["pid"]
    try:
        fd = os.open(f"/proc/{pid}/fd/{fd_number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerUnreachableError(
            f"window {found.label!r} of {found.peer!r} (process {pid}) can't be opened: {error.strerror}; "
            "the process has ended or freed it, or runs as another user or in another PID namespace (then "
            "use transport 'gloo' or 'nixl')"
        ) from None
    try:
        try:
            known = os.pread(fd, _HEADER.size, 0)
        except OSError:  # what has the number now can't be read so: a pipe, a process's handle
            known = b""
        magic, its_tag, its_bytes, its_signals = _HEADER.unpack(known.ljust(_HEADER.size, b"\0"))
        if (magic, its_tag) != (_MAGIC, tag):
            raise PeerUnreachableError(
                f"window {found.label!r} of {found.peer!r} is gone: process {pid} holds another file in its "
                "place; open the peer's newest window"
            )
        check_same_size(found, its_bytes, its_signals)
        return Segment(fd, found.num_bytes, found.num_signals)
    finally:
        os.close(fd)


# Windows in shared memory: this process's, and those of peers mapped here.


class ShmWindow(LocalWindow["ShmTransport"]):
    """Local memory in a segment of its own."""

    def __init__(self, owner: ShmTransport, label: str, num_bytes: int, num_signals: int) -> None:
        super().__init__(owner, label, num_bytes, num_signals)
        self._segment = OwnSegment(num_bytes, num_signals)
        self.bytes = self._segment.data
        self.words = SignalWords(self._segment.signals, owner.bell.doorbell)

    def medium(self) -> dict[str, Any]:
        """Process, files, tags."""
        bell = self._owner.bell
        return {
            "pid": os.getpid(),
            **{"fd": self._segment.fd, "tag": self._segment.tag},
            **{"bell_fd": bell.fd, "bell_tag": bell.tag},
        }

    def free(self) -> None:
        """Take the window back: later puts of peers raise PeerGoneError."""
        if self._owner.forget(self):
            self._segment.free()


class ShmProcess:
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

    def __init__(self, found: Descriptor, peer: ShmProcess, segment: Segment) -> None:
        self.peer, self.label, self.generation = found.peer, found.label, found.generation
        self.num_bytes, self.num_signals = found.num_bytes, found.num_signals
        self._process: ShmProcess | None = peer
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


# Below this a copy is done without letting go of the GIL: getting it back may take longer than the copy.
_SHORT_COPY_BYTES = 64 << 10


class ShmTransport:
    """Shared memory on one host; see the contract."""

    kind = "shm"

    def __init__(self, *, name: str, store: Store | None = None, spin_s: float = 20e-6) -> None:
        """spin_s: how long a wait spins before it sleeps."""
        self.name = name
        self._directory = Directory(store, self.kind, name)
        self.generation = self._directory.generation
        self.bell = OwnSegment(0, 0)
        self._waiter = SignalWaiter(self.bell.doorbell, spin_s)
        self._windows: dict[str, ShmWindow] = {}
        self._processes: weakref.WeakValueDictionary[tuple[int, int], ShmProcess] = (
            weakref.WeakValueDictionary()
        )
        self._remotes: weakref.WeakSet[ShmRemoteWindow] = weakref.WeakSet()
        self._lock = threading.Lock()
        """Held around the three collections above; not while the store is asked."""
        self._closed = False

    def alloc(self, label: str, num_bytes: int, num_signals: int) -> ShmWindow:
        """A window in a segment of its own."""
        with self._lock:
            check_new_window(self.name, label, self._windows, self._closed)
            window = self._windows[label] = ShmWindow(self, label, num_bytes, num_signals)
        self._directory.publish(label, window.descriptor())
        return window

    def forget(self, window: ShmWindow) -> bool:
        """Called by a window that is freed; whether it was still known."""
        with self._lock:
            known = self._windows.get(window.label) is window
            if known:
                del self._windows[window.label]
            return known

    def attach(self, descriptor: bytes) -> ShmRemoteWindow:
        """Map the window that a descriptor names."""
        found = Descriptor.decode(descriptor, self.kind)
        key = found.medium["pid"], found.medium["bell_tag"]
        with self._lock:
            process = self._processes.get(key)
            if process is None:
                process = self._processes[key] = ShmProcess(found)
        segment = map_peer_segment(found, found.medium["fd"], found.medium["tag"])
        remote = ShmRemoteWindow(found, process, segment)
        if not remote.alive():
            raise PeerUnreachableError(
                f"window {found.label!r} of {found.peer!r} was freed, or its process ended; open its newest "
                "window"
            )
        with self._lock:
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
        with self._lock:
            self._remotes.discard(remote)
        remote.detach()

    def close(self) -> None:
        """Free and detach all."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            windows, remotes = list(self._windows.values()), list(self._remotes)
        for window in windows:
            window.free()
        for remote in remotes:
            self.detach(remote)
        self.bell.free()

    def __enter__(self) -> ShmTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
