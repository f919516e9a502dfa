# SPDX-License-Identifier: Apache-2.0
"""Layer-by-layer reads of an adapter: from a peer's memory, else from its directory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from moe_lora.adapters.host_store import adapter_in, adapter_without_data, is_intact, layout_of, write_adapter
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.errors import AdapterError, PeerGoneError, PeerUnreachableError, StorageError
from moe_lora.core.request import AdapterFacts

if TYPE_CHECKING:
    from moe_lora.dist.transport.contract import RemoteWindow, Transport


class Peers:
    """Open windows of pool peers, and counters.

    A shared-memory window is detached after use, so that the peer can free the memory; a network peer's last
    window stays with the connection.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.counts = dict.fromkeys(("peer_fetches", "disk_fetches", "fetched_bytes", "failed_sources"), 0)
        self._last: dict[str, RemoteWindow] = {}
        self._lock = threading.Lock()

    def release(self, window: RemoteWindow) -> None:
        before: RemoteWindow | None = window
        if self.transport.kind != "shm" and window.alive():
            with self._lock:
                before = self._last.get(window.peer)
                self._last[window.peer] = window
        if before is not None:
            self.transport.detach(before)

    def count(self, name: str, number: int = 1) -> None:
        """Thread-safe."""
        with self._lock:
            self.counts[name] += number


logger = logging.getLogger(__name__)


class LayerReader:
    """The layers of one adapter, from the first working source.

    sources: windows in order of preference.  A failed source is replaced even in the middle: all sources hold
    equal bytes.  For one thread.
    """

    def __init__(
        self,
        facts: AdapterFacts,
        sources: Callable[[], Sequence[bytes]],
        peers: Peers,
        read_again: Callable[[], PackedAdapter],
    ) -> None:
        self.facts = facts
        self._layout = layout_of(facts)
        self._list_sources = sources
        self._peers = peers
        self._read_again = read_again
        self._left: list[bytes] | None = None
        self._window: RemoteWindow | None = None
        self._from_disk: torch.Tensor | None = None

    @property
    def layer_bytes(self) -> list[int]:
        return [length for _, length in self._layout.data]

    def read_head(self, out: torch.Tensor | None = None) -> PackedAdapter:
        """The adapter with tables and scales in `out` (uint8 [head_bytes]), without data.

        Raises AdapterError.
        """
        head = torch.empty(self._layout.head_bytes, dtype=torch.uint8) if out is None else out
        self._get(0, head)
        return adapter_without_data(self.facts, head)

    def read(self, number: int, out: torch.Tensor) -> None:
        """out = the data of layer `number`: uint8, on the CPU.  Raises AdapterError likewise."""
        start, length = self._layout.data[number]
        assert len(out) == length
        if length:
            self._get(start, out)
            if self._from_disk is None:
                self._peers.count("fetched_bytes", length)

    def read_whole(self, memory: torch.Tensor) -> PackedAdapter:
        """The adapter in `memory` (uint8 [layout.num_bytes]), checked.  Raises AdapterError."""
        while True:
            self.read_head(memory[: self._layout.head_bytes])
            for number, (start, length) in enumerate(self._layout.data):
                self.read(number, memory[start : start + length])
            packed = adapter_in(self.facts, memory)
            if is_intact(packed):
                return packed
            assert self._from_disk is None, "what was read from disk was checked"
            self._give_up("what it holds is not the adapter that was asked for")

    def close(self, *, done: bool) -> None:
        """Close the source.  done: all layers were read."""
        if done:
            self._peers.count("peer_fetches" if self._from_disk is None else "disk_fetches")
        self._leave()

    def _get(self, start: int, out: torch.Tensor) -> None:
        """out = the bytes from `start` on, from this or later sources; the directory is last."""
        if self._left is None:
            self._left = list(self._list_sources())
        while self._left:
            try:
                self._peers.transport.get(self._open(self._left[0]), start, out)
                return
            except (PeerGoneError, PeerUnreachableError, OSError, ValueError) as error:
                self._give_up(str(error))
        if self._from_disk is None:
            self._from_disk = self._read_directory()
        out.copy_(self._from_disk[start : start + len(out)])

    def _read_directory(self) -> torch.Tensor:
        name = self.facts.name
        logger.info("adapter %s: no instance that holds it answers; read from disk", name)
        try:
            packed = self._read_again()
            if packed.content_hash != self.facts.content_hash:
                raise AdapterError(
                    f"adapter {name!r}: no instance holds it, and what lies in its directory now is not "
                    "what was loaded; load it again with load_inplace=true"
                )
        except (AdapterError, StorageError):
            self._peers.count("failed_sources")
            raise
        memory = torch.empty(self._layout.num_bytes, dtype=torch.uint8)
        write_adapter(packed, memory)
        return memory

    def _open(self, descriptor: bytes) -> RemoteWindow:
        if self._window is None:
            window = self._peers.transport.attach(descriptor)
            if window.num_bytes != self._layout.num_bytes:
                self._peers.release(window)
                raise ValueError(f"{window.peer} has {window.num_bytes} bytes of it")
            self._window = window
        return self._window

    def _give_up(self, reason: str) -> None:
        logger.warning("adapter %s: a source failed: %s", self.facts.name, reason)
        self._peers.count("failed_sources")
        self._leave()
        if self._left:
            del self._left[0]

    def _leave(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            self._peers.release(window)


def fetch_layers(reader: LayerReader, targets: Sequence[torch.Tensor]) -> PackedAdapter:
    """Copy each layer's data to a target, uint8; returns the adapter without data.

    For a GPU through two page-locked buffers: a read overlaps a copy.  Raises AdapterError.
    """
    done = False
    try:
        packed = reader.read_head()
        if targets and targets[0].is_cuda:
            _fetch_staged(reader, targets)
        else:
            for number, target in enumerate(targets):
                reader.read(number, target)
        done = True
        return packed
    finally:
        reader.close(done=done)


def fetch_whole(reader: LayerReader) -> PackedAdapter:
    """The adapter in memory, checked.  Raises AdapterError."""
    done = False
    try:
        packed = reader.read_whole(torch.empty(layout_of(reader.facts).num_bytes, dtype=torch.uint8))
        done = True
        return packed
    finally:
        reader.close(done=done)


def _fetch_staged(reader: LayerReader, targets: Sequence[torch.Tensor]) -> None:
    size = max(map(len, targets))
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in buffers]
    for number, target in enumerate(targets):
        side = number % 2
        copied[side].synchronize()
        buffer = buffers[side][: len(target)]
        reader.read(number, buffer)
        target.copy_(buffer, non_blocking=True)
        copied[side].record()
