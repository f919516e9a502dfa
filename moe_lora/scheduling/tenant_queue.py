# SPDX-License-Identifier: Apache-2.0
"""The queue of a scheduler whose requests have several tenants or priorities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from moe_lora.policies.admission.fairness import VirtualTokenCounter

from .views import RequestQueue, Sequence

LEAST_CREDIT = 2048.0
"""For a tenant after an absence: some requests, however few tokens a step takes."""


class TenantQueue(RequestQueue[Sequence]):
    """Starts requests by tokens per tenant, within a tenant by priority, then in the order of `waiting`.

    counter: tokens per tenant.  waiting: the queue until now.  in_vain: no other tenant could use the
    returned slots.
    """

    def __init__(
        self, counter: VirtualTokenCounter, waiting: RequestQueue[Sequence], max_num_seqs: int
    ) -> None:
        super().__init__(self._fair_order)
        self.counter = counter
        self.in_vain = False
        self._order_of_one = waiting.order
        self._max_num_seqs = max_num_seqs
        self._max_returned = max_num_seqs
        """Slots to return at once: as many as found another tenant's request lately."""
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

    def _fair_order(self, requests: Iterable[Sequence]) -> Iterator[Sequence]:
        return self.counter.order(self._order_of_one(requests))

    def to_preempt(self, running: list[Sequence], loading: list[Sequence]) -> list[Sequence]:
        """Running requests to preempt in a full batch: the tenants exceed their shares of the slots, and
        another tenant is next.
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

        The other tenant then lacks pages or an adapter's slot.  If all were taken again, no slot is
        returned until a request ends.
        """
        num_used = sum(sequence.gave_way for sequence in preempted)
        self.in_vain = self.in_vain or not num_used
        all_used = num_used == len(preempted)
        self._max_returned = min(2 * num_used, self._max_num_seqs) if all_used else max(1, num_used)
