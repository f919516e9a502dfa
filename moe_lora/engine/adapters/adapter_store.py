# SPDX-License-Identifier: Apache-2.0
"""Adapters outside the arenas: versions, bytes, sizes, failures."""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter, PackedLayer, shard_layer
from moe_lora.core.clock import Clock
from moe_lora.core.errors import (
    AdapterError,
    AdapterFailedError,
    PeerGoneError,
    PeerUnreachableError,
    SignalTimeoutError,
    StorageError,
)
from moe_lora.core.host import OwnFolder
from moe_lora.core.request import AdapterResidency
from moe_lora.core.shape import ModelShape
from moe_lora.core.shard import ModelShard
from moe_lora.lora.row_routing import Lease
from moe_lora.policies.caching.caching import ANYBODY, Asker

if TYPE_CHECKING:
    from moe_lora.dist.host_workers.workers import HostWorkers

    from .leased_adapters import LeasedAdapters
    from .pool_store import PoolAdapters

logger = logging.getLogger(__name__)

MAX_LOADS = 3
"""Failed loads in a row before the adapter's requests end."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
PASSING = (OSError, StorageError, AdapterError, PeerGoneError, PeerUnreachableError, SignalTimeoutError)
"""Causes of failed loads that may be temporary."""


@dataclass(eq=False)
class AdapterVersion:
    """One version of an adapter.

    uid: namespace in the cache.  num_running: requests that hold the version.  num_waiting: requests before
    their hold.  lease: of the LoRA Server.  merged: partly in the weights, or soon.  leaseless: the weights
    carry the LoRA Server's whole part.  asker: tenant of the last holding request.
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
        """True without requests and merged parts."""
        return not (self.num_running or self.num_waiting or self.merged)


def no_others() -> list[int]:
    """As `Followers.counts`, of an instance of one rank."""
    return [0] * 4


class AdapterStore:
    """Packed adapters by content hash: as mapped files, or in this process's memory.

    in_files: files private to this process.  before_removal: True once no process will open unused files,
    False for a later removal; None: files stay.  host: workers that read the store; closed with this object.
    """

    on_change: Callable[[], None] | None = None
    """Called from another thread when a waiting request may start."""
    on_failure: Callable[[str, Exception], None] | None = None
    """Called from another thread with a failed adapter's content hash and another process's error; the next
    `keep` serves the adapter again.
    """

    def __init__(
        self,
        *,
        in_files: bool = False,
        store: HostStore | None = None,
        before_removal: Callable[[], bool] | None = None,
        host: HostWorkers | None = None,
        others_counts: Callable[[], list[int]] = no_others,
    ) -> None:
        self.host = host
        self._others_counts = others_counts
        self._in_files = in_files
        self._store = store
        self._before_removal = before_removal
        self._unused: set[str] = set()
        self._kept: dict[str, PackedAdapter] = {}
        self._prepared: dict[str, PackedAdapter] = {}
        self._num_kept: Counter[str] = Counter()
        self._without_host: set[str] = set()

    @property
    def leases(self) -> LeasedAdapters | None:
        """This store as a LoRA Server's client, if any."""
        return None

    @property
    def pool(self) -> PoolAdapters | None:
        """This store as a part of the pool, if any."""
        return None

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """The slow part of a later `keep`, for another thread.  Raises CapacityError likewise."""
        if self._store is not None:
            return _stored(packed, self._store)
        if self._in_files:
            packed = self._prepared[packed.content_hash] = _nameless(packed)
        return packed

    def undo_prepare(self, packed: PackedAdapter) -> None:
        self._prepared.pop(packed.content_hash, None)
        if packed.content_hash not in self._kept and self._store is not None and self._before_removal:
            self._store.remove(packed.content_hash)

    def keep(self, packed: PackedAdapter, path: str | None = None) -> PackedAdapter:
        """Keep an adapter until as many `forget`s; returns the kept form.

        path: of the PEFT directory.  Raises CapacityError without room.
        """
        if self._store is not None:
            packed = _stored(packed, self._store)
        elif self._in_files:
            prepared = packed.content_hash in self._prepared
            packed = self._prepared.pop(packed.content_hash) if prepared else _nameless(packed)
        self._without_host.discard(packed.content_hash)
        self._unused.discard(packed.content_hash)
        self._kept.setdefault(packed.content_hash, packed)
        self._num_kept[packed.content_hash] += 1
        return packed

    def find(self, content_hash: str) -> PackedAdapter:
        return self._kept[content_hash]

    def forget(self, packed: PackedAdapter) -> None:
        """Undo one `keep`."""
        content_hash = packed.content_hash
        self._num_kept[content_hash] -= 1
        if self._num_kept[content_hash]:
            return
        del self._num_kept[content_hash]
        del self._kept[content_hash]
        self._without_host.discard(content_hash)
        if self._store is not None and self._before_removal is not None:
            self._unused.add(content_hash)
            while self._unused and self._before_removal():
                self._store.remove(self._unused.pop())

    def place(self, content_hash: str) -> AdapterResidency:
        """Place of a kept adapter's bytes."""
        return "host" if self._store is None and not self._in_files else "disk"

    def host_has(self, content_hash: str) -> bool:
        """True if host workers can compute the adapter's deltas."""
        return self.host is not None and content_hash not in self._without_host

    def stop_host(self, content_hash: str) -> None:
        """Hide an adapter from host workers until the next `keep`."""
        self._without_host.add(content_hash)

    def counters(self) -> dict[str, int]:
        """Counters by names in `EngineStats`."""
        if self.host is None:
            return {}
        return {"host_fallback_rows": self.host.backend.num_fallback_rows + self._others_counts()[0]}

    def close(self) -> None:
        """Close the host workers."""
        if self.host is not None:
            self.host.close()

    def __len__(self) -> int:
        return self._num_kept.total()


