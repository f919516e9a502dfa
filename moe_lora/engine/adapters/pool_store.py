# SPDX-License-Identifier: Apache-2.0
"""Adapters of a pool's instance: some held in windows for peers."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_lora.adapters.host_store import (
    HostStore,
    adapter_in,
    adapter_without_data,
    facts_of,
    has_data,
    layout_of,
    without_data,
    write_adapter,
)
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.core.errors import AdapterError, AdapterNotFoundError, StorageError
from moe_lora.core.host import allow_many_files, num_open_files
from moe_lora.core.request import AdapterFacts, AdapterInfo, AdapterResidency
from moe_lora.engine.client.messages import PoolEntry

from .adapter_store import AdapterStore, ShardSizes, no_others
from .pool_fetch import LayerReader, Peers, fetch_whole

if TYPE_CHECKING:
    from moe_lora.dist.host_workers.workers import HostWorkers
    from moe_lora.dist.transport.contract import Transport, Window

logger = logging.getLogger(__name__)

_SPARE_FILES = 48
"""File descriptors left for adapter reads, fetches, connections."""


@dataclass(frozen=True, eq=False)
class Held:
    """An adapter with tensors in a window of this process."""

    packed: PackedAdapter
    window: Window


class PoolAdapters(AdapterStore):
    """`AdapterStore` with local bytes for some adapters only.

    `keep` holds an adapter's bytes in a window.  Of an adapter without bytes only the facts are kept, and
    each use fetches the bytes.  `fetch_held` and `hold` add the bytes later, `drop` drops them.  The engine's
    thread calls all but `prepare`, `undo_prepare`, `fetch_held`, readers, and the result of `sharing`.

    store: files of adapters under load, for host workers and ranks.
    sizes: of several ranks.
    """

    def __init__(
        self,
        transport: Transport,
        read: Callable[[str, str, str], PackedAdapter],
        *,
        sizes: ShardSizes | None = None,
        store: HostStore | None = None,
        before_removal: Callable[[], bool] | None = None,
        host: HostWorkers | None = None,
        others_counts: Callable[[], list[int]] = no_others,
    ) -> None:
        super().__init__(host=host, others_counts=others_counts)
        self._files = store
        self._before_unshare = before_removal
        self._sizes = sizes
        self._transport = transport
        self._peers = Peers(transport)
        self._read = read
        self._labels = itertools.count()
        self._held: dict[str, Held] = {}
        self._waiting: dict[str, Held] = {}
        self._sources: dict[str, tuple[bytes, ...]] = {}
        self._paths: dict[str, str] = {}
        self._shared: dict[str, PackedAdapter] = {}
        self._with_file: set[str] = set()
        self._closed = False
        self._lock = threading.Lock()
        """Guards _waiting, and the tables in _kept."""
        self._max_files = allow_many_files()  # each shared-memory window takes two open files

    @property
    def pool(self) -> PoolAdapters:
        return self

    def prepare(self, packed: PackedAdapter) -> PackedAdapter:
        """Copy the adapter into a window."""
        held = self._place(packed)
        with self._lock:
            before = self._waiting.pop(packed.content_hash, None)
            self._waiting[packed.content_hash] = held
        if before is not None:
            before.window.free()
        return held.packed

    def undo_prepare(self, packed: PackedAdapter) -> None:
        if has_data(packed):
            with self._lock:
                held = self._waiting.pop(packed.content_hash, None)
            if held is not None:
                held.window.free()
        if packed.content_hash not in self._kept:
            self._sources.pop(packed.content_hash, None)

    def keep(self, packed: PackedAdapter, path: str | None = None) -> PackedAdapter:
        """Returns the adapter without bytes, held or not."""
        content_hash = packed.content_hash
        if has_data(packed):
            with self._lock:
                held = self._waiting.pop(content_hash, None)
            if held is not None or content_hash not in self._held:
                self.hold(held or self._place(packed))
            there = self._held[content_hash].packed
            facts, elements = facts_of(packed), there.shard_elements
            packed = adapter_without_data(replace(facts, shard_elements=elements, of_ranks=there.of_ranks))
        if path is not None:
            self._paths[content_hash] = path
        return super().keep(packed)

    def find(self, content_hash: str) -> PackedAdapter:
        """A kept adapter, with bytes if held."""
        held = self._held.get(content_hash)
        return super().find(content_hash) if held is None else held.packed

    def forget(self, packed: PackedAdapter) -> None:
        """A held adapter stays as an orphan: other instances may still compute the version."""
        with self._lock:
            super().forget(packed)
        content_hash = packed.content_hash
        if content_hash not in self._kept:
            self._sources.pop(content_hash, None)
            self._paths.pop(content_hash, None)

    def orphans(self) -> list[str]:
        """Content hashes held, no longer kept."""
        return [content_hash for content_hash in self._held if content_hash not in self._kept]

    def free_orphan(self, content_hash: str) -> None:
        """Free an orphan, unless kept again."""
        if content_hash in self._held and content_hash not in self._kept:
            self._held.pop(content_hash).window.free()

    def knows(self, content_hash: str) -> bool:
        return content_hash in self._kept

    def stand_in(self, facts: AdapterFacts) -> PackedAdapter:
        """An adapter for `keep`, with bytes elsewhere."""
        return adapter_without_data(facts)

    def entry(self, info: AdapterInfo, packed: PackedAdapter) -> PoolEntry:
        """An adapter for the pool's directory."""
        return PoolEntry(info=info, facts=facts_of(packed), source=self.source(packed.content_hash))

    def hold(self, held: Held) -> None:
        """Hold the result of `prepare` or `fetch_held`, unless already held."""
        content_hash = held.packed.content_hash
        if self._held.setdefault(content_hash, held) is not held:
            held.window.free()

    def drop(self, content_hash: str) -> None:
        """Drop the bytes.  Running copies keep the first bytes."""
        held = self._held.pop(content_hash, None)
        if held is not None:
            if self.knows(content_hash):
                self.learn_tables(without_data(held.packed))
            held.window.free()

    def fetch_held(self, content_hash: str, sources: Sequence[bytes]) -> Held:
        """Fetch a known adapter into a window, for `hold`; for another thread.

        Raises AdapterError, or StorageError without memory.
        """
        reader = self.reader(content_hash, sources)
        window = self._window(reader.facts)
        done = False
        try:
            packed = reader.read_whole(window.bytes)
            done = True
            return Held(packed, window)
        finally:
            reader.close(done=done)
            if not done:
                window.free()

    def source(self, content_hash: str) -> bytes | None:
        """The descriptor for peers, if held."""
        held = self._held.get(content_hash)
        return None if held is None else held.window.descriptor()

    def set_sources(self, content_hash: str, sources: Sequence[bytes]) -> None:
        """Set an adapter's sources, in order of preference."""
        self._sources[content_hash] = tuple(sources)

    def reader(self, content_hash: str, sources: Sequence[bytes] | None = None) -> LayerReader:
        """A reader for an adapter without bytes.  sources: None: current at the start.

        Raises AdapterNotFoundError for an unknown hash.
        """
        known, path = self._kept.get(content_hash), self._paths.get(content_hash)
        if known is None:
            raise AdapterNotFoundError(f"no adapter of content {content_hash} is loaded")
        facts = facts_of(known)

        def read_again() -> PackedAdapter:
            if path is None:
                raise AdapterError(f"adapter {facts.name!r} has no directory to be read from again")
            return self._read(path, facts.name, content_hash)

        def list_sources() -> Sequence[bytes]:
            return self._sources.get(content_hash, ()) if sources is None else sources

        return LayerReader(facts, list_sources, self._peers, read_again)

    def learn_tables(self, packed: PackedAdapter) -> None:
        """Keep fetched tables and scales; thread-safe."""
        with self._lock:
            if packed.content_hash in self._kept:
                self._kept[packed.content_hash] = packed

    @property
    def shares(self) -> bool:
        """True if host workers or ranks read adapters under load."""
        return self._files is not None

    def sharing(self, content_hash: str) -> Callable[[], None]:
        """A call for another thread: writes the adapter to a file, fetched unless at hand.

        Without room ranks end the load (StorageError), and requests of host workers wait for the device.
        """
        found = self.at_hand(content_hash)
        reader = self.reader(content_hash) if found is None else None

        def share() -> None:
            if content_hash in self._with_file:
                return  # of another name or version, under load too
            packed = found if reader is None else fetch_whole(reader)
            assert packed is not None
            self.learn_tables(without_data(packed))
            if self._sizes is None:
                self._shared[content_hash] = packed
            try:
                self._write(packed)
            except (AdapterError, StorageError) as error:
                if self._sizes is not None:
                    raise
                logger.warning("adapter %s: its requests wait for the device: %s", packed.name, error)
                return
            if self.on_change is not None:
                self.on_change()

        return share

    def _write(self, packed: PackedAdapter) -> None:
        assert self._files is not None
        content_hash = packed.content_hash
        self._files.put(packed)
        try:
            self._shared[content_hash] = self._files.get(content_hash, packed.name)
        except AdapterError:
            self._files.remove(content_hash)
            raise
        self._with_file.add(content_hash)
        if self._closed:
            self._files.remove(content_hash)

    def unshare(self, content_hash: str) -> None:
        """Undo `sharing`, if any."""
        self._shared.pop(content_hash, None)
        if content_hash in self._with_file:
            assert self._files is not None
            self._with_file.discard(content_hash)
            if self._before_unshare is None or self._before_unshare():
                self._files.remove(content_hash)

    def at_hand(self, content_hash: str) -> PackedAdapter | None:
        """The adapter with its bytes, held or shared."""
        held = self._held.get(content_hash)
        return self._shared.get(content_hash) if held is None else held.packed

    def host_has(self, content_hash: str) -> bool:
        return content_hash in self._with_file and super().host_has(content_hash)

    def place(self, content_hash: str) -> AdapterResidency:
        if content_hash in self._held:
            return "host"
        return "peer" if self._sources.get(content_hash) else "disk"

    def counters(self) -> dict[str, int]:
        """Fields of `EngineStats`."""
        return {
            "pool_adapters": len(self._held),
            "pool_bytes": sum(held.window.num_bytes for held in self._held.values()),
            **{f"pool_{name}": number for name, number in self._peers.counts.items()},
            **super().counters(),
        }

    def close(self) -> None:
        self._closed = True
        super().close()
        self._transport.close()

    def _place(self, packed: PackedAdapter) -> Held:
        facts = facts_of(packed)
        if self._sizes is not None:
            elements = self._sizes.shard_elements(packed.layers)
            facts = replace(facts, shard_elements=elements, of_ranks=self._sizes.ranks)
        window = self._window(facts)
        write_adapter(packed, window.bytes)
        return Held(adapter_in(facts, window.bytes), window)

    def _window(self, facts: AdapterFacts) -> Window:
        num_bytes = layout_of(facts).num_bytes
        try:
            if num_open_files() > self._max_files - min(_SPARE_FILES, self._max_files // 4):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return self._transport.alloc(f"adapter-{next(self._labels)}", num_bytes, 0)
        except (OSError, MemoryError, RuntimeError) as error:
            few = isinstance(error, OSError) and error.errno == errno.EMFILE
            raise StorageError(
                f"adapter {facts.name!r} of {num_bytes / 1e9:.3f} GB can't be held in this instance's host "
                f"memory ({error}); {'raise the limit with ulimit -n, ' * few}unload others, or add instances"
            ) from error
