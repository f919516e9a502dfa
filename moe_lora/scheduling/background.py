# SPDX-License-Identifier: Apache-2.0
"""Background requests of a scheduler: they compute in steps without other requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

from moe_lora.core.request import BACKGROUND

from .views import Adapters, RequestQueue, Sequence

if TYPE_CHECKING:
    from .scheduler import Scheduler
    from .tenant_queue import TenantQueue


class Background(Generic[Sequence]):
    """Gives the scheduler background requests while no other request is there.

    The queue of other requests, with its tenants, never has a background request.  When another request
    arrives, the next plan first puts all background requests back.  Their filled blocks stay in the prefix
    cache.  Requests here count as waiting for their adapters, whose versions stay.
    """

    def __init__(self, scheduler: Scheduler[Sequence], adapters: Adapters[Any]) -> None:
        self._scheduler, self._adapters = scheduler, adapters
        self._parked: RequestQueue[Sequence] = RequestQueue()
        self._arrived: list[Sequence] = []
        """Other requests since the last plan."""
        self._others: tuple[RequestQueue[Sequence], TenantQueue[Sequence] | None] | None = None
        """Queues of other requests while background requests run."""

    @property
    def runs(self) -> bool:
        """True if the scheduler has background requests."""
        return self._others is not None

    @property
    def num_waiting(self) -> int:
        return len(self._parked) + len(self._arrived)

    def add(self, sequence: Sequence) -> None:
        (self._parked if sequence.priority >= BACKGROUND else self._arrived).append(sequence)
        if sequence.adapter is not None:
            self._adapters.enqueue(sequence.adapter)

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended or aborted sequence outside of the scheduler's queues."""
        for group in (self._parked, self._arrived):
            if sequence in group:
                group.remove(sequence)
                self._dequeue(sequence)

    def turn(self) -> None:
        """Before a plan: change between background and other requests if due."""
        scheduler = self._scheduler
        if self._arrived and self._others is not None:
            self._put_back(*self._others)
        if self._others is None:
            if scheduler.running or scheduler.loading or scheduler.waiting or not self._parked:
                return
            self._others = scheduler.waiting, scheduler.tenants
            scheduler.waiting, scheduler.tenants = RequestQueue(), None
        scheduler.waiting.extend(self._parked)
        self._parked.clear()

    def _put_back(self, waiting: RequestQueue[Sequence], tenants: TenantQueue[Sequence] | None) -> None:
        scheduler = self._scheduler
        scheduler.preempt_all()
        self._parked.extendleft(reversed(scheduler.waiting))
        self._others, scheduler.waiting, scheduler.tenants = None, waiting, tenants
        arrived, self._arrived = self._arrived, []
        for sequence in arrived:
            scheduler.add(sequence)
            self._dequeue(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._adapters.dequeue(sequence.adapter)
