"""Adapters of a simulated instance, as its scheduler sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moe_lora.cache.orders import Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.clock import Clock


class CachedAdapters:
    """`scheduling.views.Adapters` by name, in the cache alone: no versions, no leases.

    num_pages: of each adapter.
    """

    waits_for_others = False

    def __init__(self, cache: UnifiedCache, num_pages: Mapping[str, int], clock: Clock) -> None:
        self._cache = cache
        self._num_pages = num_pages
        self._clock = clock
        self._refused_pages = math.inf

    def enqueue(self, adapter: str) -> None:
        """Nobody asks how many wait."""

    def dequeue(self, adapter: str) -> None:
        """Nor here."""

    def begin_round(self) -> None:
        """Look for room anew."""
        self._refused_pages = math.inf

    def acquire(self, adapter: str, *, again: bool = False) -> Readiness:
        """Pin it for one request, and have it brought if need be.  Within a round, what found no room for few
        pages is not searched for more, as in the engine.
        """
        num_pages = self._num_pages[adapter]
        if num_pages >= self._refused_pages and self.readiness(adapter) is Readiness.NO_ROOM:
            return Readiness.NO_ROOM
        found = self._cache.hold(adapter, self._clock.now_s(), again=again)
        if found is Readiness.NO_ROOM:
            self._refused_pages = num_pages
        return found

    def has_unused_lease(self, adapter: str) -> bool:
        """Never."""
        return False

    def readiness(self, adapter: str) -> Readiness:
        """Whether its pages are there."""
        return self._cache.readiness(adapter)

    def release(self, adapter: str) -> None:
        """Undo one `acquire`."""
        self._cache.let_go(adapter, self._clock.now_s())
