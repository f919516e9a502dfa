# SPDX-License-Identifier: Apache-2.0
"""A scheduler over a real cache, with the simulator's requests and adapters; copies are done when told."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from moe_lora.cache.orders import Order
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.admission.host_start import HostLoads
from moe_lora.policies.caching.caching import CachingPolicy, make_caching_policy
from moe_lora.scheduling.scheduler import Scheduler, StepLimits
from moe_lora.scheduling.views import RequestQueue
from moe_lora.scheduling.views import shortest_first as shortest_first_order
from moe_lora.sim.adapters import CachedAdapters
from moe_lora.sim.requests import CachedRequest
from moe_lora.timing.host_times import CacheCosts, ColdAdapter
from moe_lora.workload.replay_plan import TurnRequest
from tests.virtual_clock import VirtualClock

BLOCK_SIZE = 4
TOKEN = 7
"""Every token of every answer."""


def cold_of(num_pages: dict[str, int], page_bytes: int) -> Callable[[str], ColdAdapter]:
    """Adapters of rank 1 and these sizes."""
    return lambda name: ColdAdapter(lora_rank=1, num_bytes=num_pages[name] * page_bytes)


class Parts:
    """adapters: pages of each by its name.  prompt: copies are done as soon as they are ordered; else when
    `work` is called.  host_tokens: of loading adapters in a step beside others; None: no host workers.
    host_loads: decides when they are used; None: whenever they can be.
    """

    def __init__(
        self,
        adapters: dict[str, int] | None = None,
        *,
        num_pages: int = 20,
        num_host_pages: int = 0,
        kv_pages: int | None = None,
        max_adapters: int | None = None,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        starvation_s: float = 5.0,
        shortest_first: bool = False,
        policy: CachingPolicy | None = None,
        prompt: bool = True,
        host_tokens: int | None = None,
        host_loads: HostLoads | None = None,
        page_bytes: int = 1,
    ) -> None:
        adapters = adapters or {}
        if host_tokens is not None and host_loads is None:
            host_loads = HostLoads(None, max_num_batched_tokens)
        self.clock = VirtualClock()
        self.cache = UnifiedCache(
            num_device_pages=num_pages,
            num_host_pages=num_host_pages,
            block_size=BLOCK_SIZE,
            policy=policy or make_caching_policy("fastlibra", CacheCosts(page_bytes=64)),
            max_kv_pages=kv_pages,
            max_adapters=max_adapters,
        )
        for name, pages in adapters.items():
            self.cache.add_adapter(name, (pages,), 0.0)
        self.scheduler: Scheduler[CachedRequest] = Scheduler(
            self.cache,
            CachedAdapters(self.cache, adapters, self.clock, host_loads, cold_of(adapters, page_bytes)),
            self.clock,
            StepLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                starvation_s=starvation_s,
                max_host_tokens=host_tokens or 0,
            ),
            queue=RequestQueue(shortest_first_order) if shortest_first else None,
        )
        self._prompt = prompt
        self.orders: deque[Order] = deque()
        self._done: list[Order] = []
        self._names: dict[CachedRequest, str] = {}
        self._indices = itertools.count()
        self._next_tick_s = 0.0

    def add(
        self, name: str, prompt: range, adapter: str | None = None, num_answer: int = 100, **competing: Any
    ) -> CachedRequest:
        """Queue a request; without an adapter it is one of the base model.  competing: tenant and such."""
        planned = TurnRequest(
            next(self._indices),
            self.clock.now_s(),
            adapter,
            tuple(prompt),
            (TOKEN,) * num_answer,
            **competing,
        )
        request = CachedRequest(planned)
        self._names[request] = name
        self.scheduler.add(request)
        return request

    def work(self, num_orders: int = 1_000_000) -> None:
        """Do this many of the copies."""
        for _ in range(min(num_orders, len(self.orders))):
            self._done.append(self.orders.popleft())

    def step(self, only: frozenset[str | None] | None = None) -> dict[str, int]:
        """Schedule and pretend to compute: name -> tokens computed."""
        self._settle()
        now_s = self.clock.now_s()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + 0.1
            self.cache.tick(now_s, len(self.scheduler.running))
            self.orders += self.cache.take_orders()
        plan = self.scheduler.schedule(only)
        self.orders += self.cache.take_orders()
        if self._prompt:
            self.work()
        sampling = [item.sequence for item in plan if item.samples]
        self.scheduler.advance(plan)
        for request in sampling:
            if request.append(now_s):
                self.scheduler.finish(request)
        return {self._names[item.sequence]: item.num_tokens for item in plan}

    def names(self) -> tuple[list[str], list[str], list[str]]:
        """Who runs, who loads, who waits."""
        groups = (self.scheduler.running, self.scheduler.loading, self.scheduler.waiting)
        running, loading, waiting = ([self._names[request] for request in group] for group in groups)
        return running, loading, waiting

    def _settle(self) -> None:
        for order in self._done:
            self.cache.copied(order.copy_id)
        self._done.clear()
