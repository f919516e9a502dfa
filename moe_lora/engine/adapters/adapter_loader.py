"""Where adapters' bytes lie while requests use them: the interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter, shard_layer
from moe_lora.cache.orders import Readiness
from moe_lora.core.errors import AdapterError, StorageError
from moe_lora.core.request import AdapterResidency
from moe_lora.core.shape import ModelShape
from moe_lora.lora.row_routing import Lease

# One version of an adapter, as the engine keeps it.


@dataclass(eq=False)
class AdapterVersion:
    """One version of an adapter.

    uid: its namespace in the cache.  num_running: requests that hold it, those that wait for its bytes
    included.  num_waiting: requests that don't yet.  slot: while it is ready on this device.  lease: while
    the LoRA Server holds it for this engine.
    """

    uid: int
    version: int
    packed: PackedAdapter
    path: str | None
    num_running: int = 0
    num_waiting: int = 0
    last_used_s: float | None = None
    retired: bool = False
    pinned: bool = False
    slot: int | None = None
    lease: Lease | None = None

    @property
    def name(self) -> str:
        return self.packed.name

    @property
    def is_idle(self) -> bool:
        """No request holds it or waits for it."""
        return not (self.num_running or self.num_waiting)


class AdapterLoader(Protocol):
    """Makes adapters ready for computing.  Called by the engine's own thread only."""

    on_change: Callable[[], None] | None
    """Called, from another thread, when an adapter that was not ready may be now."""

    @property
    def waits_for_others(self) -> bool:
        """Whether it may depend on another process that an adapter becomes ready."""
        ...

    def counters(self) -> dict[str, int]:
        """Counters of `EngineStats` by their names there."""
        ...

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """What takes long of an `admit` that is to come; may be called from another thread."""
        ...

    def undo_prepare(self, packed: PackedAdapter) -> None:
        """No `admit` of what was prepared will come."""
        ...

    def admit(self, adapter: AdapterVersion) -> None:
        """Take on an adapter that `drop` will end; `adapter.packed` becomes what to keep of it.

        Raises CapacityError if it could never be made ready.
        """
        ...

    def begin_round(self) -> None:
        """Requests are about to be admitted, one `hold` after the other."""
        ...

    def hold(self, adapter: AdapterVersion, *, again: bool = False) -> Readiness:
        """Keep the adapter ready for one request, or make it so; NO_ROOM: ask again later.

        again: this is no further use of it: the request held it before.
        """
        ...

    def has_unused_lease(self, adapter: AdapterVersion) -> bool:
        """Whether others wait for its place, which is kept for this engine, though no request uses it."""
        ...

    def readiness(self, adapter: AdapterVersion) -> Readiness:
        """Of an adapter that is held."""
        ...

    def let_go(self, adapter: AdapterVersion) -> None:
        """Undo one `hold`: it stays ready while nobody else needs the room."""
        ...

    def stop_asking(self, adapter: AdapterVersion) -> None:
        """Nobody holds the adapter, and nobody will ask again soon."""
        ...

    def drop(self, adapter: AdapterVersion) -> None:
        """It will not be used again."""
        ...

    def pin(self, adapter: AdapterVersion) -> None:
        """Bring the adapter in and keep it.  Raises CapacityError if that left no room for a request."""
        ...

    def bring_pinned(self) -> None:
        """Bring in what was pinned when there was no room; to be called again and again."""
        ...

    def unpin(self, adapter: AdapterVersion) -> None:
        """Undo `pin`."""
        ...

    def where(self, adapter: AdapterVersion) -> tuple[AdapterResidency, int]:
        """Where its bytes are, and how many pages of the device's arena they take there."""
        ...

    def resident(self) -> Iterator[AdapterVersion]:
        """Adapters that are ready now."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...


# Adapters that are not in an arena: their packed bytes, and how much room they will take there.


class AdapterStore:
    """Packed adapters by content hash: as mapped files, or in this process's memory.

    in_files: as files, which this process alone can read; lasting: a store that has them already.  store: as
    files in this store, which others read too.  before_removal: called before such a file goes, returns when
    none of them will open it any more.
    """

    def __init__(
        self,
        *,
        in_files: bool = False,
        lasting: HostStore | None = None,
        store: HostStore | None = None,
        before_removal: Callable[[], None] = lambda: None,
    ) -> None:
        self._lasting = lasting
        self.in_files = in_files or store is not None
        self._store = store
        self._before_removal = before_removal
        self._kept: dict[str, PackedAdapter] = {}
        self._prepared: dict[str, PackedAdapter] = {}
        self._num_kept: Counter[str] = Counter()

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """What takes long of a `keep` that is to come; for another thread.  Raises CapacityError likewise."""
        if self._store is not None:
            return _stored(packed, self._store)
        if self.in_files:
            packed = self._prepared[packed.content_hash] = self._mapped(packed)
        return packed

    def undo_prepare(self, packed: PackedAdapter) -> None:
        """No `keep` will come."""
        content_hash = packed.content_hash
        self._prepared.pop(content_hash, None)
        if self._store is not None and not self._num_kept[content_hash] and content_hash in self._store:
            self._store.remove(content_hash)

    def keep(self, packed: PackedAdapter, path: str | None = None) -> PackedAdapter:
        """Take on an adapter, once for each time that `forget` will end it; returns what to keep of it.

        path: its PEFT directory, of use to those who read it again.  Raises CapacityError if there is no room
        for that.
        """
        if self._store is not None:
            packed = _stored(packed, self._store)
        elif self.in_files:
            known = packed.content_hash in self._prepared
            packed = self._prepared.pop(packed.content_hash) if known else self._mapped(packed)
        self._kept.setdefault(packed.content_hash, packed)
        self._num_kept[packed.content_hash] += 1
        return packed

    def _mapped(self, packed: PackedAdapter) -> PackedAdapter:
        """As a mapped file, whose name may go."""
        return _nameless(packed) if self._lasting is None else _stored(packed, self._lasting)

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
        if self._store is not None:
            self._before_removal()
            self._store.remove(content_hash)

    def place(self, content_hash: str) -> AdapterResidency:
        """Where a kept adapter's bytes are."""
        return "disk" if self.in_files else "host"

    def counters(self) -> dict[str, int]:
        """Counters of `EngineStats` by their names there."""
        return {}

    def close(self) -> None:
        """The engine ends."""

    @property
    def num_prepared(self) -> int:
        """Adapters in files of their own that were prepared and neither kept nor refused yet."""
        return len(self._prepared)

    def __len__(self) -> int:
        """Adapters kept, each as often as it was."""
        return self._num_kept.total()


