# SPDX-License-Identifier: Apache-2.0
"""Transport over shared memory on one host: a put is a memcpy and a store, complete on return.

All processes run as one user in one PID namespace.  Segments are memfds: the kernel frees them with the last
mapping.  A peer opens /proc/PID/fd/FD and checks a random tag.  Layout: a header page {magic, tag, num_bytes,
num_signals}, {freed}, {doorbell}; signals, 64 bytes each; data, at a page.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import weakref
from dataclasses import replace
from typing import Any

import torch

from moe_lora.core.errors import PeerUnreachableError

from . import shm_library
from .contract import (
    LINE_BYTES,
    Descriptor,
    RemoteWindow,
    Transport,
    Window,
    check_range,
    check_same_size,
    check_signal,
    check_tensor,
)
from .shm_library import SignalWaiter, SignalWords

_MAGIC = int.from_bytes(b"moelora1", "little")
_HEADER = struct.Struct("<QQQQ")
_FREED_OFFSET = LINE_BYTES
_DOORBELL_OFFSET = 2 * LINE_BYTES
_PAGE = mmap.PAGESIZE


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


class Segment:
    """A segment, mapped as long as this object or its tensors."""

    def __init__(self, fd: int, num_bytes: int, num_signals: int) -> None:
        data = _PAGE + _up(num_signals * LINE_BYTES)
        total = data + _up(num_bytes)
        if os.fstat(fd).st_size != total:
            raise ValueError(
                f"the peer's segment has {os.fstat(fd).st_size} bytes where {num_bytes} bytes and "
                f"{num_signals} signals need {total}; run the same version of moe_lora in all processes"
            )
        # Populated: page faults would exceed the first put's copy.
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
        """Notify peers and close the file; mappings and views stay."""
        self.freed[0] = 1
        os.close(self.fd)


def map_peer_segment(found: Descriptor, fd_number: int, tag: int) -> Segment:
    """Raises PeerUnreachableError, or ValueError for wrong sizes."""
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
        except OSError:
            known = b""
        magic, its_tag, its_bytes, its_signals = _HEADER.unpack(known.ljust(_HEADER.size, b"\0"))
        if (magic, its_tag) != (_MAGIC, tag):
            raise PeerUnreachableError(
                f"window {found.label!r} of {found.peer!r} is gone: process {pid} holds another file in its "
                "place; attach to the peer's newest window"
            )
        check_same_size(found, its_bytes, its_signals)
        return Segment(fd, found.num_bytes, found.num_signals)
    finally:
        os.close(fd)


class ShmWindow(Window):
    """In its own segment."""

    def __init__(
        self, owner: ShmTransport, number: int, label: str, num_bytes: int, num_signals: int
    ) -> None:
        super().__init__(owner, number, label, num_bytes, num_signals)
        self._bell = owner.bell
        self._segment = OwnSegment(num_bytes, num_signals)
        self.bytes = self._segment.data
        self.words = SignalWords(self._segment.signals, owner.bell.doorbell)

    def medium(self) -> dict[str, Any]:
        """Process, files, tags."""
        return {
            "pid": os.getpid(),
            **{"fd": self._segment.fd, "tag": self._segment.tag},
            **{"bell_fd": self._bell.fd, "bell_tag": self._bell.tag},
        }

    def discard(self) -> None:
        self._segment.free()


class ShmProcess:
    """A peer process: its doorbell, and a handle for its end."""

    def __init__(self, found: Descriptor) -> None:
        medium = found.medium
        try:
            self.pidfd = os.pidfd_open(medium["pid"])
        except OSError as error:
            raise PeerUnreachableError(
                f"process {medium['pid']} of {found.peer!r} does not run ({error.strerror}); attach to its "
                "newest window"
            ) from None
        weakref.finalize(self, os.close, self.pidfd)
        # The tag check after the open proves the handle's process is the descriptor's.
        bell = replace(found, num_bytes=0, num_signals=0)
        self.bell = map_peer_segment(bell, medium["bell_fd"], medium["bell_tag"])


class ShmRemoteWindow(RemoteWindow):
    """A peer's window, mapped here."""

    def __init__(self, found: Descriptor, peer: ShmProcess, segment: Segment) -> None:
        super().__init__(found)
        self._process: ShmProcess | None = peer
        self._freed = segment.freed.data_ptr()
        self._segment: Segment | None = segment
        self.words = SignalWords(segment.signals, peer.bell.doorbell)

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor | None:
        """The peer's bytes."""
        check_range(self, offset_bytes, num_bytes)
        return self.live_segment().data[offset_bytes : offset_bytes + num_bytes]

    def signal(self, signal: int, value: int) -> None:
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
        """The mapping.  Raises PeerGoneError."""
        segment = self._segment
        if segment is None or not self.alive():
            raise self.gone_error()
        return segment

    def detach(self) -> None:
        """Release the mapping, except for views."""
        self._process = self._segment = None


# A short copy keeps the GIL: getting the GIL back may take longer.
_SHORT_COPY_BYTES = 64 << 10


class ShmTransport(Transport):
    """See the contract."""

    kind = "shm"
    local_window = ShmWindow

    def __init__(self, *, name: str) -> None:
        self.bell = OwnSegment(0, 0)
        super().__init__(name, SignalWaiter(self.bell.doorbell))
        self._processes: weakref.WeakValueDictionary[tuple[int, int], ShmProcess] = (
            weakref.WeakValueDictionary()
        )

    def attach(self, descriptor: bytes) -> ShmRemoteWindow:
        """Map a descriptor's window."""
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
                f"window {found.label!r} of {found.peer!r} was freed, or its process ended; attach to its "
                "newest window"
            )
        with self._lock:
            self._remotes.add(remote)
        return remote

    def put_signal(
        self, dst: ShmRemoteWindow, offset_bytes: int, src: torch.Tensor | None, signal: int, value: int
    ) -> None:
        """Copy, then raise."""
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

    def get(self, src: ShmRemoteWindow, offset_bytes: int, out: torch.Tensor) -> None:
        """Copy from the peer's memory."""
        num_bytes = check_tensor(out, "out")
        check_range(src, offset_bytes, num_bytes)
        segment = src.live_segment()
        shm_library.free.moe_lora_shm_copy(out.data_ptr(), segment.data.data_ptr() + offset_bytes, num_bytes)

    def quiet(self, dst: ShmRemoteWindow) -> None:
        """Raises PeerGoneError; puts are complete already."""
        dst.live_segment()

    fence = quiet

    def detach(self, remote: ShmRemoteWindow) -> None:
        with self._lock:
            self._remotes.discard(remote)
        remote.detach()

    def end(self) -> None:
        self.bell.free()
