"""Segments of memory that processes of one user on one host share: memfds, found through /proc.

A memfd has no name, so nothing is left behind however a process ends: the kernel frees it with the last
mapping.  A peer opens /proc/PID/fd/FD; a random tag in the header tells whether that is still the segment it
was told of.  Layout: a header page {magic, tag, num_bytes, num_signals}, {freed}, {doorbell}; signals, 64
bytes each; data, at a page.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct

import torch

from moe_lora.core.errors import PeerUnreachableError

from .descriptor import LINE_BYTES, Descriptor, check_same_size

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
