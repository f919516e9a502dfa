"""Transport over shared memory on one host: a put is a memcpy and a store, a wait spins, then sleeps.

All processes run as one user in one PID namespace.  Puts are complete when they return.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import cast

import torch

from moe_lora.core.errors import PeerUnreachableError

from . import shm_library
from .contract import RemoteWindow, Store, Window
from .descriptor import Descriptor, check_new_window, check_range, check_signal, check_tensor
from .directory import Directory
from .shm_library import Waiter
from .shm_memory import OwnSegment, map_peer_segment
from .shm_window import ShmProcess, ShmRemoteWindow, ShmWindow

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
        self._waiter = Waiter(self.bell.doorbell, spin_s)
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
