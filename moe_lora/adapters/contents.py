"""What adapters' folders held when they were registered, kept by hash for whoever must read it again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_lora.adapters.peft.reader import adapter_layer_bytes, read_adapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.shape import ModelShape

from .host_store import HostStore, is_intact
from .packed import PackedAdapter

logger = logging.getLogger(__name__)


class AdapterContents:
    """Reads adapters, from their folders or from a store of contents that were read before.

    store: where contents are kept; None: nowhere.  owned: whether contents go from there when nothing is
    served of them any more.  Used by the engine's thread and by one that reads files.
    """

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, store: HostStore | None = None, *, owned: bool = True
    ) -> None:
        self.store = store
        self._shape = shape
        self._dtype = dtype
        self._owned = owned
        self._served: dict[str, list[str]] = {}
        """Name -> the content hashes of its last two versions: a load that others refuse is taken back."""
        self._lock = threading.Lock()

    def read(self, name: str, path: str, expected: str | None = None) -> PackedAdapter:
        """The adapter in a folder; with a content hash given, that content and no other.

        Raises AdapterError, also if the folder has other content and the store has not that one,
        CapacityError if the store is full.
        """
        if expected is not None and (kept := self._kept(name, expected)) is not None:
            return kept
        packed = read_adapter(Path(path), self._shape, self._dtype, name)
        if expected is not None and packed.content_hash != expected:
            raise AdapterError(
                f"adapter {name!r}: {path} does not hold what was loaded (content {expected[:12]}, now "
                f"{packed.content_hash[:12]}); load it again with load_inplace=true"
            )
        if self.store is not None:
            self.store.put(packed)
        return packed

    def read_all(
        self, adapters: Sequence[tuple[str, str]], *, leave_out_bad: bool
    ) -> list[tuple[PackedAdapter, str]]:
        """Each adapter of (name, path) pairs, with its path.

        leave_out_bad: one that can't be had is logged and left out.  Raises as `read` otherwise.
        """
        found = []
        for name, path in adapters:
            try:
                found.append((self.read(name, path), path))
            except AdapterError as error:
                if not leave_out_bad:
                    raise
                logger.error("adapter %s is left out: %s", name, error)
        return found

    def layer_bytes(self, adapters: Sequence[tuple[str, str]], *, leave_out_bad: bool) -> list[list[int]]:
        """Bytes that each layer of each adapter takes; see `read_all`."""
        found = []
        for _, path in adapters:
            try:
                found.append(adapter_layer_bytes(path, self._shape, self._dtype))
            except AdapterError:
                if not leave_out_bad:
                    raise  # whoever is given the adapter says so
        return found

    def serve(self, name: str, hash_now: str) -> None:
        """A new version of `name` has this content; that of the last but one is not needed any more."""
        with self._lock:
            before = self._served.get(name, [])
            if before[-1:] != [hash_now]:
                self._served[name] = [*before[-1:], hash_now]
                self._remove(before[:-1])

    def forget(self, name: str) -> None:
        """The name is not served any more."""
        with self._lock:
            self._remove(self._served.pop(name, []))

    def _remove(self, hashes: Sequence[str]) -> None:
        if self.store is None or not self._owned:
            return
        used = {one for hashes_of_name in self._served.values() for one in hashes_of_name}
        for one in set(hashes) - used:
            self.store.remove(one)

    def _kept(self, name: str, expected: str) -> PackedAdapter | None:
        """The content in the store, if it is there and whole."""
        if self.store is None or expected not in self.store:
            return None
        try:
            packed = self.store.get(expected, name)
            if is_intact(packed):
                return packed
            problem = "its content is another"
        except AdapterError as error:
            problem = str(error)
        logger.error("adapter %s: %s is damaged: %s", name, self.store.path(expected), problem)
        self.store.remove(expected)
        return None
