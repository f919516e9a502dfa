# SPDX-License-Identifier: Apache-2.0
"""Contents of registered adapters, kept by hash."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from moe_lora.adapters.peft.reader import bare_layers, pack_state_dict, read_adapter
from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.core.request import COMPOSED
from moe_lora.core.shape import ModelShape, rank_problem

from .host_store import HostStore, is_intact
from .packed import PackedAdapter, PackedLayer

logger = logging.getLogger(__name__)

OUTER_BESIDE_LORA_SERVER = (
    "a change of lm_head or embed_tokens is computed by an instance alone, and lora_server keeps the "
    "adapters outside; serve the adapter without a LoRA Server, or train without these targets"
)
COLUMNS_REFUSED = {
    "lora_server": "use_dora and lora_bias change the base's outputs, at an instance alone, and lora_server "
    "keeps the adapters outside; serve the adapter without a LoRA Server, or train a plain LoRA",
    "cuda": "use_dora and lora_bias are served on a CPU alone; start the server with --device cpu, or train "
    "a plain LoRA",
    "quantised": "use_dora and lora_bias need the base as it was trained, for DoRA's norms; start the server "
    "without --quantize, or train a plain LoRA",
}
"""By `AdapterContents.computed_by`."""


class AdapterContents:
    """Reads adapters from folders, or from a store of earlier contents.

    Thread-safe.  root: folder that must contain every path.  base_dir: checkpoint of the base, for copies and
    replaced rows; None: both are refused.  computed_by: "cpu", "cuda", "quantised" (at the load), or
    "lora_server".
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        store: HostStore | None = None,
        *,
        root: str | None = None,
        max_lora_rank: int | None = None,
        base_dir: Path | None = None,
        computed_by: str = "cpu",
    ) -> None:
        self.store = store
        self.max_lora_rank = max_lora_rank
        self._base_dir = base_dir
        self._computed_by = computed_by
        self._root = root
        self.shape = shape
        self.dtype = dtype
        self._served: dict[str, list[str]] = {}
        """Name -> content hashes of the last two versions, to undo a refused load."""
        self._new: set[str] = set()
        """Content hashes that a load wrote, until served or refused."""
        self._loads: Counter[str] = Counter()
        """Loads under way by content hash, until served or refused."""
        self._lock = threading.Lock()
        self.delete: Callable[[str], None] | None = None if store is None else store.remove
        """Called with content hashes that no name here uses."""

    def pack(self, name: str, tensors: Mapping[str, torch.Tensor], config: Any) -> PackedAdapter:
        """The adapter of these tensors; the store does not keep it, and loses a damaged copy."""
        packed = pack_state_dict(
            tensors, config, self.shape, self.dtype, name, self.max_lora_rank, self._base_dir
        )
        self._check_place(packed)
        if self.store is not None:
            self._kept(name, packed.content_hash)
        if packed.base_copies:
            from .peft.base_weights import check_copies, parts_in_memory

            copies = {key: parts_in_memory(tensors[key]) for key in packed.base_copies}
            check_copies(copies, self._base_dir, f"adapter {name!r}")
        return packed

    def read(
        self,
        name: str,
        path: str,
        expected: str | None = None,
        *,
        must_keep: bool | None = None,
        loads: bool = True,
    ) -> PackedAdapter:
        """The adapter in a folder; with a content hash, exactly this content.

        must_keep: a full store is an error; None: only without a content hash.  loads: `serve` or `discard`
        follows.  The log names the folder.  Raises AdapterError; StorageError without room or a file handle.
        """
        must_keep = expected is None if must_keep is None else must_keep
        if expected is not None and (kept := self._kept(name, expected)) is not None:
            self._check_place(kept)
            with self._lock:
                self._loads[expected] += loads
            return kept
        called = f"adapter {name!r}: "
        try:
            if path.startswith(COMPOSED):
                packed = self._composed(name, path)
            else:
                words: Any = {"root": self._root, "max_lora_rank": self.max_lora_rank}
                words |= {"called": called, "base_dir": self._base_dir}
                packed = read_adapter(path, self.shape, self.dtype, name, **words)
            self._check_place(packed)
            if packed.base_copies:
                from .peft.base_weights import check_copies_in

                check_copies_in(Path(path), packed.base_copies, self._base_dir, called)
        except AdapterError as error:
            logger.warning("%s (in %s)", error, path)
            raise
        if expected is not None and packed.content_hash != expected:
            raise AdapterError(
                f"adapter {name!r}: its folder does not hold what was loaded (content {expected[:12]}, now "
                f"{packed.content_hash[:12]}); load it again with load_inplace=true"
            )
        if self.store is not None:
            if time.time() >= self.store.sweep_s:
                with self._lock:
                    served = {*chain.from_iterable(self._served.values())}
                self.store.remove_unused(served)
            with self._lock:
                self._loads[packed.content_hash] += loads
            try:
                if self.store.put(packed):
                    if expected is None:
                        self._new.add(packed.content_hash)
                elif self._kept(name, packed.content_hash) is None:
                    self.store.put(packed)
            except StorageError as error:
                if must_keep:
                    self.discard(packed.content_hash)
                    raise
                logger.warning("adapter %s is served, but no copy of it is kept: %s", name, error)
        return packed

    def read_all(
        self, adapters: Sequence[tuple[str, str]], *, leave_out_bad: bool
    ) -> list[tuple[PackedAdapter, str]]:
        """Each adapter of (name, path) pairs, with its path.

        leave_out_bad: skip bad adapters, and ignore a full store; otherwise raises as `read`.
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

    def bare_layers(
        self, adapters: Sequence[tuple[str, str]], *, leave_out_bad: bool, tables: bool
    ) -> Iterator[list[PackedLayer]]:
        """Layers of each adapter, values unread; see `read_all`."""
        for _, path in adapters:
            try:
                limits = self._root, self.max_lora_rank, self._base_dir
                yield bare_layers(path, self.shape, self.dtype, *limits, tables=tables)
            except (AdapterError, StorageError):
                if not leave_out_bad:
                    raise

    def serve(self, name: str, hash_now: str) -> None:
        """Record a new version's content; drops the version before the last."""
        with self._lock:
            self._new.discard(hash_now)
            self._loads -= Counter((hash_now,))  # never below 0: not every content was read here
            before = self._served.get(name, [])
            if before[-1:] != [hash_now]:
                self._served[name] = [*before[-1:], hash_now]
                if before[:-1]:
                    self._remove(before[:-1])

    def forget(self, name: str) -> None:
        """Drop an unloaded name's contents."""
        with self._lock:
            self._remove(self._served.pop(name, []))

    def is_served(self, content_hash: str) -> bool:
        """True if a name may return to the content."""
        with self._lock:
            return content_hash in chain.from_iterable(self._served.values())

    def discard(self, content_hash: str) -> None:
        """Drop a refused load's content, if a load wrote it and no name or load uses it."""
        with self._lock:
            self._loads -= Counter((content_hash,))
            if self._computed_by == "lora_server":  # whose leader drops unused contents
                self._new.discard(content_hash)
            elif content_hash in self._new:
                self._remove([content_hash])

    def _composed(self, name: str, path: str) -> PackedAdapter:
        """The weighted sum at `path`."""
        from moe_lora.core.composed import parts_in

        from .composed import compose

        parts, store = parts_in(path), self.store
        new = [one.content_hash for one in parts if store is not None and one.content_hash not in store]
        try:
            terms = [
                (self.read(one.name, one.path, one.content_hash, loads=False), one.weight) for one in parts
            ]
            packed = compose(name, terms, self.shape)
        finally:
            with self._lock:
                self._remove(new)
        if self.max_lora_rank is not None and packed.max_lora_rank > self.max_lora_rank:
            raise AdapterError(f"the weighted sum: {rank_problem(packed.max_lora_rank, self.max_lora_rank)}")
        return packed

    def _check_place(self, packed: PackedAdapter) -> None:
        """Log warnings.  Raises AdapterError for changes that are not computed here."""
        for warning in packed.warnings:
            logger.warning("%s", warning)
        beside_lora_server, problem = self._computed_by == "lora_server", None
        if beside_lora_server and len(packed.layers) > self.shape.num_layers:
            problem = OUTER_BESIDE_LORA_SERVER
        elif packed.has_columns and self._computed_by != "cpu":
            problem = COLUMNS_REFUSED[self._computed_by]
        if problem is not None:
            raise AdapterError(f"adapter {packed.name!r}: {problem}")

    def _remove(self, hashes: Sequence[str]) -> None:
        if self.delete is None:
            return
        for one in {*hashes}.difference(*self._served.values()):
            if self._loads[one]:
                self._new.add(one)  # the last of these loads decides
            else:
                self._new.discard(one)
                self.delete(one)

    def _kept(self, name: str, expected: str) -> PackedAdapter | None:
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
