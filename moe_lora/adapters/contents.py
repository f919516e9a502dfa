# SPDX-License-Identifier: Apache-2.0
"""What adapters' folders held when they were registered, kept by hash for whoever must read it again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from moe_lora.adapters.peft.reader import adapter_layer_bytes, read_adapter
from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.core.shape import ModelShape

from .host_store import HostStore, is_intact
from .packed import PackedAdapter

logger = logging.getLogger(__name__)


class AdapterContents:
    """Reads adapters, from their folders or from a store of contents that were read before.

    store: where contents are kept; None: nowhere.  owned: whether contents go from there when nothing is
    served of them any more.  root: the folder that all that is read must lie in.  max_lora_rank: adapters
    above this rank are refused.  Used by the engine's thread and by one that reads files.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        store: HostStore | None = None,
        *,
        owned: bool = True,
        root: str | None = None,
        max_lora_rank: int | None = None,
    ) -> None:
        self.store = store
        self.max_lora_rank = max_lora_rank
        self._root = root
        self._shape = shape
        self._dtype = dtype
        self._owned = owned
        self._served: dict[str, list[str]] = {}
        """Name -> the content hashes of its last two versions: a load that others refuse is taken back."""
        self._lock = threading.Lock()

    def read(
        self, name: str, path: str, expected: str | None = None, *, must_keep: bool | None = None
    ) -> PackedAdapter:
        """The adapter in a folder; with a content hash given, that content and no other.

        must_keep: whether a full store is an error; None: if no content was named, since what is served
        already is served on.  Errors may go to clients: they name the adapter, and the log the folder.
        Raises AdapterError, also if the folder has other content and the store has not that one,
        StorageError if the store is full, or no file can be opened.
        """
        must_keep = expected is None if must_keep is None else must_keep
        if expected is not None and (kept := self._kept(name, expected)) is not None:
            return kept
        called = f"adapter {name!r}: "
        try:
            packed = read_adapter(
                path,
                self._shape,
                self._dtype,
                name,
                called=called,
                root=self._root,
                max_lora_rank=self.max_lora_rank,
            )
        except AdapterError as error:
            logger.warning("%s (in %s)", error, path)
            raise
        if expected is not None and packed.content_hash != expected:
            raise AdapterError(
                f"adapter {name!r}: its folder does not hold what was loaded (content {expected[:12]}, now "
                f"{packed.content_hash[:12]}); load it again with load_inplace=true"
            )
        if self.store is not None:
            try:
                self.store.put(packed)
            except StorageError as error:
                if must_keep:
                    raise
                logger.warning("adapter %s is served, but no copy of it is kept: %s", name, error)
        return packed

    def read_all(
        self, adapters: Sequence[tuple[str, str]], *, leave_out_bad: bool
    ) -> list[tuple[PackedAdapter, str]]:
        """Each adapter of (name, path) pairs, with its path.

        leave_out_bad: one that can't be had is logged and left out, and a full store is no error.  Raises as
        `read` otherwise.
        """
        found = []
        for name, path in adapters:
            try:
                found.append((self.read(name, path, must_keep=not leave_out_bad), path))
            except (AdapterError, StorageError) as error:
                if not leave_out_bad:
                    raise
                logger.error("adapter %s is left out: %s", name, error)
        return found

    def layer_bytes(self, adapters: Sequence[tuple[str, str]], *, leave_out_bad: bool) -> list[list[int]]:
        """Bytes that each layer of each adapter takes; see `read_all`."""
        found = []
        for _, path in adapters:
            try:
                found.append(
                    adapter_layer_bytes(path, self._shape, self._dtype, self._root, self.max_lora_rank)
                )
            except (AdapterError, StorageError):
                if not leave_out_bad:
                    raise  # whoever is given the adapter says so
        return found

    def serve(self, name: str, hash_now: str) -> None:
        """A new version of `name` has this content; that of the last but one is not needed any more."""
        with self._lock:
            before = self._served.get(name, [])
            if before[-1:] != [hash_now]:
                self._served[name] = [*before[-1:], hash_now]
                if before[:-1]:
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
