# SPDX-License-Identifier: Apache-2.0
"""Adapters that are not in an arena: their versions, their packed bytes, and how much room they will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter, shard_layer
from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.core.host import OwnFolder
from moe_lora.core.request import AdapterResidency
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.lora.row_routing import Lease
from moe_lora.policies.caching.caching import ANYBODY, Asker

if TYPE_CHECKING:
    from moe_lora.dist.host_workers.workers import HostWorkers


@dataclass(eq=False)
class AdapterVersion:
    """One version of an adapter.

    uid: its namespace in the cache.  num_running: requests that hold it, those that wait for its bytes
    included.  num_waiting: requests that don't yet.  num_pages: what it takes on this device when it is
    there.  slot: while it is ready there.  loading_slot: from when its bytes began to
    come.  lease: while the LoRA Server holds it for this engine.  merged: the weights carry some of it, or
    will.  leaseless: they carry all that the server would compute of it.  asker: whose request held it
    last.
    """

    uid: int
    version: int
    packed: PackedAdapter
    path: str | None
    num_pages: int = 0
    num_running: int = 0
    num_waiting: int = 0
    last_used_s: float | None = None
    retired: bool = False
    pinned: bool = False
    slot: int | None = None
    loading_slot: int | None = None
    lease: Lease | None = None
    merged: bool = False
    leaseless: bool = False
    asker: Asker = ANYBODY
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.packed.name

    @property
    def is_idle(self) -> bool:
        """No request holds it or waits for it, and the weights carry nothing of it."""
        return not (self.num_running or self.num_waiting or self.merged)


class AdapterStore:
    """Packed adapters by content hash: as mapped files, or in this process's memory.

    in_files: as files without a name, which this process alone has.  store: as files of this store.
    before_removal: they go from there when nobody keeps them; called before, returns when no other process
    will open them any more.  None: they stay.  host: workers that read them there, closed with this.
    others_fallback_rows: see `counters`; of the engine's other ranks.
    """

    on_change: Callable[[], None] | None = None
    """Called, from another thread, when a request that waits for an adapter may be able to start."""
    on_failure: Callable[[str, Exception], None] | None = None
    """Called, from another thread, with the content hash of a failed adapter and another process's error.
    The adapter is served again after its next `keep`."""

    def __init__(
        self,
        *,
        in_files: bool = False,
        store: HostStore | None = None,
        before_removal: Callable[[], None] | None = None,
        host: HostWorkers | None = None,
        others_fallback_rows: Callable[[], int] = int,
    ) -> None:
        self.host = host
        self._others_fallback_rows = others_fallback_rows
        self._in_files = in_files
        self._store = store
        self._before_removal = before_removal
        self._kept: dict[str, PackedAdapter] = {}
        self._prepared: dict[str, PackedAdapter] = {}
        self._num_kept: Counter[str] = Counter()
        self._without_host: set[str] = set()

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """What takes long of a `keep` that is to come; for another thread.  Raises CapacityError likewise."""
        if self._store is not None:
            return _stored(packed, self._store)
        if self._in_files:
            packed = self._prepared[packed.content_hash] = _nameless(packed)
        return packed

    def undo_prepare(self, packed: PackedAdapter) -> None:
        """No `keep` will come."""
        self._prepared.pop(packed.content_hash, None)
        if packed.content_hash not in self._kept and self._store is not None and self._before_removal:
            self._store.remove(packed.content_hash)

    def keep(self, packed: PackedAdapter, path: str | None = None) -> PackedAdapter:
        """Take on an adapter, once for each time that `forget` will end it; returns what to keep of it.

        path: its PEFT directory, of use to those who read it again.  Raises CapacityError if there is no room
        for that.
        """
        if self._store is not None:
            packed = _stored(packed, self._store)
        elif self._in_files:
            prepared = packed.content_hash in self._prepared
            packed = self._prepared.pop(packed.content_hash) if prepared else _nameless(packed)
        self._without_host.discard(packed.content_hash)
        self._kept.setdefault(packed.content_hash, packed)
        self._num_kept[packed.content_hash] += 1
        return packed

    def find(self, content_hash: str) -> PackedAdapter:
        """A kept adapter."""
        return self._kept[content_hash]

    def forget(self, packed: PackedAdapter) -> None:
        """End what `keep` began."""
        content_hash = packed.content_hash
        self._num_kept[content_hash] -= 1
        if self._num_kept[content_hash]:
            return
        del self._num_kept[content_hash]
        del self._kept[content_hash]
        self._without_host.discard(content_hash)
        if self._store is not None and self._before_removal is not None:
            self._before_removal()
            self._store.remove(content_hash)

    def place(self, content_hash: str) -> AdapterResidency:
        """Where a kept adapter's bytes are."""
        return "host" if self._store is None and not self._in_files else "disk"

    def host_has(self, content_hash: str) -> bool:
        """Whether host workers can compute a kept adapter's deltas."""
        return self.host is not None and content_hash not in self._without_host

    def stop_host(self, content_hash: str) -> None:
        """Keep an adapter from host workers after a failure, until the next load from a file."""
        self._without_host.add(content_hash)

    def counters(self) -> dict[str, int]:
        """Counters of `EngineStats` by their names there."""
        if self.host is None:
            return {}
        return {"host_fallback_rows": self.host.backend.num_fallback_rows + self._others_fallback_rows()}

    def close(self) -> None:
        """The engine ends."""
        if self.host is not None:
            self.host.close()

    def __len__(self) -> int:
        """Adapters kept, each as often as it was."""
        return self._num_kept.total()


def _nameless(packed: PackedAdapter) -> PackedAdapter:
    """As a mapped file without a name: whatever ends this process, nothing is left behind."""
    with OwnFolder() as directory:
        return _stored(packed, HostStore(directory))


def _stored(packed: PackedAdapter, store: HostStore) -> PackedAdapter:
    """As a mapped file: what was read into this process's memory may go."""
    try:
        store.put(packed)
        return store.get(packed.content_hash, packed.name)
    except AdapterError as error:
        raise StorageError(
            f"adapter {packed.name!r} of {packed.nbytes / 1e9:.3f} GB can't be kept on this host ({error}); "
            "free room there, or let state_dir or TMPDIR name another place"
        ) from error


class ShardSizes:
    """Pages that the layers of adapters take on the rank that holds most of them.

    kept: per rank the entries ([X] bool) that it keeps.  shard: of the first rank, as large as each; None:
    matrices are whole.
    """

    def __init__(
        self,
        shape: ModelShape,
        page_bytes: int,
        kept: Sequence[np.ndarray],
        shard: ModelShard | None = None,
    ) -> None:
        self._shape = shape
        self.page_bytes = page_bytes
        self._kept = kept
        self._shard = shard
        self._all_kept = all(entries.all() for entries in kept) and shard is None

    def layer_pages(self, packed: PackedAdapter) -> list[int]:
        if self._all_kept:
            return [self.num_pages(layer.nbytes) for layer in packed.layers]
        return [
            self.num_pages(
                max(shard_layer(layer, self._shape, kept, self._shard).num_elements for kept in self._kept)
                * layer.data.element_size()
            )
            for layer in packed.layers
        ]

    def num_pages(self, num_bytes: int) -> int:
        """Whole pages that so many bytes take."""
        return -(-num_bytes // self.page_bytes)
