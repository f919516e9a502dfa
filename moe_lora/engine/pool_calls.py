"""The methods of an engine loop by which an adapter pool is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_lora.adapters.facts import AdapterFacts
from moe_lora.adapters.window_layout import adapter_without_data, facts_of
from moe_lora.core.errors import AdapterNotFoundError

from .core import EngineCore
from moe_lora.engine.adapters.pool_store import PoolAdapters
from moe_lora.engine.client.pool_messages import PoolEntry

Sources = Sequence[bytes]
"""Descriptors of the windows that hold an adapter, in the order in which to read them."""


class PoolCalls:
    """`EngineLoop.methods` of an instance whose adapters lie in a pool."""

    def __init__(self, core: EngineCore, pool: PoolAdapters) -> None:
        self._core = core
        self._pool = pool

    def quick(self) -> dict[str, Callable[..., Any]]:
        """Methods that are done at once."""
        return {
            "pool_know": self.know,
            "pool_drop": self._pool.drop,
            "pool_sources": self.set_sources,
            "pool_state": self.state,
            "pool_orphans": self._pool.orphans,
            "pool_known": self.known,
            "pool_free": self._pool.free_orphan,
        }

    def slow(self) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
        """Methods of two parts: one for another thread, and one for the loop's, which gets what the first
        returned, and then the arguments."""
        return {
            "pool_load": (self._read, self._add),
            "pool_hold": (self._fetch, self._hold),
        }

    def know(
        self, facts: AdapterFacts, path: str, replace: bool, version: int, sources: Sources
    ) -> PoolEntry:
        """Serve an adapter whose bytes other instances hold."""
        self._core.add_adapter(adapter_without_data(facts), path, replace=replace, version=version)
        self._pool.set_sources(facts.content_hash, sources)
        return self._entry(facts.name)

    def set_sources(self, sources: Mapping[str, Sources]) -> None:
        """From now on read these adapters (content hashes) from there."""
        for content_hash, places in sources.items():
            if self._pool.knows(content_hash):
                self._pool.set_sources(content_hash, places)

    def known(self, content_hashes: Sequence[str]) -> list[str]:
        """Which of these adapters are served here, or have requests of a version that no longer is."""
        return [content_hash for content_hash in content_hashes if self._pool.knows(content_hash)]

    def state(self) -> list[PoolEntry]:
        """The adapters known here."""
        return [self._entry(info.name) for info in self._core.list_adapters()]

    def _read(
        self, name: str, path: str, replace: bool, version: int, content_hash: str | None = None
    ) -> Any:
        return self._core.read_adapter(name, path, content_hash)

    def _add(
        self,
        packed: Any,
        name: str,
        path: str,
        replace: bool,
        version: int,
        content_hash: str | None = None,
    ) -> PoolEntry:
        """Serve an adapter and hold it."""
        return self._entry(self._core.add_adapter(packed, path, replace=replace, version=version).name)

    def _fetch(self, content_hash: str, sources: Sources) -> Any:
        if not self._pool.knows(content_hash):
            raise AdapterNotFoundError(f"no adapter of content {content_hash} is loaded")
        return self._pool.fetch_held(content_hash, sources)

    def _hold(self, held: Any, content_hash: str, sources: Sources) -> bytes | None:
        """Hold an adapter that is known; how peers reach it.  The reply is the confirmation."""
        if not self._pool.knows(content_hash):
            held.window.free()
            raise AdapterNotFoundError(f"the adapter of content {content_hash} was unloaded meanwhile")
        self._pool.hold(held)
        return self._pool.source(content_hash)

    def _entry(self, name: str) -> PoolEntry:
        info, packed = self._core.known_adapter(name)
        return PoolEntry(info=info, facts=facts_of(packed), source=self._pool.source(packed.content_hash))
