"""Windows in shared memory: this process's, and those of peers mapped here."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from moe_lora.core.errors import PeerGoneError, PeerUnreachableError

from . import shm_library
from .descriptor import Descriptor, check_range, check_signal
from .shm_library import SignalWords
from .shm_memory import OwnSegment, Segment, map_peer_segment
from .window import LocalWindow

if TYPE_CHECKING:
    from .shm import ShmTransport


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
