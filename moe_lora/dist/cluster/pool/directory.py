# SPDX-License-Identifier: Apache-2.0
"""Directory of a pool: holders of adapters."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.request import AdapterFacts
from moe_lora.engine.client.client import CallableEngine
from moe_lora.engine.client.messages import PoolEntry
from moe_lora.policies.migration.pool_moves import place_holders

logger = logging.getLogger(__name__)


class PoolDirectory:
    """Adapters by name, and the live engines that hold each content hash.  Of one event loop.

    version: differs after each change.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.version = 0
        self._facts: dict[str, AdapterFacts] = {}
        self._served: dict[str, tuple[str, int]] = {}
        """Path and version of each name."""
        self._num_names: Counter[str] = Counter()
        self._holders: defaultdict[str, dict[CallableEngine, bytes]] = defaultdict(dict)
        self._changes: list[str] = []
        self._told: WeakKeyDictionary[CallableEngine, int] = WeakKeyDictionary()
        """Number of changes sent to an engine."""
        self._joining: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks joining engines' loads of a name: not all must hold an adapter."""

    def serve(self, entry: PoolEntry) -> None:
        """Set the entry of a name."""
        facts = entry.facts
        self.version += 1
        before = self._facts.get(facts.name)
        self._facts[facts.name] = facts
        self._served[facts.name] = (entry.info.path or "", entry.info.version)
        self._num_names[facts.content_hash] += 1
        if before is not None:
            self._unname(before.content_hash)

    def forget(self, name: str, version: int | None = None) -> None:
        """Remove a name.  version: a later version stays."""
        if name not in self._facts or (version is not None and version < self._served[name][1]):
            return
        self.version += 1
        del self._served[name]
        self._unname(self._facts.pop(name).content_hash)

    def note(self, client: CallableEngine, content_hash: str, source: bytes | None) -> None:
        """Record that an engine holds or dropped a served adapter."""
        if content_hash not in self._num_names:
            return
        if source is not None:
            self._holders[content_hash][client] = source
        else:
            self._holders[content_hash].pop(client, None)
        self._change(content_hash)
        self.version += 1

    def content_hashes(self) -> dict[str, str]:
        return {name: facts.content_hash for name, facts in self._facts.items()}

    def sizes(self) -> dict[str, int]:
        """Content hash -> bytes."""
        return {facts.content_hash: facts.nbytes for facts in self._facts.values()}

    def held(self, clients: Mapping[CallableEngine, int]) -> dict[str, list[int]]:
        """Content hash -> numbers of its holders."""
        self._forget_ended()
        return {
            content_hash: [clients[client] for client in holders if client in clients]
            for content_hash, holders in self._holders.items()
        }

    def sources(self, content_hash: str, client: CallableEngine, turn: int = 0) -> tuple[bytes, ...]:
        """An adapter's sources for an engine, rotated by `turn`."""
        self._told.setdefault(client, len(self._changes))
        holders = self._holders.get(content_hash, {})
        places = [
            one for holder, one in holders.items() if holder is not client and not holder.ended.is_set()
        ]
        turn %= max(1, len(places))
        return (*places[turn:], *places[:turn])

    def news(self, client: CallableEngine, turn: int) -> dict[str, tuple[bytes, ...]]:
        """Sources changed since this engine's last call."""
        self._forget_ended()
        changed = set(self._changes[self._told.get(client, 0) :]) & self._holders.keys()
        self._told[client] = len(self._changes)
        return {one: self.sources(one, client, turn) for one in changed}

    async def enter(self, client: CallableEngine) -> None:
        """Learn a new or formerly silent engine's adapters; a name's highest version counts."""
        entries: list[PoolEntry] = await client.call("pool_state")
        self._told[client] = 0  # an earlier front end's sources may have changed
        for entry in entries:
            name = entry.facts.name
            if name not in self._facts or entry.info.version > self._served[name][1]:
                self.serve(entry)
            if self._facts[name].content_hash == entry.facts.content_hash:
                self.note(client, entry.facts.content_hash, entry.source)

    async def give(
        self, client: CallableEngine, name: str, path: str, version: int, content_hash: str | None = None
    ) -> None:
        """Load this content on a joining engine, with a copy if needed.

        Raises EngineDeadError, and the load's errors.
        """
        if await self._know(client, name, path, version):
            return
        async with self._joining.setdefault(name, asyncio.Lock()):
            if not await self._know(client, name, path, version):  # an engine may hold a copy by now
                await self._take(client, name, path, version, content_hash)

    async def _know(self, client: CallableEngine, name: str, path: str, version: int) -> bool:
        """Serve an adapter without a copy; False if too few others hold copies."""
        facts = self.facts_at(name, path, version)
        if facts is None:
            return False
        sources = self.sources(facts.content_hash, client)
        if len(sources) < self.replicas:
            return False
        entry: PoolEntry = await client.call("pool_know", facts, path, True, version, sources)
        self.note(client, facts.content_hash, entry.source)
        return True

    async def _take(
        self, client: CallableEngine, name: str, path: str, version: int, content_hash: str | None
    ) -> None:
        facts = self.facts_at(name, path, version)
        if facts is None:
            await self._load(client, name, path, version, content_hash)
            return
        sources = self.sources(facts.content_hash, client)
        entry: PoolEntry = await client.call("pool_know", facts, path, True, version, sources)
        source = entry.source
        if source is None:
            try:
                source = await client.call("pool_hold", facts.content_hash, sources)
            except EngineDeadError:
                raise
            except Exception:
                await client.call("unload_adapter", name)
                raise
        self.note(client, facts.content_hash, source)

    def facts_at(self, name: str, path: str, version: int) -> AdapterFacts | None:
        """Facts about this version of the name, if current."""
        return self._facts[name] if self._served.get(name) == (path, version) else None

    async def fill(
        self,
        clients: Sequence[CallableEngine],
        adapters: Sequence[tuple[str, str]],
        optional: frozenset[str] = frozenset(),
    ) -> None:
        """Divide adapters over empty engines: only the holders read an adapter from disk.

        Raises a failed load's error, unless optional.
        """
        lost = set[str]()
        sizes = {name: _file_bytes(path) for name, path in adapters}
        places = place_holders(sizes, {}, range(len(clients)), self.replicas)
        homes = {name: sorted(holders) for name, holders in places.items()}

        async def load(part: int, index: int) -> None:
            """Parts: the first holder, further holders, the rest."""
            for name, path in adapters:
                own = min(1, homes[name].index(index)) if index in homes[name] else 2
                if own != part or name in lost:
                    continue
                try:
                    if part == 2:
                        await self.give(clients[index], name, path, 1)
                    else:
                        content_hash = self.content_hashes()[name] if part else None
                        await self._load(clients[index], name, path, 1, content_hash)
                except Exception as error:
                    if name not in optional or isinstance(error, EngineDeadError):
                        raise
                    lost.add(name)

        for part in range(3):
            await asyncio.gather(*(load(part, index) for index in range(len(clients))))

    async def _load(
        self, client: CallableEngine, name: str, path: str, version: int, content_hash: str | None = None
    ) -> None:
        entry: PoolEntry = await client.call("pool_load", name, path, True, version, content_hash)
        self.serve(entry)
        self.note(client, entry.facts.content_hash, entry.source)

    def _unname(self, content_hash: str) -> None:
        """Remove a name of a content; instances free contents without names."""
        self._num_names[content_hash] -= 1
        if not self._num_names[content_hash]:
            del self._num_names[content_hash]
            self._holders.pop(content_hash, None)

    def _change(self, content_hash: str) -> None:
        """Note changed holders; after many changes engines get full lists."""
        self._changes.append(content_hash)
        if len(self._changes) > 1000 + 10 * len(self._holders):
            self._changes = list(self._holders)
            self._told = WeakKeyDictionary(dict.fromkeys(self._told, 0))

    def _forget_ended(self) -> None:
        ended = {client for holders in self._holders.values() for client in holders if client.ended.is_set()}
        for content_hash, holders in self._holders.items() if ended else ():
            for client in ended & holders.keys():
                del holders[client]
                self._change(content_hash)


def _file_bytes(path: str) -> int:
    if not os.path.isdir(path):
        return 1
    return max(1, sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file()))
