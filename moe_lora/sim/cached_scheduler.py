"""Which requests compute how many tokens in a simulated step: `engine.scheduler`, without an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from moe_lora.cache.orders import Readiness
from moe_lora.cache.unified import UnifiedCache
from moe_lora.policies.admission import admissible

from .cached_requests import CachedRequest

LOOK_AHEAD = 32
"""Queued requests that the cache is told of."""

Plan = dict[CachedRequest, int]
"""Tokens of each request that the next step computes."""


class CachedScheduler:
    """Decode rows first, then prompts under way, then newcomers, within the step's token budget.

    running: requests that compute.  loading: those whose adapter or history is on its way; they hold both,
    and wait alone.  waiting: those that hold nothing.  on_wait: told of each request that begins to load.
    """

    def __init__(
        self,
        cache: UnifiedCache,
        now_s: Callable[[], float],
        on_wait: Callable[[CachedRequest], None],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        starvation_s: float,
    ) -> None:
        self.running: list[CachedRequest] = []
        self.loading: list[CachedRequest] = []
        self.waiting: deque[CachedRequest] = deque()
        self.num_preemptions = 0
        self._cache = cache
        self._now_s = now_s
        self._on_wait = on_wait
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._starvation_s = starvation_s

    def schedule(self) -> Plan:
        """The next step's work; its pages are reserved.  Empty if nothing can run."""
        plan: Plan = {}
        budget = self._budget
        for request in sorted(self.running, key=lambda r: r.num_uncomputed > 1):
            if budget and request in self.running:
                budget -= self._continue(request, budget, plan)
        budget = self._budget - sum(plan.values())
        for request in list(self.loading):
            if budget and request in self.loading and self._is_loaded(request):
                if not self._start(request, budget, plan):
                    break
                budget -= plan[request]
        else:  # younger ones, once admitted, would take the room that one waits for
            self._admit(budget, plan)
        queued = islice(self.waiting, LOOK_AHEAD)
        self._cache.look_ahead([(request.adapter_uid, request.planned.prompt) for request in queued])
        return plan

    def finish(self, request: CachedRequest) -> None:
        """It has its last token."""
        self.running.remove(request)
        self._give_back(request)

    def _continue(self, request: CachedRequest, budget: int, plan: Plan) -> int:
        """Plan a running request's next tokens; if pages run out, the youngest give theirs back."""
        num_tokens = min(request.num_uncomputed, budget)
        while not self._grow(request, request.num_computed + num_tokens):
            if self.loading:
                self._put_back(self.loading.pop())
                continue
            victim = self.running.pop()
            self.num_preemptions += 1
            self._put_back(victim)
            plan.pop(victim, None)
            if victim is request:
                return 0
        plan[request] = num_tokens
        return num_tokens

    def _admit(self, budget: int, plan: Plan) -> None:
        """Have waiting requests start, or their bytes brought in, while there is room for them."""
        if not self.waiting or not self._has_room(budget):
            return
        for request in admissible(list(self.waiting), self._hold, self._now_s(), self._starvation_s):
            self.waiting.remove(request)
            self.loading.append(request)
            self._match(request)
            if self._is_loaded(request):
                if not self._start(request, budget, plan):
                    self.loading.remove(request)
                    self._put_back(request)
                    return
                budget -= plan[request]
            else:
                self._on_wait(request)
            if not self._has_room(budget):
                return

    def _has_room(self, budget: int) -> bool:
        return budget > 0 and len(self.running) + len(self.loading) < self._max_num_seqs

    def _hold(self, request: CachedRequest) -> bool:
        found = self._cache.hold(request.adapter_uid, self._now_s(), again=request.matched)
        return found is not Readiness.NO_ROOM

    def _match(self, request: CachedRequest) -> None:
        now_s = self._now_s()
        tokens = request.tokens[: request.num_total]
        request.table = self._cache.match(request.adapter_uid, tokens, now_s, again=request.matched)
        if not request.matched:
            request.matched, request.held_s = True, now_s
            request.num_cached = request.table.num_matched
        request.adapter_here_s = None

    def _is_loaded(self, request: CachedRequest) -> bool:
        """Whether adapter and history of a loading request have come."""
        now_s = self._now_s()
        if request.adapter_here_s is None:
            if self._cache.readiness(request.adapter_uid) is not Readiness.READY:
                return False
            request.adapter_here_s = now_s
        return request.table.ready

    def _start(self, request: CachedRequest, budget: int, plan: Plan) -> bool:
        """Move a loaded request to the running ones if its pages can be had, if need be from younger ones
        that load.
        """
        table = request.table
        num_tokens = min(request.num_total - table.num_matched, budget)
        while not self._grow(request, table.num_matched + num_tokens):
            if self.loading[-1] is request:
                return False
            self._put_back(self.loading.pop())
        self.loading.remove(request)
        self.running.append(request)
        request.num_computed = table.num_matched
        request.note_start(self._now_s())
        plan[request] = num_tokens
        return True

    def _grow(self, request: CachedRequest, num_tokens: int) -> bool:
        return self._cache.grow(request.table, num_tokens, self._now_s())

    def _put_back(self, request: CachedRequest) -> None:
        """Wait again, before all others, holding nothing."""
        self._give_back(request)
        request.num_computed = 0
        self.waiting.appendleft(request)

    def _give_back(self, request: CachedRequest) -> None:
        """Pages first, then the adapter that they depend on."""
        now_s = self._now_s()
        self._cache.publish(request.table, request.tokens, request.num_computed, now_s)
        self._cache.release(request.table, now_s)
        self._cache.let_go(request.adapter_uid, now_s)