def _nameless(packed: PackedAdapter) -> PackedAdapter:
    """As a mapped file without a name: whatever ends this process, nothing is left behind."""
    with TemporaryDirectory(prefix="moe_lora-") as directory:
        return _stored(packed, HostStore(directory))


def _stored(packed: PackedAdapter, store: HostStore) -> PackedAdapter:
    """As a mapped file: what was read into this process's memory may go."""
    try:
        store.put(packed)
        return store.get(packed.content_hash, packed.name)
    except AdapterError as error:
        raise StorageError(
            f"adapter {packed.name!r} of {packed.nbytes / 1e9:.3f} GB can't be kept in "
            f"{store.directory} ({error}); free room there or let TMPDIR name another place"
        ) from error


class ShardSizes:
    """Pages that the layers of adapters take on the rank that holds most of them.

    kept: per rank the entries ([X] bool) that it keeps.
    """

    def __init__(self, shape: ModelShape, page_bytes: int, kept: Sequence[np.ndarray]) -> None:
        self._shape = shape
        self.page_bytes = page_bytes
        self._kept = kept
        self._all_kept = all(entries.all() for entries in kept)

    def layer_pages(self, packed: PackedAdapter) -> list[int]:
        return [self.num_pages(num_bytes) for num_bytes in self._layer_bytes(packed)]

    def num_pages(self, num_bytes: int) -> int:
        """Whole pages that so many bytes take."""
        return -(-num_bytes // self.page_bytes)

    def _layer_bytes(self, packed: PackedAdapter) -> list[int]:
        if self._all_kept:
            return [layer.nbytes for layer in packed.layers]
        return [
            max(shard_layer(layer, self._shape, kept).num_elements for kept in self._kept)
            * layer.data.element_size()
            for layer in packed.layers
        ]
