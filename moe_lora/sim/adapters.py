# SPDX-License-Identifier: Apache-2.0
"""Adapters of a simulated instance."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_lora.cache.orders import Copy, LoadAdapter, Namespace, Order, Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.clock import Clock
from moe_lora.policies.admission.host_start import HostLoads
from moe_lora.policies.merging.merging import Batching, MergingPolicy, MergingView
from moe_lora.policies.merging.merging_costs import Mode, Uid
from moe_lora.scheduling.views import Adapters
from moe_lora.sim.events import EventQueue
from moe_lora.timing.host_times import ColdAdapter, LinkTime

from .requests import CachedRequest


class CopyLinks:
    """One link to the device, one back, each for one order at a time.

    Orders of waiting requests overtake prefetches.  Adapter files are in main memory: a load takes as long as
    a host copy.
    """

    def __init__(
        self,
        events: EventQueue,
        bytes_per_s: float,
        page_bytes: int,
        load_pages: Callable[[Namespace], int],
        on_done: Callable[[int], None],
        *,
        latency_s: float = 20e-6,
    ) -> None:
        self._events = events
        self._link, self._page_bytes = LinkTime(bytes_per_s, latency_s), page_bytes
        self._load_pages = load_pages
        self._on_done = on_done
        self._urgent: tuple[deque[Order], deque[Order]] = (deque(), deque())
        self._ahead: tuple[deque[Order], deque[Order]] = (deque(), deque())
        self._busy = [False, False]
        self.busy_s = [0.0, 0.0]

    def submit(self, orders: list[Order], *, urgent: bool) -> None:
        """Queue the orders.  urgent: before the rest."""
        for order in orders:
            (self._urgent if urgent else self._ahead)[_direction(order)].append(order)
        for direction in (0, 1):
            self._begin(direction)

    def hurry(self, namespace: Namespace) -> None:
        """Let the adapter's orders overtake prefetches."""
        ahead = self._ahead[0]
        needed = [order for order in ahead if order.namespace == namespace]
        for order in needed:
            ahead.remove(order)
            self._urgent[0].append(order)

    def _begin(self, direction: int) -> None:
        queue = self._urgent[direction] or self._ahead[direction]
        if self._busy[direction] or not queue:
            return
        order = queue.popleft()
        pages = (
            self._load_pages(order.namespace) if isinstance(order, LoadAdapter) else len(order.device_pages)
        )
        copy_s = self._link.of_parts(pages, self._page_bytes)
        self._busy[direction] = True
        self.busy_s[direction] += copy_s
        self._events.at(self._events.now_s() + copy_s, lambda: self._end(direction, order.copy_id))

    def _end(self, direction: int, copy_id: int) -> None:
        self._busy[direction] = False
        self._on_done(copy_id)
        self._begin(direction)


def _direction(order: Order) -> int:
    """0: to the device, 1: from the device."""
    return 0 if isinstance(order, LoadAdapter) or (isinstance(order, Copy) and order.to_device) else 1


