# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: the next step's sequences and numbers of tokens."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic

from moe_lora.cache.orders import Namespace, Readiness
from moe_lora.cache.pages import BlockTable
from moe_lora.cache.unified import UnifiedCache
from moe_lora.core.clock import Clock
from moe_lora.core.request import BACKGROUND
from moe_lora.policies.admission.admission import admissible

from .views import Adapters, RequestQueue, Scheduled, Sequence

if TYPE_CHECKING:
    from .queues import Background, TenantQueue

LOOK_AHEAD = 16
"""Queued requests shown to the cache."""
_EARLY = attrgetter("early")


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Limits of a step, and the wait in seconds before a request overtakes.

    max_host_tokens: prompt tokens of loading adapters in a shared step.  Host workers compute these tokens
    (HOST_COMPUTABLE), divided by `fair_shares`; no decode step waits for the host.  Source: Toppings section
    4.1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    starvation_s: float
    max_host_tokens: int = 0


class Scheduler(Generic[Sequence]):
    """Decode rows first, then prefill chunks, then newcomers, within the step's token budget.

    loading: sequences with an adapter or history on the way.  tenants: `waiting`, from the second tenant or
    priority on.

    Progress: the first running (else loaded) request keeps all holds to the end.  Without a free page,
    younger requests release pages, and none is admitted in that schedule.  Then only this request, pins and
    running copies hold pages; copies end, and copied pages can be evicted.  A request still without pages is
    impossible (`oldest`).
    """

    def __init__(
        self,
        cache: UnifiedCache,
        adapters: Adapters[Any],
        clock: Clock,
        limits: StepLimits,
        queue: RequestQueue[Sequence] | None = None,
    ) -> None:
        self.running: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.waiting: RequestQueue[Sequence] = RequestQueue() if queue is None else queue
        self.tenants: TenantQueue[Sequence] | None = None
        self.background: Background[Sequence] | None = None
        self._lane: tuple[str, int] | None = None
        """Tenant and priority of all requests so far."""
        self._num_sampled = 0
        self._told: list[Sequence] = []
        self._is_short = False
        self.num_put_back = 0
        self.num_preemptions = self.num_adapter_hits = self.num_adapter_misses = 0
        self._cache = cache
        self._adapters = adapters
        self.clock = clock
        self._limits = limits
        self.held_back = False
        """True if a request found no adapter slot at the last plan."""
        self._only: Container[Namespace] | None = None
        self._host_shares: dict[Sequence, int] | None = None
        """None: all requests need a host."""

    @property
    def num_waiting(self) -> int:
        """Sequences before their first step, but for the background's `num_queued`."""
        num, background = len(self.waiting) + len(self.loading), self.background
        return num if background is None else num + background.num_waiting - background.num_queued

    @property
    def num_deferred(self) -> int:
        """Sequences of `num_waiting` waiting for bytes or a slot."""
        waiting = () if self.background is not None and self.background.runs else self.waiting
        return len(self.loading) + sum(one.waits.is_held_back for one in waiting)

    @property
    def waits_for_others(self) -> bool:
        """True if an adapter's readiness may depend on another process."""
        return self._adapters.waits_for_others

    @property
    def is_full(self) -> bool:
        """True without a seat to spare; one seat alone may be in use."""
        return len(self.running) + len(self.loading) >= max(2, self._limits.max_num_seqs)

    @property
    def oldest(self) -> Sequence | None:
        """The first in line: if it can never continue, none can."""
        return next(chain(self.running, self.loading, self.waiting.order(self.waiting)), None)

    def add(self, sequence: Sequence) -> None:
        if sequence.priority >= BACKGROUND or (self.background is not None and self.background.runs):
            self._add_beside(sequence)
            return
        lane = sequence.tenant, sequence.priority
        if self._lane is None:
            self._lane = lane
        elif self.tenants is None and lane != self._lane:
            self.count_tenants()
        self.waiting.append(sequence)
        if sequence.adapter is not None:
            self._adapters.enqueue(sequence.adapter)

    def _add_beside(self, sequence: Sequence) -> None:
        if self.background is None:
            from .queues import Background

            self.background = Background(self, self._adapters)
        self.background.add(sequence)

    def count_tenants(self) -> None:
        """Queue requests by tenant.  Earlier tokens count for the first tenant."""
        from moe_lora.policies.admission.fairness import DECODE_COST, PREFILL_COST, VirtualTokenCounter

        from .queues import LEAST_CREDIT, TenantQueue

        found, (tenant, share) = self._cache.counters, self._cache.asker
        num_computed = found.kv_query_tokens - found.kv_device_hit_tokens - found.kv_host_hit_tokens
        given = (PREFILL_COST * num_computed + DECODE_COST * self._num_sampled) / share
        counter = VirtualTokenCounter(max(LEAST_CREDIT, self._limits.max_num_batched_tokens), tenant, given)
        self.waiting = self.tenants = TenantQueue(counter, self.waiting, self._limits.max_num_seqs)

    def schedule(self, only: Container[Namespace] | None = None) -> list[Scheduled[Sequence]]:
        """The next step's work, with reserved pages.

        only: the adapters that compute (the base model as None); other sequences keep holds.  Without `only`,
        or if no sequence of `only` can run, all adapters compute.
        """
        if self.background is not None:
            self.background.turn()
        plan = self._plan(only)
        if only is not None and not plan:
            plan = self._plan(None)
        queued = list(islice(self.waiting, LOOK_AHEAD))
        if queued != self._told:
            self._told = queued
            self._cache.look_ahead([(one.adapter_uid, one.tokens, one.cache_salt) for one in queued])
        return [Scheduled(sequence, num_tokens) for sequence, num_tokens in plan.items()]

    def _plan(self, only: Container[Namespace] | None) -> dict[Sequence, int]:
        plan: dict[Sequence, int] = {}
        self._only = only
        preempted = [] if self.tenants is None or only is not None else self._return_slots(self.tenants)
        self._is_short = self.held_back = False
        self._look_at_adapters()
        self._host_shares = self._divide_host() if self._limits.max_host_tokens else None
        budget = self._limits.max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda s: s.num_uncomputed > 1):
            put_back = self._is_short and sequence not in self.running
            if len(plan) == self._limits.max_num_seqs or not (only is None or sequence.adapter_uid in only):
                continue
            waits_for_adapter = 0 < sequence.cold_tokens <= sequence.num_computed
            if budget and not put_back and not waits_for_adapter:
                budget -= self._continue(sequence, budget, plan)
        budget = self._limits.max_num_batched_tokens - sum(plan.values())
        for sequence in list(self.loading):
            may_start = sequence in self.loading and (only is None or sequence.adapter_uid in only)
            may_start = may_start and budget > 0 and len(plan) < self._limits.max_num_seqs
            if may_start and self._is_loaded(sequence, budget, plan):
                self._start(sequence, budget, plan)
                budget -= plan.get(sequence, 0)
        if not self._is_short:
            self._admit(budget, plan)
        if self.tenants is not None and preempted:
            self.tenants.note_preempted(preempted)
        return plan

    def advance(self, plan: Iterable[Scheduled[Sequence]]) -> None:
        """After the step's compute: filled blocks become findable."""
        now_s = self.clock.now_s()
        for item in plan:
            sequence = item.sequence
            if item.samples:
                self._num_sampled += 1
                if self.tenants is not None:
                    self.tenants.counter.decode(sequence.tenant, sequence.share)
            sequence.num_computed += item.num_tokens
            if sequence.unshared:
                self._cache.keep_private(sequence.table)
            else:
                num_shared = min(sequence.num_computed, sequence.base_tokens or sequence.num_computed)
                self._cache.publish(sequence.table, sequence.tokens, num_shared, now_s)

    def charge(self, sequence: Sequence) -> None:
        """Count a token drawn by no step."""
        self._num_sampled += 1
        if self.tenants is not None:
            self.tenants.counter.decode(sequence.tenant, sequence.share)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages for a loading sequence's awaited KV; False if too few."""
        return self._cache.grow(sequence.table, num_tokens, self.clock.now_s())

    def finish(self, sequence: Sequence) -> None:
        """Remove an ended or aborted sequence from any queue."""
        if self.tenants is not None:
            self.tenants.in_vain = False
        for group in (self.running, self.loading):
            if sequence in group:
                group.remove(sequence)
                self._give_back(sequence)
                return
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            if sequence.adapter is not None:
                self._adapters.dequeue(sequence.adapter)
                if self.background is not None:
                    self.background.release_lease(sequence.adapter)
        elif self.background is not None:
            self.background.remove(sequence)

    def preempt_all(self) -> None:
        """Put back all running and loading sequences, by start."""
        while self.loading:
            self._stop_loading()
        while self.running:
            self._preempt(self.running[-1])

    def restart(self, sequence: Sequence) -> None:
        """Put back a running or loading sequence; the adapter may change then."""
        self._told = []
        if sequence in self.running:
            self._preempt(sequence)
        elif sequence in self.loading:
            self.loading.remove(sequence)
            self._put_back(sequence)

    def _continue(self, sequence: Sequence, budget: int, plan: dict[Sequence, int]) -> int:
        """Without pages, preempt the youngest."""
        num_tokens = self._num_tokens(sequence, sequence.num_computed, budget, plan)
        while num_tokens and not self._grow(sequence.table, sequence.num_computed + num_tokens):
            if self.loading:
                self._stop_loading()
                continue
            victim = self.running[-1]
            if victim is self.running[0]:
                return 0
            self._preempt(victim)
            plan.pop(victim, None)
            if victim is sequence:
                return 0
        if num_tokens:
            plan[sequence] = num_tokens
        return num_tokens

    def _num_tokens(self, sequence: Sequence, start: int, budget: int, plan: dict[Sequence, int]) -> int:
        """Tokens from `start`; 0 if waiting is quicker than the host."""
        num_uncomputed = sequence.num_uncomputed + sequence.num_computed - start - sequence.held
        if start < sequence.base_tokens:
            num_uncomputed = sequence.base_tokens - start
        if not sequence.cold_tokens:
            return min(num_uncomputed, budget)
        on_host = sum(num_tokens for other, num_tokens in plan.items() if other.cold_tokens)
        if self._host_shares is not None:
            share = self._host_shares.get(sequence, self._limits.max_host_tokens)
            budget = min(budget, share, self._limits.max_host_tokens - on_host)
        num_tokens = max(0, min(num_uncomputed, budget))
        pays = num_tokens and self._adapters.pays_on_host(sequence.adapter, num_tokens, on_host)
        return num_tokens if pays else 0

    def _divide_host(self) -> dict[Sequence, int] | None:
        """Tokens for each prompt of a loading adapter; None: no other requests."""
        if not self._has_warm():
            return None
        from moe_lora.policies.admission.host_start import fair_shares

        cold = {one: one.num_uncomputed for one in self.running if one.cold_tokens > one.num_computed}
        for one in self.loading:
            readiness = None if one.adapter is None else self._adapters.readiness(one.adapter)
            if readiness is Readiness.HOST_COMPUTABLE and one.table.ready:
                cold[one] = len(one.tokens) - one.table.num_matched
        return dict(zip(cold, fair_shares(list(cold.values()), self._limits.max_host_tokens), strict=True))

    def _has_warm(self) -> bool:
        may_begin = self.waiting if self._has_room(1) else ()
        adapters = self._adapters
        for one in filter(self._may_compute, chain(self.running, self.loading, may_begin)):
            if one.adapter is None or adapters.readiness(one.adapter) is Readiness.READY:
                return True
        return adapters.waits_for_others and bool(may_begin)

    def _admit(self, budget: int, plan: dict[Sequence, int]) -> None:
        if not self.waiting or not self._has_room(budget):
            return
        self._adapters.begin_round()
        only, waiting = self._only, self.waiting
        order = waiting.order(one for one in waiting if only is None or one.adapter_uid in only)
        now_s = self.clock.now_s()
        passes = self._has_unused_lease if self._adapters.waits_for_others else None
        for sequence in admissible(order, self._acquire, now_s, self._limits.starvation_s, passes):
            self.waiting.remove(sequence)
            if sequence.adapter is not None:
                self._adapters.dequeue(sequence.adapter)
            self.loading.append(sequence)
            self.loading.sort(key=_EARLY)  # the last gives way
            sequence.gave_way = False
            now_s = self.clock.now_s()
            sequence.waits.load(now_s)
            self._match(sequence, now_s)
            if self._is_loaded(sequence, budget, plan):
                if not self._start(sequence, budget, plan):
                    return
                budget -= plan.get(sequence, 0)
            if not self._has_room(budget):
                return
        for sequence in filter(self._may_compute, self.waiting):
            self.held_back = True
            waits = sequence.waits
            if waits.held_back_s is None and waits.admitted_s is None:
                waits.held_back_s = now_s

    def _return_slots(self, tenants: TenantQueue[Sequence]) -> list[Sequence]:
        victims = tenants.to_preempt(self.running, self.loading)
        for victim in victims:
            self._preempt(victim)
        return victims

    def _match(self, sequence: Sequence, now_s: float) -> None:
        """Look up computed tokens; none for awaited KV.

        Uncomputed tokens count for the tenant, once.
        """
        namespace = sequence.table.namespace
        if sequence.awaits_kv or sequence.computes_prompt:
            sequence.table = self._cache.new_table(namespace, sequence.cache_salt)
        else:
            tokens = sequence.tokens[: sequence.base_tokens + 1] if sequence.base_tokens else sequence.tokens
            sequence.table = self._cache.match(
                namespace, tokens, now_s, again=sequence.matched, salt=sequence.cache_salt
            )
        if sequence.awaits_kv:
            return
        if self.tenants is not None and not sequence.matched:
            num_tokens = len(sequence.tokens) - sequence.table.num_matched
            self.tenants.counter.prefill(sequence.tenant, sequence.share, num_tokens)
        sequence.matched = True

    def _has_room(self, budget: int) -> bool:
        num = len(self.running) + len(self.loading)
        if self._only is not None:
            num = sum(map(self._may_compute, chain(self.running, self.loading)))
        return budget > 0 and num < self._limits.max_num_seqs

    def _may_compute(self, sequence: Sequence) -> bool:
        return self._only is None or sequence.adapter_uid in self._only

    def _acquire(self, sequence: Sequence) -> bool:
        self._cache.count_for(sequence.tenant, sequence.share, self.clock.now_s())
        if sequence.adapter is None:
            return True
        readiness = self._adapters.acquire(
            sequence.adapter, again=sequence.matched, num_tokens=len(sequence.tokens)
        )
        if sequence.waits.admitted_s is None and readiness is Readiness.LOADING:
            sequence.adapter_hit = False
        return readiness is not Readiness.NO_ROOM

    def _has_unused_lease(self, sequence: Sequence) -> bool:
        adapter = sequence.adapter
        return adapter is not None and self._adapters.has_unused_lease(adapter)

    def _is_loaded(self, sequence: Sequence, budget: int, plan: dict[Sequence, int]) -> bool:
        now_s = self.clock.now_s()
        if sequence.waits.adapter_s is None:
            adapter = sequence.adapter
            if adapter is not None:
                readiness = self._adapters.readiness(adapter)
                if readiness not in (Readiness.READY, Readiness.HOST_COMPUTABLE):
                    return False
                if readiness is Readiness.HOST_COMPUTABLE:
                    sequence.cold_tokens = len(sequence.tokens)
                    if not self._num_tokens(sequence, sequence.table.num_matched, budget, plan):
                        sequence.cold_tokens = 0
                        return False
            sequence.waits.adapter_s = now_s
        if sequence.awaits_kv or not sequence.table.ready:
            return False
        sequence.waits.loaded(now_s)
        return True

    def _start(self, sequence: Sequence, budget: int, plan: dict[Sequence, int]) -> bool:
        """Start a loaded sequence, if need be with younger loading sequences' pages."""
        table = sequence.table
        num_tokens = self._num_tokens(sequence, table.num_matched, budget, plan)
        while not self._grow(table, table.num_matched + num_tokens):
            if self.loading[-1] is sequence:
                return False
            self._stop_loading()
        self.loading.remove(sequence)
        self.running.append(sequence)
        sequence.num_computed = table.num_matched
        if sequence.waits.admitted_s is None:
            sequence.waits.admitted_s = self.clock.now_s()
            sequence.num_cached = table.num_matched
            if sequence.adapter is not None:
                self.num_adapter_hits += sequence.adapter_hit
                self.num_adapter_misses += not sequence.adapter_hit
        if num_tokens:
            plan[sequence] = num_tokens
        return True

    def _grow(self, table: BlockTable, num_tokens: int) -> bool:
        if self._cache.grow(table, num_tokens, self.clock.now_s()):
            return True
        self._is_short = True
        return False

    def _look_at_adapters(self) -> None:
        """Put back sequences after a failed load, without a host, or with a lost history."""
        # Youngest first: each is put before the others.
        for where in (self.loading, self.running):
            for sequence in [one for one in reversed(where) if one.cold_tokens or where is self.loading]:
                adapter = sequence.adapter
                readiness = Readiness.READY if adapter is None else self._adapters.readiness(adapter)
                if readiness is Readiness.READY:
                    sequence.cold_tokens = 0
                elif readiness is Readiness.NO_ROOM or (
                    readiness is Readiness.LOADING and sequence.cold_tokens > sequence.num_computed
                ):
                    where.remove(sequence)
                    self._put_back(sequence)
        for sequence in self.loading[::-1]:
            if sequence.table.lost:
                self.loading.remove(sequence)
                self._put_back(sequence)

    def _stop_loading(self) -> None:
        self.num_put_back += 1
        self._put_back(self.loading.pop())

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.num_preemptions += 1
        sequence.waits.num_preemptions += 1
        self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        self.waiting.appendleft(sequence)
        if sequence.adapter is not None:
            self._adapters.enqueue(sequence.adapter)
        self._give_back(sequence)
        sequence.num_computed = sequence.cold_tokens = 0
        sequence.awaits_kv, sequence.unshared = sequence.early, False

    def _give_back(self, sequence: Sequence) -> None:
        self._cache.release(sequence.table, self.clock.now_s())
        if sequence.adapter is not None:
            self._adapters.release(sequence.adapter)
