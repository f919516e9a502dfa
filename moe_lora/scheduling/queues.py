# SPDX-License-Identifier: Apache-2.0
"""Queues of several tenants or priorities, and of background requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Generic

from moe_lora.core.request import BACKGROUND
from moe_lora.policies.admission.fairness import VirtualTokenCounter

from .views import Adapters, RequestQueue, Sequence

if TYPE_CHECKING:
    from .scheduler import Scheduler

LEAST_CREDIT = 2048.0
"""For a tenant after an absence: some requests, however few tokens a step takes."""


class TenantQueue(RequestQueue[Sequence]):
    """Starts requests by tokens per tenant, then priority, then order of `waiting`.

    in_vain: no other tenant could use the returned slots.
    """

    def __init__(
        self, counter: VirtualTokenCounter, waiting: RequestQueue[Sequence], max_num_seqs: int
    ) -> None:
        super().__init__(lambda requests: counter.order(waiting.order(requests)))
        self.counter = counter
        self.in_vain = False
        self._max_num_seqs = max_num_seqs
        self._max_returned = max_num_seqs
        """Most slots returned at once: as many as other tenants used lately."""
        for sequence in waiting:
            self.append(sequence)

    def append(self, sequence: Sequence, /) -> None:
        super().append(sequence)
        self.counter.enqueue(sequence.tenant, sequence.share)

    def appendleft(self, sequence: Sequence, /) -> None:
        super().appendleft(sequence)
        self.counter.enqueue(sequence.tenant, sequence.share)

    def remove(self, sequence: Sequence, /) -> None:
        super().remove(sequence)
        self.counter.dequeue(sequence.tenant)

    def to_preempt(self, running: list[Sequence], loading: list[Sequence]) -> list[Sequence]:
        """Running requests to preempt in a full batch: their tenants exceed their shares, and another tenant
        is next.
        """
        if self.in_vain or len(running) + len(loading) < self._max_num_seqs:
            return []
        others = Counter(sequence.tenant for sequence in loading)
        movable = [sequence for sequence in running if not sequence.held]
        found = self.counter.borrowed(self, movable, others, self._max_num_seqs)[: self._max_returned]
        for sequence in found:
            sequence.gave_way = True
        return found

    def note_preempted(self, preempted: list[Sequence]) -> None:
        """Return fewer slots from now on if some of these requests took the slots again.

        The other tenant then lacks pages or an adapter's slot.  If all slots were taken again, return none
        until a request ends.
        """
        num_used = sum(sequence.gave_way for sequence in preempted)
        self.in_vain = self.in_vain or not num_used
        all_used = num_used == len(preempted)
        self._max_returned = min(2 * num_used, self._max_num_seqs) if all_used else max(1, num_used)


class Background(Generic[Sequence]):
    """Gives the scheduler background requests while no other request is there.

    An arriving request puts all background requests back at the next plan.  Requests here count as waiting,
    so versions of their adapters stay; they have no lease.
    """

    def __init__(self, scheduler: Scheduler[Sequence], adapters: Adapters[Any]) -> None:
        self._scheduler, self._adapters = scheduler, adapters
        self._parked: RequestQueue[Sequence] = RequestQueue()
        self._arrived: list[Sequence] = []
        """Other requests since the last plan."""
        self._others: TenantQueue[Sequence] | None = None
        """Queue of other requests while background requests run."""

    @property
    def runs(self) -> bool:
        """True if the scheduler has background requests."""
        return self._others is not None

    @property
    def num_waiting(self) -> int:
        return len(self._parked) + len(self._arrived)

    @property
    def num_queued(self) -> int:
        """Background requests here and in the scheduler's queue."""
        return len(self._parked) + (len(self._scheduler.waiting) if self.runs else 0)

    def add(self, sequence: Sequence) -> None:
        (self._parked if sequence.priority >= BACKGROUND else self._arrived).append(sequence)
        if sequence.adapter is not None:
            self._adapters.enqueue(sequence.adapter)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence outside the scheduler's queues."""
        for group in (self._parked, self._arrived):
            if sequence in group:
                group.remove(sequence)
                self._dequeue(sequence)

    def release_lease(self, adapter: Any) -> None:
        """Release the lease, or cancel its request, if parked requests alone wait for the adapter."""
        if not self.runs and all(one.adapter is not adapter for one in self._scheduler.waiting):
            self._adapters.release_lease(adapter)

    def turn(self) -> None:
        """Change between background and other requests if due."""
        scheduler = self._scheduler
        if self._arrived and self._others is not None:
            self._put_back(self._others)
        if self._others is None:
            if scheduler.running or scheduler.loading or scheduler.waiting or not self._parked:
                return
            if scheduler.tenants is None:
                scheduler.count_tenants()  # background requests count for no tenant
            self._others = scheduler.tenants
            scheduler.waiting, scheduler.tenants = RequestQueue(), None
        scheduler.waiting.extend(self._parked)
        self._parked.clear()

    def _put_back(self, others: TenantQueue[Sequence]) -> None:
        scheduler = self._scheduler
        scheduler.preempt_all()
        self._parked.extendleft(reversed(scheduler.waiting))
        if self._adapters.waits_for_others:
            for adapter in {one.adapter for one in self._parked if one.adapter is not None}:
                self._adapters.release_lease(adapter)
        self._others, scheduler.waiting, scheduler.tenants = None, others, others
        arrived, self._arrived = self._arrived, []
        for sequence in arrived:
            scheduler.add(sequence)
            self._dequeue(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._adapters.dequeue(sequence.adapter)