def _nameless(packed: PackedAdapter) -> PackedAdapter:
    with OwnFolder() as directory:
        return _stored(packed, HostStore(directory))


def _stored(packed: PackedAdapter, store: HostStore) -> PackedAdapter:
    try:
        store.put(packed)
        return store.get(packed.content_hash, packed.name)
    except AdapterError as error:
        raise StorageError(
            f"adapter {packed.name!r} of {packed.nbytes / 1e9:.3f} GB can't be kept on this host ({error}); "
            "free room there, or let state_dir or TMPDIR name another place"
        ) from error


class ShardSizes:
    """Pages of adapters' layers on the rank with the most.

    kept: [X] bool of each rank.  shard: of the first rank; None: whole matrices.
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
        self.ranks = (len(kept), 1) if shard is None else (shard.expert_parallel, shard.tensor_parallel)

    def is_computed_here(self, packed: PackedAdapter) -> bool:
        """True for pairs on head or embedding, and scaled columns: no host worker computes these."""
        return len(packed.layers) > self._shape.num_layers or packed.has_columns

    def layer_pages(
        self,
        layers: Sequence[PackedLayer],
        shard_elements: Sequence[int] = (),
        of_ranks: tuple[int, int] = (1, 1),
    ) -> list[int]:
        """shard_elements, of_ranks: of layers without tables.  Raises AdapterError for other ranks."""
        if self._all_kept:
            return [-(-layer.nbytes // self.page_bytes) for layer in layers]
        if layers[0].table.is_meta and of_ranks != self.ranks:
            raise AdapterError(
                "the adapter comes from an instance of other ranks; give all instances of a pool the same "
                "tensor_parallel and expert_parallel"
            )
        itemsize, counts = layers[0].data.element_size(), shard_elements or self.shard_elements(layers)
        return [-(-num * itemsize // self.page_bytes) for num in counts]

    def shard_elements(self, layers: Sequence[PackedLayer]) -> tuple[int, ...]:
        """Elements of each layer on the rank with the most, of several."""
        return tuple(
            max(shard_layer(layer, self._shape, kept, self._shard).num_elements for kept in self._kept)
            for layer in layers
        )


def site_ranks(shape: ModelShape, adapters: Sequence[PackedAdapter]) -> list[int]:
    """The largest rank at each site, outer sites last."""
    sites = (*shape.sites, *shape.outer_sites)
    entries = np.zeros(sites[-1].entry_base + 1, dtype=np.int64)
    for layer in (layer for packed in adapters for layer in packed.layers):
        ranks = layer.table[: len(entries), 2].numpy()
        np.maximum(entries[: len(ranks)], ranks, out=entries[: len(ranks)])
    return [int(entries[s.entry_base : s.entry_base + s.num_entries].max(initial=0)) for s in sites]


@dataclass(frozen=True)
class Failure:
    """retry_s: time of the next allowed load; None: needs a new load call."""

    reason: str
    retry_s: float | None = None


class AdapterFailures:
    """Failures by version, until a load succeeds.

    For the engine's thread; any thread may call `report`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.by_version: dict[int, Failure] = {}
        self._num_loads: dict[int, int] = {}
        self.reports: queue.SimpleQueue[tuple[str, Exception]] = queue.SimpleQueue()

    def report(self, content_hash: str, error: Exception) -> None:
        """Record another process's failure."""
        self.reports.put((content_hash, error))

    def load_failed(self, adapter: AdapterVersion, error: Exception, *, may_repeat: bool = True) -> bool:
        """Record a failed load; True if the adapter's requests must end.

        may_repeat: False if the loader has retried.
        """
        number = self._num_loads[adapter.uid] = self._num_loads.get(adapter.uid, 0) + 1
        passing = isinstance(error, PASSING)
        if passing and may_repeat and number % MAX_LOADS:
            logger.warning("adapter %s: load %d failed (%s); trying again", adapter.name, number, error)
            return False
        pause_s = None
        if passing:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (min(number, 30) // MAX_LOADS - 1))
        self._note(adapter, f"it could not be loaded: {_said(error)}", pause_s)
        return True

    def compute_failed(self, adapter: AdapterVersion, error: Exception, *, may_pass: bool = False) -> None:
        """Record an error of a step with this adapter alone.

        may_pass: other adapters failed too.
        """
        may_pass = may_pass or isinstance(error, (MemoryError, *PASSING))
        self._note(
            adapter, f"computing its deltas failed: {_said(error)}", FIRST_PAUSE_S if may_pass else None
        )

    def loaded(self, adapter: AdapterVersion) -> None:
        """A load succeeded: ends a failure with a pause only."""
        self._num_loads.pop(adapter.uid, None)
        failure = self.by_version.get(adapter.uid)
        if failure is not None and failure.retry_s is not None:
            del self.by_version[adapter.uid]

    def forget(self, uid: int) -> None:
        self._num_loads.pop(uid, None)
        self.by_version.pop(uid, None)

    def problem(self, adapter: AdapterVersion) -> str | None:
        """Reason of the failure; None: available."""
        failure = self.by_version.get(adapter.uid)
        return None if failure is None else failure.reason

    def check(self, adapter: AdapterVersion) -> None:
        """Raises AdapterFailedError for an unavailable adapter; a failure ends with its pause."""
        failure = self.by_version.get(adapter.uid)
        if failure is None:
            return
        if failure.retry_s is None or self._clock.now_s() < failure.retry_s:
            raise AdapterFailedError(self.message(adapter))
        del self.by_version[adapter.uid]

    def message(self, adapter: AdapterVersion) -> str:
        """Text for clients."""
        failure = self.by_version[adapter.uid]
        way_out = "load it again once that is mended"
        if failure.retry_s is not None:
            rest_s = max(0.0, failure.retry_s - self._clock.now_s())
            way_out = f"requests from {rest_s:.0f} s on try again"
        return f"adapter {adapter.name!r} is unavailable: {failure.reason}; {way_out}"

    def _note(self, adapter: AdapterVersion, reason: str, pause_s: float | None) -> None:
        retry_s = None if pause_s is None else self._clock.now_s() + pause_s
        self.by_version[adapter.uid] = Failure(reason, retry_s)
        logger.error("adapter %s version %d is unavailable: %s", adapter.name, adapter.version, reason)


def _said(error: Exception) -> str:
    text = str(error)
    if text and type(error).__module__.startswith("moe_lora."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