class CachedAdapters:
    """`scheduling.views.Adapters` by name, in the cache alone.  host_loads: None: no host workers."""

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
        """Does nothing: waiting requests are not counted."""

    def dequeue(self, adapter: str) -> None:
        """Does nothing."""

    def begin_round(self) -> None:
        """Forget failed searches for room."""
        self._refused_pages = math.inf

    def acquire(self, adapter: str, *, again: bool = False, num_tokens: int = 1) -> Readiness:
        """Pin the adapter for a request of num_tokens tokens; start a load if needed.

        Within a round, a failed search is not repeated for as many or more pages.
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
        """Readiness of the pages, or for prompts without pages."""
        found = self._cache.readiness(adapter)
        if self.host_loads is None:
            return found
        return Readiness.HOST_COMPUTABLE if found is Readiness.LOADING else found

    def pays_on_host(self, adapter: str, num_tokens: int, on_host: int) -> bool:
        """True if host workers should compute these tokens."""
        now_s = self._clock.now_s()
        return self.host_loads is None or self.host_loads.pays(adapter, num_tokens, on_host, now_s)

    def release(self, adapter: str) -> None:
        """Undo one `acquire`."""
        self._cache.let_go(adapter, self._clock.now_s())

    def release_lease(self, adapter: str) -> None:
        """Does nothing: no adapter has a lease."""


@dataclass(frozen=True, kw_only=True)
class SimMerging:
    """merge_s: of a whole adapter, in or out.  swap_steps: of a swap without urgency."""

    policy: Callable[[], MergingPolicy]
    merge_s: float
    swap_steps: int = 8


@dataclass(frozen=True, slots=True)
class LoraWork:
    """LoRA work of a step.

    rows: rows times the share of layers with a delta; two deltas count twice.  adapters: with read matrices,
    each with its share of layers.
    """

    rows: float
    adapters: Mapping[str, float]


class SimMergedWeights:
    """Carries out a policy's decisions; layers without the merged adapter are computed unmerged."""

    def __init__(self, config: SimMerging, adapters: Adapters[str], max_num_seqs: int, clock: Clock) -> None:
        self.num_steps: Counter[Mode] = Counter()
        self.num_merges = 0
        self.swap_s = 0.0
        self.policy = config.policy()
        self._config = config
        self._adapters = adapters
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._carried: str | None = None
        self._share = 0.0
        self._batching = Batching()
        self._step_swap_s = 0.0

    def decide(self, requests: Sequence[CachedRequest], *, held_back: bool) -> frozenset[Uid] | None:
        """Change the weights; returns the adapters allowed in the step, None: all.

        held_back: requests wait for an adapter slot; an idle merged adapter then leaves weights and slot.
        """
        view = MergingView(
            requests=requests,
            max_num_seqs=self._max_num_seqs,
            merged=self._carried if self._share == 1 else None,
            eligible=self._is_eligible,
            now_s=self._clock.now_s(),
            swapping=self._carried is not None and self._share < 1,
        )
        self._batching = self.policy.decide(view)
        target = self._batching.merge
        if held_back and all(request.adapter != target for request in requests):
            target = None
        assert target is None or isinstance(target, str)
        self._step_swap_s += self._move(target, self._batching.at_once)
        return self._batching.only

    def lora_work(self, rows: Mapping[str | None, float]) -> LoraWork:
        """LoRA work of these rows, weighted by delta cost."""
        carried, share = self._carried, self._share
        others = {name: 1.0 for name in rows if name not in (carried, None)}
        num_others = sum(rows[name] for name in others)
        if carried is None:
            return LoraWork(num_others, others)
        own, base = rows.get(carried, 0), rows.get(None, 0)
        read = ((1 - share) if own else 0.0) + (share if others or base else 0.0)
        return LoraWork(own * (1 - share) + num_others * (1 + share) + base * share, others | {carried: read})

    def took(self, rows: Mapping[str | None, int], seconds: float) -> float:
        """Record a step; returns the extra seconds of weight changes."""
        mode: Mode = "unmerged"
        if self._carried is not None:
            mode = "merged" if self._share == 1 and set(rows) == {self._carried} else "mixed"
        self.num_steps[mode] += 1
        swap_s, self._step_swap_s = self._step_swap_s, 0.0
        self.swap_s += swap_s
        self.policy.took(self._batching, mode, sum(rows.values()), seconds + swap_s, swap_s)
        return swap_s

    def keep_apart(self, requests: Iterable[CachedRequest]) -> None:
        """Keep KV of another adapter's weights out of the prefix cache."""
        if self._carried is not None:
            for request in requests:
                request.unshared |= request.adapter != self._carried

    def _is_eligible(self, uid: Uid) -> bool:
        return isinstance(uid, str) and self._adapters.readiness(uid) is Readiness.READY

    def _move(self, target: str | None, at_once: bool) -> float:
        part = 1.0 if at_once else 1.0 / self._config.swap_steps
        moved = 0.0
        if self._carried is not None and self._carried != target:
            out = min(self._share, part)
            self._share = 0.0 if self._share - out < 1e-9 else self._share - out
            moved += out
            if not self._share:
                self._adapters.release(self._carried)
                self._carried = None
        if target is not None and self._carried in (None, target) and (at_once or not moved):
            if self._carried is None:
                if self._adapters.acquire(target) is not Readiness.READY:
                    return moved * self._config.merge_s
                self._carried = target
                self.num_merges += 1
            into = min(1.0 - self._share, part)
            self._share = 1.0 if self._share + into > 1 - 1e-9 else self._share + into
            moved += into
        return moved * self._config.merge_s
