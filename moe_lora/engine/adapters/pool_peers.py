"""Peers of a pool as one instance sees them: their windows while it reads them, and how that went."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from moe_lora.dist.transport.contract import RemoteWindow, Transport


@dataclass(eq=False)
class PoolCounters:
    """Since the start.  peer_fetches, disk_fetches: adapters whose last layer came from there.
    failed_sources: peers and directories that did not give what they should."""

    peer_fetches: int = 0
    disk_fetches: int = 0
    fetched_bytes: int = 0
    failed_sources: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, number: int = 1) -> None:
        """From any thread."""
        with self._lock:
            setattr(self, name, getattr(self, name) + number)


class PeerWindows:
    """Windows of peers, attached while they are read.

    Over shared memory a peer's memory is free only when nobody maps it; over a network the last window of a
    peer stays attached, because the connection goes with it.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._last: dict[str, RemoteWindow] = {}
        self._lock = threading.Lock()

    def attach(self, descriptor: bytes) -> RemoteWindow:
        """Raises PeerUnreachableError."""
        return self.transport.attach(descriptor)

    def release(self, window: RemoteWindow) -> None:
        """It is not read any more."""
        before: RemoteWindow | None = window
        if self.transport.kind != "shm" and window.alive():
            with self._lock:
                before = self._last.get(window.peer)
                self._last[window.peer] = window
        if before is not None:
            self.transport.detach(before)
