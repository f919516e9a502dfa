# SPDX-License-Identifier: Apache-2.0
"""Adapters of a simulated instance with the real cache, for its scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from moe_lora.cache.orders import Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.clock import Clock
from moe_lora.policies.admission.host_start import ColdAdapter, HostLoads


class CachedAdapters:
    """`scheduling.views.Adapters` by name, in the cache alone: no versions, no leases.

    num_pages: of each adapter.  host_loads: decides for host workers during loads; None: no workers.  cold:
    its facts of an adapter.
    """

    waits_for_others = False

    def __init__(
        self,
        cache: UnifiedCache,
        num_pages: Mapping[str, int],
        clock: Clock,
        host_loads: HostLoads | None = None,
        cold: Callable[[str], ColdAdapter] = lambda name: ColdAdapter(lora_rank=1, num_bytes=1.0),
    ) -> None:
        self.host_loads = host_loads
        self._cold = cold
        self._cache = cache
        self._num_pages = num_pages
        self._clock = clock
        self._refused_pages = math.inf
        if host_loads is not None:
            cache.watch_loads(lambda uid: host_loads.end(uid, clock.now_s()))

    def enqueue(self, adapter: str) -> None:
        """Waiting requests are not counted."""

    def dequeue(self, adapter: str) -> None:
        """Waiting requests are not counted."""

    def begin_round(self) -> None:
        """Forget failed searches for room."""
        self._refused_pages = math.inf

    def acquire(self, adapter: str, *, again: bool = False, num_tokens: int = 1) -> Readiness:
        """Pin the adapter for one request of num_tokens tokens, and start its load if needed.

        Within a round, a failed search for few pages is not repeated for more, as in the engine.
        """
        num_pages = self._num_pages[adapter]
        if num_pages >= self._refused_pages and self.readiness(adapter) is Readiness.NO_ROOM:
            return Readiness.NO_ROOM
        now_s, before = self._clock.now_s(), self._cache.readiness(adapter)
        found = self._cache.hold(adapter, now_s, again=again)
        if self.host_loads is not None and found is Readiness.LOADING:
            under_way = before is Readiness.LOADING
            self.host_loads.begin(adapter, self._cold(adapter), num_tokens, now_s, under_way=under_way)
        if found is Readiness.NO_ROOM:
            self._refused_pages = num_pages
        return found

    def has_unused_lease(self, adapter: str) -> bool:
        """Never."""
        return False

    def readiness(self, adapter: str) -> Readiness:
        """Readiness of its pages, or for prompts without them."""
        found = self._cache.readiness(adapter)
        if self.host_loads is None:
            return found
        return Readiness.HOST_COMPUTABLE if found is Readiness.LOADING else found

    def pays_on_host(self, adapter: str, num_tokens: int, on_host: int) -> bool:
        """True if host workers should compute these prompt tokens."""
        now_s = self._clock.now_s()
        return self.host_loads is None or self.host_loads.pays(adapter, num_tokens, on_host, now_s)

    def release(self, adapter: str) -> None:
        """Undo one `acquire`."""
        self._cache.let_go(adapter, self._clock.now_s())
